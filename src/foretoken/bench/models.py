"""The models of a bench: ours behind `open_lm`, and untouched copies for the peers.

Our kernels are installed in place, so a peer never shares a model with us, and a row that asks for
another language-model option (`exact_bits`) gets a third.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foretoken.bench import other_engines, peers
from foretoken.bench.catalogue import writes_beams, writes_together
from foretoken.bench.interpreters import Interpreter
from foretoken.bench.limit import weight_bytes
from foretoken.bench.other_engines import EngineRow, Handed, gguf_path
from foretoken.bench.own import BeamsRow, OwnRow, Row, Waiting
from foretoken.bench.peers import Assisted, PeerRow
from foretoken.bench.rows import OF_DRAFT, RowSpec
from foretoken.bench.tuning import TunedRow
from foretoken.engine.assemble import assemble, check_options
from foretoken.engine.load_log import draft_vocabulary_of
from foretoken.engine.measure import measure_batches
from foretoken.engine.models import (
    check_tokenizers,
    check_vocabulary,
    end_tokens,
    opened_draft,
)
from foretoken.engine.prepare import teach_costs
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.load import check_source, load_model, load_tokenizer, locate
from foretoken.lm.opening import FORWARD_OPTIONS, open_lm
from foretoken.types import CostTable, Memory

FORMS: Mapping[str, type[TunedRow]] = {**peers.FORMS, **other_engines.FORMS}


def check_rows(specs: Sequence[RowSpec], draft: Any, requests: int = 1) -> None:
    """Refuse, before any model is loaded, what a row's name alone tells to be impossible."""
    for spec in specs:
        if spec.peer:
            FORMS[spec.method].check_options(spec)
        else:
            check_options(spec.method, **spec.method_options)
        if spec.needs_draft and draft is None and spec.draft is None:
            raise ConfigError(
                f"the row {spec.label} was asked for without a draft model.",
                f"{spec.method} guesses with a second, smaller model of the same vocabulary.",
                "pass --draft, or leave the row out.",
            )
        if requests > 1 and not writes_together(spec.method):
            raise ConfigError(
                f"the row {spec.label} was asked for with {requests} requests at once.",
                "our rows of one text and vllm:* write several texts together.",
                "leave the row out, or pass --requests 1.",
            )


class Models:
    """Loads what rows need, once."""

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        tokenizer: Any = None,
        draft_vocabulary: Any = None,
        **loading: Any,
    ) -> None:
        for source in (target, draft):  # before minutes of measuring others
            if isinstance(source, str | Path):
                check_source(source, loading.get("allow_pickle", False))
        self._loading = loading
        self._draft_vocabulary = draft_vocabulary  # of rows that say nothing about it
        self.sources = {"target": target, "draft": draft}
        self._pristine = {  # a loaded model is copied before kernels change it
            role: copy.deepcopy(source)
            for role, source in self.sources.items()
            if source is not None and not isinstance(source, str | Path)
        }
        self._own: dict[tuple[Any, ...], Any] = {}
        self._costs: dict[str, CostTable] = {}  # by a row's label
        self._clean: dict[str, Any] = {}
        first = self._load("target")
        trusted = bool(loading.get("trust_remote_code"))
        self.tokenizer = load_tokenizer(target, tokenizer, trusted)
        self.eos = end_tokens(first, self.tokenizer)
        self.parameters = {"target": first.num_parameters()}
        self.weights = weight_bytes(first)  # read by one forward of the target
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.device = first.device
        self._spare = {"target": first}
        self._named: dict[str, str] = {}  # drafts that rows name -> their roles
        self.room = self.requests = 1  # tokens of the longest text, texts at once: the bench knows
        self.interpreters: Mapping[str, Interpreter] = {}
        self._open = ExitStack()
        self._folders: dict[str, Path] = {}
        self._files: dict[Path, str] = {}

    def row(self, spec: RowSpec) -> OwnRow | BeamsRow | PeerRow | EngineRow:
        """The row that `spec` asks for, with its models loaded."""
        check_rows([spec], self.sources["draft"])
        if spec.engine is not None:
            return self._engine_row(spec, spec.engine)
        if spec.peer:
            return self._peer_row(spec)
        options = spec.model_options
        target = self.own("target", {k: v for k, v in options.items() if k != OF_DRAFT})
        draft_lm = None
        if spec.needs_draft:
            forward = {k: v for k, v in options.items() if k in (*FORWARD_OPTIONS, OF_DRAFT)}
            draft_lm = self.own(self._draft_of(spec), forward)
        engine = assemble(spec.method, target, draft_lm, **spec.method_options)
        check_vocabulary(engine, self.tokenizer)
        if engine.controller.needs_costs:
            self._costs[spec.label] = teach_costs(engine, self._costs.get(spec.label))
            if self.requests > 1:  # else the first cell of a renewed row would hold it
                engine.max_rows = self.requests
                measure_batches(engine)
        if writes_beams(spec.method):
            return BeamsRow(spec, engine)
        if self.device.type == "cuda":
            engine.target = Waiting(engine.target)  # type: ignore[assignment]
        return OwnRow(spec, engine)

    def _peer_row(self, spec: RowSpec) -> PeerRow:
        """A form of `generate`, over models that nothing of ours has touched."""
        draft = self.clean("draft") if spec.needs_draft else None
        row = peers.FORMS[spec.method](spec, self.clean("target"), draft)
        if isinstance(row, Assisted) and row.through_text:
            row.read_with(self.tokenizer, self._draft_tokenizer)
        return row

    @cached_property
    def _draft_tokenizer(self) -> Any:
        """Read once: transformers keeps what it prunes of a draft by the tokenizer's identity."""
        trusted = bool(self._loading.get("trust_remote_code"))
        return load_tokenizer(self.sources["draft"], None, trusted)

    def _draft_of(self, spec: RowSpec) -> str:
        """The role of the draft that a row guesses with: the bench's, or one that it names."""
        if spec.draft is None:
            return "draft"
        if spec.draft not in self._named:
            role = self._named[spec.draft] = f"draft {len(self._named) + 2}"
            self.sources[role] = spec.draft
        return self._named[spec.draft]

    def renew(self, row: Row) -> None:
        """Let a row that learns from its answers forget them, as a new session would.

        Else it would read the answers of one repetition in the next.
        """
        if isinstance(row, OwnRow) and remembers(row):
            made = self.row(row.spec)
            assert isinstance(made, OwnRow)
            row.engine = made.engine

    def _engine_row(self, spec: RowSpec, engine: str) -> EngineRow:
        """A row in another interpreter, with folders of the very weights that ours have."""
        if self.device.type != "cpu":
            raise CapabilityError(
                f"the row {spec.label} on {self.device.type}.",
                "other engines are compared on a CPU.",
                "pass --device cpu, or leave the row out.",
            )
        target = self.folder("target")
        draft = self.folder("draft") if spec.needs_draft else None
        if draft is not None:
            check_tokenizers(self.tokenizer, self.sources["draft"], load_tokenizer)
        limit = self.own("target").max_length
        room = self.room + other_engines.SPARE
        handed = Handed(
            python=self.interpreters[engine].python,
            target=target,
            draft=draft,
            dtype=self.dtype,
            threads=torch.get_num_threads(),
            room=room if limit is None else min(room, limit),
            together=self.requests,
            files=tuple(self._gguf(folder) for folder in (target, draft) if engine == "llama"),
        )
        row = other_engines.FORMS[spec.method](spec, handed)
        self._open.callback(row.close)
        return row

    def _gguf(self, folder: Path | None) -> str | None:
        """The file that llama.cpp reads in place of a folder."""
        if folder is None:
            return None
        if folder not in self._files:
            self._files[folder] = str(gguf_path(folder, self.dtype))
        return self._files[folder]

    def folder(self, role: str) -> Path:
        """A folder of config.json and safetensors; written for what is none, until `close`."""
        if role not in self._folders:
            self._folders[role] = self._folder(role)
        return self._folders[role]

    def _folder(self, role: str) -> Path:
        source = self.sources[role]
        where = None if role in self._pristine else locate(source, "model")
        if isinstance(where, Path) and next(where.glob("*.safetensors"), None):
            return where
        written = Path(self._open.enter_context(tempfile.TemporaryDirectory())) / role
        self.clean(role).save_pretrained(written)
        return written

    def close(self) -> None:
        """End the workers of other engines, and forget what was written for them."""
        self._open.close()

    def own(self, role: str, options: Mapping[str, Any] | None = None) -> Any:
        """Our language model over target or draft, one for each set of options."""
        options = dict(options or {})
        key = (role, *sorted(options.items()))
        if key not in self._own:
            self._own[key] = self._opened(role, options)
        return self._own[key]

    def _opened(self, role: str, options: dict[str, Any]) -> Any:
        if role == "target":
            return open_lm(self._take(role), name=role, **options)
        words = options.pop(OF_DRAFT, self._draft_vocabulary)
        width = self.own("target").vocab_size
        return opened_draft(
            self._take(role),
            self.sources[role],
            words,
            tokenizer=self.tokenizer,
            width=width,
            trusted=bool(self._loading.get("trust_remote_code")),
            **options,
        )

    def draft_vocabularies(self) -> list[str]:
        """Drafts that score part of their tokens only, such as 8,192 of 49,152."""
        found = [draft_vocabulary_of(lm) for key, lm in self._own.items() if key[0] == "draft"]
        return sorted({told for told in found if told})

    def asked_words(self) -> dict[str, str]:
        """What was told of the draft's tokens, for a resumed run: another list makes other rows."""
        asked = self._draft_vocabulary
        if asked is None:
            return {}
        path = Path(asked).expanduser() if isinstance(asked, str | Path) else None
        if path is not None and path.is_file():
            asked = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return {OF_DRAFT: str(asked)}

    def clean(self, role: str) -> Any:
        """A plain transformers model that nothing of ours has touched."""
        if role not in self._clean:
            self._clean[role] = self._take(role)
        return self._clean[role]

    def _take(self, role: str) -> Any:
        """A model of its own for one use."""
        model = self._spare.pop(role, None)
        if model is None:
            model = self._load(role)
            self.parameters.setdefault(role, model.num_parameters())
        return model

    def _load(self, role: str) -> Any:
        source = self.sources[role]
        if role in self._pristine:
            source = copy.deepcopy(self._pristine[role])
        return load_model(source, **self._loading)

    def names(self) -> dict[str, str | None]:
        """What the models are called: a folder's own name, never its path."""
        return {role: _name(source) for role, source in self.sources.items()}


def remembers(row: Row) -> bool:
    """Whether a row guesses better for the texts that it wrote before."""
    return isinstance(row, OwnRow) and row.engine.drafter.traits.memory is Memory.ENGINE


def _name(source: Any) -> str | None:
    if source is None:
        return None
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).exists()):
        return Path(source).resolve().name
    return source if isinstance(source, str) else type(source).__name__

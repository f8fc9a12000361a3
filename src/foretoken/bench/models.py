"""The models of a bench: ours behind `open_lm`, and untouched copies for the peers.

Our kernels are installed in place, so a peer never shares a model with us, and a row that asks for
another language-model option (`exact_bits`) gets a third.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.bench.catalogue import writes_beams
from foretoken.bench.limit import weight_bytes
from foretoken.bench.own import BeamsRow, OwnRow, Waiting
from foretoken.bench.peers import FORMS, PeerRow
from foretoken.bench.rows import RowSpec
from foretoken.engine.assemble import assemble, check_options
from foretoken.engine.measure import measure_costs
from foretoken.engine.models import check_tokenizers, check_vocabulary, end_tokens
from foretoken.errors import ConfigError
from foretoken.lm.load import load_model, load_tokenizer
from foretoken.lm.opening import FORWARD_OPTIONS, open_lm


def check_rows(specs: Sequence[RowSpec], draft: Any) -> None:
    """Refuse, before any model is loaded, what a row's name alone tells to be impossible."""
    for spec in specs:
        if spec.peer:
            FORMS[spec.method].check_options(spec)
        else:
            check_options(spec.method, **spec.method_options)
        if spec.needs_draft and draft is None:
            raise ConfigError(
                f"the row {spec.label} was asked for without a draft model.",
                f"{spec.method} guesses with a second, smaller model of the same vocabulary.",
                "pass --draft, or leave the row out.",
            )


class Models:
    """Loads what rows need, once."""

    def __init__(
        self, target: Any, draft: Any = None, tokenizer: Any = None, **loading: Any
    ) -> None:
        self._loading = loading
        self._sources = {"target": target, "draft": draft}
        self._pristine = {  # a loaded model is copied before kernels change it
            role: copy.deepcopy(source)
            for role, source in self._sources.items()
            if source is not None and not isinstance(source, str | Path)
        }
        self._own: dict[tuple[Any, ...], Any] = {}
        self._clean: dict[str, Any] = {}
        first = self._load("target")
        self.tokenizer = load_tokenizer(target, tokenizer)
        self.eos = end_tokens(first, self.tokenizer)
        self.parameters = {"target": first.num_parameters()}
        self.weights = weight_bytes(first)  # read by one forward of the target
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.device = first.device
        self._spare = {"target": first}

    def row(self, spec: RowSpec) -> OwnRow | BeamsRow | PeerRow:
        """The row that `spec` asks for, with its models loaded."""
        check_rows([spec], self._sources["draft"])
        if spec.peer:
            draft = self.clean("draft") if spec.needs_draft else None
            return FORMS[spec.method](spec, self.clean("target"), draft)
        target = self.own("target", spec.model_options)
        draft_lm = None
        if spec.needs_draft:
            forward = {k: v for k, v in spec.model_options.items() if k in FORWARD_OPTIONS}
            draft_lm = self.own("draft", forward)
        engine = assemble(spec.method, target, draft_lm, **spec.method_options)
        if spec.needs_draft:
            check_tokenizers(self.tokenizer, self._sources["draft"], load_tokenizer)
        check_vocabulary(engine, self.tokenizer)
        if engine.controller.needs_costs:
            engine.controller.learn(measure_costs(engine))
        if writes_beams(spec.method):
            return BeamsRow(spec, engine)
        if self.device.type == "cuda":
            engine.target = Waiting(engine.target)  # type: ignore[assignment]
        return OwnRow(spec, engine)

    def own(self, role: str, options: Mapping[str, Any] | None = None) -> Any:
        """Our language model over target or draft, one for each set of options."""
        options = dict(options or {})
        key = (role, *sorted(options.items()))
        if key not in self._own:
            self._own[key] = open_lm(self._take(role), name=role, **options)
        return self._own[key]

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
        source = self._sources[role]
        if role in self._pristine:
            source = copy.deepcopy(self._pristine[role])
        return load_model(source, **self._loading)

    def names(self) -> dict[str, str | None]:
        """What the models are called: a folder's own name, never its path."""
        return {role: _name(source) for role, source in self._sources.items()}


def _name(source: Any) -> str | None:
    if source is None:
        return None
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).exists()):
        return Path(source).resolve().name
    return source if isinstance(source, str) else type(source).__name__

"""What models say about a text while it is decoded, collected in files for heads to learn from.

The target writes after each prompt by its own law (by the engine, so with speculation); a capture
then records, text by text, what its head will see and what is true. Shards of a few prompts are
files, complete or absent, and follow from the seed alone: a killed collection goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from foretoken.coins import SeededCoins
from foretoken.engine.requests import prompt_ids
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError
from foretoken.lm.views.view import innermost
from foretoken.row import make_row
from foretoken.training.bar import tracked
from foretoken.training.dataset.records import Chat, replace_tensors, replace_text
from foretoken.training.features import Features
from foretoken.training.identity import identity
from foretoken.types import DecodeState

SHARD = 16  # prompts per file

Tensors = dict[str, Tensor]  # all [n] or [n, width]; n tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """What is recorded along the texts of a run; its fields are options of that run."""

    new_tokens: int
    temperature: float
    seed: int

    @classmethod
    def of(cls, config: Any) -> Any:
        """The capture that a head's training options ask for."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names})

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        """Features of the tokens of one text below `row`'s; "input_ids" [n] is among them."""
        raise NotImplementedError


def check_prompts(session: Session, prompts: Sequence[Any], split: str) -> None:
    """ConfigError for a prompt that the target cannot read; its own shard may come after hours.

    Chats that `train data` made have been read by it.
    """
    vocab, longest = session.target.vocab_size, session.target.max_length
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Chat):
            which = f"prompt {i} of the split {split!r}"
            prompt_ids(prompt, session.tokenizer, vocab, longest, which)


def collect(
    session: Session,
    prompts: Sequence[Any],
    capture: Capture,
    folder: Path,
    split: str,
    *,
    show: bool = True,
) -> Features:
    """Features of all prompts of a split; finished shards in `folder` are not made again."""
    _same_run(folder, split, prompts, capture, identity(*models_of(session)))
    paths = []
    starts = range(0, len(prompts), SHARD)
    for start in tracked(starts, f"collecting, {split}", len(starts), show):
        path = folder / f"{split}-{start:06d}.safetensors"
        if not path.is_file():
            some = prompts[start : start + SHARD]
            # No two prompts of a run share coins, whatever their split.
            seed = 1_000_003 * capture.seed + 2 * start + 500_000 * (split != "train")
            kept(path, shard(session, some, capture, seed))
        paths.append(path)
    return Features(paths)


def kept(path: Path, found: Tensors) -> None:
    """A shard on the disk; CheckpointError where it cannot be written."""
    try:
        replace_tensors(path, found)
    except (OSError, SafetensorError) as error:
        size = sum(part.nbytes for part in found.values()) / 2**20
        raise CheckpointError(
            f"keeping {size:.0f} MiB of hidden states in {path.parent} was asked for.",
            f"the file cannot be written ({error}); the shards before it are whole.",
            "free disk space, then run the same command: it goes on. Or pass --set states=asked, "
            "where the head takes it: nothing is kept then.",
        ) from error


@torch.inference_mode()
def shard(session: Session, prompts: Sequence[Any], capture: Capture, seed: int) -> Tensors:
    """Features of some prompts."""
    parts = [
        capture.record(session, row, text) for row, text in written(session, prompts, capture, seed)
    ]
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: values.contiguous().clone().cpu() for name, values in found.items()}


def written(
    session: Session, prompts: Sequence[Any], capture: Capture, seed: int
) -> Iterator[tuple[DecodeState, Sequence[int]]]:
    """Fresh rows of the prompts, and what the target wrote after each.

    Text i is drawn from the seed `seed + 2i`, and the coins of its row from the next; chats that
    `train data` made are taken as they are.
    """
    if isinstance(prompts[0], Chat):
        for chat, row in zip(
            prompts, session.rows([one.prompt for one in prompts], 1), strict=True
        ):
            yield row, chat.answer
        return
    seeds = [seed + 2 * i for i in range(len(prompts))]
    temperature, length = capture.temperature, capture.new_tokens
    rows = session.rows(list(prompts), length, temperature=temperature, seed=seeds)
    before = [list(row.tokens) for row in rows]
    session.decode(rows)
    for row, ids, own in zip(rows, before, seeds, strict=True):
        fresh = make_row(ids, row.params, SeededCoins(own + 1), session.target.vocab_size)
        yield fresh, row.new_tokens


def models_of(session: Session) -> list[Any]:
    """Whatever of a session has weights that could be others another time."""
    found = (getattr(innermost(lm), "model", None) for lm in (session.target, session.draft))
    return [model for model in found if isinstance(model, nn.Module)]


def _same_run(folder: Path, split: str, prompts: Sequence[Any], capture: Capture, of: str) -> None:
    """Refuse to go on with a collection of other models, other prompts or other options."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.json"
    plan = {"capture": type(capture).__name__, **asdict(capture)}
    told = json.dumps({"plan": plan, "prompts": list(prompts), "of": of}, default=asdict)
    if not path.is_file():
        replace_text(path, told)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if {"of": of, **found} != json.loads(told):  # once it was not there
        raise CheckpointError(
            f"going on with the collection in {folder} was asked for.",
            "it was begun with another target or draft, other prompts or other options.",
            "pass what it was begun with, another folder, or --fresh to start over.",
        )

"""Hidden states of the target, kept while texts are made, for heads that learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.errors import CapabilityError, ConfigError
from foretoken.training.dataset.records import STATES, Laws, shards
from foretoken.training.features import Features
from foretoken.types import FinalNorm, Layer, Scores, Tap

FINAL = "final"  # behind the last norm: what the output layer reads
BYTES = 2  # of a kept number
GIB = 2**30


@dataclass(frozen=True, slots=True)
class States:
    """Which hidden states are kept, and how."""

    taps: tuple[Tap, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, session: Session, asked: Any) -> States:
        """Of `final`, of layers by number, of several, or of none."""
        names = asked if isinstance(asked, tuple) else () if asked is None else (asked,)
        own = getattr(getattr(session.target, "model", None), "dtype", torch.float32)
        kept = torch.bfloat16 if own == torch.bfloat16 else torch.float16
        return cls(tuple(tap(name, session.target) for name in names), kept)

    def check_size(self, places: int, width: int, limit: float) -> None:
        """ConfigError where the states at so many places would take more than `limit` GiB."""
        needed = places * len(self.taps) * width * BYTES / GIB
        if needed > limit:
            raise ConfigError(
                f"{len(self.taps)} hidden states at up to {places:,} places were asked for.",
                f"they would take {needed:.2f} GiB, and features_gib={limit:g} is the limit.",
                f"pass fewer chats, new_tokens or layers, or --set features_gib={needed:.1f}.",
            )

    def session(self, session: Session) -> Session:
        """One that decodes plainly and reads these states in the same forwards."""
        if not self.taps:
            return session
        engine = assemble("plain", session.target, max_rows=session.max_rows)
        engine.drafter.traits = replace(engine.drafter.traits, taps=self.taps, context=1)
        return Session(
            engine, method="plain", tokenizer=session.tokenizer, eos=session.eos,
            generation=session.generation,
        )  # fmt: skip

    def laws(self, score: Scores, places: slice | Sequence[int], size: int) -> Laws:
        """What a forward says at some of its nodes."""
        logits = score.logits[places]
        if not self.taps:
            return Laws.likeliest(logits, size)
        assert score.hidden is not None, "its taps were asked for"
        return Laws.likeliest(logits, size, self.kept(score.hidden[places]))

    def kept(self, hidden: Tensor) -> Tensor:
        found = hidden.to(self.dtype).cpu()
        if not torch.isfinite(found).all():
            raise CapabilityError(
                "hidden states of the target were to be kept in float16.",
                "some of them are larger than float16 can tell.",
                "load the target with --dtype bfloat16: they are kept in that then.",
            )
        return found


def tap(name: Any, target: Any) -> Tap:
    """Where a hidden state with this name is read."""
    if name == FINAL:
        return FinalNorm()
    if not isinstance(name, int) or not -target.layers <= name < target.layers:
        raise ConfigError(
            f"features={name} was asked for.",
            f"{FINAL} and the layers 0 to {target.layers - 1} of this target can be kept.",
            f"pass features={FINAL}, a layer's number, or several between commas.",
        )
    return Layer(name)


def kept_states(folder: Path, split: str) -> Features:
    """The states that were kept of a split: "input_ids" [n] and "hidden" [n L H], with which the
    target said these tokens; in the order of the texts.
    """
    found = [path.with_suffix(STATES) for path in shards(folder, split)]
    paths = [path for path in found if path.is_file()]
    if not paths:
        raise ConfigError(
            f"hidden states in {folder} were asked for.",
            "its texts were made without them.",
            f"make some: foretoken train data --set features={FINAL}.",
        )
    return Features(paths)

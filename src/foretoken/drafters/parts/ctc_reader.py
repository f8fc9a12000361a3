"""Frames of a CTC head as a draft model: the law of the next token behind what frames began to say.

The probability that frames collapse to something that begins with a path is a sum over alignments,
which grows token by token (prefix scores, Graves 2008). So a tree of tokens is drafted as from any
other model, where the paper collapses a tree of frames and mends masks and positions afterwards
(arXiv 2412.00061).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.drafters.parts.block_reader import BlockReader, Known
from foretoken.drafters.parts.trained_head import HeadOptions
from foretoken.heads.ctc import tokens_of
from foretoken.types import Ragged, Rows, Scores, Taps

LEAST = 1e-30  # a probability that counts as none


@dataclass(frozen=True, slots=True)
class Prefix:
    """What frames began to say, and how likely each number of the U frames says just that."""

    last: int | None  # its last token
    told: list[float]  # by alignments of 0 to U frames that end in that token
    blank: list[float]  # and in a blank


@dataclass(slots=True)
class Said(Known):
    """A row with the frames of its open tree, as probabilities; the blank is the last class."""

    frames: Float[Tensor, "U V+1"] | None = None
    prefixes: list[Prefix] = field(default_factory=list)  # at each node


class CtcReader(BlockReader):
    """Laws by the frames of a head of the kind `ctc`."""

    made = Said

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.deepest = tokens_of(self.head.depth)  # behind so many tokens frames say nothing

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes; frames are guessed for all roots among them, in one pass."""
        roots = [row for row, above in zip(rows, parents, strict=True) if above[0] < 0]
        if roots:
            self.guess(roots)
        found = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            known: Said = row.private[self]
            assert known.frames is not None and known.slots is not None, "its root was fed"
            for token, parent in zip(new, above, strict=True):
                known.prefixes.append(
                    nothing(known.frames)
                    if parent < 0
                    else longer(known.prefixes[parent], token, known.frames)
                )
            said = following(known.prefixes[-len(new) :], known.frames)
            logits = said.clamp(min=LEAST).log().to(self.like)
            hidden = known.slots[:1, None].expand(len(new), len(taps), -1) if taps else None
            found.append(Scores(logits, hidden))
        return found

    def guess(self, rows: Rows) -> None:
        super().guess(rows)
        for row in rows:
            known: Said = row.private[self]
            assert known.slots is not None and known.laws is not None, "just guessed"
            logits = self.head.frames(known.slots, known.laws)
            known.frames, known.prefixes = logits.double().softmax(-1), []


def nothing(frames: Float[Tensor, "U V+1"]) -> Prefix:
    """Frames that said nothing yet: all of them blank."""
    blank = [1.0, *frames[:, -1].cumprod(0).tolist()]
    return Prefix(None, [0.0] * len(blank), blank)


def longer(prefix: Prefix, token: int, frames: Float[Tensor, "U V+1"]) -> Prefix:
    """The prefix with one more token."""
    told, blank = [0.0], [0.0]
    for t, (own, empty) in enumerate(frames[:, [token, -1]].tolist()):
        fresh = prefix.blank[t] + (0.0 if token == prefix.last else prefix.told[t])
        blank.append((told[-1] + blank[-1]) * empty)
        told.append((told[-1] + fresh) * own)
    return Prefix(token, told, blank)


def following(prefixes: Sequence[Prefix], frames: Float[Tensor, "U V+1"]) -> Float[Tensor, "n V"]:
    """How likely what is said begins with each prefix and then each token."""
    ends = [[a + b for a, b in zip(one.told, one.blank, strict=True)] for one in prefixes]
    found = frames.new_tensor(ends)[:, :-1] @ frames[:, :-1]
    for own, one in zip(found, prefixes, strict=True):
        if one.last is not None:  # said again only behind a blank
            own[one.last] -= frames.new_tensor(one.told[:-1]) @ frames[:, one.last]
    return found


def likelihood(prefix: Prefix) -> float:
    """How likely all frames together say the prefix and nothing else."""
    return prefix.told[-1] + prefix.blank[-1]


def path_of(frames: Float[Tensor, "U V+1"], tokens: Sequence[int]) -> Prefix:
    """The prefix of several tokens."""
    prefix = nothing(frames)
    for token in tokens:
        prefix = longer(prefix, token, frames)
    return prefix

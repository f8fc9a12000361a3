"""A small decoder that reads the target's hidden states beside tokens, as a draft model (EAGLE).

Token i enters with the state of token i - 1: the target's where the text is committed, and the
decoder's own output in an open tree, whose nodes are forgotten when the tree is judged
(arXiv 2401.15077, 2503.01840). Behind that it is an ordinary language model with a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.opened_head import opened
from foretoken.drafters.parts.trained_head import (
    PIECE,
    HeadOptions,
    TrainedHead,
    check_depth,
    reading_few,
)
from foretoken.drafters.parts.unread import Unread
from foretoken.heads.store import window_of
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.kernels.entering import Entering
from foretoken.lm.views.few_rows import FewRows, is_silenced
from foretoken.lm.views.read_by_target import ReadByTarget
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import DecodeState, Layer, Ragged, Rows, Scores, Taps

FEW = Entering.most  # tokens whose states are read at once
LEAST_READ = 256  # tokens of a text, however short those were that a head learned from
POSITIONS = 1 << 20  # rotary: as many as anyone needs, where the target names no end


class StateReading(Protocol):
    """What a head is asked for; W is the width of its own states."""

    width: int
    begins: int  # the first token that enters: 0, or 1 for a head that never saw one without a
    # state before it
    goes_on: Layer | None  # of the decoder, whose output the next token is read with; None: its
    # outputs behind those of tokens, W of them
    scored: Int[Tensor, "n"] | None  # tokens its own outputs score; None: the target's outputs do
    # What enters is a row for the token and the state before it, added. Then it also says whether
    # it `reads_embeddings` of the target, `maps_outputs` from them, and makes a `table` of them;
    # all that `fused` does are a map, a norm and a map: `fusing`.
    adds_tokens: bool

    def reads_of(self, layers: int) -> Taps:
        """States that it reads of a target of so many layers."""

    def fused(self, states: Float[Tensor, "*n L H"]) -> Float[Tensor, "*n W"]:
        """The target's states as one state of the head's own kind."""

    def entering(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n W"], embed: Any
    ) -> Float[Tensor, "*n W"]:
        """What enters the decoder at tokens, from the states before them.

        `embed(tokens)` gives the target's input embeddings.
        """

    def decoder(self, positions: int) -> Any:
        """A model of transformers, whose first outputs are those of the tokens scored."""


@dataclass(slots=True)
class Followed:
    """A row as the decoder knows it."""

    own: DecodeState  # what the decoder is asked of: the row, or one without its first tokens
    skipped: int  # of the row's tokens, which the decoder never reads
    read: list[int]  # the row's tokens, which its own followed last: those of a fork are others
    entering: Float[Tensor, "n W"]  # at committed tokens that it has not cached yet, the root last
    outputs: Float[Tensor, "N W"] | None = None  # at each node of the open tree


class StateReader(TrainedHead):
    """Guesses by a head that goes on with states.

    Of a text that is not drafted for it keeps what enters the decoder, fewer numbers than the
    decoder's cache would have. Of a text that is longer than those it learned from it reads the end
    alone: more takes time, and no more of its guesses stood.
    """

    context: int | None = None

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.taps = self.head.reads_of(target.layers)
        check_depth(self.taps, kind, target)
        self.target, self.hidden_size = target, self.head.width
        self.unread = Unread(self.missing)  # rows that were never drafted for
        self.max_length = target.max_length
        self.recent = read_back(self.card.notes)
        self.nothing = self.like.new_zeros(1, self.hidden_size)  # the state before the first token
        positions = self.max_length or POSITIONS
        found = opened(self.head, positions, target.vocab_size, self.embedded)
        self.decoder, self.table = found.decoder, found.table
        self.entering: Entering | None = None  # in one call, where operations in C can be had
        if self.table is not None:
            fuse, norm, join = self.head.fusing
            self.entering = Entering.of(fuse, norm, join, self.table)
        self.laws = self.scoring(target, str((config or self.Config()).draft_head))

    def scoring(self, target: LanguageModel, folder: str) -> FewRows | ReadByTarget:
        """The decoder with laws over the target's tokens."""
        if (ids := self.head.scored) is not None:
            rows = OutputRows(torch.arange(len(ids), device=ids.device), ids, target.vocab_size)
            return FewRows(self.decoder, rows)
        return ReadByTarget(self.decoder, reading_few(target, folder))

    @torch.inference_mode()
    def open(self, row: DecodeState, features: Features | None) -> bool:
        assert features is not None, "the engine asks for the taps"
        if self.max_length is not None and len(row.tokens) > self.max_length:
            return False
        if is_silenced(self.laws, row.params):
            return False
        if self.context is not None:
            features = features[-self.context :]
        if self.recent is not None:
            features = features[-self.recent :]
        before = torch.cat([self.nothing, self.head.fused(features.to(self.nothing))])
        begun = len(row.tokens) - len(before)  # the token whose state before it is not there
        # that is read at the beginning of a text, by some heads, and where there is no other
        first = begun if begun == 0 and (self.head.begins == 0 or len(before) == 1) else begun + 1
        own = row if first == 0 else behind(row, first)
        row.private[self] = Followed(
            own,
            first,
            row.tokens,
            in_pieces(self.read, own.tokens, before[first - begun :], PIECE),
        )
        self.unread.add(row)
        return True

    def followed(self, row: DecodeState) -> Followed:
        """The row as the decoder knows it, up to the tokens there are now."""
        known: Followed = row.private[self]
        if not known.skipped:
            known.own = row  # or a fork of it, which the decoder knows by the same name
            return known
        own, count = known.own.tokens, len(row.tokens) - known.skipped
        if known.read is not row.tokens:
            known.read, own[:] = row.tokens, row.tokens[known.skipped :]
        elif len(own) < count:  # a long text is not copied for every level of a draft
            own += row.tokens[known.skipped + len(own) :]
        else:
            del own[count:]
        return known

    def missing(self, row: DecodeState) -> int:
        """Tokens that the decoder has yet to read, the root aside."""
        known: Followed = row.private[self]
        return len(known.entering) - 1

    def supply(self, known: Followed) -> None:
        """Tell the decoder what enters at the tokens that it lacks, the root last.

        A call that ended in an error may have had some of them cached.
        """
        lacking = self.decoder.missing(known.own) + 1
        self.decoder.supply(known.own, known.entering[-lacking:])

    def feed(self, rows: list[DecodeState]) -> None:
        """Let the decoder read texts that are drafted for the first time, their roots aside."""
        for row in rows:
            known = self.followed(row)
            if len(known.entering) > 1:
                self.supply(known)
                try:
                    self.decoder.prefill([known.own])
                except BaseException:  # nobody knows what was read: it begins anew
                    self.decoder.free([known.own])
                    raise
            known.entering = known.entering[-1:].clone()  # which does not keep the others

    def to_read(self, row: DecodeState) -> float:
        """Seconds until this row can be drafted for."""
        return self.unread.to_read(row)

    def read(self, tokens: Sequence[int], before: Float[Tensor, "n W"]) -> Float[Tensor, "n W"]:
        """What enters the decoder at tokens, from the states before them."""
        ids = torch.tensor(tokens, device=before.device)
        if self.table is not None:
            return F.embedding(ids, self.table) + before
        entering: Tensor = self.head.entering(ids, before, self.embedded)
        return entering

    def embedded(self, tokens: Int[Tensor, "n"]) -> Float[Tensor, "n H"]:
        """The target's input embeddings."""
        return self.target.embed(tokens.tolist()).to(self.nothing)

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes; a root is fed with the committed tokens before it."""
        self.unread.read(rows, self.feed)
        deeper = [
            (new, self.output_of(row, above))
            for row, new, above in zip(rows, tokens, parents, strict=True) if above[0] >= 0
        ]  # fmt: skip
        if deeper:
            below, before = [new for new, _ in deeper], [states for _, states in deeper]
            together = before[0] if len(before) == 1 else torch.cat(before)
            entering = in_pieces(self.read, [token for new in below for token in new], together)
            parts = iter(torch.split(entering, [len(new) for new in below]))
        for row, above in zip(rows, parents, strict=True):
            known = self.followed(row)
            if above[0] < 0:
                self.supply(known)
            else:
                self.decoder.supply(known.own, next(parts))
        asked = [row.private[self].own for row in rows]
        scores, outputs = self.said(asked, tokens, parents, taps)
        for row, above, own in zip(rows, parents, outputs, strict=True):
            known = row.private[self]
            if known.outputs is None or above[0] < 0:  # what was fed before the root is cached now
                known.entering, known.outputs = known.entering[-1:], own
            else:
                known.outputs = torch.cat([known.outputs, own])
        return scores

    def grow_trees(self, rows: Rows, rules: Sequence[GrowthRule]) -> list[Grown | None]:
        """New trees of rows in one call; None: to be asked level by level instead."""
        if self.table is None:
            return [None] * len(rows)
        self.unread.read(rows, self.feed)
        for row in rows:
            self.supply(self.followed(row))
        asked = [row.private[self].own for row in rows]
        found = self.decoder.grow_trees(asked, rules, self.head.scored, self.table)
        for row, grown in zip(rows, found, strict=True):
            if grown is not None:
                known = row.private[self]
                known.entering, known.outputs = known.entering[-1:], grown.said
        return found

    def output_of(self, row: DecodeState, nodes: Sequence[int]) -> Float[Tensor, "n W"]:
        """What came out at these nodes of a row's open tree."""
        outputs: Tensor = row.private[self].outputs
        first, last = nodes[0], nodes[-1]
        if list(nodes) == list(range(first, last + 1)):  # of a chain, and of most levels
            return outputs[first : last + 1]
        return outputs.index_select(0, torch.tensor(nodes, device=outputs.device))

    def said(
        self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps
    ) -> tuple[list[Scores], list[Float[Tensor, "n W"]]]:
        """Laws after new nodes, and what the head goes on with there."""
        if self.head.goes_on is None:
            assert isinstance(self.laws, FewRows), "it has outputs of its own"
            scores = self.decoder.grow(rows, tokens, parents, taps)
            own = [score.logits[:, -self.hidden_size :].to(self.nothing) for score in scores]
            return [self.laws.spread(score) for score in scores], own
        scores = self.laws.grow(rows, tokens, parents, (self.head.goes_on, *taps))
        own = []
        for score in scores:
            assert score.hidden is not None, "it was asked for"
            own.append(score.hidden[:, 0])
            score.hidden = score.hidden[:, 1:] if taps else None
        return scores, own

    @torch.inference_mode()
    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Keep roots, which were fed with the target's states; the other tokens are fed again."""
        opened = [
            row.private[self].own for row, path in zip(rows, paths, strict=True) if path is not None
        ]
        if opened:
            self.decoder.commit(opened, [()] * len(opened))
        seen = [one for one in features if one is not None]
        assert len(seen) == len(rows), "features come with every verdict"
        states = (seen[0] if len(seen) == 1 else torch.cat(seen)).to(self.nothing)
        tokens = [
            token for row, one in zip(rows, seen, strict=True) for token in row.tokens[-len(one) :]
        ]
        entering = in_pieces(self.entered, tokens, states)
        parts = torch.split(entering, [len(one) for one in seen])
        for row, path, part in zip(rows, paths, parts, strict=True):
            known: Followed = row.private[self]
            known.entering = part if path is not None else torch.cat([known.entering, part])
            known.outputs = None

    def entered(
        self, tokens: Sequence[int], states: Float[Tensor, "n L H"]
    ) -> Float[Tensor, "n W"]:
        """What enters the decoder at a few tokens, from the target's states before them."""
        if self.entering is not None and self.entering.takes(states):
            return self.entering(states, tokens)
        return self.read(tokens, self.head.fused(states))

    def close(self, row: DecodeState) -> None:
        known = row.private.get(self)
        super().close(row)
        self.unread.discard(row)
        self.decoder.free([row if known is None else known.own])


def behind(row: DecodeState, first: int) -> DecodeState:
    """The row as a decoder knows it that never reads what lies before the token `first`."""
    left = max(row.prompt_len - first, 0)
    return DecodeState(row.tokens[first:], left, row.params, row.coins, row.warp)


def read_back(notes: Mapping[str, Any]) -> int | None:
    """Tokens of a text that a head reads, the last ones, by the notes of its training; None: all,
    where they do not say what it learned from.
    """
    window = window_of(notes)
    return None if window is None else max(window, LEAST_READ)


def in_pieces(
    read: Callable[[Sequence[int], Tensor], Tensor],
    tokens: Sequence[int],
    states: Tensor,
    size: int = FEW,
) -> Float[Tensor, "n W"]:
    """What enters at tokens, few at a time: more at once are multiplied by other kernels than a
    row's few, and round otherwise.
    """
    starts = range(0, len(tokens), size)
    pieces = [
        read(tokens[first : first + len(own)], own)
        for first, own in zip(starts, torch.split(states, size), strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

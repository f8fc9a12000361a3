"""A batch as a left-padded rectangle, as "Batch Speculative Decoding Done Right" keeps it
(arXiv 2510.22876): what our ragged slots are measured against.

It is the slot cache once more, with two differences. A row's columns begin behind its pads, so that
column = pads + position; and whenever rows are fed whose last tokens do not share a column, they
are padded anew and their columns moved. Forwards are those of every CachedLM, captured and in C
where that can be, so that a comparison measures realigning and nothing else. Pads are told by their
number, never by a token's id, and no token sees one: a row behind pads has a mask over all its
columns where torch attends, and is read from behind them in C. The invariants of every forward:

1. the tokens of a row are neighbours, and its last one lies in the column of everybody's last;
2. a query sees the columns of its own row's tokens up to itself, and no pad;
3. the position of a token is the number of its row's tokens before it;
4. a column holds keys and values of its own token at that position; all but the last are cached;
5. rows that ended are not touched, and no row depends on another.

Rows are moved right before a forward and not right after a commit: as often, but rows that ended
meanwhile are spared, and those that joined are moved with the others. Each is moved in one copy
through all layers. A gather per layer over the whole batch, which moves rows that stay as well,
took five to ten times as long on a CPU (30 layers, 8 rows of 400 columns).

Where a draft lacks its own last guess in some rows, the last two tokens are fed again for all of
them, as published; a row that lacks more (it was not drafted for) catches up alone, as a prompt.
Prompts themselves are fed unpadded, in chunks, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.alignment import Alignment, Move
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.packing import Feed
from foretoken.lm.runtime.partial_forwards import Part
from foretoken.lm.runtime.sharing import exclusive
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import Caps, DecodeState, Ragged, Rows, Scores, Taps

WHY = "a left-padded batch is a rectangle of chains"


class AlignedLM(CachedLM):
    """The model of another CachedLM with a cache of its own, whose rows end in one column."""

    def __init__(self, lm: CachedLM) -> None:
        refuse_unpaddable(lm)
        super().__init__(lm.model, lm.family, lm.borrowing, lm.name)
        self.plan, self.vocab_size, self.kernels = lm.plan, lm.vocab_size, lm.kernels
        self.caps = Caps("chain", True, lm.caps.taps, WHY)
        self.alignment = Alignment()

    def reset(self) -> None:
        super().reset()
        self.alignment.pads.clear()

    @exclusive
    def free(self, rows: Rows) -> None:
        super().free(rows)
        self.alignment.forget(rows)

    @exclusive
    def columns(self, row: DecodeState, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a row's cached tokens, its pads left out."""
        memory, pad = self._memory(row), self.alignment.pad(row)
        found = self.cache.kept(layer, memory.slot, pad + memory.cached)
        return None if found is None else (found[0][:, pad:], found[1][:, pad:])

    def grow_trees(
        self,
        rows: Rows,
        rules: Sequence[GrowthRule],
        names: Tensor | None = None,
        table: Tensor | None = None,
    ) -> list[Grown | None]:
        return [None] * len(rows)  # columns begin with pads

    def _advance(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps) -> list[Scores]:
        """New nodes of the rows' chains; those that open one are a rectangle by then."""
        opening = [row for row, above in zip(rows, parents, strict=True) if above and above[0] < 0]
        if opening:
            self.catch_up(opening)
            self.move(self.alignment.align(opening))
            self.crop(opening)
        return super()._advance(rows, tokens, parents, taps)

    def catch_up(self, rows: Rows) -> None:
        """Feed what rows lack beyond their last two tokens, or their last where one has no more."""
        spare = 1 if min(len(row.tokens) for row in rows) > 1 else 0
        late = [row for row in rows if self.missing(row) > spare]
        if late:
            self._fill(late)

    def move(self, moves: Sequence[Move]) -> None:
        """Columns of rows to where their new pads end."""
        if not moves:
            return
        began = self.clock()
        for at, move in enumerate(moves):
            memory = self._memory(move.row)
            try:
                self.cache.reserve([memory.slot], [move.target + memory.cached])
                self.cache.shift(memory.slot, move.source, move.target, memory.cached)
            except BaseException:
                self.alignment.undo(moves[at:])
                self.lose(move.row)
                raise
        self.alignment.seconds += self.clock() - began

    def lose(self, row: DecodeState) -> None:
        """Have a row read anew, without pads: what of its columns was moved is not known, and keys
        that lie apart from their values write another text."""
        memory = self._memory(row)
        memory.cached = 0
        memory.forget()
        self.alignment.forget([row])

    def crop(self, rows: Rows) -> None:
        """Cut all rows to the columns that each of them has."""
        most = max(self.missing(row) for row in rows)
        for row in rows:
            self._memory(row).cached = len(row.tokens) - 1 - most

    def clock(self) -> float:
        """Now, the device's work included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def _run(self, feeds: list[Feed], taps: Taps, part: Part | None = None) -> list[Scores]:
        """Forward feeds behind their rows' pads, and nodes of all rows to one width."""
        counts = [len(feed.tokens) for feed in feeds]
        width = max(counts)
        for feed in feeds:
            if not feed.in_order:
                raise CapabilityError(
                    f"a tree was handed to a left-padded batch of {self.family.name}.",
                    f"it takes chains only: {WHY}.",
                    "use method tree, whose rows lie in slots of their own.",
                )
            if feed.scored:
                widen(feed, width)
            self.place(feed)
        ran = super()._run(feeds, taps, part)
        return [
            score if len(feed.tokens) == count else narrowed(score, len(feed.tokens) - count)
            for feed, score, count in zip(feeds, ran, counts, strict=True)
        ]

    def place(self, feed: Feed) -> None:
        """Behind the pads of its row, which its tokens do not see."""
        pad = self.alignment.pads.get(self._slots[feed.memory.slot], 0)
        if not pad:
            return
        feed.base, feed.start = 0, feed.start + pad
        pads = (1 << pad) - 1
        feed.seen = [((2 << feed.start + i) - 1) ^ pads for i in range(len(feed.tokens))]
        feed.key_positions = list(range(-pad, feed.stop - pad))


def widen(feed: Feed, width: int) -> None:
    """Repeat the last token of a chain behind it; nobody looks at what is said of these."""
    count = len(feed.tokens)
    more = width - count
    if not more:
        return
    feed.tokens = feed.tokens + feed.tokens[-1:] * more
    feed.positions = feed.positions + feed.positions[-1:] * more
    feed.key_positions = [*feed.key_positions, *feed.key_positions[-1:] * more]
    tail = feed.start - feed.base
    feed.seen = feed.seen + [(2 << tail + i) - 1 for i in range(count, width)]
    feed.scored += more


def narrowed(score: Scores, more: int) -> Scores:
    """Without what was repeated."""
    hidden = None if score.hidden is None else score.hidden[:-more]
    return Scores(score.logits[:-more], hidden)


def refuse_unpaddable(lm: CachedLM) -> None:
    """CapabilityError for models whose rows cannot be moved, and for what would not be kept."""
    name, plan = lm.family.name, lm.plan
    why = ""
    if not (plan.tree and plan.ragged):
        why = plan.why or "it takes no masks of ours"
    elif plan.ordered:
        why = "exact_bits cuts sums by column, and pads move columns"
    elif not lm._positions_accepted:
        why = "it counts positions itself, pads included"
    if why:
        raise CapabilityError(
            f"a left-padded batch of {name} was asked for.",
            f"its rows cannot be padded and moved: {why}.",
            "use method chain, whose rows need neither.",
        )

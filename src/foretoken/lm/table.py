"""TableLM: a toy language model with an exact law, for tests and audits.

It keeps its own record of what is cached, answers from that record alone, and raises
AssertionError whenever it is used against the protocol, so it also audits whoever calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm.leaving import Leave
from foretoken.lm.shadow import Watched
from foretoken.lm.table_views import TableExits, TableLeaves, TableSkips, disturbed, left_early
from foretoken.types import NORMED, Caps, DecodeState, Draft, Scores, TokenTree


@dataclass(slots=True)
class Memory:
    """What the table knows of one row."""

    cached: list[int]
    tokens: list[int] = field(default_factory=list)  # open tree, root first
    parents: list[int] = field(default_factory=list)
    early: Memory | None = None  # a tree drafted by the first layers
    depth: int = 0  # layers that have seen the open tree; zero: all
    scratch: bool = False  # the open tree is drafted afresh by whoever scores
    wanted: tuple[int, ...] = ()  # depths whose hidden states the scores are to bring
    leave: Leave | None = None  # the next scoring may end before the last layer
    shown: Tensor | None = None  # [n, L, V]: hidden states of the prompt's end, if asked for

    def opened(self, depth: int, wanted: tuple[int, ...]) -> Memory:
        """The same cached tokens under an empty tree."""
        return Memory(self.cached, depth=depth, wanted=wanted)


class TableLM:
    """A Markov chain of order one or two: `logits[a, b]` [V] follow the tokens a, b.

    Missing context counts as token 0. Any method that runs on a transformer runs on it.
    """

    def __init__(
        self,
        logits: Float[Tensor, "*context V"],
        caps: Caps | None = None,
        layers: int = 4,
        disturbance: float = 1.0,
    ) -> None:
        sizes = set(logits.shape)
        assert len(sizes) == 1 and logits.dim() in (2, 3), "a table is [V, V] or [V, V, V]"
        self.logits = logits.double()
        self.order = logits.dim() - 1
        self.vocab_size = self.hidden_size = logits.shape[-1]
        self.caps = caps or Caps()
        self.max_length: int | None = None
        self.layers = layers  # what its early exits and views are shares of
        self.disturbance = disturbance  # of logits when all layers are missing
        self.forwards = 0  # calls of score and grow, for accounting tests
        self.layers_run = 0.0  # by these and by views
        self.watched: Watched | None = None  # hidden states that a view wants of every prompt
        self._rows: dict[int, Memory] = {}

    @classmethod
    def random(
        cls,
        vocab: int = 4,
        order: int = 2,
        seed: int = 0,
        scale: float = 1.5,
        layers: int = 4,
    ) -> TableLM:
        """Normally distributed logits; a larger `scale` makes more certain laws."""
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab,) * (order + 1)
        logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(logits, layers=layers)

    def after(self, tokens: Sequence[int]) -> Float[Tensor, "V"]:
        """Logits of the next token: the whole truth about this model."""
        return self._look_up(self.logits, tokens)

    def exits(self, marks: Sequence[int], look_back: int | None = None) -> TableExits:
        """Early exits, see `lm.views`."""
        return TableExits(self, marks, look_back)

    def skips(self) -> TableSkips:
        """Drafting without some sublayers, see `lm.views`."""
        return TableSkips(self)

    def leaves(self) -> TableLeaves:
        """Forwards that end early, see `lm.views`."""
        return TableLeaves(self)

    def prefill(
        self, row: DecodeState, taps: tuple[int, ...] = ()
    ) -> Float[Tensor, "S L V"] | None:
        assert row.uid not in self._rows, "prefill of a row that is already cached"
        assert row.tokens, "prefill of an empty row"
        self._rows[row.uid] = memory = Memory(list(row.tokens[:-1]))
        if self.watched is not None:
            wanted, last = self.watched.taps, self.watched.last
            ends = range(max(1, len(row.tokens) - last), len(row.tokens))
            memory.shown = self._hidden([row.tokens[:end] for end in ends], wanted)
        if not taps:
            return None
        return self._tapped([row.tokens[:end] for end in range(1, len(row.tokens))], taps)

    def score(
        self, rows: Sequence[DecodeState], drafts: Sequence[Draft], taps: tuple[int, ...] = ()
    ) -> list[Scores]:
        trees = [draft.tree for draft in drafts]
        wanted = [self._drop_early(row, tree) for row, tree in zip(rows, trees, strict=True)]
        scores = self.grow_scores(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)
        for row, score, depths in zip(rows, scores, wanted, strict=True):
            if depths:
                score.hidden = self._hidden(self._contexts(row), depths)
            memory = self._memory(row)
            wish, memory.leave = memory.leave, None
            if wish is not None:
                score.logits = left_early(self, wish, self._contexts(row))
        return scores

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> list[Float[Tensor, "n V"]]:
        assert len({row.uid for row in rows}) == len(rows), "one row twice in a forward"
        self.forwards += 1
        self.layers_run += self.layers
        return [
            self._grow_row(row, self._memory(row), new, above, self.logits)
            for row, new, above in zip(rows, tokens, parents, strict=True)
        ]

    def grow_scores(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        taps: tuple[int, ...],
    ) -> list[Scores]:
        scores = [Scores(logits) for logits in self.grow(rows, tokens, parents)]
        if taps:
            for row, score in zip(rows, scores, strict=True):
                contexts = self._contexts(row)
                score.hidden = self._tapped(contexts[len(contexts) - len(score.logits) :], taps)
        return scores

    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        for row, path in zip(rows, paths, strict=True):
            memory = self._memory(row)
            assert memory.tokens, "commit without an open tree"
            node = 0
            for step in path:
                assert 0 < step < len(memory.tokens), f"commit of unknown node {step}"
                assert memory.parents[step] == node, f"node {step} is no child of {node}"
                node = step
            memory.cached += [memory.tokens[i] for i in (0, *path)]
            memory.tokens, memory.parents = [], []

    def prune(
        self,
        rows: Sequence[DecodeState],
        kept: Sequence[Sequence[int]],
        settled: Sequence[int],
    ) -> None:
        for row, nodes, count in zip(rows, kept, settled, strict=True):
            memory = self._memory(row)
            assert list(nodes) == sorted(set(nodes)), "kept nodes are ascending"
            places = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
            above = [memory.parents[node] for node in nodes]
            assert all(parent in places for parent in above), "a kept node lost its parent"
            parents = [places[parent] for parent in above]
            assert parents[: count + 1] == list(range(-1, min(count + 1, len(nodes)) - 1)), (
                "settled tokens and the new root are one path"
            )
            assert all(parent >= count for parent in parents[count + 1 :]), "outside the new root"
            tokens = [memory.tokens[node] for node in nodes]
            memory.cached += tokens[:count]
            memory.tokens = tokens[count:]
            memory.parents = [-1 if i == 0 else p - count for i, p in enumerate(parents[count:])]

    def free(self, rows: Sequence[DecodeState]) -> None:
        for row in rows:
            self._rows.pop(row.uid, None)

    def cached(self, row: DecodeState) -> list[int]:
        """The tokens this model has cached for `row`."""
        return list(self._memory(row).cached)

    @property
    def rows_held(self) -> int:
        return len(self._rows)

    def _memory(self, row: DecodeState) -> Memory:
        assert row.uid in self._rows, "a row that was never prefilled, or was freed"
        return self._rows[row.uid]

    def _tapped(
        self, contexts: Sequence[Sequence[int]], taps: tuple[int, ...]
    ) -> Float[Tensor, "n L V"]:
        depths = [self.layers if tap == NORMED else tap % self.layers + 1 for tap in taps]
        return self._hidden(contexts, depths)

    def _look_up(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        padded = [0] * self.order + list(tokens[-self.order :])
        return logits[tuple(padded[-self.order :])]

    def _drop_early(self, row: DecodeState, tree: TokenTree) -> tuple[int, ...]:
        """Scoring goes on where early layers stopped, with the very nodes they were fed.

        Returns the depths whose hidden states are wanted.
        """
        memory = self._memory(row)
        early, memory.early = memory.early, None
        if early is None or early.scratch:
            return ()
        fed = len(early.tokens)
        assert list(tree.tokens[:fed]) == early.tokens, "scored nodes are not those drafted"
        assert list(tree.parents[:fed]) == early.parents, "scored nodes hang elsewhere"
        return early.wanted

    def _contexts(self, row: DecodeState) -> list[list[int]]:
        memory = self._memory(row)
        return [self._context(memory, node) for node in range(len(memory.tokens))]

    def _hidden(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> Float[Tensor, "n L V"]:
        """A table's hidden states are the logits of its early exits."""
        tables = [disturbed(self, depth) for depth in depths]
        states = [self._look_up(table, tokens) for tokens in contexts for table in tables]
        none = self.logits.new_zeros(0, self.vocab_size)
        flat = torch.stack(states) if states else none
        return flat.view(len(contexts), len(depths), self.vocab_size)

    def _grow_row(
        self,
        row: DecodeState,
        memory: Memory,
        new: Sequence[int],
        above: Sequence[int],
        logits: Tensor,
    ) -> Tensor:
        if not memory.tokens and new:
            self._open(memory, row, new[0], above[0])
        rows = []
        for token, parent in zip(new, above, strict=True):
            assert 0 <= token < self.vocab_size, f"token {token} is outside the vocabulary"
            at = len(memory.tokens)
            assert (parent == -1) if at == 0 else (0 <= parent < at), f"parent {parent} of {at}"
            memory.tokens.append(token)
            memory.parents.append(parent)
            rows.append(self._look_up(logits, self._context(memory, at)))
        return torch.stack(rows) if rows else self.logits.new_zeros(0, self.vocab_size)

    def _open(self, memory: Memory, row: DecodeState, token: int, parent: int) -> None:
        """Catch up with committed tokens, then start a tree at the last one."""
        held = len(memory.cached)
        assert parent == -1, "the first node of a tree is its root"
        assert held <= len(row.tokens) - 1, "more tokens cached than were committed"
        assert memory.cached == row.tokens[:held], "the cache holds other tokens than the row"
        assert token == row.tokens[-1], "the root repeats the last committed token"
        memory.cached += row.tokens[held:-1]

    def _context(self, memory: Memory, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.append(memory.tokens[node])
            node = memory.parents[node]
        return memory.cached[-self.order :] + path[::-1]

"""TableLM: a toy language model with an exact law, for tests and audits.

It keeps its own record of what is cached, answers from that record alone, and raises
AssertionError whenever it is used against the protocol, so it also audits whoever calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.types import Caps, DecodeState, Draft, Layer, Ragged, Rows, Scores, Taps


@dataclass(slots=True)
class Memory:
    """What the table knows of one row."""

    cached: list[int]
    tokens: list[int] = field(default_factory=list)  # open tree, root first
    parents: list[int] = field(default_factory=list)

    def forget(self) -> None:
        """Drop the open tree."""
        self.tokens, self.parents = [], []


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
        self.lossless = True
        self.verified = float("inf")  # a table is right at any length
        self.layers = layers  # what its early exits and views are shares of
        self.disturbance = disturbance  # of logits when all layers are missing
        self.forwards = 0  # calls of score and grow, for accounting tests
        self.layers_run = 0.0  # by these and by views
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

    def behind(self, depth: int) -> Float[Tensor, "*context V"]:
        """The table behind `depth` of its layers: disturbed, always the same for the same depth."""
        if depth == self.layers:
            return self.logits
        generator = torch.Generator().manual_seed(depth)
        noise = torch.randn(self.logits.shape, generator=generator, dtype=torch.float64)
        return self.logits + self.disturbance * (1.0 - depth / self.layers) * noise

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L V"] | None]:
        fed = []
        for row in rows:
            new = row.uid not in self._rows
            assert row.tokens, "prefill of an empty row"
            assert new or self.missing(row), "prefill of a row that is already cached"
            memory = self._rows.setdefault(row.uid, Memory([]))
            assert not memory.tokens, "prefill beside an open tree"
            held, stop = len(memory.cached), len(row.tokens) - 1
            stop = stop if limit is None else min(stop, held + limit)
            self._catch_up(memory, row.tokens[:stop])
            first = held if last is None else max(held, stop - last)
            contexts = [row.tokens[: end + 1] for end in range(first, stop)]
            fed.append(self.tapped(contexts, taps) if taps else None)
        return fed

    def missing(self, row: DecodeState) -> int:
        memory = self._rows.get(row.uid)
        return len(row.tokens) - 1 - (0 if memory is None else len(memory.cached))

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        for row in rows:
            self._memory(row).forget()
        trees = [draft.tree for draft in drafts]
        return self.grow(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        assert len({row.uid for row in rows}) == len(rows), "one row twice in a forward"
        self.forwards += 1
        self.layers_run += self.layers
        scores = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            logits = self._grow_row(row, self._memory(row), new, above, self.logits)
            contexts = self._contexts(row) if taps else []
            hidden = self.tapped(contexts[len(contexts) - len(new) :], taps) if taps else None
            scores.append(Scores(logits, hidden))
        return scores

    def commit(self, rows: Rows, paths: Ragged) -> None:
        for row, path in zip(rows, paths, strict=True):
            memory = self._memory(row)
            assert memory.tokens, "commit without an open tree"
            node = 0
            for step in path:
                assert 0 < step < len(memory.tokens), f"commit of unknown node {step}"
                assert memory.parents[step] == node, f"node {step} is no child of {node}"
                node = step
            memory.cached += [memory.tokens[i] for i in (0, *path)]
            memory.forget()

    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
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

    def self_check(self, row: DecodeState) -> None:
        return None

    # What a session asks of a loaded model: a table is always ready, and nothing changes it.

    def check_usable(self) -> None:
        return None

    def refresh(self, full: bool = False) -> int:
        return 0

    def close(self) -> None:
        return None

    def free(self, rows: Rows) -> None:
        for row in rows:
            self._rows.pop(row.uid, None)

    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n V"]:
        return torch.eye(self.vocab_size, dtype=torch.float64)[list(tokens)]

    def unembed(self, hidden: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        return hidden

    def layer_cache(self, layer: int) -> TableCache:
        return TableCache(self, layer)

    def cached(self, row: DecodeState) -> list[int]:
        """The tokens this model has cached for `row`."""
        return list(self._memory(row).cached)

    @property
    def rows_held(self) -> int:
        return len(self._rows)

    def _memory(self, row: DecodeState) -> Memory:
        assert row.uid in self._rows, "a row that was never prefilled, or was freed"
        return self._rows[row.uid]

    def tapped(self, contexts: Ragged, taps: Taps) -> Float[Tensor, "n L V"]:
        """A table's hidden states are the logits of its early exits."""
        tables = [
            self.behind(tap.index % self.layers + 1 if isinstance(tap, Layer) else self.layers)
            for tap in taps
        ]
        states = [self._look_up(table, tokens) for tokens in contexts for table in tables]
        none = self.logits.new_zeros(0, self.vocab_size)
        flat = torch.stack(states) if states else none
        return flat.view(len(contexts), len(taps), self.vocab_size)

    def _look_up(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        padded = [0] * self.order + list(tokens[-self.order :])
        return logits[tuple(padded[-self.order :])]

    def _contexts(self, row: DecodeState) -> list[list[int]]:
        memory = self._memory(row)
        return [self._context(memory, node) for node in range(len(memory.tokens))]

    def _grow_row(
        self,
        row: DecodeState,
        memory: Memory,
        new: Sequence[int],
        above: Sequence[int],
        logits: Tensor,
    ) -> Tensor:
        if above and above[0] < 0:
            memory.forget()  # a parent of -1 opens a new tree
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
        assert parent == -1, "the first node of a tree is its root"
        assert token == row.tokens[-1], "the root repeats the last committed token"
        self._catch_up(memory, row.tokens[:-1])

    def _catch_up(self, memory: Memory, tokens: Sequence[int]) -> None:
        held = len(memory.cached)
        assert held <= len(tokens), "more tokens cached than were committed"
        assert memory.cached == list(tokens[:held]), "the cache holds other tokens than the row"
        memory.cached += tokens[held:]

    def _context(self, memory: Memory, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.append(memory.tokens[node])
            node = memory.parents[node]
        return memory.cached[-self.order :] + path[::-1]


class TableCache:
    """What a layer of a table would keep of cached tokens: its hidden states, as keys and values.

    One head, and no rotation: a table knows no positions.
    """

    heads, rotary = 1, False

    def __init__(self, table: TableLM, layer: int) -> None:
        self.table, self.size, self.tap = table, table.vocab_size, Layer(layer)

    def keys_values(
        self, row: DecodeState
    ) -> tuple[Float[Tensor, "1 S V"], Float[Tensor, "1 S V"]]:
        cached = self.table.cached(row)
        contexts = [cached[:end] for end in range(1, len(cached) + 1)]
        states = self.table.tapped(contexts, (self.tap,)).transpose(0, 1)
        return states, states

    def rotated(
        self, states: Float[Tensor, "n any V"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n any V"]:
        return states

"""A head with a sliding window that reads the target's KV cache, as a draft model (LongSpec).

All rows' nodes pass the head's products in one flat batch; each row attends to columns of its own.
The window is a ring: the token at position p lies in column p modulo the window, and the open tree
behind it. What is kept of a row is that ring, whatever the length of its text (arXiv 2502.17421).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import HeadOptions, TrainedHead, reading_few
from foretoken.errors import ConfigError
from foretoken.heads.longspec import attended
from foretoken.lm.views.few_rows import is_silenced
from foretoken.trees.masks import Sight, ancestors, depths
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps

ROOM = 64  # columns for the open tree; they double where a tree is larger


@dataclass(slots=True)
class Window:
    """A row: columns of the last tokens, then of the open tree."""

    keys: Float[Tensor, "kv_heads columns size"]
    values: Float[Tensor, "kv_heads columns size"]
    known: int = 0  # committed tokens that have passed through
    depths: list[int] = field(default_factory=list)  # of the open tree
    seen: list[int] = field(default_factory=list)  # ancestors as bits
    # of the target, of the text before the open tree; views of its cache
    context: tuple[Float[Tensor, "heads S size"], Float[Tensor, "heads S size"]] | None = None

    @property
    def columns(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[1]

    def forget(self) -> None:
        """Close the open tree."""
        self.depths, self.seen, self.context = [], [], None

    def reserve(self, columns: int) -> None:
        """Room for so many columns."""
        if columns > self.columns:
            more = max(columns - self.columns, ROOM)
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))


@dataclass(slots=True)
class Fed:
    """What one row brings to a forward: committed tokens that are new, then nodes."""

    window: Window
    tokens: list[int]
    positions: list[int]
    late: int  # of them, committed tokens


class WindowReader(TrainedHead):
    """Laws by a module of the kind `longspec`."""

    taps: Taps = ()
    context: int | None = None
    reads_cache = True  # so it can guess behind tokens alone that the target has read

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.target = reading_few(target, (config or self.Config()).draft_head)
        self.hidden_size, self.max_length = target.hidden_size, target.max_length
        self.cache = target.layer_cache(target.layers - 1)
        self.sight = Sight(self.like.dtype, self.like.device)
        self.slots = torch.arange(self.head.window, device=self.like.device)
        asked, heads, size = self.head.asked, self.cache.heads, self.cache.size
        if asked % (heads * size):
            raise ConfigError(
                f"a {kind} head whose queries are {asked} wide was asked for.",
                f"the target's last layer keeps {heads} heads of {size}, of which they must be a "
                "multiple.",
                f"use the model it was trained for, or train one: `foretoken train {kind}`.",
            )

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if self.max_length is not None and len(row.tokens) > self.max_length:
            return False
        if is_silenced(self.target, row.params):
            return False
        head = self.head
        shape = head.kv_heads, head.window + ROOM, head.size
        row.private[self] = Window(self.like.new_zeros(shape), self.like.new_zeros(shape))
        return True

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes; all of a tree see the target's cache as it was at the root."""
        fed = [self.fed(*given) for given in zip(rows, tokens, parents, strict=True)]
        ids = [token for one in fed for token in one.tokens]
        places = [position for one in fed for position in one.positions]
        positions = torch.tensor([places], device=self.like.device)
        x = self.target.embed(ids).to(self.like)[None]
        query, key, value = (part[0] for part in self.head.entered(x, positions))
        mixed: list[Tensor] = []
        nodes: list[int] = []
        begin = 0
        for one in fed:
            first, end = begin + one.late, begin + len(one.tokens)
            self.enter(one, key[begin:end], value[begin:end])
            mixed.append(self.looked_back(one, query[first:end], positions[0, first:end]))
            nodes += range(first, end)
            begin = end
        told, x, positions = torch.cat(mixed), x[:, nodes], positions[:, nodes]
        x = x + self.head.joined(told)
        states = self.head.left(x, self.read(fed, x, positions))[0]
        counts = [len(one.tokens) - one.late for one in fed]
        laws = self.target.unembed(states)
        return [
            Scores(law, own[:, None].expand(-1, len(taps), -1) if taps else None)
            for law, own in zip(torch.split(laws, counts), torch.split(states, counts), strict=True)
        ]

    def fed(self, row: DecodeState, tokens: Sequence[int], parents: Sequence[int]) -> Fed:
        """A row's nodes, behind committed tokens that the window lacks."""
        window: Window = row.private[self]
        committed, late = len(row.tokens) - 1, range(0)
        if parents[0] < 0:
            window.forget()
            late = range(max(window.known, committed - self.head.window), committed)
            window.context = self.cache.keys_values(row)
        down, seen = depths(parents, window.depths), ancestors(parents, window.seen)
        window.depths += down
        window.seen += seen
        positions = [*late, *(committed + depth for depth in down)]
        return Fed(window, [*(row.tokens[i] for i in late), *tokens], positions, len(late))

    def enter(
        self,
        one: Fed,
        keys: Float[Tensor, "n kv_heads size"],
        values: Float[Tensor, "n kv_heads size"],
    ) -> None:
        """Write new columns: of committed tokens over the oldest ones, of nodes behind the ring."""
        window, size = one.window, self.head.window
        last = size + len(window.seen)
        window.reserve(last)
        first = last - (len(one.tokens) - one.late)
        columns = [p % size for p in one.positions[: one.late]] + list(range(first, last))
        at = torch.tensor(columns, device=keys.device)
        window.keys[:, at] = keys.transpose(0, 1)
        window.values[:, at] = values.transpose(0, 1)
        if one.late:  # their columns are there now
            window.known = one.positions[one.late - 1] + 1

    def looked_back(
        self, one: Fed, query: Float[Tensor, "n heads size"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n W"]:
        """Self-attention of a row's new nodes to the window and to their own paths."""
        window, size = one.window, self.head.window
        held = window.known - 1 - (window.known - 1 - self.slots) % size  # positions in the ring
        sees = (held >= 0) & (held > positions[:, None] - size)
        ring = torch.zeros_like(sees, dtype=query.dtype)
        ring = ring.masked_fill_(~sees, torch.finfo(query.dtype).min)
        total = len(window.seen)
        tree = self.sight.unpack(window.seen[total - len(query) :], total)
        last = size + total
        mask = torch.cat([ring, tree], 1)
        return attended(query, window.keys[:, :last], window.values[:, :last], mask)

    def read(
        self, fed: Sequence[Fed], x: Float[Tensor, "1 n H"], positions: Int[Tensor, "1 n"]
    ) -> Float[Tensor, "1 n W"]:
        """Cross-attention of each row's new nodes to the target's verified rows."""
        asking = self.cache.rotated(self.head.asking(x, self.cache.size)[0], positions[0])
        parts = torch.split(asking, [len(one.tokens) - one.late for one in fed])
        found = []
        for one, part in zip(fed, parts, strict=True):
            assert one.window.context is not None, "its root was fed"
            found.append(attended(part.contiguous(), *one.window.context))
        return torch.cat(found)[None]

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Forget open trees: what stands of them enters the window with the next root."""
        for row in rows:
            row.private[self].forget()

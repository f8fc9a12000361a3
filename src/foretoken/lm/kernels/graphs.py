"""Scoring one row by captured CUDA graphs, one per bucket of node counts.

A small forward on a GPU spends most of its time launching kernels; a captured graph launches all
of them at once. It needs shapes and addresses that never change: nodes are padded to a bucket, all
of the cache's columns are read under a mask, and inputs are written into fixed buffers. A graph
goes when the cache it points into is replaced. No graph is trusted unseen: its first replays are
compared with the ordinary forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.lm.runtime.cache import Target
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.masks import window_bounds
from foretoken.lm.runtime.packing import Batch

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
COMPARED = 2  # replays of each graph that are compared: the second has other inputs and columns
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]


def bucket_of(nodes: int) -> int | None:
    """The smallest bucket that holds `nodes`; None beyond the largest."""
    return next((bucket for bucket in BUCKETS if bucket >= nodes), None)


def captured(run: Callable[[], Tensor]) -> Replay:
    """A CUDA graph of `run`, after two warm-up runs on a stream of their own."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@dataclass(slots=True, eq=False)
class Still:
    """Inputs of one graph, at addresses that stay."""

    numbers: Tensor  # [3, 1, bucket]: token ids, positions, cache columns written
    rows: Tensor  # [1, bucket]: the slot, once per node
    mask: Tensor  # [1, 1, bucket, capacity]
    slot: int
    replay: Replay | None = None
    compared: int = 0

    @property
    def bucket(self) -> int:
        return self.numbers.shape[2]

    @property
    def capacity(self) -> int:
        return self.mask.shape[3]


class Graphs:
    """Captured forwards of one CachedLM. `why` says why they were given up, once they are."""

    def __init__(self, lm: CachedLM, capture: Capture = captured) -> None:
        self.lm, self.capture = lm, capture
        self.made: dict[tuple[int, int], Still] = {}  # (bucket, slot)
        self.buffers: tuple[Any, ...] = ()  # the cache the graphs point into
        self.why = ""

    def drop(self) -> None:
        """Forget what was captured: weights lie elsewhere now."""
        self.made = {}

    def logits(self, batch: Batch) -> Tensor | None:
        """Logits [1, kept, V] of a batch; None where it is one for the ordinary forward."""
        bucket = bucket_of(batch.width)
        feed = batch.feeds[0]
        if (
            self.why
            or bucket is None
            or len(batch.feeds) > 1
            or not feed.scored
            or not self.lm.cache.groups  # its buffers are made by the first forward
            or not self.lm.cache.takes(feed.start + bucket)  # padding has columns as well
            or window_bounds(batch.feeds, self.lm.family.windows)
        ):
            return None
        self.lm.cache.reserve([feed.memory.slot], [feed.start + bucket])
        still = self.still(bucket, feed.memory.slot)
        self.fill(still, batch)
        if still.replay is None:
            try:
                still.replay = self.capture(lambda: self.forward(still))
            except RuntimeError as error:
                self.give_up(f"capture failed: {str(error).splitlines()[0]}")
                return None
        found = still.replay()[:, : batch.width].clone()
        if still.compared < COMPARED and not self.agrees(still, found):
            return None
        return found[:, -batch.kept :]

    def still(self, bucket: int, slot: int) -> Still:
        """The buffers of a bucket; all are dropped when the cache has been replaced."""
        cache = self.lm.cache
        layers: list[Any] = list(cache.layers)
        buffers = (cache.columns, cache.slots, *(layer.keys.data_ptr() for layer in layers))
        if buffers != self.buffers:
            self.made, self.buffers = {}, buffers
        if (bucket, slot) not in self.made:
            device = self.lm.device
            self.made[bucket, slot] = Still(
                numbers=torch.zeros(3, 1, bucket, dtype=torch.long, device=device),
                rows=torch.full((1, bucket), slot, dtype=torch.long, device=device),
                mask=self.lm.masks.nothing.new_zeros(1, 1, bucket, cache.columns),
                slot=slot,
            )
        return self.made[bucket, slot]

    def fill(self, still: Still, batch: Batch) -> None:
        """Write a batch into the buffers. Padding repeats the last node, behind all columns."""
        [feed] = batch.feeds
        missing = still.bucket - len(feed.tokens)
        numbers = [
            feed.tokens + feed.tokens[-1:] * missing,
            feed.positions + feed.positions[-1:] * missing,
            list(range(feed.start, feed.start + still.bucket)),
        ]
        still.numbers.copy_(torch.tensor(numbers).reshape(still.numbers.shape))
        still.mask[..., : feed.stop] = self.lm.masks.full([feed], still.bucket, feed.stop, 1)
        still.mask[..., feed.stop :] = self.lm.masks.least

    def forward(self, still: Still) -> Tensor:
        """The model call on the buffers: nothing in it depends on anything else."""
        lm, names = self.lm, self.lm.family.names
        ids, positions, columns = still.numbers.unbind(0)
        layers: list[Any] = list(lm.cache.layers)
        for layer in layers:
            layer.low = 0
        lm.cache.target = Target(
            still.slot, 1, 0, still.bucket, still.capacity, cells=(still.rows, columns)
        )
        arguments: dict[str, Any] = {
            "attention_mask": dict.fromkeys(names, still.mask) if names else still.mask
        }
        if lm._positions_accepted:
            arguments["position_ids"] = positions
        with lm._switch.to(lm.plan.attention):
            output = lm.model(input_ids=ids, past_key_values=lm.cache, use_cache=True, **arguments)
        logits: Tensor = output.logits
        return logits

    def agrees(self, still: Still, found: Tensor) -> bool:
        """Compare a replay with the ordinary forward on the same buffers."""
        still.compared += 1
        right = self.forward(still)[:, : found.shape[1]]
        spread = right.float().std().clamp_min(1e-6)
        error = float((found.float() - right.float()).abs().max() / spread)
        if error <= ALLOWED.get(found.dtype, 1e-1):
            return True
        self.give_up(f"a replay of {still.bucket} nodes is off by {error:.1%} of the spread")
        return False

    def give_up(self, why: str) -> None:
        """Say so, and leave all further forwards to the ordinary path."""
        self.why, self.made = why, {}
        warnings.warn(
            f"CUDA graphs of {self.lm.name} are off, scoring goes on without: {why}",
            RuntimeWarning,
            stacklevel=2,
        )

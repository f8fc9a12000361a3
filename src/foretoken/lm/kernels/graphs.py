"""Scoring one row by captured CUDA graphs, one per bucket of node counts.

A small forward on a GPU spends most of its time launching kernels; a captured graph launches all
of them at once. It needs shapes and addresses that never change: nodes are padded to a bucket, all
of the cache's columns are read under a mask, and inputs are written into fixed buffers. A graph
goes when the cache it points into is replaced, or when another is wanted and it was not used for
long. No graph is trusted unseen: its first replays are compared with the ordinary forward.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from foretoken.lm.runtime.cache import Target
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.masks import window_bounds
from foretoken.lm.runtime.packing import Batch
from foretoken.lm.runtime.rounding import relative, unmasked

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
KEPT = 2 * len(BUCKETS)  # graphs of one model: each takes memory
# Forwards that a graph was not used for when another may take its place. A capture costs as much as
# several forwards: rows of many slots that are scored in turn would else be captured every time.
UNUSED = 512
COMPARED = 2  # replays of each graph that are compared: the second has other inputs and columns
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]

CAPTURING = threading.Lock()  # torch forbids two captures at once in a process


def bucket_of(nodes: int) -> int | None:
    """The smallest bucket that holds `nodes`; None beyond the largest."""
    return next((bucket for bucket in BUCKETS if bucket >= nodes), None)


class Captures:
    """CUDA graphs of one device (None: the current one) that lie in the same memory.

    What one makes on its way may lie where another's output does. So they are replayed one behind
    another, and an output is read before the next replay.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.graphs: WeakSet[Any] = WeakSet()  # those that somebody still has
        self.pool: Any = None
        self.aside: Any = None  # the stream they are captured on: a pool is shared within one

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """A CUDA graph of `run`, after two warm-up runs.

        What other threads do on the device meanwhile does not end the capture.
        """
        with CAPTURING, torch.cuda.device(self.device):
            if not self.graphs:  # torch gave the pool up with the last of them
                self.pool = torch.cuda.graph_pool_handle()
                self.aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            before, aside = torch.cuda.current_stream(), self.aside
            aside.wait_stream(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(aside):  # also left as it should be if a capture fails
                for _ in range(2):
                    run()
                before.wait_stream(aside)
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=aside, capture_error_mode="thread_local"
                ):
                    output = run()
            self.graphs.add(graph)

        def replay() -> Tensor:
            with torch.cuda.device(self.device):
                graph.replay()
            return output

        return replay


def captured(run: Callable[[], Tensor], device: torch.device | None = None) -> Replay:
    """A CUDA graph of `run` alone, on its device (None: the current one)."""
    return Captures(device)(run)


@dataclass(slots=True, eq=False)
class Still:
    """Inputs of one graph, at addresses that stay."""

    numbers: Tensor  # [3, 1, bucket]: token ids, positions, cache columns written
    rows: Tensor  # [1, bucket]: the slot, once per node
    mask: Tensor  # [1, 1, bucket, capacity]
    slot: int
    replay: Replay | None = None
    compared: int = 0
    used: int = 0  # the number of the forward that used it last

    @property
    def bucket(self) -> int:
        return self.numbers.shape[2]

    @property
    def capacity(self) -> int:
        return self.mask.shape[3]


class Graphs:
    """Captured forwards of one CachedLM. `why` says why they were given up, once they are."""

    def __init__(self, lm: CachedLM, capture: Capture | None = None) -> None:
        self.lm = lm
        self.capture = Captures(lm.device) if capture is None else capture
        self.made: OrderedDict[tuple[int, int], Still] = OrderedDict()  # (bucket, slot), as used
        self.asked = 0  # forwards so far
        self.buffers: tuple[Any, ...] = ()  # the cache the graphs point into
        self.why = ""

    def drop(self) -> None:
        """Forget what was captured: weights lie elsewhere now."""
        self.made.clear()

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
            or window_bounds(batch.feeds, self.lm.family.windows)
        ):
            return None
        self.lm.cache.reserve([feed.memory.slot], [feed.start + bucket])
        still = self.still(bucket, feed.memory.slot)
        if still is None:
            return None
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

    def still(self, bucket: int, slot: int) -> Still | None:
        """The buffers of a bucket; all are dropped when the cache has been replaced. None where
        there are enough, and all of them are in use."""
        cache = self.lm.cache
        # a layer that reads another's keys and values has none of its own
        places = [layer.keys.data_ptr() for layer in cache.rows_of if layer.keys is not None]
        buffers = (cache.columns, cache.slots, *places)
        if buffers != self.buffers:
            self.made.clear()
            self.buffers = buffers
        self.asked += 1
        if (bucket, slot) not in self.made:
            if len(self.made) >= KEPT:
                oldest = next(iter(self.made))
                if self.asked - self.made[oldest].used <= UNUSED:
                    return None
                del self.made[oldest]
            device = self.lm.device
            self.made[bucket, slot] = Still(
                numbers=torch.zeros(3, 1, bucket, dtype=torch.long, device=device),
                rows=torch.full((1, bucket), slot, dtype=torch.long, device=device),
                mask=self.lm.masks.nothing.new_zeros(1, 1, bucket, cache.columns),
                slot=slot,
            )
        self.made.move_to_end((bucket, slot))
        still = self.made[bucket, slot]
        still.used = self.asked
        return still

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
        logits, right = unmasked(found, self.forward(still)[:, : found.shape[1]])
        error = relative((logits - right).abs().max(), right.std().clamp_min(1e-6))
        if error <= ALLOWED.get(found.dtype, 1e-1):
            return True
        self.give_up(f"a replay of {still.bucket} nodes is off by {error:.1%} of the spread")
        return False

    def give_up(self, why: str) -> None:
        """Say so, and leave all further forwards to the ordinary path."""
        self.why = why
        self.made.clear()
        warnings.warn(
            f"CUDA graphs of {self.lm.name} are off, scoring goes on without: {why}",
            RuntimeWarning,
            stacklevel=2,
        )

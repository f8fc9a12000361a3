"""The largest rows, context and trees that a budget holds, and which of them writes fastest.

SpecMemo (arXiv 2506.01986) seeks the smallest budget that still speeds up. Every candidate tree
size is scored by expected tokens over measured seconds; trees are nested, each the best of its
size, so that larger ones only add nodes. The choice is the best score among those that fit; where
none beats plain decoding by a margin, no tree at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from foretoken.controllers.step_costs import StepCosts
from foretoken.engine.batch_costs import batch_costs
from foretoken.engine.engine import Engine
from foretoken.engine.measure import ScratchRow, longest_text, measure_costs
from foretoken.engine.memory.plan import Layout, Need
from foretoken.trees.select import best_first_shape
from foretoken.types import CostTable

SIZES = (1, 8, 16, 24, 32, 48, 64)  # of trees with the root; 1 is plain decoding
MARGIN = 0.05  # what a tree has to be faster by
MEASURED = 2048  # tokens of all texts that are written to see what a batch costs
MOST_ROWS, MOST_CONTEXT, MOST_NODES = 1 << 12, 1 << 24, 1 << 10


@dataclass(frozen=True, slots=True)
class Largest:
    """The most of each that a budget holds while the others stay; 0 where not even one does."""

    rows: int
    context: int
    nodes: int | None  # guessed below the root; None: not even plain decoding fits


def largest(layout: Layout, budget: int, need: Need) -> Largest:
    """For a budget of weights and generation together."""
    longest = layout.target.max_length or MOST_CONTEXT

    def fits(**changed: Any) -> bool:
        return layout.plan(replace(need, **changed)).total <= budget

    rows = most(lambda n: fits(rows=n), 1, MOST_ROWS)
    context = most(lambda n: fits(context=n), 1, longest)
    nodes = most(lambda n: fits(nodes=n - 1), 1, MOST_NODES + 1)
    return Largest(rows, context, nodes - 1 if nodes else None)


def most(fits: Callable[[int], bool], least: int, end: int) -> int:
    """The largest number up to `end` that fits, where larger ones never fit sooner; 0: none."""
    if not fits(least):
        return 0
    low, high = least, end + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@torch.inference_mode()
def costs_of(engine: Engine, rows: int, seconds: float = 3.0) -> CostTable:
    """What steps of so many rows cost on this machine, their drafts for all of them included."""
    if rows == 1:
        return measure_costs(engine)
    room, context = longest_text(engine), min(128, max(MEASURED // rows, 8))
    context = context if room is None else max(1, min(context, room // 2))
    affords = partial(engine.waiting.affords, context, rows=rows)
    with ExitStack() as opened:
        made = [opened.enter_context(closing(ScratchRow(engine, context))) for _ in range(rows)]
        return batch_costs([one.row for one in made], engine, seconds, affords)


@dataclass(frozen=True, slots=True)
class Point:
    """One size of tree: what it takes and what it is expected to write."""

    nodes: int  # with the root
    total: int  # bytes, weights and generation
    generation: int
    tokens: float  # expected of a row and step
    seconds: float  # of a step of all rows
    score: float  # tokens per second of all rows


def frontier(
    layout: Layout,
    need: Need,
    costs: CostTable,
    rates: Sequence[float],
    sizes: Sequence[int] = SIZES,
) -> list[Point]:
    """Every size of tree; `costs` are those of steps of `need.rows` rows, `rates` the chances that
    the first, second, ... child stands."""
    step = StepCosts.of(costs)
    found = []
    for size in sizes:
        shape = best_first_shape(rates, size - 1, need.depth)
        nodes, depth = len(shape.parents) - 1, depth_of(shape.parents)
        seconds = step.plain(need.rows)
        if nodes:
            seconds = step.drafted(need.rows, depth, need.rows * nodes)
        plan = layout.plan(replace(need, nodes=nodes, depth=depth))
        score = need.rows * shape.expected / seconds
        found.append(Point(1 + nodes, plan.total, plan.generation, shape.expected, seconds, score))
    return found


def depth_of(parents: Sequence[int]) -> int:
    """Of the deepest node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths)


def best(points: Sequence[Point], budget: int, margin: float = MARGIN) -> Point | None:
    """The fastest point that fits, the smaller tree among equals; plain decoding where no tree is
    faster by the margin. None: nothing fits."""
    fitting = [point for point in points if point.total <= budget]
    plain = [point for point in fitting if point.nodes == 1]
    if not plain:
        return None
    chosen = max(fitting, key=lambda point: (point.score, -point.nodes))
    return chosen if chosen.score >= (1.0 + margin) * plain[0].score else plain[0]


def lower_bound(points: Sequence[Point], margin: float = MARGIN) -> int | None:
    """The least memory with which a tree is faster than plain decoding; None: none ever is."""
    plain = min(points, key=lambda point: point.nodes).score
    paying = [p.total for p in points if p.nodes > 1 and p.score >= (1.0 + margin) * plain]
    return min(paying, default=None)

"""Trees of a draft model that grow in one call in C (`c/growth.c`, which tells of the fields)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, addressof, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from foretoken.native.laws import LEAST
from foretoken.native.library import Call, operation
from foretoken.trees.growing import Drawing, Grown, GrowthRule
from foretoken.trees.worth import Calibration, Decline

NODES, FED, AT_ONCE, WIDEST = 2048, 256, 64, 64  # as in C
GROWING, WHOLE = range(2)  # any other: left to somebody else


def _fields(**kinds: str) -> tuple[tuple[str, Any], ...]:
    """Names of equal kinds side by side, in the order of the structure."""
    known = {"p": c_void_p, "n": c_int64, "d": c_double}
    return tuple((name, known[kind[0]]) for kind, names in kinds.items() for name in names.split())


class _Row(ctypes.Structure):
    _fields_ = _fields(n1="slot first last start stop behind mask mask_token skip")


class Forward(ctypes.Structure):
    """A forward over the next nodes of all trees."""

    _fields_ = (
        *_fields(p1="steps", n1="step_count", p2="buffers layers"),
        *_fields(n1="threads most widest", p1="logits", n2="columns apart", p2="names table entry"),
        ("width", c_int64),
        ("seconds", c_double),
        ("rows", _Row * AT_ONCE),
        *((name, c_int64 * AT_ONCE) for name in ("ids", "positions", "wanted")),
        ("chances", c_float * (AT_ONCE * WIDEST)),
        ("followers", c_int64 * (AT_ONCE * WIDEST)),
    )


class Growth(ctypes.Structure):
    """One row's tree."""

    _fields_ = (
        *_fields(
            n1="slot late root room", p1="mask given said", d1="scale", n2="depth nodes branch"
        ),
        *_fields(p1="ends", n1="end_count", p2="prices bars", n2="price_count"),
        *_fields(d1="share least level_price floor min_gain", p1="hits promised edges"),
        *_fields(n1="edge_count greedy rehearsed", d1="weight fade", p1="decline coins"),
        *_fields(d1="law_scale", p1="drawn", n1="law_width"),
        *_fields(n1="state count level fed paid held waiting", d1="worth gain"),
        ("before", c_int64 * AT_ONCE),
        *((name, c_int64 * NODES) for name in ("tokens", "parents", "ranks", "places")),
        *((name, c_double * NODES) for name in ("laws", "values")),
        *((name, c_int64 * AT_ONCE) for name in ("best", "frontier")),
        *((name, c_int64 * FED) for name in ("above", "depths")),
    )


class Planted:
    """Memory for one tree at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.state = Growth()
        self.mask = torch.empty(AT_ONCE, FED, dtype=dtype, device="cpu")
        self.state.mask = self.mask.data_ptr()
        self.edges = array("d", Calibration.EDGES)
        self.state.edges, self.state.edge_count = self.edges.buffer_info()
        self.state.fade = Decline.FADE
        self.kept: list[Any] = []  # what the state points to
        self.given = self.said = self.laws = self.mask.new_empty(0)

    def enters(self, given: Tensor) -> None:
        """What enters at the tokens before the root and at the root, [n W]; room for what is said
        at nodes."""
        self.given = given.contiguous()
        if self.said.shape[-1] != given.shape[1]:
            self.said = self.mask.new_empty(FED, given.shape[1])
        self.state.given, self.state.said = self.given.data_ptr(), self.said.data_ptr()

    def place(self, slot: int, column: int, room: int, before: Sequence[int]) -> None:
        """Say where the tree lies in the cache, and which tokens are fed before its root."""
        state = self.state
        state.slot, state.root, state.room, state.late = slot, column, room, len(before)
        state.before[: len(before)] = before

    def plant(self, root: int, rule: GrowthRule) -> None:
        """A tree of one token, and by which rule it grows."""
        state, prices, bars = self.state, array("d", rule.prices), array("d", rule.bars)
        ends = array("q", rule.ends)
        self.kept = [prices, bars, ends]
        state.ends, state.end_count = ends.buffer_info()
        state.prices, state.price_count = prices.buffer_info()
        state.bars = bars.buffer_info()[0] if rule.bars else None
        state.hits = state.promised = None
        if rule.calibration is not None:
            known = rule.calibration
            counts = known.hits, known.promised
            state.hits, state.promised = (some.buffer_info()[0] for some in counts)
            state.weight = known.weight
            self.kept += counts
        state.scale = 1.0 / rule.temperature
        state.depth, state.nodes, state.branch = rule.depth, rule.nodes, rule.branch
        state.share, state.least, state.level_price = rule.share, rule.least, rule.level
        state.floor, state.min_gain = rule.floor, rule.min_gain
        state.greedy, state.rehearsed = rule.greedy, rule.rehearsed
        state.state, state.count, state.waiting, state.frontier[0] = GROWING, 1, 1, 0
        state.level = state.fed = state.paid = state.held = 0
        state.worth = state.gain = 0.0
        state.coins = state.drawn = None
        if rule.drawing is not None:
            self.draws_by(rule.drawing, rule.depth)
        state.tokens[0], state.parents[0], state.ranks[0], state.places[0] = root, -1, 0, -1
        state.laws[0] = state.values[0] = 1.0

    def draws_by(self, drawing: Drawing, depth: int) -> None:
        """Room for the laws of a chain, and what its tokens are drawn by."""
        state, coins = self.state, array("d", drawing.coins)
        self.laws = torch.empty(depth + 1, drawing.width, dtype=torch.float32, device="cpu")
        self.kept.append(coins)
        state.coins, state.drawn = coins.buffer_info()[0], self.laws.data_ptr()
        state.law_scale, state.law_width = max(1.0 / drawing.temperature, LEAST), drawing.width

    def tree(self) -> Grown | None:
        """What has grown; None: nothing was fed."""
        state = self.state
        if not state.fed:
            return None
        count, laws, self.laws = state.count, self.laws, self.mask.new_empty(0)
        return Grown(
            whole=state.state == WHOLE,
            tokens=state.tokens[:count],
            parents=state.parents[:count],
            ranks=state.ranks[:count],
            laws=state.laws[:count],
            values=state.values[:count],
            places=state.places[:count],
            best=state.best[: state.held],
            paid=state.paid,
            frontier=state.frontier[: state.waiting],
            level=state.level,
            worth=state.worth,
            gain=state.gain,
            drawn=laws[: count - 1] if state.coins else None,
        )


class Grove:
    """Memory for trees that grow together, and the call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.call: Call | None = operation("grow", dtype)
        self.dtype, self.forward = dtype, Forward()
        self.places: list[Planted] = []

    def takes(self, rule: GrowthRule, columns: int, names: Tensor | None) -> bool:
        """Whether a tree may be as large as it is wanted, and its laws are over tokens that logits
        of so many columns are of."""
        fits = 0 < rule.nodes <= AT_ONCE and 0 < rule.branch <= WIDEST and rule.depth > 0
        drawing = rule.drawing
        known = drawing is None or names is not None or drawing.width == columns
        return self.call is not None and fits and known

    def planted(self, count: int) -> list[Planted]:
        """Memory for so many trees."""
        while len(self.places) < count:
            self.places.append(Planted(self.dtype))
        return self.places[:count]

    def grow(
        self, trees: Sequence[Planted], rules: Sequence[GrowthRule], names: Tensor | None
    ) -> float:
        """Let planted trees grow, the forward being told of; seconds that forwards took.

        What levels gain is learned by all trees of one rule together, as they grow.
        """
        learned: dict[int, tuple[Decline, array[float]]] = {}
        for tree, rule in zip(trees, rules, strict=True):
            tree.state.decline = None
            if (known := rule.decline) is not None:
                numbers = array("d", (known.last, known.following))
                numbers = learned.setdefault(id(known), (known, numbers))[1]
                tree.state.decline = numbers.buffer_info()[0]
        forward = self.forward
        forward.names, forward.seconds = None if names is None else names.data_ptr(), 0.0
        table = (POINTER(Growth) * len(trees))(*(ctypes.pointer(tree.state) for tree in trees))
        assert self.call is not None
        self.call(addressof(forward), addressof(table), len(trees))
        for known, numbers in learned.values():
            known.last, known.following = numbers
        return float(forward.seconds)

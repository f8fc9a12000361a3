"""Trees of a draft model that grow in one call in C (`c/growth.c`)."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from foretoken.native.library import Call, operation
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.trees.worth import Calibration

NODES, FED, AT_ONCE, WIDEST = 512, 128, 64, 64  # as in C


class _Row(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in ("slot", "first", "last", "start", "stop", "behind", "mask", "mask_token")
    )


class Growth(ctypes.Structure):
    """What C reads and writes; the fields are told of there."""

    _fields_ = (
        ("steps", c_void_p),
        ("step_count", c_int64),
        ("buffers", c_void_p),
        ("layers", c_void_p),
        ("threads", c_int64),
        ("logits", c_void_p),
        ("columns", c_int64),
        ("apart", c_int64),
        ("names", c_void_p),
        ("scale", c_double),
        ("mask", c_void_p),
        ("late", c_int64),
        ("root", c_int64),
        ("room", c_int64),
        ("most", c_int64),
        ("depth", c_int64),
        ("nodes", c_int64),
        ("branch", c_int64),
        ("ends", c_void_p),
        ("end_count", c_int64),
        ("prices", c_void_p),
        ("bars", c_void_p),
        ("price_count", c_int64),
        ("share", c_double),
        ("least", c_double),
        ("level_price", c_double),
        ("floor", c_double),
        ("min_gain", c_double),
        ("hits", c_void_p),
        ("promised", c_void_p),
        ("edges", c_void_p),
        ("edge_count", c_int64),
        ("greedy", c_int64),
        ("rehearsed", c_int64),
        ("weight", c_double),
        ("last", c_double),
        ("following", c_double),
        ("count", c_int64),
        ("level", c_int64),
        ("fed", c_int64),
        ("paid", c_int64),
        ("held", c_int64),
        ("waiting", c_int64),
        ("worth", c_double),
        ("gain", c_double),
        ("seconds", c_double),
        ("row", _Row),
        ("ids", c_int64 * AT_ONCE),
        ("positions", c_int64 * AT_ONCE),
        ("tokens", c_int64 * NODES),
        ("parents", c_int64 * NODES),
        ("ranks", c_int64 * NODES),
        ("places", c_int64 * NODES),
        ("laws", c_double * NODES),
        ("values", c_double * NODES),
        ("best", c_int64 * (AT_ONCE + 1)),
        ("frontier", c_int64 * AT_ONCE),
        ("above", c_int64 * FED),
        ("depths", c_int64 * FED),
        ("chances", c_float * (AT_ONCE * WIDEST)),
        ("followers", c_int64 * (AT_ONCE * WIDEST)),
    )


class Growing:
    """Memory for one tree at a time, and the call that grows it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.call: Call | None = operation("grow", dtype)
        self.state = Growth()
        self.mask = torch.empty(AT_ONCE, FED, dtype=dtype, device="cpu")
        self.state.mask = self.mask.data_ptr()
        self.in_order = array("q", range(AT_ONCE))  # places that logits are wanted at
        self.edges = array("d", Calibration.EDGES)
        self.state.edges, self.state.edge_count = self.edges.buffer_info()

    def takes(self, rule: GrowthRule) -> bool:
        """Whether a tree may be as large as it is wanted."""
        return self.call is not None and 0 < rule.nodes <= AT_ONCE and rule.branch <= WIDEST

    def grow(self, root: int, rule: GrowthRule, names: Tensor | None) -> bool:
        """Grow a tree below the token `root`; whether it is whole. Forward and row are told before.

        What decides is kept until the call is over; experience is read and written where it is.
        """
        state = self.state
        kept: list[Any] = [names, array("q", rule.ends), array("d", rule.prices)]
        state.ends, state.end_count = kept[1].buffer_info()
        state.prices, state.price_count = kept[2].buffer_info()
        state.bars = None
        if rule.bars:
            kept.append(array("d", rule.bars))
            state.bars = kept[-1].buffer_info()[0]
        state.hits = state.promised = None
        if rule.calibration is not None:
            state.weight = rule.calibration.weight
            kept += [array("d", rule.calibration.hits), array("d", rule.calibration.promised)]
            state.hits, state.promised = (counts.buffer_info()[0] for counts in kept[-2:])
        decline = rule.decline
        state.last, state.following = (1.0, 1.0) if decline is None else (
            decline.last, decline.following
        )  # fmt: skip
        state.names = None if names is None else names.data_ptr()
        state.scale = 1.0 / rule.temperature
        state.depth, state.nodes, state.branch = rule.depth, rule.nodes, rule.branch
        state.share, state.least, state.level_price = rule.share, rule.least, rule.level
        state.floor, state.min_gain = rule.floor, rule.min_gain
        state.greedy, state.rehearsed = rule.greedy, rule.rehearsed
        state.count = state.waiting = 1
        state.level = state.fed = state.paid = state.held = 0
        state.worth = state.gain = state.seconds = 0.0
        state.tokens[0], state.parents[0], state.ranks[0], state.places[0] = root, -1, 0, -1
        state.laws[0] = state.values[0] = 1.0
        state.frontier[0] = 0
        assert self.call is not None
        whole = bool(self.call(ctypes.addressof(state), self.in_order.buffer_info()[0]))
        if decline is not None and not rule.rehearsed:
            decline.last, decline.following = state.last, state.following
        return whole

    def tree(self, whole: bool) -> Grown:
        """What has grown."""
        state = self.state
        count = state.count
        return Grown(
            whole,
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
            seconds=state.seconds,
        )

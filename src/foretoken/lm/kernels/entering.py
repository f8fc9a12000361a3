"""What enters a head's decoder behind the target's states, as one call in C (`c/segment.c`).

A step commits some tokens, whose states are mapped, normed and mapped again, and to which a row of
a table is added for each token: five operations over a few rows, of which torch makes five calls
and two teams of threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foretoken.lm.kernels.capture import IDS
from foretoken.lm.kernels.lowering import KIND, WHOLE, LookUp, Place, Step
from foretoken.lm.kernels.segments import bound, in_a_row
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL
from foretoken.native.library import Call, Places, operation, places

GIVEN, MADE, FUSED, NORMED = range(4)  # where numbers of a token lie


class Entering:
    """join(norm(fuse(states))) + table[tokens], of at most `most` tokens, bit for bit as by the
    modules where their products are in C. For one thread at a time.
    """

    most = IN_ONE_CALL

    def __init__(
        self, call: Call, fuse: Places, norm: nn.RMSNorm, join: Places, table: Tensor
    ) -> None:
        width, size = fuse.outs, table.shape[1]
        self.call, self.reads, self.table = call, fuse.width, table
        self.kept = fuse, norm, join  # what the steps point into
        self.room = [table.new_empty(self.most, count) for count in (width, width)]
        given, made = Place(GIVEN, 0, fuse.width), Place(MADE, 0, size)
        fused, normed = Place(FUSED, 0, width), Place(NORMED, 0, width)
        joined = Place(FUSED, 0, size)
        eps = torch.finfo(table.dtype).eps if norm.eps is None else norm.eps
        steps = (
            Step(KIND["look up"], size, (), made, LookUp(IDS, lambda: table)),
            Step(KIND["product"], fuse.width, (given,), fused, fuse),
            Step(KIND["norm"], width, (fused,), normed, "norm", width, eps),
            Step(KIND["product"], width, (normed,), joined, join),
            Step(KIND["add"], size, (made, joined), made),
        )
        self.steps = in_a_row([bound(step, {"norm": norm.weight}) for step in steps])
        self.steps[0].what, self.steps[0].count = table.data_ptr(), len(table)
        self.bases = (ctypes.c_void_p * 4)(0, 0, *(room.data_ptr() for room in self.room))

    @classmethod
    def of(
        cls, fuse: nn.Linear, norm: nn.RMSNorm, join: nn.Linear, table: Float[Tensor, "V W"]
    ) -> Entering | None:
        """None where operations in C cannot be had, or cannot read one of these."""
        call = operation("segment", table.dtype)
        weights = fuse.weight, norm.weight, join.weight
        same = all(one.dtype is table.dtype and one.is_cpu for one in weights)
        whole = not any(size % WHOLE for size in (*fuse.weight.shape, *join.weight.shape))
        if call is None or not same or not whole or not table.is_contiguous():
            return None
        first, last = (places([(one.weight, one.bias)]) for one in (fuse, join))
        if first is None or last is None:
            return None
        return cls(call, first, norm, last, table)

    def takes(self, states: Float[Tensor, "n *H"]) -> bool:
        """Whether there are few enough, of its own type."""
        return 0 < len(states) <= self.most and states.dtype is self.room[0].dtype

    def __call__(
        self, states: Float[Tensor, "n *H"], tokens: Sequence[int]
    ) -> Float[Tensor, "n W"]:
        """What enters at tokens, from the states before them, `reads` numbers each."""
        count, held, ids = len(states), states.contiguous(), array("q", tokens)
        assert len(ids) == count and held.numel() == count * self.reads, "a state before each token"
        made = self.table.new_empty(count, self.table.shape[1])
        self.bases[GIVEN], self.bases[MADE] = held.data_ptr(), made.data_ptr()
        known = ids.buffer_info()[0]
        short = self.call(
            ctypes.addressof(self.steps), len(self.steps), ctypes.addressof(self.bases),
            count, 0, known, known, known, None, None, 0, torch.get_num_threads(),
        )  # fmt: skip
        if short >= 0:
            raise IndexError(f"{list(tokens)} are not all below {len(self.table)}")
        return made

"""Memory that is lent to one tensor at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from foretoken.native import scratch

F32 = torch.float32
MANY = scratch.LEAST // 4  # numbers that fill the smallest block


def test_memory_is_lent_again_once_nobody_looks_at_it():
    with scratch.used_again() as memory:
        first = scratch.empty((1, MANY), F32)
        at = first.data_ptr()
        part = first[:, 1:2]
        del first
        other = scratch.empty((1, MANY), F32)
        assert other.data_ptr() != at, "a view still looks at it"
        part.fill_(3.0)
        other.fill_(4.0)
        assert part.item() == 3.0
        del part
        assert scratch.empty((2 * MANY,), torch.bfloat16).data_ptr() == at, "of any shape and type"
        assert len(memory.blocks) == 2


def test_the_smallest_block_that_is_large_enough_is_lent():
    with scratch.used_again() as memory:
        places = [scratch.empty((n * MANY,), F32).data_ptr() for n in (1, 3, 2)]  # none is kept
        assert len(set(places)) < 3 and len(memory.blocks) == 2
        three, one = scratch.empty((3 * MANY,), F32), scratch.empty((MANY,), F32)
        assert (one.data_ptr(), three.data_ptr()) == (places[0], places[1])


def test_what_goes_on_fills_no_more_than_its_own_memory():
    with scratch.used_again() as memory:
        large = scratch.empty((4 * MANY,), F32)
        del large
        small = scratch.empty((2, MANY), F32).fill_(5.0)
        whole = scratch.empty((MANY,), F32).fill_(6.0)
        before, made = (small.data_ptr(), whole.data_ptr()), [small, whole]
        memory.leave(made)
    assert made[0].data_ptr() != before[0] and made[1].data_ptr() == before[1]
    assert torch.equal(made[0], torch.full((2, MANY), 5.0)) and made[1].unique().tolist() == [6.0]


def test_only_the_thread_that_asked_uses_it_and_only_then():
    blocks = []

    def elsewhere():
        blocks.append(scratch.HERE.scratch)

    with pytest.raises(ZeroDivisionError), scratch.used_again() as memory:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        scratch.empty((scratch.LEAST // 8,), F32)
        assert not memory.blocks, "little is left to the C library"
        raise ZeroDivisionError
    assert blocks == [None] and scratch.HERE.scratch is None

"""Threads that help a thread which computes no more are ended."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import pytest
import torch

import foretoken
from foretoken.lm.kernels import teams
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.slot_attention import InSlots, Reading
from foretoken.native import library as native

pytestmark = pytest.mark.skipif(
    teams.openmp() is None or not os.path.isdir("/proc/self/task"), reason="no OpenMP that pauses"
)


def alive():
    return set(os.listdir("/proc/self/task"))


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_helpers_end_and_are_made_again_when_there_is_work():
    numbers = torch.randn(1000, 1000)
    with threads(3):
        assert teams.dismiss()
        before, right = alive(), numbers.exp()
        assert len(alive() - before) == 2
        assert teams.dismiss() and alive() <= before
        assert torch.equal(numbers.exp(), right)
        assert teams.dismiss() and teams.dismiss()


def test_helpers_of_others_are_left_alone():
    found, done = threading.Event(), threading.Event()
    numbers, told = torch.randn(1000, 1000), []

    def work():
        numbers.exp()
        told.append(alive())
        found.set()
        done.wait()
        told.append(numbers.exp())

    with threads(3):
        teams.dismiss()
        other = threading.Thread(target=work)
        other.start()
        found.wait()
        assert teams.dismiss() and told[0] <= alive()
        done.set()
        other.join()
        assert torch.equal(told[1], numbers.exp())
        teams.dismiss()


def test_whoever_loads_keeps_no_helpers(make_llama):
    """The first text may be written by another thread, which then has all processors."""
    with threads(2), foretoken.load(make_llama(61), "plain") as session:
        before = alive()
        assert teams.dismiss() and alive() == before
        assert session.generate([1, 2, 3], max_new_tokens=4).tokens


@pytest.mark.skipif(isinstance(native.library(), native.Unavailable), reason="no operations in C")
@pytest.mark.parametrize("count", [2, 5, 9])
def test_teams_larger_than_the_machine_meet_all_the_same(count):
    """Two threads at once, each with helpers for more processors than there are."""
    query, new = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64)

    def attended():
        slots = SlotCache(1, 1, 64)
        slots.update(new[:, :, :1], new[:, :, :1], 0)
        slots.reserve([0], [64])
        attend = InSlots(slots, 2, 64).over([Reading.of(0, 0, 40, 0, None)])
        return attend(0, query, new, new, None)

    with threads(1):
        right, wrong = attended(), []
    with threads(count):

        def work():
            wrong.extend(not torch.equal(attended(), right) for _ in range(30))

        both = [threading.Thread(target=work) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
    assert len(wrong) == 60 and not any(wrong)

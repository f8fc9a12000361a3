"""Columns of the slot cache that stand: moved in C as by torch's operations."""

from __future__ import annotations

import pytest
import torch

from foretoken.lm.runtime.cache import SlotCache
from foretoken.native import columns as module
from foretoken.native.columns import movers
from foretoken.native.library import Library, library

SLOT, START = 1, 3
in_c = pytest.mark.skipif(not isinstance(library(), Library), reason="no operations in C here")


def filled(dtype: torch.dtype) -> SlotCache:
    """Three layers, two of them alike, whose numbers all differ."""
    cache = SlotCache(3, slots=3, columns=32)
    generator = torch.Generator().manual_seed(0)
    for layer, (heads, size) in enumerate([(2, 8), (1, 12), (2, 8)]):
        states = torch.zeros(1, heads, 1, size, dtype=dtype)
        cache.update(states, states[..., :5].contiguous(), layer)
    cache.reserve([2], [32])
    for group in cache.groups:
        for buffer in (group.keys, group.values):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("nodes", [[0, 2], [0, 1, 4, 5, 9], [3], [1, 2, 3, 4]])
def test_they_are_those_of_the_nodes_and_nothing_else_changes(dtype, nodes):
    cache = filled(dtype)
    before = [(group.keys.clone(), group.values.clone()) for group in cache.groups]
    cache.keep(SLOT, START, nodes)
    for group, pair in zip(cache.groups, before, strict=True):
        for found, old in zip((group.keys, group.values), pair, strict=True):
            wanted = old.clone()
            for i, node in enumerate(nodes):
                wanted[:, SLOT, :, START + i] = old[:, SLOT, :, START + node]
            assert torch.equal(found, wanted)


@in_c
def test_c_is_asked_where_it_is_there_and_torch_where_it_is_not(monkeypatch):
    [group, _] = filled(torch.float32).groups
    assert group.gathered(SLOT, [5, 7], 4)
    monkeypatch.setattr(module, "operation", lambda *_: None)  # a machine without a compiler
    assert movers(group.keys, group.values) == []
    other = filled(torch.float32)
    assert not other.groups[0].gathered(SLOT, [5, 7], 4)
    kept = other.groups[0].keys[:, SLOT, :, START + 2].clone()
    other.keep(SLOT, START, [0, 2])
    assert torch.equal(other.groups[0].keys[:, SLOT, :, START + 1], kept)


def test_buffers_that_were_made_anew_are_looked_up_anew():
    cache = filled(torch.float32)
    cache.keep(SLOT, START, [0, 2])
    cache.reserve([2], [200])  # others, elsewhere
    wanted = cache.groups[0].keys[:, SLOT, :, START + 6].clone()
    cache.keep(SLOT, START, [0, 6])
    assert torch.equal(cache.groups[0].keys[:, SLOT, :, START + 1], wanted)

"""The cache check on a real model: silent when all is well, loud when one column is misplaced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from foretoken.audit.cache import cache_difference
from foretoken.audit.greedy import compare_greedy
from foretoken.engine.assemble import assemble
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cached import CachedLM
from foretoken.types import DecodeState

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7], [1, 1, 1, 1, 1]]


def doubling_a_column(lm: CachedLM) -> CachedLM:
    """Keeps a column twice and loses its neighbour: from now on, or its own probe refused it."""
    sound = lm.commit

    @torch.inference_mode()
    def commit(rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        memories = [(lm._memory(row), lm._memory(row).cached) for row in rows]
        sound(rows, paths)
        for memory, start in memories:
            if memory.cached - start >= 2:
                lm.cache.keep(memory.slot, start, [0, 0])

    lm.commit = commit
    return lm


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(31, seed=5)


@pytest.mark.parametrize("good", [True, False])
def test_a_misplaced_column_is_seen(good: bool, model) -> None:
    target, draft = open_lm(model, kernels="dense"), open_lm(model, name="draft", kernels="dense")
    if not good:
        doubling_a_column(target)
    build = partial(assemble, "chain", target, draft, depth=3)
    seen = cache_difference(build, PROMPTS, 12, temperature=0.0)
    assert seen.good is good, f"{seen.relative:.2e} at {seen.where}"
    found = compare_greedy(partial(assemble, "plain", target), build, PROMPTS, 24)
    assert bool(found.errors) is not good

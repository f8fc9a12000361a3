"""The cache check on a real model: silent when all is well, loud when one column is misplaced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from foretoken.audit.cache import cache_difference
from foretoken.audit.greedy import compare_greedy
from foretoken.engine.assemble import assemble
from foretoken.lm.cached import CachedLM
from foretoken.types import DecodeState

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7], [1, 1, 1, 1, 1]]


class DoublesColumn(CachedLM):
    """Keeps a column twice and loses its neighbour: armed late, or its own probe refuses it."""

    armed = False

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.armed = True

    @torch.inference_mode()
    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        memories = [(self._memory(row), self._memory(row).cached) for row in rows]
        super().commit(rows, paths)
        for memory, start in memories:
            if self.armed and memory.cached - start >= 2:
                self.cache.keep(memory.slot, start, [0, 0])


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(31, seed=5)


@pytest.mark.parametrize(("kind", "good"), [(CachedLM, True), (DoublesColumn, False)])
def test_a_misplaced_column_is_seen(kind: type[CachedLM], good: bool, model) -> None:
    target, draft = kind(model, kernels="dense"), CachedLM(model, name="draft", kernels="dense")
    build = partial(assemble, "chain", target, draft, depth=3)
    seen = cache_difference(build, PROMPTS, 12, temperature=0.0)
    assert seen.good is good, f"{seen.relative:.2e} at {seen.where}"
    found = compare_greedy(partial(assemble, "plain", target), build, PROMPTS, 24)
    assert bool(found.errors) is not good

"""The cache check on a real model: silent when all is well, loud when one column is misplaced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from foretoken.audit import checks, report
from foretoken.audit.cache import cache_difference
from foretoken.audit.greedy import compare_greedy
from foretoken.engine.assemble import assemble
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cached import CachedLM
from foretoken.methods import METHODS
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


def test_a_model_that_finds_its_own_cache_wrong_has_failed(model) -> None:
    """Where it only cannot do what a check needs, the check was not run."""
    target, draft = open_lm(model, kernels="dense"), open_lm(model, name="draft", kernels="dense")
    jobs = checks.model_jobs(METHODS["chain"], doubling_a_column(target), draft)
    [row] = [report.run_one(*job) for job in jobs if job[0] == "cache, models"]
    assert row.verdict == "fail" and "logits from its cache are off" in row.detail


def test_a_draft_of_another_width_is_told_the_ids_of_the_target(
    pair_folders, byte_tokenizer, make_llama, tmp_path
) -> None:
    """Rows of padding behind the vocabulary: one tokenizer, two widths."""
    make_llama(len(byte_tokenizer) + 8, seed=3).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    pair = report.language_models(pair_folders[0], tmp_path)
    rows = [report.run_one(*job) for job in checks.model_jobs(METHODS["chain"], *pair)]
    assert rows and all(row.verdict == "pass" for row in rows), rows

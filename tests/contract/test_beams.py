"""What every method of beams promises: the law of its set of texts, and the machinery below."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from foretoken.audit import beam_law as exact
from foretoken.audit import beams as checks
from foretoken.coins import SeededCoins
from foretoken.drafters.beam_model import BeamModel
from foretoken.engine.assemble import assemble
from foretoken.engine.beam import decode
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, Method, needs_draft
from foretoken.row import make_row
from foretoken.trees.forest import BeamRow
from foretoken.types import SamplingParams

VOCAB = 61
PROMPTS = [[(7 * i * i + 3 * i) % VOCAB for i in range(n)] for n in (23, 1, 9)]
BEAMS = [entry for entry in METHODS.values() if entry.writes == "beams"]
TABLE_JOBS = [
    pytest.param(job, id=f"{subject}-{check}")
    for entry in BEAMS
    for check, subject, job in checks.beam_jobs(entry, None, None)
    if check != "models"
]
every_row = pytest.mark.parametrize("entry", BEAMS, ids=lambda entry: entry.name)


@pytest.mark.parametrize("job", TABLE_JOBS)
def test_on_tables(job) -> None:
    good, seen, _ = job()
    assert good, seen


@pytest.fixture(scope="module")
def real_pair(make_llama):
    """A tiny target and a draft that often agrees with it, in float32."""
    target = make_llama(VOCAB, seed=3)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return open_lm(target, kernels="dense"), open_lm(draft, name="draft", kernels="dense")


def real(entry: Method, pair, **config):
    models = pair if needs_draft(entry) else pair[:1]
    return assemble(entry.name, *models, num_beams=checks.WIDTH, **config)


@every_row
def test_greedy_text_is_plains_on_a_model(entry: Method, real_pair) -> None:
    good, seen, _ = checks.greedy(partial(real, entry, real_pair), PROMPTS, 24)
    assert good, seen


@every_row
def test_the_cache_equals_a_fresh_recompute_on_a_model(entry: Method, real_pair) -> None:
    """Forests of a ragged batch in one forward, pruned between rounds, against single texts."""
    good, seen, _ = checks.cache(partial(real, entry, real_pair), PROMPTS, 10)
    assert good, seen
    assert real_pair[0].rows_held == real_pair[1].rows_held == 0, "rows are freed at the end"


@every_row
def test_seeds_and_neighbours_on_a_model(entry: Method, real_pair) -> None:
    good, seen, _ = checks.seeds(partial(real, entry, real_pair), PROMPTS, 12)
    assert good, seen


class Distinct(BeamModel):
    """The released code's bug: attempts without replacement, judged as independent ones."""

    def _extend(self, draft, logits) -> None:
        held = draft.row.state.coins

        class Without:
            flip = held.flip

            def __init__(self):
                self.taken: list[int] = []

            def draw(self, law):
                left = law.clone()
                left[self.taken] = 0.0
                self.taken.append(held.draw(left / left.sum()))
                return self.taken[-1]

        draft.row.state.coins = Without()
        super()._extend(draft, logits)
        draft.row.state.coins = held


def test_attempts_without_replacement_are_seen_by_the_audit() -> None:
    """Both checks of the law find the bias, far above their bound."""
    build = checks.table_build(METHODS["dsbd"], 2, num_beams=2, min_width=2, depth=1)

    def broken():
        engine = build()
        engine.drafter = Distinct(engine.drafter.lm)
        return engine

    params = SamplingParams(max_new_tokens=2, temperature=4.0)
    prompt = [0, 1, 0]
    table = exact.Table(TableLM.random(2, seed=21), prompt, params, 2)
    seen = exact.engine_texts(broken, prompt, params, 2)
    assert exact.variation(seen.law, exact.fixed_width(table)) > 0.01
    assert exact.layers_gap(seen) > 0.01


def test_a_draft_that_is_right_is_kept_whole() -> None:
    """Q = P: every attempt stands, so rounds of g layers grow by g + 1 tokens."""
    for width in (1, 3):
        engine = assemble(
            "dsbd", TableLM.random(5, seed=1), TableLM.random(5, seed=1),
            num_beams=width, depth=3,
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=16, temperature=1.0)
        row = BeamRow(make_row([1, 2], params, SeededCoins(1), 5), width)
        rounds = [record.rounds[0] for record in decode([row], engine)]
        assert [done.grown for done in rounds] == [4, 4, 4, 4]
        assert {w for done in rounds for w in done.widths} == {width}


def rounds_of(**config) -> list[float]:
    engine = assemble(
        "dsbd", TableLM.random(6, seed=21), TableLM.random(6, seed=24), depth=3, **config
    )
    params = SamplingParams(max_new_tokens=60, temperature=1.0)
    rows = [
        BeamRow(make_row([i % 6, 1], params, SeededCoins(i), 6), engine.verifier.config.num_beams)
        for i in range(12)
    ]
    return [done.grown for record in decode(rows, engine) for done in record.rounds]


def test_a_narrow_demand_goes_deeper_than_a_wide_one() -> None:
    """K = 1 of four attempts stands more often than K = 4."""
    narrow, wide = (
        sum(found) / len(found)
        for found in (rounds_of(num_beams=4, threshold=1.0), rounds_of(num_beams=4, min_width=4))
    )
    assert narrow > 1.2 * wide


@every_row
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_caps_and_end_tokens_are_exact(entry: Method, limit: int) -> None:
    build = checks.table_build(entry, 4, num_beams=3, depth=3)
    params = SamplingParams(max_new_tokens=limit, temperature=1.0, eos=frozenset({3}))
    rows = [BeamRow(make_row([1, i], params, SeededCoins(i), 4), 3) for i in range(4)]
    for _ in decode(rows, build(), 2):
        pass
    for row in rows:
        assert row.written
        for text in row.written:
            assert 3 not in text.tokens[:-1]
            assert text.reason == ("stop" if text.tokens[-1] == 3 else "length")
            assert len(text.tokens) == limit or text.reason == "stop"
        assert len({text.tokens for text in row.written}) == len(row.written)


def test_one_text_outlives_a_round_that_saves_memory() -> None:
    engine = checks.table_build(METHODS["dsbd"], 5, num_beams=3, depth=2, keep_one=True)()
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    row = BeamRow(make_row([1, 2], params, SeededCoins(0), 5), 3)
    for _ in decode([row], engine):
        assert len(row.beams) <= 1
        assert not (row.beams and row.columns), (
            "nothing stays open: one text is one chain of cached tokens"
        )
    assert len(row.written) == 1


def test_a_prompt_beyond_the_drafts_positions_is_written_without_guesses() -> None:
    draft = TableLM.random(4, seed=22)
    draft.max_length = 3
    engine = assemble("dsbd", TableLM.random(4, seed=21), draft, num_beams=2, depth=2)
    params = SamplingParams(max_new_tokens=6, temperature=1.0)
    rows = [BeamRow(make_row(prompt, params, SeededCoins(0), 4), 2) for prompt in ([1] * 5, [1])]
    drafted = [0, 0]
    for record in decode(rows, engine):
        for row, done in zip(record.rows, record.rounds, strict=True):
            drafted[rows.index(row)] += len(done.layers)
    assert drafted[0] == 0 and drafted[1] > 0
    assert all(len(text.tokens) == 6 for row in rows for text in row.written)

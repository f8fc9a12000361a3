"""Rows of equal length from a pool: which are taken, what that spares, who waits."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import torch

from foretoken.audit.rows import seeded_rows, write
from foretoken.coins import SeededCoins
from foretoken.engine import admission
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.grouping import PATIENCE, POOL, GroupingEngine
from foretoken.engine.record import Recorder
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.types import DecodeState, SamplingParams

VOCAB = 12
HOT = SamplingParams(max_new_tokens=20, temperature=1.0)
COLD = SamplingParams(max_new_tokens=20)


def pair(noise: float = 0.7):
    """A target and a draft that agrees with it most of the time."""
    target = TableLM.random(VOCAB, seed=1)
    generator = torch.Generator().manual_seed(2)
    more = noise * torch.randn(target.logits.shape, generator=generator, dtype=torch.float64)
    return target, TableLM(target.logits + more)


def grouping(batch: int, noise: float = 0.7, **options) -> GroupingEngine:
    return assemble("exspec", *pair(noise), depth=3, max_rows=batch, **options)


def some_prompts(count: int, seed: int = 0, longest: int = 40):
    dice = random.Random(seed)
    return [
        [dice.randrange(VOCAB) for _ in range(dice.randrange(5, longest))] for _ in range(count)
    ]


def rate(engine: GroupingEngine) -> float:
    """Rounds of several rows that needed no realigning."""
    return 1.0 - engine.alignment.realigned / engine.alignment.rounds


def run(engine: GroupingEngine, rows):
    """All steps of these rows."""
    return list(decode(rows, engine))


def test_equal_prompts_and_a_perfect_draft_are_never_realigned():
    engine = grouping(4, noise=0.0)
    prompts = [[row, 3, 5, 7, row] for row in range(12)]
    steps = run(engine, seeded_rows(prompts, COLD, VOCAB))
    assert all(len(step.rows) == 4 for step in steps)
    assert engine.alignment.rounds == len(steps) and rate(engine) == 1.0
    assert engine.alignment.moved == engine.drafter.model.lm.alignment.moved == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_a_larger_window_finds_more_groups(ordered):
    found = []
    for window in (4, 8, 16, 24):
        engines = [grouping(4, window=window, sort_prompts=ordered) for _ in range(3)]
        for seed, engine in enumerate(engines):
            run(engine, seeded_rows(some_prompts(24, seed), HOT, VOCAB, seed))
        found.append(fmean(map(rate, engines)))
    assert found == sorted(found) and found[-1] > 2 * found[0]


@pytest.mark.parametrize("window", [8, 16])
def test_sorted_prompts_find_more_groups(window):
    found = {}
    for ordered in (False, True):
        engines = [grouping(4, window=window, sort_prompts=ordered) for _ in range(4)]
        for seed, engine in enumerate(engines):
            run(engine, seeded_rows(some_prompts(24, seed), HOT, VOCAB, seed))
        found[ordered] = fmean(map(rate, engines))
    assert found[True] > found[False]


def test_a_round_is_a_full_group_or_the_oldest_rows():
    engine = grouping(3, window=9)
    rows = seeded_rows(some_prompts(20), HOT, VOCAB)
    for row in rows:
        engine.submit(row)
    while len(engine.waiting) + len(engine.filling) > 0:
        running = list(engine.running)
        lengths = {row.uid: engine.alignment.stored(row) for row in running}
        before = engine.alignment.realigned
        step = engine.step()
        taken = list(step.rows)
        assert len(taken) == 3 and len(engine.running) <= 9
        if engine.alignment.realigned > before and len(running) == 9:
            assert taken == running[:3], "who is realigned are the oldest"
            counts = list(lengths.values())
            assert max(counts.count(length) for length in counts) < 3, "a full group was there"
    engine.close()


def test_the_last_rows_need_no_full_group():
    engine = grouping(4, window=12)
    prompts = [[1, 2, 3]] * 3 + [[1, 2, 3, 4]]
    for row in seeded_rows(prompts, COLD, VOCAB):
        engine.submit(row)
    assert len(engine.step().rows) == 3 and engine.alignment.realigned == 0
    assert len(engine.step().rows) in (3, 4)
    engine.close()
    engine = grouping(4, window=12)
    for row in seeded_rows([[1, 2], [1, 2, 3], [1, 2, 3, 4]], COLD, VOCAB):
        engine.submit(row)
    assert len(engine.step().rows) == 3 and engine.alignment.realigned == 1, "no two are alike"
    engine.close()


def test_the_window_is_a_multiple_of_the_batch_unless_it_is_named():
    assert grouping(5).most_held == 5 * POOL
    assert grouping(5, window=7).most_held == 7
    assert grouping(5, window=2).most_held == 5


@pytest.mark.parametrize("window", [4, 7, 40])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_texts_and_verify_calls_are_those_of_each_prompt_alone(batch, window):
    prompts, params = some_prompts(11), COLD
    alone = []
    for prompt in prompts:
        single = grouping(1)
        steps = run(single, rows := seeded_rows([prompt], params, VOCAB))
        alone.append((rows[0].new_tokens, len(steps)))
    engine = grouping(batch, window=window)
    rows = seeded_rows(prompts, params, VOCAB)
    calls = dict.fromkeys((row.uid for row in rows), 0)
    for step in run(engine, rows):
        for row in step.rows:
            calls[row.uid] += 1
    assert [(row.new_tokens, calls[row.uid]) for row in rows] == alone
    assert {len(row.new_tokens) for row in rows} == {params.max_new_tokens}


def test_seconds_of_a_row_hold_the_rounds_it_sat_out():
    engine = grouping(2, window=8)
    rows = seeded_rows(some_prompts(8), HOT, VOCAB)
    recorder, passed, ends = Recorder(rows), 0.0, {}
    for turn, step in enumerate(decode(rows, engine)):
        recorder(step)
        passed += step.times.whole + (step.times.prefill if turn else 0.0)
        ends.update({row.uid: (passed, turn + 1) for row in step.rows})
    for row in rows:
        stats, (seconds, turns) = recorder.stats[row.uid], ends[row.uid]
        assert stats.seconds == pytest.approx(seconds + row.prefill)
        assert stats.target_steps <= turns
    last = recorder.stats[max(rows, key=lambda row: ends[row.uid]).uid]
    assert last.target_steps < turns / 2 and last.other_seconds > last.draft_seconds


def test_cancelled_rows_leave_the_pool_and_others_join():
    engine = grouping(2, window=5)
    rows = seeded_rows(some_prompts(9), COLD, VOCAB)
    right = write(grouping(1), seeded_rows(some_prompts(9), COLD, VOCAB))
    for row in rows[:5]:
        engine.submit(row)
    for _ in range(3):
        engine.step()
    for row in (rows[0], rows[3]):
        engine.cancel(row)
    for row in rows[5:]:
        engine.submit(row)
    while engine.step() is not None:
        pass
    for i, row in enumerate(rows):
        if i in (0, 3):
            assert row.finish.reason == "cancelled" or row.new_tokens == right[i]
        else:
            assert row.new_tokens == right[i]
    assert engine.target.rows_held == 0 and not engine.alignment.pads


def test_a_row_that_raises_ends_alone():
    def refusing(row):
        if len(row.new_tokens) == 5:
            raise ValueError("no further")
        return None

    engine = grouping(2, window=6)
    rows = [
        make_row(prompt, COLD, SeededCoins(0), VOCAB, ended=refusing if i == 1 else None)
        for i, prompt in enumerate(some_prompts(5))
    ]
    for row in rows:
        engine.submit(row)
    while engine.step() is not None:
        pass
    assert isinstance(rows[1].error, ValueError) and len(rows[1].new_tokens) == 5
    assert all(row.error is None for i, row in enumerate(rows) if i != 1)
    assert {len(row.new_tokens) for i, row in enumerate(rows) if i != 1} == {20}


def test_the_oldest_row_is_not_left_behind_full_groups_of_others():
    """Its stored length is never that of the others, who make full groups for as long as any are
    left."""
    engine = grouping(2, noise=0.0, window=8)
    prompts = [[1, 2, 3, 4], *([5, 6, 7] for _ in range(60))]
    sat_out, longest, served = 0, 0, 0
    rows = seeded_rows(prompts, COLD, VOCAB)
    for row in rows:
        engine.submit(row)
    while rows[0].finish is None:
        step = engine.step()
        served += rows[0] in step.rows
        sat_out = 0 if rows[0] in step.rows else sat_out + 1
        longest = max(longest, sat_out)
    assert served > 1 and longest == PATIENCE
    while engine.step() is not None:
        pass
    assert [row.new_tokens for row in rows] == write(
        grouping(1, noise=0.0), seeded_rows(prompts, COLD, VOCAB)
    )


def test_a_long_prompt_is_let_in_when_many_short_ones_were():
    engine = grouping(2, window=2, sort_prompts=True)
    prompts = [list(range(10)), *([1, 2, 3] for _ in range(admission.PATIENCE + 20))]
    rows = seeded_rows(prompts, SamplingParams(max_new_tokens=1), VOCAB)
    for row in rows:
        engine.submit(row)
    ended = [row for step in iter(engine.step, None) for row in step.rows]
    assert len(ended) == len(rows)
    assert ended.index(rows[0]) <= admission.PATIENCE + 2 < len(rows) - 1


def test_the_shortest_prompt_is_taken_among_those_of_one_owner():
    engine = grouping(2, window=2, sort_prompts=True)
    long = row_of("b", 40)
    for _ in range(6):
        engine.waiting.add(row_of("a", 4))
    engine.waiting.add(long)
    assert engine.waiting.next([row_of("a", 5)]) is long


def row_of(owner, length):
    made = make_row(list(range(1, 1 + length)), SamplingParams(), SeededCoins(0), 64)
    made.owner = owner
    return made


class Counting(DecodeState):
    """A row that counts how often what was written was copied."""

    copies = 0

    @property
    def new_tokens(self):
        Counting.copies += 1
        return self.tokens[self.prompt_len :]


def test_no_text_is_copied_to_note_who_sat_out():
    engine = grouping(2, window=4)
    for prompt in some_prompts(3):
        engine.submit(make_row(prompt, COLD, SeededCoins(0), VOCAB, row_class=Counting))
    step, before = engine.step(), Counting.copies
    engine.note_aside(step)
    assert step.rows and set(step.rows) <= set(engine.before)
    assert Counting.copies == before
    engine.close()

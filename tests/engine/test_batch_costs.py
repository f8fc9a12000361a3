"""What batches cost, tried on their own rows."""

import pytest
from timed_tables import Timed, set_in, timed_pair

from foretoken.audit.fixtures import needed
from foretoken.coins import SeededCoins
from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.smartspec import SmartSpec
from foretoken.drafters.parts import unread
from foretoken.engine import batch_costs as batches
from foretoken.engine import step
from foretoken.engine.assemble import assemble
from foretoken.engine.batch_costs import batch_costs
from foretoken.engine.engine import decode
from foretoken.engine.measure import measure_batches, measure_costs
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, needs_draft
from foretoken.row import make_row
from foretoken.types import CostTable, SamplingParams

VOCAB = 12
LEARNING = ("cost_model", "smartspec")
TEXT = [
    name
    for name, row in METHODS.items()
    if row.writes == "text" and name != "plain" and row.engine == METHODS["chain"].engine
]


@pytest.fixture
def clock(monkeypatch):
    return set_in(monkeypatch, batches, step, unread)


def pair(clock, base=1e-3, node=1e-4):
    return timed_pair(clock, base, node, draft_node=1e-5)


def engine_of(name, models, controller="cost_model", **options):
    models = models if needs_draft(METHODS[name]) else models[:1]
    return assemble(
        name,
        *models,
        controller=controller,
        **{**needed(METHODS[name], VOCAB, controller), **options},
    )


def rows_of(count, **options):
    made = []
    for at in range(count):
        prompt = [(at + 5 * i) % VOCAB for i in range(3 + at)]
        params = SamplingParams(**{"max_new_tokens": 40, **options})
        made.append(make_row(prompt, params, SeededCoins(at), VOCAB))
    return made


def started(engine, rows):
    """Rows whose prompts are cached."""
    traits = engine.drafter.traits
    seen = engine.target.prefill(rows, traits.taps, last=traits.context)
    for row, features in zip(rows, seen, strict=True):
        engine.drafter.start(row, features)
    return rows


@pytest.mark.parametrize("name", TEXT)
def test_costs_are_what_forwards_of_the_batch_take(clock, name):
    engine = engine_of(name, pair(clock))
    rows = started(engine, rows_of(4))
    held = {row.uid: len(row.tokens) for row in rows}
    costs = batch_costs(rows, engine)
    assert (costs.rows, costs.cached) == (4, sum(len(row.tokens) - 1 for row in rows))
    assert set(costs.target) == {4, 8, 12, 20, 36}
    for nodes, seconds in costs.target.items():
        assert seconds == pytest.approx(1e-3 + 1e-4 * nodes)
    if name == "chain":
        assert costs.draft == pytest.approx({d: d * (2e-4 + 4e-5) for d in (1, 2, 4, 8)})
    assert held == {row.uid: len(row.tokens) for row in rows}
    assert not any(row.rehearsal or row.finish for row in rows)


def test_two_sizes_are_tried_however_slow_the_model_is(clock):
    engine = engine_of("chain", pair(clock, base=5.0))
    costs = batch_costs(started(engine, rows_of(3)), engine)
    assert set(costs.target) == {3, 6}
    assert clock.now < 11.0


def test_large_batches_are_not_tried_at_many_nodes(clock):
    engine = engine_of("prompt-lookup", pair(clock))
    costs = batch_costs(started(engine, rows_of(16)), engine)
    assert set(costs.target) == {16, 32, 48, 80}


def test_short_positions_are_not_outrun(clock):
    target, draft = pair(clock)
    target.max_length = 12
    engine = engine_of("chain", (target, draft))
    costs = batch_costs(started(engine, rows_of(8)), engine)  # the longest has ten tokens
    assert set(costs.target) == {8, 16, 24}


@pytest.mark.parametrize(("most", "sizes"), [(9, {8, 16, 24, 40, 72}), (4, {8, 16, 24}), (1, {8})])
def test_memory_bounds_what_is_tried(clock, monkeypatch, most, sizes):
    """Caches of running rows were granted for their trees and no more."""
    engine, rows = engine_of("chain", pair(clock)), rows_of(8)
    engine.controller.learn(measure_costs(engine))
    told, asked = tables_learned(engine, monkeypatch), []

    def affords(tokens, nodes, rows=1):
        asked.append((tokens, rows))
        return nodes <= most

    monkeypatch.setattr(engine.waiting, "affords", affords)
    engine.price(started(engine, rows))
    assert set(told[0].target) == sizes
    assert set(asked) == {(max(row.prompt_len + row.limit[0] for row in rows), 8)}
    if most == 1:
        assert not told[0].draft and engine.advance(rows).emitted


def test_forwards_of_one_target_are_tried_once_for_all_methods(clock):
    models = pair(clock)
    first = engine_of("chain", models)
    costs = batch_costs(started(first, rows_of(4)), first)
    before, other = models[0].forwards, engine_of("prompt-lookup", models)
    again = batch_costs(started(other, rows_of(4)), other)
    assert again.target == costs.target and again.draft != costs.draft
    assert models[0].forwards - before <= batches.ROUNDS, "plain forwards, for the verdicts' sake"


def test_slow_drafts_end_with_their_time_where_the_forwards_are_known(clock):
    """Else a slow draft would be asked for every depth, in the time of a user's first step."""
    target, _ = pair(clock)
    first = engine_of("prompt-lookup", (target,))
    batch_costs(started(first, rows_of(4)), first)
    slow = Timed.random(vocab=VOCAB, seed=1).prepare(clock, 0.5, 0.0)
    engine = engine_of("chain", (target, slow))
    assert set(batch_costs(started(engine, rows_of(4)), engine).draft) == {1}


def tables_learned(engine, monkeypatch):
    """Tables of costs that the engine's controller was told, from now on."""
    told = []
    learn = engine.controller.learn

    def noting(costs):
        told.append(costs)
        learn(costs)

    monkeypatch.setattr(engine.controller, "learn", noting)
    return told


@pytest.mark.parametrize("controller", LEARNING)
def test_a_batch_is_tried_before_its_first_step_and_a_lone_row_never(monkeypatch, controller):
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)), controller)
    engine.controller.learn(measure_costs(engine))
    told = tables_learned(engine, monkeypatch)
    for _ in decode(rows_of(1), engine):
        pass
    assert told == []
    steps = 0
    for _ in decode(rows_of(5), engine):
        steps += 1
        assert [costs.rows for costs in told][:1] == [5]
    for _ in decode(rows_of(4), engine):
        pass
    assert sum(costs.rows >= 4 for costs in told) == 1, "four to seven rows are one size"
    assert steps > 1


@pytest.mark.parametrize("controller", LEARNING)
def test_what_is_left_of_a_batch_is_tried_only_if_it_lasts(monkeypatch, controller):
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)), controller)
    engine.controller.learn(measure_costs(engine))
    told = tables_learned(engine, monkeypatch)
    rows = rows_of(4, max_new_tokens=20)
    rows[0].params = rows[1].params = SamplingParams(max_new_tokens=4)
    rows[0].limit = rows[1].limit = (4, "length")
    for _ in decode(rows, engine):
        pass
    assert [costs.rows for costs in told] == [4]
    for _ in decode(rows_of(2, max_new_tokens=200), engine):
        pass
    assert [costs.rows for costs in told] == [4, 2]


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize(
    "controller", [LEARNING[0], pytest.param(LEARNING[1], marks=pytest.mark.slow)]
)
def test_texts_do_not_know_that_they_were_tried_on(name, controller):
    """Greedy rows, and seeds that have to repeat their text, as each writes alone."""
    drawn = {"temperature": 1.0}

    def write(numbers, **options):
        engine = engine_of(name, (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)), controller)
        target = {n: 1e-3 + 1e-5 * n for n in (1, 2, 4, 8, 16, 32, 64)}
        engine.controller.learn(CostTable(target, {1: 1e-5, 4: 4e-5}, 1e-5))
        rows = [rows_of(4, seed=7, **options)[at] for at in numbers]
        for _ in decode(rows, engine):
            pass
        return [row.new_tokens for row in rows]

    for options in ({}, drawn):
        assert write(range(4), **options) == [write([at], **options)[0] for at in range(4)]


def test_coins_are_put_back():
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)))
    engine.controller.learn(CostTable({1: 1e-3, 2: 1e-3}, {1: 1e-4}))
    rows = started(engine, rows_of(3, temperature=1.0))
    used = [row.coins.used for row in rows]
    engine.price(rows)
    assert [row.coins.used for row in rows] == used


def test_a_controller_that_knows_batches_prices_them_by_what_they_cost():
    lone = CostTable({n: 1.0 + 0.05 * (n - 1) for n in (1, 2, 4, 8, 16)}, {1: 0.05, 4: 0.2})
    dear = CostTable({n: 3.0 + 0.4 * n for n in (8, 16, 24)}, {1: 0.2, 4: 0.8}, rows=8, cached=800)
    cheap = CostTable({n: 3.0 + 0.01 * n for n in (8, 16, 24)}, {1: 0.02}, rows=8, cached=800)
    for kind in (CostModel, SmartSpec):
        lengths = []
        for table in (dear, cheap):
            controller = kind()
            controller.learn(lone)
            assert not controller.lacks(1) and controller.lacks(8)
            controller.learn(table)
            assert not controller.lacks(8)
            lengths.append(sum(budget.depth for budget in controller.budgets(rows_of(8))))
        assert lengths[0] < lengths[1]


def test_trials_end_where_a_node_costs_as_much_as_a_token(clock):
    """A forward that is arithmetic alone: no draft can pay, so none is tried further."""
    engine = engine_of("chain", timed_pair(clock, 1e-6, 1e-3, draft_node=1e-5))
    costs = batch_costs(started(engine, rows_of(4)), engine)
    assert set(costs.target) == {4, 8} and set(costs.draft) == {1}


def test_reading_a_text_is_no_drafting(clock):
    """A draft model reads prompts in its first trial, which has to tell what drafting takes."""

    class Slow(Timed):
        def prefill(self, rows, *given, **options):
            self.clock.now += 10.0
            return super().prefill(rows, *given, **options)

    target = Timed.random(vocab=VOCAB, seed=0).prepare(clock, 1e-3, 1e-4)
    draft = Slow.random(vocab=VOCAB, seed=1).prepare(clock, 2e-4, 0.0)
    engine = engine_of("chain", (target, draft))
    rows = started(engine, rows_of(2))
    costs = batch_costs(rows, engine)
    assert costs.draft == pytest.approx({1: 2e-4, 2: 4e-4, 4: 8e-4, 8: 16e-4})
    assert [row.prefill for row in rows] == [pytest.approx(10.0)] * 2


@pytest.mark.parametrize("controller", LEARNING)
def test_batches_can_be_measured_before_there_is_one(clock, controller):
    engine = engine_of("chain", pair(clock), controller)
    engine.max_rows = 6
    engine.controller.learn(measure_costs(engine))
    assert engine.controller.lacks(2)
    rehearsals, finish = [], engine.drafter.finish
    engine.drafter.finish = lambda row: rehearsals.append(row.rehearsal) or finish(row)
    measure_batches(engine)
    assert rehearsals == [True] * 4, "nothing is learned of them when they leave, either"
    assert not any(engine.controller.lacks(size) for size in range(1, 7))
    assert engine.controller.lacks(8), "more than run together"
    assert engine.target.rows_held == 0 and engine.idle


def test_a_trial_that_fails_is_not_repeated_and_its_rows_go_on_together(monkeypatch, caplog):
    """As for want of memory: the steps that follow are of all rows, and nobody tries again."""
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)))
    engine.controller.learn(measure_costs(engine))
    told, tried, together = tables_learned(engine, monkeypatch), [], []
    score, price, advance = engine.target.score, engine.price, engine.advance

    def short(rows, drafts, taps=()):
        if rows[0].rehearsal and max(len(draft.tree) for draft in drafts) > 1:
            raise MemoryError("no room")
        return score(rows, drafts, taps)

    def priced(rows):
        tried.append(len(rows))
        price(rows)

    def advanced(rows):
        together.append(len(rows))
        return advance(rows)

    monkeypatch.setattr(engine.target, "score", short)
    monkeypatch.setattr(engine, "price", priced)
    monkeypatch.setattr(engine, "advance", advanced)
    rows = rows_of(4, temperature=1.0)
    writing = decode(rows, engine)
    for _ in range(3):  # eleven tokens of forty at most in each
        next(writing)
    writing.close()
    assert tried == [4] and together == [4, 4, 4] and told == []
    assert not any(row.error or row.rehearsal for row in rows)
    assert caplog.text.count("cannot be tried") == 1


def test_batches_without_room_for_a_trial_stop_no_start(monkeypatch, caplog):
    """A server measures them before its first request, and could not start."""
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)))
    engine.controller.learn(measure_costs(engine))
    score = engine.target.score

    def short(rows, drafts, taps=()):
        if len(rows) > 2:
            raise MemoryError("no room")
        return score(rows, drafts, taps)

    monkeypatch.setattr(engine.target, "score", short)
    measure_batches(engine)
    assert not engine.unpriced(2) and engine.untried == {3}
    assert caplog.text.count("cannot be tried") == 1 and engine.target.rows_held == 0


def test_a_row_without_a_law_leaves_the_price_of_its_batch_to_be_found():
    engine = engine_of("chain", (TableLM.random(VOCAB), TableLM.random(VOCAB, seed=1)))
    engine.controller.learn(measure_costs(engine))
    rows = rows_of(4, temperature=1.0)
    banned = SamplingParams(temperature=1.0, banned_tokens=frozenset(range(VOCAB - 1)),
                            eos=frozenset({VOCAB - 1}), min_new_tokens=5)  # fmt: skip
    rows[1] = make_row([1, 2], banned, SeededCoins(9), VOCAB)
    for row in rows:
        engine.submit(row)
    engine.step()
    assert [row.error is None for row in rows] == [True, False, True, True]
    assert engine.untried == set()
    engine.close()

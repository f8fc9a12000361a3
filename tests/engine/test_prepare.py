"""Guesses are tried before there are texts; what can never pay drafts nothing, seeds or not."""

import pytest
import torch
from timed_tables import set_in, timed_pair

from foretoken.coins import SeededCoins
from foretoken.engine import measure, prepare, step
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.prepare import TOKENS, price_of, rehearse, rehearsing, teach_costs
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.types import CostTable, SamplingParams

PARTS = ("layerskip", "del", "swift")
SEARCH = {"hopeless_after": 6}


def spoilt(disturbance):
    """A target whose layers disturb what is said behind them, the more of them are missing."""
    return TableLM(TableLM.random(24).logits, layers=12, disturbance=disturbance)


def engine_of(name, target, **options):
    search = SEARCH if name == "swift" else {}
    return assemble(name, target, **search, **options)


def model_of(engine):
    [(_, model)] = rehearsing(engine.drafter)
    return model


def written(engine, **options):
    row = make_row([3, 2], SamplingParams(max_new_tokens=40, **options), SeededCoins(7), 24)
    steps = list(decode([row], engine))
    return row.new_tokens, sum(len(draft.tree) - 1 for one in steps for draft in one.drafts)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7}])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_never_right_is_not_asked(name, options):
    target = spoilt(200.0)
    asked, retired = engine_of(name, target), engine_of(name, target)
    for engine in (asked, retired):
        engine.controller.learn(CostTable({1: 1.0, 16: 1.1}, {1: 0.3, 8: 2.4}))
    rehearse(retired, 0.5)
    assert model_of(retired).hopeless and not model_of(asked).hopeless
    assert target.rows_held == 0
    text, drafted = written(asked, **options)
    plain, none = written(retired, **options)
    assert drafted > 0 and none == 0
    if not options:
        assert text == plain == written(assemble("plain", target))[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_right_is_kept(name):
    engine = engine_of(name, spoilt(0.1))
    rehearse(engine, 0.5)
    assert not model_of(engine).hopeless
    engine.controller.learn(CostTable({1: 1.0, 16: 1.1}, {1: 0.1, 8: 0.8}))
    assert written(engine)[1] > 0


def test_members_of_a_portfolio_are_tried_too():
    engine = assemble("auto", spoilt(200.0))
    teach_costs(engine, lone=True, batches=False)
    [(member, model)] = rehearsing(engine.drafter)
    assert model.hopeless and member.hopeless and engine.target.rows_held == 0
    assert not engine.drafter.alive()


def test_a_set_that_is_given_is_judged_by_its_own_guesses():
    for disturbance, hopeless in ((200.0, True), (0.1, False)):
        engine = assemble("swift", spoilt(disturbance), skip=(2, 3, 4, 5))
        rehearse(engine, 0.5)
        assert model_of(engine).hopeless is hopeless and model_of(engine).shared.tries == 0


def test_nothing_is_concluded_of_a_slow_model(monkeypatch):
    engine = engine_of("layerskip", spoilt(200.0))
    monkeypatch.setattr(prepare, "SECONDS", 0.0)
    rehearse(engine, 0.5)
    assert not model_of(engine).hopeless and engine.target.rows_held == 0


def test_nothing_is_concluded_where_positions_end(monkeypatch):
    target = spoilt(200.0)
    target.max_length = 2 * TOKENS
    engine = engine_of("layerskip", target)
    monkeypatch.setattr(prepare, "tried", lambda *_: pytest.fail("there is no room for a text"))
    rehearse(engine, 0.5)
    assert not model_of(engine).hopeless


def test_only_parts_of_the_target_are_tried(monkeypatch):
    monkeypatch.setattr(prepare, "tried", lambda *_: pytest.fail("it has a model of its own"))
    engine = assemble("chain", TableLM.random(24), TableLM.random(24, seed=1))
    teach_costs(engine, lone=True, batches=False)
    assert engine.controller.costs.draft


def test_rows_are_given_back_where_a_drafter_raises(monkeypatch):
    engine = engine_of("layerskip", spoilt(1.0))

    def broken(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine.drafter, "propose", broken)
    with pytest.raises(torch.OutOfMemoryError):
        rehearse(engine, 0.5)
    assert engine.target.rows_held == 0


def test_a_guess_costs_a_level_and_a_node(monkeypatch):
    clock = set_in(monkeypatch, measure, step)
    target, _ = timed_pair(clock)  # a forward takes 1 ms and 0.1 ms for each node
    costs = measure.measure_costs(assemble("prompt-lookup", target))
    assert price_of(costs) == pytest.approx(0.1 / 1.1)
    assert price_of(CostTable({1: 2.0, 2: 2.5}, {2: 3.0}, 0.5)) == pytest.approx(2.0 / 2.5)

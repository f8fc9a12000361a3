"""Guesses are tried before there are texts; what can never pay drafts nothing, seeds or not."""

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.drafters.parts import skip_search
from foretoken.drafters.parts.exit_evidence import ENOUGH
from foretoken.drafters.parts.part_of_target import PartOfTarget
from foretoken.engine import prepare
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.prepare import TOKENS, least_price, rehearse, rehearsing, teach_costs
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.types import CostTable, SamplingParams

VOCAB = 96
PARTS = ("layerskip", "del", "swift")
SEARCH = {"hopeless_after": 6}
SAMPLED = {"temperature": 1.0, "seed": 7}
DEAR = CostTable({1: 1e-3, 16: 1.1e-3}, {1: 5e-4, 8: 4e-3})
CHEAP = CostTable({1: 1e-3, 16: 1.1e-3}, {1: 1e-4, 8: 8e-4})


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(prepare, "SECONDS", 600.0)
    monkeypatch.setattr(skip_search, "REHEARSAL", 600.0)


def spoilt(disturbance):
    """A target whose layers disturb what is said behind them, the more of them are missing."""
    return TableLM(9.0 * TableLM.random(VOCAB).logits, layers=12, disturbance=disturbance)


def engine_of(name, target):
    return assemble(name, target, **(SEARCH if name == "swift" else {}))


def model_of(engine):
    [(_, model)] = rehearsing(engine.drafter)
    return model


def written(engine, **options):
    row = make_row([3, 2], SamplingParams(max_new_tokens=40, **options), SeededCoins(7), VOCAB)
    steps = list(decode([row], engine))
    return row.new_tokens, sum(len(draft.tree) - 1 for one in steps for draft in one.drafts)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in PARTS),
        *(
            pytest.param(name, SAMPLED, marks=[pytest.mark.slow] * (name == "swift"))
            for name in PARTS
        ),
    ],
)
def test_a_part_that_is_never_right_is_not_asked(name, options):
    target = spoilt(200.0)
    asked, retired = engine_of(name, spoilt(200.0)), engine_of(name, target)
    for engine in (asked, retired):
        engine.controller.learn(CHEAP)
    rehearse(retired, DEAR)
    assert model_of(retired).hopeless and not model_of(asked).hopeless
    assert target.rows_held == 0
    text, drafted = written(asked, **options)
    plain, none = written(retired, **options)
    assert (drafted > 0 or name == "del") and none == 0  # it sees itself that none is right
    if not options:
        assert text == plain == written(assemble("plain", target))[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_right_is_kept(name):
    engine = engine_of(name, spoilt(0.1))
    rehearse(engine, DEAR)
    assert not model_of(engine).hopeless
    engine.controller.learn(CHEAP)
    assert written(engine)[1] > 0


def test_members_of_a_portfolio_are_tried_too():
    engine = assemble("auto", spoilt(200.0))
    teach_costs(engine)
    [(member, model)] = rehearsing(engine.drafter)
    assert model.hopeless and member.hopeless and engine.target.rows_held == 0
    assert not engine.drafter.alive()


@pytest.mark.slow
def test_a_set_that_is_given_is_judged_by_its_own_guesses():
    for disturbance, hopeless in ((200.0, True), (0.1, False)):
        engine = assemble("swift", spoilt(disturbance), skip=(2, 3, 4, 5))
        rehearse(engine, DEAR)
        assert model_of(engine).hopeless is hopeless and model_of(engine).shared.tries == 0


def test_the_text_is_drawn_and_teaches_nobody(monkeypatch):
    """Greedy texts about nothing repeat themselves, and other rows do not write this one."""
    rows, seen = [], prepare.tried

    def watched(engine, drafter, row):
        rows.append(row)
        return seen(engine, drafter, row)

    monkeypatch.setattr(prepare, "tried", watched)
    for name in PARTS:
        engine = engine_of(name, spoilt(0.1))
        rehearse(engine, DEAR)
        shared = getattr(engine.drafter, "shared", None)
        assert shared is None or not any(shared.calibration.hits)
    assert all(row.rehearsal and not row.warp.greedy and not row.repeatable for row in rows)
    assert all(len(row.tokens) >= TOKENS for row in rows)


@pytest.mark.slow
def test_a_search_that_is_not_over_goes_on_as_if_there_had_been_no_text():
    engine = engine_of("swift", spoilt(0.1))
    rehearse(engine, DEAR)
    search = model_of(engine).shared
    assert not search.done and search.tries == 0 and search.cost.seconds == 0.0


def test_few_guesses_condemn_nothing():
    part = PartOfTarget(TableLM.random(24))
    for asked, hopeless in ((ENOUGH - 1, False), (ENOUGH, True)):
        part.rehearsed(None, None, 0, asked, 0.5)
        assert part.hopeless is hopeless
    part.rehearsed(None, None, ENOUGH // 2, ENOUGH, 0.5)
    assert not part.hopeless


@pytest.mark.parametrize("why", ["slow", "short"])
def test_nothing_is_tried_of_a_slow_model_or_where_positions_end(why, monkeypatch):
    target = spoilt(200.0)
    target.max_length = 2 * TOKENS if why == "short" else None
    engine = engine_of("layerskip", target)
    monkeypatch.setattr(prepare, "tried", lambda *_: pytest.fail("there is no time or room"))
    rehearse(engine, CostTable({1: 99.0}, {1: 9.0}) if why == "slow" else CHEAP)
    assert not model_of(engine).hopeless


def test_what_takes_too_long_is_left_unfinished(monkeypatch):
    engine = engine_of("layerskip", spoilt(200.0))
    monkeypatch.setattr(prepare, "SECONDS", 0.0)
    rehearse(engine, CostTable({1: 1e-9}, {1: 1e-9}))
    assert not model_of(engine).hopeless and engine.target.rows_held == 0


def test_only_parts_of_the_target_are_tried(monkeypatch):
    monkeypatch.setattr(prepare, "tried", lambda *_: pytest.fail("it has a model of its own"))
    engine = assemble("chain", TableLM.random(24), TableLM.random(24, seed=1))
    teach_costs(engine)
    assert engine.controller.costs.draft


def test_what_goes_wrong_is_told_and_left_to_texts(monkeypatch, caplog):
    engine = engine_of("layerskip", spoilt(1.0))

    def broken(*_):
        raise torch.OutOfMemoryError("no room for it")

    monkeypatch.setattr(engine.drafter, "propose", broken)
    rehearse(engine, DEAR)
    assert engine.target.rows_held == 0 and not model_of(engine).hopeless
    assert "no room for it" in caplog.text


def test_a_vocabulary_of_one_token_is_none_to_fail_at(caplog):
    teach_costs(assemble("layerskip", TableLM.random(1, layers=12)))
    assert "not found out" not in caplog.text


def test_a_guess_costs_what_it_costs_in_the_best_of_drafts():
    """One alone bears all that two nodes cost more than one."""
    costs = CostTable({1: 1.0, 2: 1.5, 5: 1.53}, {1: 0.1, 4: 0.4})
    assert least_price(costs) == pytest.approx((0.4 + 0.53) / 4)
    assert least_price(CostTable({1: 1.0, 2: 1.2}, {})) == pytest.approx(0.2)

import pytest
from timed_tables import Clock, Timed, set_in, timed_pair

from foretoken.audit.fixtures import needed
from foretoken.drafters.parts import unread
from foretoken.engine import measure, step
from foretoken.engine.assemble import assemble
from foretoken.engine.measure import DEPTHS, SIZES, measure_costs
from foretoken.methods import METHODS, needs_draft
from foretoken.types import Shape


@pytest.fixture
def clock(monkeypatch):
    return set_in(monkeypatch, measure, step, unread)


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.writes == "text"])
def test_costs_are_what_the_forwards_take(clock, name):
    target, draft = timed_pair(clock)
    models = (target, draft) if needs_draft(METHODS[name]) else (target,)
    engine = assemble(name, *models, **needed(METHODS[name], 12))
    costs = measure_costs(engine)
    assert set(SIZES) <= set(costs.target)
    for size, seconds in costs.target.items():
        assert seconds == pytest.approx(1e-3 + 1e-4 * size)
    for depth, seconds in costs.draft.items():  # one draft forward per level
        forwards = depth + (name == "specee")  # candidates for the tokens behind the leaves too
        expected = pytest.approx(2e-4 * forwards if needs_draft(METHODS[name]) else 0.0)
        # Levels that come from elsewhere cost no forward.
        assert seconds == expected or (METHODS[name].inner and 0 < seconds < 2e-4 * depth)
    if name == "del":  # ends its drafts by a rule of its own
        assert costs.draft and set(costs.draft) <= set(range(1, 13))
    elif (
        engine.drafter.traits.shape is Shape.CHAIN
    ):  # a tree may be less deep than it was allowed to be
        deepest = getattr(engine.drafter, "deepest", None) or 12
        expected = set() if name == "plain" else {depth for depth in DEPTHS if depth <= deepest}
        assert set(costs.draft) == expected
    assert target.rows_held == draft.rows_held == 0


def test_scoring_that_did_part_of_its_work_is_taken_for_what_a_whole_forward_costs(clock):
    """A view that went on where a draft stopped, or left early, says the share that it did."""

    class Half(Timed):
        def score(self, rows, drafts, taps=()):
            scores = super().score(rows, drafts, taps)
            if len(drafts[0].tree) > 1 and drafts[0].chances is not None:  # proposed, not made up
                clock.now -= 0.5 * (1e-3 + 1e-4 * len(drafts[0].tree))
                for one in scores:
                    one.share = 0.5
            return scores

    target = Half.random(vocab=12, seed=0).prepare(clock, 1e-3, 1e-4)
    draft = Timed.random(vocab=12, seed=1).prepare(clock, 2e-4, 0.0)
    costs = measure_costs(assemble("tree", target, draft))
    for size, seconds in costs.target.items():
        assert seconds == pytest.approx(1e-3 + 1e-4 * size)


def test_short_positions_get_a_smaller_table(clock):
    target, draft = timed_pair(clock)
    target.max_length = 40
    costs = measure_costs(assemble("chain", target, draft))
    assert 1 in costs.target and max(costs.target) <= 40
    target.max_length = 2
    tiny = measure_costs(assemble("chain", target, draft)).target
    assert tiny == {1: pytest.approx(1.1e-3), 2: pytest.approx(1.2e-3)}


def test_a_slow_model_gets_fewer_repeats_and_sizes(clock):
    target, draft = timed_pair(clock, base=0.05, node=0.005)
    costs = measure_costs(assemble("chain", target, draft), seconds=3.0)
    assert clock.now < 6.0
    assert costs.target[16] == pytest.approx(0.13)
    fast = Clock()
    target, draft = timed_pair(fast)
    target.clock = draft.clock = clock
    began = clock.now
    measure_costs(assemble("chain", target, draft), seconds=3.0)
    assert clock.now - began < 3.0


def test_a_row_in_flight_is_left_alone(clock):
    """Measuring uses a row of its own and forgets it."""
    from foretoken.coins import SeededCoins
    from foretoken.types import DecodeState, SamplingParams
    from foretoken.warp import Warp

    target, draft = timed_pair(clock)
    params = SamplingParams()
    row = DecodeState([1, 2, 3], 3, params, SeededCoins(0), Warp(params, 3, 12))
    target.prefill([row])
    measure_costs(assemble("chain", target, draft))
    assert target.cached(row) == [1, 2] and target.rows_held == 1 and draft.rows_held == 0


def test_forwards_of_one_target_are_timed_once_for_all_methods(clock):
    target, draft = timed_pair(clock)
    first = measure_costs(assemble("chain", target, draft))
    before = target.forwards
    again = measure_costs(assemble("prompt-lookup", target))
    assert set(SIZES) <= set(again.target) and again.target[24] == first.target[24]
    assert target.forwards - before < before / 2
    other, _ = timed_pair(clock, base=5e-3)
    assert measure_costs(assemble("plain", other)).target[1] == pytest.approx(5.1e-3)


def test_a_tree_is_timed_as_deep_as_it_may_be_drafted(clock):
    """A draft that is sure of nothing in the scratch text would end every tree at its first level,
    and every further level would be taken for as dear as the first one with all that goes with it.
    """
    target, draft = timed_pair(clock)
    draft.logits *= 0.0  # all tokens alike
    costs = measure_costs(assemble("tree", target, draft))
    assert set(costs.draft) == {depth for depth in DEPTHS if depth <= 12}
    for depth, seconds in costs.draft.items():
        assert seconds == pytest.approx(2e-4 * depth)


def test_nothing_is_learned_of_a_draft_by_timing_it(clock):
    """The scratch text takes no guess: chances learned there would be chances of nothing."""
    target, draft = timed_pair(clock)
    engine = assemble("tree", target, draft)
    measure_costs(engine)
    ranker = engine.drafter.ranker
    assert not any(ranker.calibration.promised) and ranker.decline.last == 1.0


def test_a_measurement_that_fails_holds_no_place(clock, monkeypatch):
    """Else each try on a first request would leave a row behind."""
    engine = assemble("tree", *timed_pair(clock))

    def fails(*_, **__):
        raise MemoryError("no room")

    for part, name in ((engine.drafter, "start"), (engine.target, "prefill")):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, fails)
            with pytest.raises(MemoryError):
                measure_costs(engine)
        assert engine.target.rows_held == 0
    measure_costs(engine)
    assert engine.target.rows_held == 0

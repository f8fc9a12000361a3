"""Rows of a forward that are not decided for: those that may not draft, those with a seed."""

import pytest
from simulated_steps import PRICES, step_of

from foretoken.coins import SeededCoins
from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.shared_policy import own_times
from foretoken.controllers.smartspec import SmartSpec
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import CostTable, Draft, Draw, SamplingParams, StepTimes, Verdict

DEAR = {1: 1.0, 2: 1.02, 8: 1.2, 16: 2.0, 32: 20.0, 64: 60.0}  # beyond sixteen nodes


def row_of(guesses=None, **options):
    row = make_row([0], SamplingParams(max_new_tokens=10**6, **options), SeededCoins(0), 3)
    row.guesses = guesses
    return row


def stepped(controller, rows, kept):
    """One step in which a row keeps `kept(row)` of what it drafted; the depths of all drafts."""
    budgets = controller.budgets(rows)
    depths = [0 if row.guesses == 0 else one.depth for row, one in zip(rows, budgets, strict=True)]
    drafts = [Draft(chain(0, [0] * depth), Draw.POINT) for depth in depths]
    paths = [range(1, 1 + min(kept(row), depth)) for row, depth in zip(rows, depths, strict=True)]
    verdicts = [Verdict(tuple(path), 0) for path in paths]
    nodes = len(rows) + sum(depths)
    seconds = 0.1 * max(depths), 1.0 + 0.02 * nodes, 0.02
    controller.observe(step_of(rows, drafts, verdicts, StepTimes(len(rows), nodes, 1, *seconds)))
    return depths


@pytest.mark.parametrize("kind", [CostModel, SmartSpec])
def test_a_row_that_may_not_draft_keeps_nobody_from_trying(kind):
    """Its drafts never come, so whoever has not drafted for longest would be asked for ever."""
    controller = kind()
    controller.learn(PRICES)
    rows = [row_of(), row_of(guesses=0)]
    for _ in range(400):
        stepped(controller, rows, lambda row: 0)
    late = [stepped(controller, rows, lambda row: 9) for _ in range(400)]
    assert sum(own > 0 for own, _ in late) > 200, "what pays by now was found out"


@pytest.mark.parametrize("kind", [CostModel, SmartSpec])
def test_requests_that_want_no_guesses_do_not_speak_against_the_drafter(kind):
    controller = kind()
    controller.learn(PRICES)
    for _ in range(200):
        stepped(controller, [row_of(guesses=0) for _ in range(4)], lambda row: 0)
    fresh = kind()
    fresh.learn(PRICES)
    row = [row_of()]
    assert controller.budgets(row) == fresh.budgets(row)


@pytest.mark.parametrize("kind", [CostModel, SmartSpec])
def test_a_row_beside_rows_with_seeds_pays_for_their_company(kind):
    controller = kind()
    controller.learn(PRICES)
    controller.learn(CostTable(DEAR, {1: 0.1, 4: 0.4}, 0.02, rows=16))
    alone = row_of()
    for _ in range(30):
        stepped(controller, [alone], lambda row: 9)
    assert controller.budgets([alone])[0].depth > 0
    seeded = [row_of(seed=at, temperature=1.0, guesses=0) for at in range(15)]
    [mine, *others] = controller.budgets([alone, *seeded])
    assert mine.depth < 2 and not any(one.depth for one in others)


def test_the_clock_of_a_step_beside_rows_with_seeds_is_heard():
    """A draft that takes ten times what was measured is given up in their company, too."""
    controller = CostModel()
    controller.learn(PRICES)
    rows = [row_of(), row_of(seed=1, temperature=1.0)]
    before = controller.shared.ledger
    for _ in range(60):
        budgets = controller.budgets(rows)
        drafts = [Draft(chain(0, [0] * one.depth), Draw.POINT) for one in budgets]
        nodes = sum(len(draft.tree) for draft in drafts)
        times = StepTimes(2, nodes, 1, 3.0 * max(one.depth for one in budgets), 1.0, 0.02)
        controller.observe(step_of(rows, drafts, [Verdict((), 0)] * 2, times))
    assert controller.shared.ledger < before
    assert controller.shared.costs_of(2).draft.drift > 1.1


def test_a_text_that_ends_does_not_speak_against_look_ups():
    """Nothing was asked for in its last step, so nothing was missing there."""
    controller = SmartSpec()
    controller.bind(PromptLookup())
    controller.learn(PRICES)
    assert controller.looks_up
    drafting, over = row_of(), row_of(guesses=0)
    controller.budgets([drafting])
    controller.admit([drafting], [Draft(chain(0, [0, 0]), Draw.POINT)])
    before = controller.shared.finding
    for _ in range(40):
        controller.budgets([over])
        controller.admit([over], [Draft(chain(0, []), Draw.POINT)])
    assert controller.shared.finding == before


def test_a_probe_has_to_pay_for_all_who_wait():
    """One token more for one row of sixteen does not pay for half a step of all."""
    controller = SmartSpec()
    controller.learn(PRICES)
    alone = [row_of()]
    company = [*alone, *(row_of(guesses=0) for _ in range(15))]
    for rows, paid in ((alone, True), (company, False)):
        controller.budgets(rows)
        assert controller.shared.paid(1, 4, 4, 1) is paid


def test_who_waits_counts_in_the_ledger():
    """A draft that doubles one row's pace and takes half a step from fifteen others loses."""
    controller = CostModel()
    controller.learn(PRICES)
    rows = [row_of(), *(row_of(guesses=0) for _ in range(15))]
    before, lost = controller.shared.ledger, False
    for _ in range(100):
        budgets = controller.budgets(rows)
        depth = budgets[0].depth
        drafts = [Draft(chain(0, [0] * one.depth), Draw.POINT) for one in budgets]
        path = (1,) if depth else ()
        verdicts = [Verdict(path, 0), *[Verdict((), 0)] * 15]
        times = StepTimes(16, 16 + depth, 1, 0.5 if depth else 0.0, 2.0, 0.02)
        controller.observe(step_of(rows, drafts, verdicts, times))
        lost |= controller.shared.ledger < before
    assert lost


def test_drafting_of_others_is_not_this_rows_price():
    rows = [row_of(), row_of(seed=1, temperature=1.0)]
    times = StepTimes(2, 14, 1, 1.0, 1.0, 0.02)
    drafts = [Draft(chain(0, [0] * depth), Draw.POINT) for depth in (2, 10)]
    step = step_of(rows, drafts, [Verdict((), 0)] * 2, times)
    assert own_times(step, [0]).draft == pytest.approx(0.2) and own_times(step, [1]) is times
    drafts = [Draft(chain(0, [0] * depth), Draw.POINT) for depth in (0, 10)]
    assert own_times(step_of(rows, drafts, [Verdict((), 0)] * 2, times), [0]) is None

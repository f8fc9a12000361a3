"""The promises of the controller, on a simulated machine and in the real loop."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
import torch
from simulated_steps import PRICES, OwnClock, step_of

from foretoken.coins import SeededCoins, enumerate_outcomes
from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.fixed import Fixed
from foretoken.controllers.policy import CHEAP, EXPLORED, Limits, Policy
from foretoken.controllers.step_costs import StepCosts
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.engine import Engine, decode
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain
from foretoken.trees.select import best_first_shape
from foretoken.trees.worth import paying
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    SamplingParams,
    Shape,
    StepTimes,
    TokenTree,
    Traits,
    Verdict,
)
from foretoken.verifiers.block import Block
from foretoken.verifiers.point import Point
from foretoken.warp import Warp


def rates(machine, tokens, seeds=5, **options):
    found = []
    for seed in range(seeds):
        one = machine(seed=seed, noise=0.1, **options)
        controller = CostModel()
        controller.learn(one.table())
        found.append(one.run(controller, tokens).rate)
    return found


def always(chance):
    return lambda token, slot: chance


@pytest.mark.parametrize(
    ("draft_cost", "slope"), [(0.01, 0.05), (0.05, 0.02), (0.1, 0.0), (0.1, 0.3), (0.15, 0.1)]
)
def test_a_useless_draft_costs_under_three_percent(machine, draft_cost, slope):
    options = {"chance": always(0.0), "draft_cost": draft_cost, "slope": slope}
    assert min(rates(machine, 2000, **options)) >= 0.97
    assert min(rates(machine, 256, **options)) >= 0.95


def test_a_useless_and_dear_draft_stays_within_the_bar(machine):
    """Catching up with the text alone takes 4 % of plain time where a draft costs 0.4."""
    assert min(rates(machine, 2000, chance=always(0.1), draft_cost=0.4)) >= 0.95


@pytest.mark.parametrize(
    ("chance", "draft_cost", "slope"),
    [(0.85, 0.05, 0.0), (0.6, 0.1, 0.0), (0.85, 0.1, 0.05), (0.7, 0.02, 0.1), (0.95, 0.05, 0.03)],
)
def test_a_good_draft_runs_at_the_rate_of_the_best_fixed_length(
    machine, best_fixed, chance, draft_cost, slope
):
    options = {"chance": always(chance), "draft_cost": draft_cost, "slope": slope}
    assert mean(rates(machine, 2000, **options)) >= 0.965 * best_fixed(**options)


def test_slots_that_harden_or_soften_are_used_as_they_are(machine, best_fixed):
    """Look-up drafts: the first token is a gamble, what follows is nearly sure."""
    options = {"chance": lambda t, j: 0.35 if j == 0 else 0.93, "draft_cost": 0.001, "slope": 0.05}
    assert mean(rates(machine, 3000, **options)) >= 0.95 * best_fixed(**options)
    options = {"chance": lambda t, j: 0.9 if j < 2 else 0.1, "draft_cost": 0.05, "slope": 0.02}
    assert mean(rates(machine, 2000, **options)) >= 0.965 * best_fixed(**options)


@pytest.mark.parametrize(
    ("before", "after", "draft_cost"), [(0.85, 0.1, 0.05), (0.1, 0.85, 0.1), (0.1, 0.85, 0.3)]
)
def test_a_change_of_regime_is_followed(machine, best_fixed, before, after, draft_cost):
    goal = best_fixed(chance=always(after), draft_cost=draft_cost)
    late = []
    for seed in range(8):
        one = machine(
            chance=lambda t, j: before if t < 1000 else after,
            draft_cost=draft_cost,
            noise=0.1,
            seed=seed,
        )
        controller = CostModel()
        controller.learn(one.table())
        late.append(one.run(controller, 2200).rate_between(1200, 2200))
    assert mean(late) >= 0.95 * goal


def test_the_ledger_bounds_the_loss_and_lets_recover(machine):
    """A draft whose measured cost was far too small: the table lies, the ledger does not."""
    one = machine(chance=always(0.3), draft_cost=0.5, noise=0.1)
    controller = CostModel()
    controller.learn(replace(one.table(), draft={k: 0.001 * k for k in range(1, 13)}))
    lowest = []
    original = controller.observe

    def watched(step):
        original(step)
        lowest.append(controller.shared.ledger)

    controller.observe = watched
    one.run(controller, 2000)
    assert min(lowest) >= -(controller.config.allowance + 1.0) * 1.3
    assert one.rate >= 0.9

    controller.shared.ledger = -1e9  # whatever happened before, a good draft is found again
    again = machine(chance=always(0.9), draft_cost=0.1, seed=3)
    again.run(controller, 700)
    steps = next(i for i in range(len(again.offered) - 8) if min(again.offered[i : i + 8]) > 1)
    assert steps <= 300


def test_the_length_falls_under_load_and_reaches_zero(machine):
    """Scoring costs nothing up to eight nodes and is linear beyond."""
    chosen = []
    for rows in (1, 2, 4, 8, 16, 32):
        one = machine(chance=always(0.7), draft_cost=0.05, rows=rows)
        one.target = lambda nodes: max(1.0, nodes / 8.0)
        controller = CostModel()
        controller.learn(
            CostTable({n: one.target(n) for n in (1, 2, 4, 8, 16, 32, 64)}, one.table().draft, 0.02)
        )
        one.run(controller, 400)
        chosen.append(mean(one.offered[len(one.offered) // 2 :]))
    assert all(later <= earlier + 0.1 for earlier, later in itertools.pairwise(chosen))
    assert chosen[0] >= 3.0 and chosen[-1] <= 0.05
    assert one.rate >= 0.97


def test_rows_that_draft_badly_do_not_stop_rows_that_draft_well(machine):
    controller = CostModel()
    one = machine(chance=always(0.0), draft_cost=0.05, slope=0.05)
    controller.learn(one.table())
    rows = [state() for _ in range(4)]
    chance = random.Random(0)
    lengths = defaultdict(list)
    for _ in range(300):
        drafts, verdicts = [], []
        for at, (_, budget) in enumerate(zip(rows, controller.budgets(rows), strict=True)):
            lengths[at].append(budget.depth)
            accepted = 0
            while at < 2 and accepted < budget.depth and chance.random() < 0.9:
                accepted += 1
            tree = TokenTree((0,) * (budget.depth + 1), tuple(range(-1, budget.depth)))
            drafts.append(Draft(tree, Draw.POINT))
            verdicts.append(Verdict(tuple(range(1, accepted + 1)), 0))
        controller.observe(step_of(rows, drafts, verdicts, StepTimes(4, 12, 1, 0.1, 1.5, 0.02)))
    assert min(mean(lengths[at][100:]) for at in (0, 1)) > 2.0
    assert max(mean(lengths[at][100:]) for at in (2, 3)) < 0.3


def state(prompt=(0,), vocab=3, coins=None, **options):
    params = SamplingParams(**options)
    warp = Warp(params, len(prompt), vocab)
    return DecodeState(list(prompt), len(prompt), params, coins or SeededCoins(0), warp)


class Clocked(OwnClock, CostModel):
    """The controller under test."""


class Bound:
    """A drafter of certain traits."""

    def __init__(self, traits):
        self.traits = traits


def clocked(traits=Traits(), **options):  # noqa: B008 - frozen
    controller = Clocked(CostModel.Config(**options))
    controller.bind(Bound(traits))
    controller.learn(PRICES)
    return controller


def test_the_law_of_the_text_does_not_change():
    """Exact enumeration over several steps whose lengths follow from what was accepted before."""
    target = TableLM.random(vocab=2, order=1, seed=3)
    draft = TableLM.random(vocab=2, order=1, seed=4)
    lengths = set()

    def write(coins):
        row = state((0,), 2, coins, max_new_tokens=4, temperature=1.0)
        drafter = Chain(OrdinaryModel(draft))
        engine = Engine(target, drafter, Block(), clocked(max_depth=2, probe_every=1))
        for record in decode([row], engine):
            lengths.add(len(record.drafts[0].tree))
        return tuple(row.new_tokens)

    law = defaultdict(float)
    for text, probability in enumerate_outcomes(write):
        law[text] += probability
    assert len(lengths) > 1
    difference = 0.0
    for text in itertools.product(range(2), repeat=4):
        p, tokens = 1.0, [0]
        for token in text:
            p *= float(target.after(tokens).softmax(-1)[token])
            tokens.append(token)
        difference += abs(p - law[text])
    assert difference / 2 <= 1e-9


@pytest.mark.parametrize("drafter", [Chain, BestFirst])
def test_greedy_text_is_the_same_with_the_controller(drafter):
    target = TableLM.random(vocab=12, order=2, seed=1)
    noise = torch.randn(target.logits.shape, generator=torch.Generator().manual_seed(2))
    draft = TableLM(target.logits + 0.7 * noise.double())
    prompts = [[3], [1, 2, 3, 4], list(range(10))]

    def write(engine):
        rows = [state(p, 12, max_new_tokens=120) for p in prompts]
        records = list(decode(rows, engine))
        return [row.new_tokens for row in rows], records

    expected, _ = write(Engine(target, Nothing(), Point(), Fixed()))
    rule = Block() if drafter is Chain else Point()
    controller = clocked()
    found, records = write(Engine(target, drafter(OrdinaryModel(draft)), rule, controller))
    assert found == expected
    assert len(records) < 100
    assert controller.shared.branching is (drafter is BestFirst)


def tree_run(share, slope, draft_cost, controller, steps=600):
    """The b-th candidate is right with chance share[b]; trees as a drafter grows them."""
    chance = random.Random(0)
    row = state()
    tokens = seconds = 0.0
    sizes = []
    for _ in range(steps):
        (budget,) = controller.budgets([row])
        depth = deep_enough(share, budget)
        best = best_first_shape(share, budget.nodes, depth).values[1:]
        kept, _ = paying(best, budget.prices)
        shape = best_first_shape(share, kept, depth)
        order = sorted(range(len(shape.parents)), key=lambda i: len_path(shape.parents, i))
        place = {node: i for i, node in enumerate(order)}
        parents = tuple(place.get(shape.parents[node], -1) for node in order)
        tree = TokenTree((0,) * len(order), parents)
        path, children = [], tree.children()
        while True:
            here = children[path[-1] if path else 0]
            coin, pick = chance.random(), None
            for rank, child in enumerate(here):
                coin -= share[rank]
                if coin < 0.0:
                    pick = child
                    break
            if pick is None:
                break
            path.append(pick)
        depth = max(tree.depths())
        times = StepTimes(1, len(tree), 1, draft_cost * depth, 1.0 + slope * (len(tree) - 1), 0.02)
        draft, verdict = Draft(tree, Draw.POINT), Verdict(tuple(path), 0)
        controller.observe(step_of([row], [draft], [verdict], times))
        tokens += len(path) + 1
        seconds += times.draft + times.target + times.other
        sizes.append(len(tree) - 1)
    return tokens / seconds * 1.02, sizes


def deep_enough(share, budget):
    """Levels that pay, where every level keeps the same share of the one above."""
    if budget.prices is None:
        return budget.depth
    worth = 0.0
    for depth in range(1, budget.depth + 1):
        values = best_first_shape(share, budget.nodes, depth).values[1:]
        before, worth = worth, paying(values, budget.prices)[1]
        if worth - before < budget.prices.level:
            return depth - 1
    return budget.depth


def len_path(parents, node):
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def tree_table(slope, draft_cost):
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return CostTable(
        {n: 1.0 + slope * (n - 1) for n in sizes},
        {k: draft_cost * k for k in range(1, 13)},
        0.02,
        asking=draft_cost,  # the first level is made before anything is known
    )


SHARE = (0.6, 0.15, 0.08, 0.04)  # chances of the first, second, ... child


@cache
def best_fixed_rate(slope, draft_cost):
    return max(
        tree_run(SHARE, slope, draft_cost, Fixed(Fixed.Config(depth=d, nodes=n)), 1500)[0]
        for d in (1, 2, 3, 5, 8)
        for n in (1, 2, 4, 8, 16, 32, 64)
        if n >= d
    )


@pytest.mark.parametrize(
    ("slope", "draft_cost"), [(0.0, 0.05), (0.02, 0.05), (0.1, 0.05), (0.02, 0.3)]
)
@pytest.mark.parametrize("valued", [False, True])
def test_a_tree_gets_the_nodes_its_costs_allow(slope, draft_cost, valued):
    controller = CostModel()
    controller.bind(Bound(Traits(shape=Shape.TREE, prices=valued)))
    controller.learn(tree_table(slope, draft_cost))
    rate, sizes = tree_run(SHARE, slope, draft_cost, controller)
    assert rate >= 0.93 * best_fixed_rate(slope, draft_cost)
    assert mean(sizes[-200:]) > 30 if slope == 0.0 else mean(sizes[-200:]) < 25


@pytest.mark.parametrize("valued", [False, True])
def test_a_tree_that_does_not_pay_is_given_up(valued):
    controller = CostModel()
    controller.bind(Bound(Traits(shape=Shape.TREE, prices=valued)))
    controller.learn(tree_table(1.0, 0.1))
    rate, sizes = tree_run((0.6, 0.15, 0.08), 1.0, 0.1, controller)
    assert mean(size == 0 for size in sizes[-300:]) > 0.95
    assert rate >= 0.95


def test_budgets_ask_for_no_more_than_configured():
    controller = clocked(max_depth=3)
    row = state()
    for _ in range(50):
        (budget,) = controller.budgets([row])
        assert budget.depth <= 3
        tree = TokenTree((0,) * (budget.depth + 1), tuple(range(-1, budget.depth)))
        draft, verdict = Draft(tree, Draw.POINT), Verdict(tuple(range(1, len(tree))), 0)
        controller.observe(
            step_of([row], [draft], [verdict], StepTimes(1, len(tree), 1, 0.1, 1.0, 0))
        )
    assert budget == Budget(3, 3)


PRICED = CostTable({n: 1.0 + 0.05 * (n - 1) for n in range(1, 65)}, {1: 0.01}, 0.0)


def priced(asking=2 * CHEAP):
    """A policy for a drafter that keeps to prices, and takes `asking` plain steps to say no."""
    return Policy(Limits(), Traits(prices=True), StepCosts.of(PRICED), asking, counted=False)


def ran(policy, row, tokens, spent, steps):
    """Steps of a row that brought `tokens` each, in the time of `spent` plain ones."""
    for _ in range(steps):
        for pace in (policy.pricing.pace, policy.record(row).pace):
            pace.update(tokens, spent)


def test_a_probe_that_falls_on_a_prediction_goes_to_somebody_else():
    """A row whose request says what comes is not asked: its probe would never end."""
    controller, rows, probed = Clocked(), [state(), state()], set()
    controller.learn(PRICES)
    policy, given = controller.shared, Draft(chain(0, [1] * 8), Draw.POINT, given=8)
    for _ in range(400):
        drafts, verdicts = [], []
        for row, budget in zip(rows, controller.budgets(rows), strict=True):
            if budget.depth and row.uid == policy.probes.row:
                probed.add(row.uid)
            guesses = Draft(chain(0, [1] * min(budget.depth, 2)), Draw.POINT)
            drafts.append(given if row is rows[0] else guesses)
            verdicts.append(Verdict(tuple(range(1, 9)) if row is rows[0] else (), 0))
        controller.observe(step_of(rows, drafts, verdicts, StepTimes(2, 4, 1, 0.0, 1.0, 0.0)))
    assert probed == {row.uid for row in rows}


def test_a_batch_whose_questions_nobody_timed_takes_them_to_cost_what_they_cost_a_lone_row():
    """As of drafts inside the target's own forward: rows that lose by them rest all the same."""
    policy, rows = priced(asking=0.03), [state() for _ in range(4)]
    policy.learn(CostTable({4: 1.0, 8: 1.1}, {}, 0.0, rows=4))
    assert policy.asking[policy.size_of(4)] == 0.03
    for row in rows:
        ran(policy, row, 1.0, 1.1, 40)
    policy.budgets(rows)
    assert all(policy.record(row).resting > 0 for row in rows)


def test_prices_are_those_of_the_speed_that_drafting_reaches():
    policy, row = priced(), state()
    ran(policy, row, 3, 1.5, steps=200)
    [budget] = policy.budgets([row])
    prices = budget.prices
    assert prices.step == prices.second == pytest.approx(2.0, abs=0.05)
    assert prices.nodes[10] == pytest.approx(prices.step * 0.5), "ten nodes take half a plain step"
    assert prices.level == pytest.approx(prices.step * 0.01, rel=0.1)


def test_a_text_has_a_speed_of_its_own():
    policy, slow, fast, new = priced(), state(), state(), state()
    for _ in range(40):
        ran(policy, slow, 3, 2.0, steps=1)
        ran(policy, fast, 8, 2.0, steps=1)
    at_slow, at_new, at_fast = (policy.budgets([row])[0].prices.step for row in (slow, new, fast))
    assert at_slow < at_new < at_fast
    assert at_slow < 2.0 < 3.0 < at_fast


def test_nothing_is_drafted_where_nothing_pays():
    policy, row = priced(), state()
    ran(policy, row, 1, 2.0, steps=10)
    assert policy.budgets([row]) == [Budget(0, 0)]


def look_up(policy, row, step, rng, asking, chance):
    """One step of a text that drafts one token where that promises to pay; its plain steps."""
    [budget] = policy.budgets([row])
    spent, tree = 1.0, TokenTree((0,), (-1,))
    if budget.depth:
        spent += asking
        if chance(step) > budget.prices.nodes[1]:
            spent, tree = spent + 0.05, TokenTree((0, 0), (-1, 0))
    path = (1,) if len(tree) > 1 and rng.random() < chance(step) else ()
    times = StepTimes(1, len(tree), 1, spent - 1.0 - 0.05 * (len(tree) - 1), 0.98, 0.02)
    times.target += 0.05 * (len(tree) - 1)
    policy.observe([row], [Draft(tree, Draw.POINT)], [Verdict(path, 0)], times)
    return budget.depth > 0, 1 + len(path), spent


def looked_up(asking, chance, steps):
    """Whether a drafter was asked, tokens and plain steps, step by step."""
    policy, row, rng = priced(asking), state(), random.Random(0)
    return [look_up(policy, row, step, rng, asking, chance) for step in range(steps)]


@pytest.mark.parametrize("asking", [0.005, 0.02, CHEAP])
def test_asking_a_drafter_that_never_pays_costs_a_small_share(asking):
    """However cheap it is to ask: 5 % of every step would be 5 % of everything."""
    steps = looked_up(asking, lambda step: 0.0, 1500)
    assert sum(asked for asked, _, _ in steps[-200:]) > 2, "it is asked again and again"
    late = steps[300:]
    assert sum(spent for _, _, spent in late) <= (1.0 + EXPLORED) * len(late)
    assert sum(spent for _, _, spent in steps) <= 1.012 * len(steps)


def test_a_text_that_begins_to_repeat_itself_is_found_within_a_few_steps():
    steps = looked_up(0.03, lambda step: 0.0 if step < 400 else 0.95, 600)
    late = [tokens for _, tokens, _ in steps[400:]]
    assert next(at for at, tokens in enumerate(late) if tokens > 1) <= 8
    assert sum(late[20:]) >= 1.9 * len(late[20:]) and all(asked for asked, _, _ in steps[440:])


def test_a_draft_that_pays_is_not_given_up_after_a_few_rejections():
    """A draft that makes texts a quarter faster is used in most steps of short texts, too, where a
    seed has to repeat them and nothing is known of other texts.
    """
    asked = steps = 0
    for seed in range(40):
        rng, row = random.Random(seed), state()
        table = StepCosts.of(CostTable(PRICED.target, {1: 0.12, 4: 0.36}, 0.0))
        policy = Policy(Limits(), Traits(prices=True), table, 0.12, counted=True)
        written = 0
        while written < 64:
            [budget] = policy.budgets([row])
            nodes = 2 if budget.depth else 0
            path = tuple(range(1, 1 + (rng.random() < 0.45) * (1 + (rng.random() < 0.55))))
            path = path if nodes else ()
            tree = TokenTree((0,) * (nodes + 1), tuple(range(-1, nodes)))
            policy.observe([row], [Draft(tree, Draw.POINT)], [Verdict(path, 0)], None)
            written += 1 + len(path)
            asked, steps = asked + (nodes > 0), steps + 1
    assert asked > 0.7 * steps


@pytest.mark.parametrize("options", [{"max_depth": 0}, {"margin": 0.5}, {"probe_every": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CostModel(CostModel.Config(**options))


def plain_steps(policy, rows, steps):
    """Steps of rows that draft what they are told and get none of it; how much they drafted."""
    found = []
    for _ in range(steps):
        budgets = policy.budgets(rows)
        found.append([budget.depth for budget in budgets])
        drafts = [
            Draft(TokenTree((0,) * (b.depth + 1), tuple(range(-1, b.depth))), Draw.POINT)
            for b in budgets
        ]
        nodes = sum(len(draft.tree) for draft in drafts)
        deepest = max(found[-1])
        times = StepTimes(len(rows), nodes, 1, 0.3 * deepest, 0.95 + 0.05 * nodes, 0.02)
        policy.observe(rows, drafts, [Verdict((), 0)] * len(rows), times)
    return found


def hopeless(monkeypatch, calm):
    """A policy that has found out that its drafts are useless, and how often it decides."""
    limits, table = Limits(), CostTable(PRICED.target, {1: 0.3, 8: 2.4}, 0.02)
    policy = Policy(limits, Traits(), StepCosts.of(table), 0.0, counted=False)
    if not calm:
        monkeypatch.setattr(policy, "calm", lambda broke: 0)
    decided, lengths = [], policy.lengths
    monkeypatch.setattr(
        policy, "lengths", lambda *given: decided.append(len(given[0])) or lengths(*given)
    )
    return policy, decided


def test_plain_steps_are_not_decided_one_by_one(monkeypatch):
    """A decision takes as long as a fortieth of a small target's step, and nothing is new."""
    policy, decided = hopeless(monkeypatch, calm=True)
    row = state()
    plain_steps(policy, [row], 60)
    decided.clear()
    plain_steps(policy, [row], 400)
    assert len(decided) < 400 / 6


def test_steps_without_a_decision_change_no_decision(monkeypatch):
    """Probes come when they came, and what counts fade by is what they faded by."""
    one, _ = hopeless(monkeypatch, calm=True)
    other, _ = hopeless(monkeypatch, calm=False)
    mine, theirs = state(), state()
    assert plain_steps(one, [mine], 700) == plain_steps(other, [theirs], 700)
    one.waken()
    mine, theirs = one.record(mine), other.record(theirs)
    assert mine.idle == theirs.idle and one.probes.waited == other.probes.waited
    assert mine.slots.unit == pytest.approx(theirs.slots.unit)


def test_a_row_that_joins_is_decided_for_at_once(monkeypatch):
    policy, decided = hopeless(monkeypatch, calm=True)
    row = state()
    plain_steps(policy, [row], 100)
    decided.clear()
    plain_steps(policy, [row, state()], 1)
    assert decided == [2]


def test_rows_that_draft_bear_what_a_level_makes_resting_rows_wait():
    """Three of four rest: the fourth pays for the level that all of them wait for."""
    policy, rows = priced(asking=0.01), [state() for _ in range(4)]
    [all_of_them, *_] = policy.budgets(rows)
    for row in rows[1:]:
        policy.record(row).resting = 9
    [one, *resting] = policy.budgets(rows)
    assert not any(budget.depth for budget in resting)
    assert one.prices.level == pytest.approx(4.0 * all_of_them.prices.level)


def test_a_second_is_worth_what_a_row_writes_in_it_however_many_rest():
    """Drafters make plain steps of seconds by it, and those take the batch no less time."""
    policy, rows = priced(asking=0.01), [state() for _ in range(4)]
    for row in rows[1:]:
        policy.record(row).resting = 5
    [one, *_] = policy.budgets(rows)
    assert one.prices.second * policy.costs_of(4).plain(4) == pytest.approx(one.prices.step)

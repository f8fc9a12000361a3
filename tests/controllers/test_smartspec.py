"""Goodput control: on a simulated server, and in the real loop."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from statistics import mean

import pytest
import torch
from load_machine import Server
from simulated_steps import PRICES, OwnClock, step_of

from foretoken.coins import SeededCoins, enumerate_outcomes
from foretoken.controllers.fixed import Fixed
from foretoken.controllers.smartspec import SmartSpec
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.engine.engine import Engine, decode
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    Memory,
    SamplingParams,
    Shape,
    StepTimes,
    Traits,
    Verdict,
)
from foretoken.verifiers.block import Block
from foretoken.verifiers.point import Point
from foretoken.warp import Warp

LENGTHS = range(7)


class Bound:
    """A drafter of certain traits."""

    def __init__(self, traits):
        self.traits = traits


DRAWN = Traits(frozenset({Draw.POINT, Draw.IID}))  # a draft model's chains


def smart(server, traits=DRAWN, **options):
    controller = SmartSpec(SmartSpec.Config(**options))
    controller.bind(Bound(traits))
    controller.learn(server.table(1))
    return controller


def rates(loads, seeds=2, **options):
    """Tokens per second of every fixed length, and of the controller."""
    fixed = []
    for depth in LENGTHS:
        runs = [Server(seed=seed, **options) for seed in range(seeds)]
        fixed.append(mean(r.run(Fixed(Fixed.Config(depth=depth)), loads).rate for r in runs))
    runs = [Server(seed=seed, **options) for seed in range(seeds)]
    return fixed, mean(run.run(smart(run), loads).rate for run in runs)


def mixed(request):
    return (0.9, 0.5, 0.7)[request % 3]


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("chance", [lambda request: 0.7, mixed])
def test_no_fixed_length_is_better_at_any_load(rows, chance):
    fixed, found = rates([(rows, 2000)], chance=chance)
    assert found >= 0.98 * max(fixed)


def test_every_fixed_length_is_worse_over_a_day():
    day = [(1, 800), (2, 800), (8, 2000), (16, 3000), (4, 1500), (1, 800)]
    fixed, found = rates(day, chance=mixed)
    assert found > 1.03 * max(fixed)


def test_lengths_fall_under_load_and_reach_zero():
    chosen = []
    for rows in (1, 2, 4, 8, 16, 32):
        one = Server()
        one.run(smart(one), [(rows, 2000)])
        chosen.append(mean(one.lengths[len(one.lengths) // 3 :]))
    assert all(later <= earlier + 0.1 for earlier, later in itertools.pairwise(chosen))
    assert chosen[0] > 4.0 and chosen[-1] < 0.05


def run(machine, controller=None, tokens=2000, **options):
    one = machine(noise=0.1, **options)
    if controller is None:
        controller = SmartSpec()
        controller.bind(Bound(DRAWN))
    controller.learn(one.table())
    return one.run(controller, tokens)


@pytest.mark.parametrize(("draft_cost", "slope"), [(0.05, 0.05), (0.1, 0.0), (0.2, 0.1)])
def test_a_useless_draft_costs_little(machine, draft_cost, slope):
    options = {"chance": lambda t, j: 0.0, "draft_cost": draft_cost, "slope": slope}
    assert mean(run(machine, seed=seed, **options).rate for seed in range(3)) >= 0.97


def test_a_fall_of_acceptance_is_followed_within_an_interval_and_what_counts_forget(machine):
    late = []
    for seed in range(4):
        one = run(machine, chance=lambda t, j: 0.9 if t < 600 else 0.2, draft_cost=0.1, seed=seed)
        steps = [at for at, (tokens, _) in enumerate(one.log) if tokens >= 600]
        late.append(mean(one.offered[steps[30] : steps[50]]))
    assert mean(late) <= 1.6


def test_acceptance_is_learned_again_while_nothing_is_drafted(machine, best_fixed):
    goal = best_fixed(chance=lambda t, j: 0.85, draft_cost=0.1)
    runs = [
        run(machine, chance=lambda t, j: 0.02 if t < 400 else 0.85, draft_cost=0.1, seed=seed)
        for seed in range(4)
    ]
    assert all(sum(one.offered[100:300]) < 100 for one in runs), "hardly anything at first"
    assert mean(one.rate_between(700, 2000) for one in runs) >= 0.93 * goal


def test_long_contexts_change_what_a_token_costs():
    """Where a step takes long anyway, guesses are cheap beside it."""
    chosen = []
    for prompt in (100, 8000):
        one = Server(prompt=prompt, kv=1e-4, level=0.12, chance=lambda request: 0.7)
        one.run(smart(one), [(8, 3000)])
        chosen.append(mean(one.lengths[len(one.lengths) // 2 :]))
    assert chosen[1] > chosen[0] + 0.5


def state(prompt=(0,), vocab=3, coins=None, **options):
    params = SamplingParams(**options)
    warp = Warp(params, len(prompt), vocab)
    return DecodeState(list(prompt), len(prompt), params, coins or SeededCoins(0), warp)


def looking_up(token, rows=1, free=1):
    """A controller of look-ups where a node beyond `free` costs `token` of a plain step."""
    controller = SmartSpec()
    controller.bind(Bound(Traits()))
    target = {n: 1.0 + token * max(n - free, 0) for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)}
    controller.learn(CostTable(target, {1: 1e-6, 8: 1e-6}))
    return controller, [state() for _ in range(rows)]


def proposed(count):
    return Draft(chain(0, [1] * count), Draw.POINT)


def test_what_is_looked_up_is_proposed_long_and_cut_to_what_is_worth_scoring():
    lengths = {}
    for token in (0.0, 0.1, 0.3):
        controller, rows = looking_up(token, 2)
        assert controller.budgets(rows) == [Budget(8, 32)] * 2, "whoever is asked proposes long"
        one, other = controller.admit(rows, [proposed(8), proposed(0)])
        assert len(other.tree) == 1
        lengths[token] = len(one.tree) - 1
    assert lengths[0.0] == 8 > lengths[0.1] > lengths[0.3] > 0
    assert one.origin == tuple(range(len(one.tree)))


def test_who_finds_something_gets_more_where_others_find_nothing():
    """Sixteen nodes cost what eight cost, more of them do not."""
    controller, rows = looking_up(0.5, 8, free=16)
    controller.budgets(rows)
    all_of_them = controller.admit(rows, [proposed(8)] * 8)
    few = controller.admit(rows, [proposed(8), *[proposed(0)] * 7])
    assert [len(draft.tree) - 1 for draft in all_of_them] == [1] * 8
    assert len(few[0].tree) - 1 == 8


def test_drawn_candidates_are_never_cut():
    controller, rows = looking_up(5.0)
    controller.bind(Bound(DRAWN))
    assert not controller.looks_up
    drafts = [Draft(chain(0, [1, 2]), Draw.IID, (torch.ones(3), torch.ones(3), None))]
    assert controller.admit(rows, drafts) is drafts


def test_what_a_request_gives_is_neither_cut_nor_counted():
    controller, rows = looking_up(0.3, 2)
    controller.budgets(rows)
    given = replace(proposed(8), given=6)
    drafts = controller.admit(rows, [given, proposed(8)])
    assert drafts[0] is given and 0 < len(drafts[1].tree) - 1 < 8
    policy, times = controller.shared, StepTimes(2, 12, 1, 0.0, 2.0, 0.0)
    fallen, stood = Verdict((1, 2), 0), Verdict((1, 2, 3, 4, 5, 6, 7), 0)
    controller.observe(step_of(rows, drafts, [fallen, Verdict((1,), 0)], times))
    assert policy.request(rows[0]).acceptance.trials == [], "nothing of its own was tried"
    controller.observe(step_of(rows, drafts, [stood, Verdict((1,), 0)], times))
    own = policy.request(rows[0]).acceptance
    assert own.chance(0.5, 0.0) == pytest.approx(0.5, abs=0.02), "one of two guesses stood"


def test_what_requests_give_is_nothing_that_was_found():
    """All are given tokens, also while one is asked; a lone row is decided for afterwards."""
    controller, rows = looking_up(1.0, 8)
    given, whole = replace(proposed(8), given=8), Verdict(tuple(range(1, 9)), 0)
    for _ in range(100):
        controller.budgets(rows)
        drafts = controller.admit(rows, [given] * 8)
        controller.observe(step_of(rows, drafts, [whole] * 8, StepTimes(8, 72, 1, 0.0, 30.0, 0.0)))
    assert controller.shared.finding == 1.0, "nobody was asked"
    for _ in range(60):
        controller.budgets(rows[:1])
        controller.admit(rows[:1], [proposed(8)])
    assert 0.9 < controller.shared.finding <= 1.0


def test_a_prediction_that_comes_true_does_not_speak_against_look_ups():
    """It was given in place of a look-up; the next request is looked up for as at first."""
    controller, [row, later] = looking_up(0.3, 2)
    given, whole = replace(proposed(8), given=8), Verdict(tuple(range(1, 9)), 0)
    for _ in range(40):
        controller.budgets([row])
        drafts = controller.admit([row], [given])
        assert drafts == [given]
        controller.observe(step_of([row], drafts, [whole], StepTimes(1, 9, 1, 0.0, 1.0, 0.0)))
    assert controller.shared.finding == 1.0
    assert controller.budgets([later])[0].depth > 0


def test_a_probe_that_falls_on_a_prediction_goes_to_somebody_else():
    controller, rows = clocked(), [state(), state()]
    policy, given = controller.shared, replace(proposed(8), given=8)
    rejected, probed = Draft(chain(0, [1, 2]), Draw.POINT), []
    for _ in range(400):
        drafts, verdicts = [], []
        for row, budget in zip(rows, controller.budgets(rows), strict=True):
            first = row is rows[0]
            probed += [row] if budget.depth and row.uid == policy.probes.row else []
            draft = given if first else rejected if budget.depth else proposed(0)
            drafts.append(draft)
            verdicts.append(Verdict(tuple(range(1, 9)) if first else (), 0))
        controller.observe(step_of(rows, drafts, verdicts, StepTimes(2, 4, 1, 0.0, 1.0, 0.0)))
    assert rows[0] in probed and rows[1] in probed


class Clocked(OwnClock, SmartSpec):
    """The controller under test."""


def clocked(**options):
    controller = Clocked(Clocked.Config(**options))
    controller.learn(PRICES)
    return controller


class Wild(SmartSpec):
    """Any trajectory at all: sizes by a die, and any part of what may be cut."""

    def __init__(self, seed):
        super().__init__()
        self.die = random.Random(seed)

    def lacks(self, rows):
        return False

    def observe(self, step):
        return None

    def budgets(self, rows):
        return [Budget(n := self.die.choice((0, 0, 1, 2, 3, 6)), 2 * n) for _ in rows]

    def admit(self, rows, drafts):
        if not self.looks_up:
            return drafts
        return [draft.keep(range(self.die.randint(1, len(draft.tree)))) for draft in drafts]


def drafters(draft):
    return {
        "chain": (Chain(OrdinaryModel(draft)), Block()),
        "tree": (BestFirst(OrdinaryModel(draft)), Point()),
        "look-up": (PromptLookup(), Point()),
    }


@pytest.fixture(scope="module")
def pair():
    target = TableLM.random(vocab=12, order=2, seed=1)
    noise = torch.randn(target.logits.shape, generator=torch.Generator().manual_seed(2))
    return target, TableLM(target.logits + 0.7 * noise.double())


PROMPTS = [[3], [1, 2, 3, 4], list(range(10)), [5, 6, 5, 6]]


@pytest.mark.parametrize("name", ["chain", "tree", "look-up"])
@pytest.mark.parametrize("controller", [clocked, lambda: Wild(0), lambda: Wild(1)])
def test_greedy_texts_are_the_same_whatever_is_chosen(pair, name, controller):
    target, draft = pair

    def write(engine):
        rows = [state(prompt, 12, max_new_tokens=60) for prompt in PROMPTS]
        steps = list(decode(rows, engine))
        return [row.new_tokens for row in rows], sum(
            len(d.tree) - 1 for s in steps for d in s.drafts
        )

    expected, _ = write(Engine(target, Nothing(), Point(), Fixed()))
    found, drafted = write(Engine(target, *drafters(draft)[name], controller()))
    assert found == expected and drafted > 20


@pytest.mark.parametrize("name", ["chain", "tree", "look-up"])
def test_rows_of_a_batch_write_what_they_write_alone(pair, name):
    """Seeds above temperature 0, greedy rows and rows without a seed in one batch."""
    target, draft = pair
    settings = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 6},
        {"temperature": 1.0, "seed": 7},
    ]

    def write(rows):
        controller = SmartSpec()
        engine = Engine(target, *drafters(draft)[name], controller)
        controller.learn(PRICES)
        for _ in decode(rows, engine):
            pass
        return [row.new_tokens for row in rows]

    def rows():
        return [
            state(prompt, 12, SeededCoins(setting.get("seed")), max_new_tokens=50, **setting)
            for prompt, setting in zip(PROMPTS, settings, strict=True)
        ]

    assert write(rows()) == [write([row])[0] for row in rows()]


def test_the_law_of_the_text_does_not_change():
    """Exact enumeration over steps whose lengths follow from what was accepted before."""
    target = TableLM.random(vocab=2, order=1, seed=3)
    draft = TableLM.random(vocab=2, order=1, seed=4)
    lengths = set()

    def write(coins):
        row = state((0,), 2, coins, max_new_tokens=4, temperature=1.0)
        engine = Engine(target, Chain(OrdinaryModel(draft)), Block(), clocked(max_depth=2))
        for step in decode([row], engine):
            lengths.add(len(step.drafts[0].tree))
        return tuple(row.new_tokens)

    law = defaultdict(float)
    for text, probability in enumerate_outcomes(write):
        law[text] += probability
    assert len(lengths) > 1
    for text in itertools.product(range(2), repeat=4):
        p, tokens = 1.0, [0]
        for token in text:
            p *= float(target.after(tokens).softmax(-1)[token])
            tokens.append(token)
        assert law[text] == pytest.approx(p, abs=1e-9)


def test_a_tree_gets_the_nodes_that_pay():
    sizes = []
    for token in (0.0, 0.1, 1.0):
        controller = SmartSpec()
        controller.bind(Bound(Traits(shape=Shape.TREE, memory=Memory.ROW, taps=DRAWN.taps)))
        controller.looks_up = False
        target = {n: 1.0 + token * (n - 1) for n in range(1, 65)}
        controller.learn(CostTable(target, {1: 0.05, 8: 0.4}))
        [budget] = controller.budgets([state()])
        sizes.append(budget.nodes)
        assert budget.depth <= budget.nodes
    assert sizes[0] > 16 > sizes[1] > 0 == sizes[2]


def test_one_row_at_a_time_probes_and_the_longest_idle_first():
    controller, rows = SmartSpec(), [state() for _ in range(3)]
    controller.bind(Bound(DRAWN))
    controller.learn(CostTable({n: float(n) for n in range(1, 33)}, {1: 1.0, 8: 8.0}))
    asked = []
    for _ in range(200):
        budgets = controller.budgets(rows)
        assert sum(budget.depth > 0 for budget in budgets) <= 1
        asked += [at for at, budget in enumerate(budgets) if budget.depth]
        drafts = [proposed(budget.depth) for budget in budgets]
        nodes = sum(len(draft.tree) for draft in drafts)
        times = StepTimes(3, nodes, 1, 1.0 * (nodes > 3), float(nodes), 0.0)
        controller.observe(step_of(rows, drafts, [Verdict((), 0)] * 3, times))
    assert set(asked[:3]) == {0, 1, 2} and len(asked) <= 10


@pytest.mark.parametrize("options", [{"max_depth": 0}, {"margin": 0.5}, {"probe_every": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SmartSpec(SmartSpec.Config(**options))

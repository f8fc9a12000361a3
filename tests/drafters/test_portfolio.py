"""Several drafters, of which one drafts: each keeps its own state, all see every outcome."""

from math import inf

import pytest
import torch

from foretoken.audit.rows import write
from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.dynamic_exit import DynamicExit
from foretoken.drafters.fusion import Fusion
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.parts.bandit import Bandit
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.portfolio import Portfolio
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.suffix import SuffixDecoding
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError, PairingError
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.build import root
from foretoken.types import (
    Budget,
    Caps,
    Draft,
    Draw,
    FinalNorm,
    Layer,
    Prices,
    SamplingParams,
    Scores,
    Shape,
    Traits,
    Verdict,
)
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive

PROMPTS = ([0, 1, 2, 0, 1], [3, 3, 1], [2])
PRICED = Budget(4, 8, Prices(0.0, (0.0,) * 9, 1.5, 3.0))


class Turns(Bandit):
    """The first member and the arms one after the other, at a fixed promise."""

    def __init__(self, *turns, promised=inf):
        super().__init__(1)
        self.turns, self.promised, self.steps = turns, promised, 0

    def choose(self, texts, speed):
        self.steps += 1
        arm = self.turns[self.steps % len(self.turns)]
        return arm, 0.0 if arm is None else self.promised


class Priced(Fixed):
    """The same budget and the same prices every step."""

    def __init__(self):
        super().__init__()
        self.budget = PRICED


@pytest.fixture
def target():
    return TableLM.random(5, seed=3)


def arm_of(target, seed=4):
    """A draft model's chain: drawn candidates, so it stands alone."""
    return Chain(OrdinaryModel(TableLM.random(target.vocab_size, seed=seed)))


def rows(target, **options):
    params = SamplingParams(max_new_tokens=60, **options)
    return [
        make_row(prompt, params, SeededCoins(i), target.vocab_size)
        for i, prompt in enumerate(PROMPTS)
    ]


def engine_of(target, drafter, *turns, promised=inf):
    if turns:
        drafter.bandit = Turns(*turns, promised=promised)
    return Engine(target, drafter, Recursive(), Priced())


@pytest.mark.parametrize("other", [arm_of, DynamicExit])
def test_text_is_plains_whoever_drafts(target, other):
    drafter = Portfolio(PromptLookup(), SuffixDecoding(), other(target))
    assert len(drafter.members) == 2 and drafter.traits.shape is Shape.TREE
    assert drafter.traits.draws == {Draw.POINT, Draw.IID}
    plain = write(Engine(target, Nothing(), Point(), Fixed()), rows(target))
    seen: set[int] = set()
    engine = engine_of(target, drafter, None, 0)
    engine.listeners.append(lambda step: seen.update(len(draft.tree) for draft in step.drafts))
    assert write(engine, rows(target), max_rows=2) == plain
    assert max(seen) > 2, "something was drafted"
    assert target.rows_held == 0


def test_what_is_looked_up_learns_while_another_member_drafts(target):
    drafter = Portfolio(SuffixDecoding(), arm_of(target))
    write(engine_of(target, drafter, 0), rows(target))
    suffix = drafter.members[0].members[0]
    held = sum(map(len, suffix.answers.values()))
    assert held >= 180, "every answer is remembered, whoever drafted it"


def test_a_look_up_drafts_where_it_is_worth_more_than_is_promised(target):
    for promised, arm in ((0.0, None), (4.1, 0), (inf, 0)):
        drafter = Portfolio(PromptLookup(), arm_of(target))
        engine = engine_of(target, drafter, 0, promised=promised)
        seen = set()
        engine.listeners.append(
            lambda step, drafter=drafter, seen=seen: seen.update(
                row.private[drafter].turn.arm for row in step.rows if row.finish is None
            )
        )
        write(engine, rows(target))
        assert seen == {arm}


def test_without_prices_the_first_member_drafts(target):
    drafter = Portfolio(PromptLookup(), arm_of(target))
    drafter.bandit = Turns(0)
    write(Engine(target, drafter, Recursive(), Fixed()), rows(target))
    assert drafter.bandit.steps == 0


def test_a_seed_repeats_its_text_beside_rows_that_are_free_to_choose(target):
    """Which member drafts follows from seconds; what it draws takes coins of its row."""

    def seeded():
        return rows(target, seed=7, temperature=1.0)[:2]

    def alone():
        drafter = Portfolio(PromptLookup(), arm_of(target))
        return write(engine_of(target, drafter, 0), seeded())

    drafter = Portfolio(PromptLookup(), arm_of(target))
    engine = engine_of(target, drafter, 0)
    kinds = [set(), set()]

    def listen(step):
        for row, draft in zip(step.rows, step.drafts, strict=True):
            if len(draft.tree) > 1:
                kinds[row.repeatable].add(draft.draw)

    engine.listeners.append(listen)
    assert write(engine, [*seeded(), *rows(target, temperature=1.0)])[:2] == alone()
    assert kinds == [{Draw.IID}, {Draw.POINT}], "the batch was split"


def test_a_step_teaches_its_members_pace(target, row, step):
    drafter = Portfolio(PromptLookup(), arm_of(target))
    bandit = drafter.bandit
    one = row([0, 1, 2, 0, 1], 5, max_new_tokens=30)
    draft_lm = drafter.members[1].model.lm
    drafter.start(one, None)
    [draft] = drafter.propose([one], [PRICED])
    assert bandit.tried == [0] and len(draft.tree) == 5
    assert draft_lm.rows_held == 1
    one.extend([draft.tree.tokens[1], 3])
    drafter.observe(step([one], [draft], [Verdict((1,), 3)], seconds=2.0))
    assert bandit.tried == [1], "a new arm is tried at first"
    assert bandit.all[0].tokens == 2 and bandit.all[0].spent == pytest.approx(2.0 * 3.0 / 1.5)
    assert one.private[drafter].paces[0].spent == bandit.all[0].spent


class Reader(RowDrafter):
    """Drafts nothing, and notes the hidden states it is shown."""

    def __init__(self, taps, context=None):
        self.traits = Traits(taps=taps, context=context)
        self.seen, self.hidden = [], []

    def propose_one(self, row, budget):
        return Draft(root(row.tokens[-1]), Draw.POINT)

    def start(self, row, seen):
        self.seen.append(seen)

    def observe(self, step):
        self.hidden += [score.hidden for score in step.scores]


def test_members_read_the_hidden_states_of_their_own_taps(target):
    def noted(drafter, *readers):
        write(Engine(target, drafter, Recursive(), Fixed()), rows(target))
        return [(reader.seen, reader.hidden) for reader in readers]

    def make():
        return Reader((Layer(0),), context=2), Reader((Layer(1), FinalNorm()), context=3)

    first, second = make()
    drafter = Portfolio(PromptLookup(), first, second)
    assert drafter.traits.taps == (Layer(0), Layer(1), FinalNorm()) and drafter.traits.context == 3
    together = noted(drafter, first, second)
    for mine, kept in zip(together, make(), strict=True):
        [alone] = noted(Portfolio(PromptLookup(), kept), kept)
        for a, b in zip((*mine[0], *mine[1]), (*alone[0], *alone[1]), strict=True):
            assert torch.equal(a, b)
    every = Portfolio(PromptLookup(), first, Reader((Layer(2),)))
    assert every.traits.context is None, "one of them reads the whole prompt"


def test_hidden_states_are_read_only_in_steps_whose_member_asks(target):
    """All steps of a member that looks in each of its own, and no other."""
    member = DynamicExit(target, DynamicExit.Config(look_every=2))
    drafter = Portfolio(PromptLookup(), member)
    engine = engine_of(target, drafter, None, 0, None)
    asked, scored = [], engine.target.score

    def score(rows, drafts, taps=()):
        turn = rows[0].private[drafter].turn
        asked.append((None if turn is None else turn.arm, taps))
        return scored(rows, drafts, taps)

    engine.target.score = score
    [one] = rows(target)[:1]
    write(engine, [one])
    own = [taps for arm, taps in asked if arm == 0]
    assert len(own) > 4 and own[::2] == [member.traits.taps] * len(own[::2])
    assert {taps for arm, taps in asked if arm is None} | set(own[1::2]) == {()}


class Hopeless(Reader):
    """A member that finds out that it cannot pay."""

    hopeless = False


def test_a_member_that_can_never_pay_is_asked_no_more_and_nothing_is_read_for_it(target, row):
    lost, other = Hopeless((Layer(0),)), Hopeless((Layer(1),))
    drafter = Portfolio(PromptLookup(), lost, other)
    one = row([0, 1, 2, 0, 1], 5, max_new_tokens=30)
    drafter.start(one, torch.zeros(4, 2, 5))
    lost.hopeless = True
    drafter.propose([one], [PRICED])
    assert drafter.bandit.arms == {1} and drafter.traits.taps == (Layer(0), Layer(1))
    other.hopeless = True
    drafter.propose([one], [PRICED])
    assert drafter.bandit.arms == set() and drafter.traits.taps == ()
    drafter.start(row([3], 5, max_new_tokens=9), None)
    assert len(drafter.propose([one], [PRICED])[0].tree) > 1, "what is looked up goes on"


def test_an_arm_that_declines_leaves_the_look_up_its_turn(target, row, step):
    drafter = Portfolio(PromptLookup(), Reader((Layer(0),)))
    one = row([0, 1, 2, 0, 1], 5, max_new_tokens=30)
    drafter.start(one, None)
    [draft] = drafter.propose([one], [PRICED])
    assert len(draft.tree) > 1 and one.private[drafter].turn.arm is None
    one.extend([0])
    drafter.observe(step([one], [draft], [Verdict((), 0)], seconds=1.0))
    assert drafter.bandit.all[0].steps == 0 and drafter.bandit.tried == [1]


def test_rows_that_an_arm_drafts_nothing_for_keep_what_was_looked_up(target, row, step):
    """And say nothing of the arm's pace: its model takes no text of six tokens."""
    draft = TableLM.random(5, seed=4)
    draft.max_length = 5
    drafter = Portfolio(PromptLookup(), Chain(OrdinaryModel(draft)))
    short, long = rows_ = [row(text, 5, max_new_tokens=30) for text in ([3, 1], [0, 1, 2] * 2)]
    for one in rows_:
        drafter.start(one, None)
    drafts = drafter.propose(rows_, [PRICED] * 2)
    assert len(drafts[0].tree) > 1 and drafts[1].tree.tokens[:4] == (2, 0, 1, 2)
    verdicts = [Verdict((), 4), Verdict((1, 2), 4)]
    short.extend([4])
    long.extend([0, 1, 4])
    zeros = [Scores(torch.zeros(len(one.tree), 5)) for one in drafts]
    drafter.observe(step(rows_, drafts, verdicts, zeros, seconds=1.0))
    assert drafter.bandit.all[0].tokens == 1, "of the row that it drafted for"
    assert [one.private[drafter].paces[0].steps for one in rows_] == [1, 0]
    assert drafter.bandit.resting == [0], "it did draft"


@pytest.mark.parametrize("others", [[], [[3, 1]]])
def test_an_arm_is_not_told_of_a_look_up_as_of_a_tree_of_its_own(row, step, others):
    """Where no node pays, its model has the root open and nothing else, in any company."""
    drafter = Portfolio(PromptLookup(), BestFirst(OrdinaryModel(TableLM(torch.zeros(5, 5)))))
    dear = Budget(4, 8, Prices(0.0, tuple(0.3 * n for n in range(9)), 1.5, 3.0))
    rows = [row(text, 5, max_new_tokens=30) for text in ([0, 1, 2, 0, 1], *others)]
    for one in rows:
        drafter.start(one, None)
    drafts = drafter.propose(rows, [dear, PRICED][: len(rows)])
    assert drafts[0].tree.tokens == (1, 2), "what was looked up"
    verdicts = [Verdict((1,), 4), Verdict((), 4)][: len(rows)]
    for one, said in zip(rows, ([2, 4], [4]), strict=False):
        one.extend(said)
    zeros = [Scores(torch.zeros(len(one.tree), 5)) for one in drafts]
    drafter.observe(step(rows, drafts, verdicts, zeros, seconds=1.0))
    [again, *_] = drafter.members[1].propose(rows, [PRICED] * len(rows))
    assert again.tree.tokens[0] == 4 and len(again.tree) > 1, "it goes on behind the whole text"


def test_what_cannot_be_merged_stands_alone(target):
    grown = BestFirst(OrdinaryModel(target))
    drafter = Portfolio(PromptLookup(), grown, arm_of(target))
    assert isinstance(drafter.members[0], Fusion) and drafter.members[1] is grown
    with pytest.raises(ConfigError, match="no sources"):
        Portfolio(arm_of(target))


def test_the_target_is_scored_through_the_view_of_a_member(target):
    member = DynamicExit(target)
    assert Portfolio(PromptLookup(), member).view is member.view
    assert not hasattr(Portfolio(PromptLookup(), arm_of(target)), "view")
    with pytest.raises(PairingError, match="one view"):
        Portfolio(PromptLookup(), member, DynamicExit(target))


def test_auto_leaves_out_what_a_target_cannot_carry():
    whole = assemble("auto", TableLM.random(4, seed=1)).drafter
    assert len(whole.members) == 2 and whole.traits.shape is Shape.TREE
    chains = TableLM(TableLM.random(4, seed=1).logits, Caps(tree="chain", why="a test"))
    assert assemble("auto", chains).drafter.traits.shape is Shape.CHAIN

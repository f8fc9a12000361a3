from array import array
from dataclasses import replace

import pytest
import torch

from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.hybrid import Hybrid, Union, shared_by_asked
from foretoken.drafters.parts.agreement import Agreement, Gain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.suffix import SuffixDecoding
from foretoken.errors import PairingError
from foretoken.lm.table import TableLM
from foretoken.trees.build import from_paths
from foretoken.trees.token_odds import TextOdds, TokenOdds
from foretoken.types import Budget, Draft, Draw, Prices, Step, StepTimes
from foretoken.verifiers.point import Point

VOCAB = 12


@pytest.fixture
def hybrid(pair):
    def make(**grower):
        inner = BestFirst(OrdinaryModel(pair[1]), BestFirst.Config(min_gain=0.0, **grower))
        return Hybrid(inner, PromptLookup(), SuffixDecoding())

    return make


def fixed(paths, chance):
    tree = from_paths(0, paths)
    return Draft(tree, Draw.POINT, chances=tuple(chance**depth for depth in tree.depths()))


def union_of(grown, found):
    union = Union(grown, found)
    union.judge(True, Agreement(), TokenOdds(), TextOdds())
    return union


def prices(level, node, nodes=12):
    return Prices(level, tuple(node * n for n in range(nodes + 1)), 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(hybrid, run, plain, row, pair, prompts, temperature):
    def rows():
        return [row(p, VOCAB, max_new_tokens=40, temperature=temperature, seed=9) for p in prompts]

    found, records = run(pair[0], hybrid(), rows(), depth=8, nodes=12)
    assert found == plain(pair[0], rows())
    for draft in (draft for record in records for draft in record.drafts):
        siblings = list(zip(draft.tree.parents[1:], draft.tree.tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings) and len(siblings) <= 12
    assert pair[1].rows_held == 0, "a strict cache of the draft model saw every commit"


def test_look_ups_go_on_where_the_drafters_depth_ends(run, row, pair):
    loop = TableLM(torch.eye(VOCAB, dtype=torch.float64).roll(1, 1) * 20.0)

    def steps(*look_ups):
        inner = BestFirst(OrdinaryModel(pair[1]), BestFirst.Config(template=(1,)))
        drafter = Hybrid(inner, *look_ups) if look_ups else inner
        one = row([0, 1], VOCAB, max_new_tokens=80)
        return len(run(loop, drafter, [one], depth=8, nodes=24)[1])

    assert max(steps(PromptLookup()), steps(SuffixDecoding())) < 0.6 * steps()


def test_both_trees_are_one_and_the_drafters_nodes_come_first():
    union = union_of(fixed([[1, 2], [3]], 0.6), fixed([[1, 4], [5]], 0.5))
    assert union.tree.tokens[: union.size] == (0, 1, 2, 3) and union.size == 4
    paths = {tuple(union.tree.tokens[n] for n in union.tree.path(i)) for i in range(1, 6)}
    assert paths == {(1,), (1, 2), (3,), (1, 4), (5,)}
    union.cut(union.draft.keep([0, 1, 4]))
    assert union.grown.tree.tokens == (0, 1), "what the drafter is told it proposed"


def test_what_the_model_did_not_name_gets_what_it_left():
    """The model gives 0.9 to another token; a look-up of 0.9 below it keeps its word."""
    union = union_of(fixed([[1]], 0.9), fixed([[2, 3], [1, 4]], 0.9))
    chance = dict(zip([tuple(union.tree.tokens[n] for n in union.tree.path(i)) for i in range(5)],
                      union.chances, strict=True))  # fmt: skip
    assert chance[(2,)] == pytest.approx(0.9 * 0.1)
    assert chance[(1, 4)] == pytest.approx(0.9)


def test_experience_tells_guesses_of_both_from_guesses_of_one():
    known = Agreement(), TokenOdds(), TextOdds()
    for _ in range(300):
        union = Union(fixed([[1], [2]], 0.4), fixed([[1], [3]], 0.4))
        union.judge(True, *known)
        union.teach([1], *known)
    both, model, look_up = union.chances[1:]
    assert both > 0.95 and model < 0.05 and look_up < 0.05
    union.judge(False, *known)
    assert union.chances[-3] == pytest.approx(0.4), "sampled texts have an agreement of their own"


def test_a_text_that_look_ups_mislead_in_is_believed_less_than_others():
    def union(token, odds, *said):
        one = Union(fixed([[1]], 0.3), fixed([[token]], 0.5))
        one.judge(True, agreement, tokens, odds)
        if said:
            one.teach([*said], agreement, tokens, odds)
        return one.draft.chances[2]

    agreement, tokens, odds = Agreement(), TokenOdds(), TextOdds()
    for token in range(3, 503):  # of other texts
        union(token, TextOdds(), token)
    trusting = union(503, TextOdds())
    for token in range(503, 543):
        union(token, odds, 1)
    assert union(543, odds) < 0.5 * trusting, "whichever token it is"
    assert union(543, odds) < 0.97 * union(543, TextOdds()), "and less than in any other text"


def test_the_model_is_not_asked_where_it_adds_less_than_it_costs(hybrid, row, pair):
    """A text of one repeated token, and levels that cost more than any tree can bring."""
    drafter, asked = hybrid(), []
    one = row([3] * 40, VOCAB, max_new_tokens=90)
    drafter.start(one, None)
    one.extend([3])  # the first token never waits for it
    drafter.look_ups.members[1].odds[0].factors[8:] = array("d", [1.0] * 8)
    grow = drafter.inner.model.grow
    drafter.inner.model.grow = lambda *given: asked.append(1) or grow(*given)
    budget = Budget(8, 12, prices(level=2.0, node=0.01))
    for _ in range(Gain.EVERY):
        [draft] = drafter.propose([one], [budget])
    assert len(draft.tree) > 3 and 1 <= len(asked) < Gain.EVERY // 2, len(asked)
    before = len(asked)
    for _ in range(2 * Gain.EVERY):
        drafter.propose([one], [budget])
    assert 1 <= len(asked) - before <= 6, "it is tried again now and then"
    free = Budget(8, 12, prices(level=0.0, node=0.01))
    before = len(asked)
    drafter.propose([one], [free])
    assert len(asked) > before, "a model that costs nothing is always asked"


def test_gains_are_told_apart_by_what_look_ups_promise():
    gain = Gain()
    sure = gain.place([1.0, 0.99, 0.98, 0.97], [-1, 0, 1, 2])
    vague = gain.place([1.0, 0.1], [-1, 0])
    assert sure != vague and gain.place([1.0], [-1]) == vague
    for _ in range(4):
        gain.update(sure, -0.5)
    assert not gain.promising(sure) and gain.promising(vague)
    for _ in range(8):
        gain.update(sure, 0.5)
    assert gain.promising(sure)


def test_a_text_is_read_only_where_trees_are_worth_it():
    gain = Gain()
    place = gain.place([1.0], [-1])
    for _ in range(20):
        gain.update(place, 0.1)
    assert gain.promising(place, 16, reading=0.05) and not gain.promising(place, 16, reading=0.3)
    tried = [gain.promising(place, 2, reading=0.3) for _ in range(2 * Gain.EVERY * Gain.RARER)]
    assert sum(tried) == 1, "now and then it is read all the same"


def test_a_batch_that_gains_nothing_by_the_model_leaves_texts_unread(hybrid, row):
    """Levels that cost several tokens of all rows together; few steps of each are left."""
    drafter = hybrid()
    rows = [row([3] * 40, VOCAB, max_new_tokens=4) for _ in range(8)]
    for one in rows:
        drafter.start(one, None)
    drafter.reader.unread.pace = 0.01
    dear = replace(prices(level=2.0, node=0.01), second=100.0)
    drafter.propose(rows, [Budget(8, 12, dear)] * 8)
    assert len(drafter.reader.unread) == 8
    drafter.propose(rows, [Budget(8, 12, replace(dear, level=0.0))] * 8)
    assert not drafter.reader.unread, "a model that costs nothing is always asked"


def test_the_first_token_does_not_wait_until_the_draft_model_has_read_the_prompt(hybrid, row):
    drafter, one = hybrid(), row([3] * 40, VOCAB, max_new_tokens=40)
    drafter.start(one, None)
    cheap = Budget(8, 12, prices(level=0.001, node=0.001))
    drafter.propose([one], [cheap])
    assert drafter.reader.waits(one)
    one.extend([5])
    drafter.propose([one], [cheap])
    assert not drafter.reader.waits(one)


def test_a_drafter_whose_candidates_are_drawn_is_refused(pair):
    with pytest.raises(PairingError, match="Chain"):
        Hybrid(Chain(OrdinaryModel(pair[1])), PromptLookup())


class NowAndThen(Fixed):
    """No row may draft in two of three steps."""

    steps = 0

    def budgets(self, rows):
        self.steps += 1
        return [Budget(0, 0)] * len(rows) if self.steps % 3 else super().budgets(rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_without_drafts_spare_the_model_and_are_forgotten(
    hybrid, run, plain, row, pair, prompts, temperature, monkeypatch
):
    """Those between them draft as ever: both sides know what was written meanwhile."""

    def rows():
        return [row(p, VOCAB, max_new_tokens=60, temperature=temperature, seed=3) for p in prompts]

    drafter, asked = hybrid(), []
    own = drafter.inner.propose
    monkeypatch.setattr(drafter.inner, "propose", lambda *given: asked.append(1) or own(*given))
    found, records = run(pair[0], drafter, rows(), kind=NowAndThen)
    assert found == plain(pair[0], rows())
    assert len(asked) == len(records) // 3
    assert any(len(draft.tree) > 2 for record in records for draft in record.drafts)
    assert sum(len(text) for text in found) > sum(len(record.rows) for record in records)
    assert pair[1].rows_held == 0


def test_who_is_asked_bears_what_the_others_wait_for_a_level():
    budgets = [Budget(8, 12, prices(level=0.5, node=0.01))] * 3 + [Budget(0, 0)]
    [own, *others] = shared_by_asked(budgets, [True, False, False, False])
    assert own.prices.level == pytest.approx(1.5) and own.depth == 8
    assert own.prices.nodes == budgets[0].prices.nodes
    assert not any(other.depth for other in others)
    assert shared_by_asked(budgets[:3], [True] * 3) == budgets[:3]


def test_a_text_that_the_model_cannot_take_says_nothing_of_what_it_is_worth(pair, row):
    short = OrdinaryModel(pair[1])
    short.max_length = 5
    drafter = Hybrid(BestFirst(short), PromptLookup())
    rows = [row([3] * 9, VOCAB, max_new_tokens=40), row([3] * 4, VOCAB, max_new_tokens=40)]
    for one in rows:
        drafter.start(one, None)
    dear = Budget(8, 12, prices(level=0.5, node=0.01))
    drafter.propose(rows[:1], [dear])
    assert all(sum(gain.trees) == len(gain.trees) for gain in drafter.gains.values())
    for _ in range(2):  # the first step of a text does not wait for the model
        drafter.propose(rows[1:], [dear])
    assert any(sum(gain.trees) > len(gain.trees) for gain in drafter.gains.values())


def test_rows_that_were_asked_for_apart_are_observed_together(hybrid, row, pair):
    """As after a failure: one may draft nothing, the other has a tree."""
    drafter = hybrid()
    rows = [row([1, 2, 3], VOCAB, max_new_tokens=9) for _ in range(2)]
    for one in rows:
        pair[0].prefill([one])
        drafter.start(one, None)
    drafts = [
        drafter.propose([one], [budget])[0]
        for one, budget in zip(rows, (Budget(0, 0), Budget(4, 8)), strict=True)
    ]
    assert drafter.inner.source.lm.rows_held == 1
    scores = pair[0].score(rows, drafts)
    for one, draft, said in zip(rows, drafts, scores, strict=True):
        said.p = one.warp.laws(one.tokens, draft.tree, said.logits)
    verdicts = Point().verify(rows, drafts, scores)
    pair[0].commit(rows, [verdict.path for verdict in verdicts])
    emitted = [
        one.extend([*(draft.tree.tokens[node] for node in verdict.path), verdict.next_token])
        for one, draft, verdict in zip(rows, drafts, verdicts, strict=True)
    ]
    drafter.observe(Step(tuple(rows), tuple(drafts), tuple(scores), tuple(verdicts),
                         tuple(emitted), StepTimes(2, 8, 4, 0.1, 0.1, 0.1)))  # fmt: skip
    drafts = drafter.propose(rows, [Budget(4, 8)] * 2)
    assert all(len(draft.tree) > 1 for draft in drafts)

"""What all growers share: rows that do not fit, features that follow the text, pruned drafts."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from foretoken.audit.fixtures import random_head
from foretoken.coins import SeededCoins
from foretoken.drafters.growers import grower as growing
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.sampled_tree import SampledTree
from foretoken.drafters.growers.stochastic_beam import StochasticBeam
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.lm.table import TableLM
from foretoken.methods.heads import FAMILY
from foretoken.row import make_row
from foretoken.types import Budget, Layer, Prices, SamplingParams, Scores, Verdict
from foretoken.verifiers.recursive import Recursive

HEADS = {row.name: row for row in FAMILY.methods if row.head}  # those that are nothing but a head
GROWERS = [Chain, BestFirst, SampledTree, StochasticBeam]


class ReadsTarget(OrdinaryModel):
    """A draft model that is shown the target's states, and checks that none is missing."""

    taps = (Layer(-1),)
    context = 2

    def __init__(self, lm, target, fits=True):
        super().__init__(lm)
        self.target, self.fits, self.known = target, fits, {}

    def open(self, row, features):
        assert len(features) == min(2, len(row.tokens) - 1)
        self.known[row.uid] = len(row.tokens) - 1
        return self.fits and super().open(row, features)

    def keep(self, rows, paths, features):
        for row, states in zip(rows, features, strict=True):
            start = self.known[row.uid]
            self.known[row.uid] += len(states)
            assert self.known[row.uid] == len(row.tokens) - 1
            for at, state in enumerate(states):
                torch.testing.assert_close(
                    state[0], self.target.after(row.tokens[: start + at + 1])
                )
        super().keep(rows, paths, features)

    def close(self, row):
        self.known.pop(row.uid, None)
        super().close(row)


@pytest.mark.parametrize("grower", GROWERS)
def test_features_of_the_root_and_of_accepted_nodes_follow_the_text(
    grower, pair, prompts, row, run, plain
):
    target, draft = pair
    make = lambda: [row(p, 12, max_new_tokens=30) for p in prompts]  # noqa: E731
    model = ReadsTarget(draft, target)
    drafter = grower(model)
    assert drafter.traits.taps == model.taps and drafter.traits.context == 2
    found, records = run(target, drafter, make(), verifier=Recursive(), depth=3, nodes=9)
    assert found == plain(target, make())
    assert any(verdict.path for record in records for verdict in record.verdicts)
    assert not model.known and draft.rows_held == 0


class Counted(ReadsTarget):
    """It notes how many tokens it was told of together."""

    reads_late = True

    def __init__(self, *args):
        super().__init__(*args)
        self.told = []

    def keep(self, rows, paths, features):
        self.told += map(len, features)
        super().keep(rows, paths, features)


def asked_seldom(drafter, every):
    """The drafter, asked for anything in every so many-th step alone."""
    propose, steps = drafter.propose, count(1)

    def seldom(rows, budgets, stop=None):
        if next(steps) % every:
            budgets = [replace(one, depth=0) for one in budgets]
        return propose(rows, budgets, stop)

    drafter.propose = seldom
    return drafter


@pytest.mark.parametrize("grower", GROWERS)
def test_a_model_that_is_not_asked_reads_nothing_and_knows_all_when_it_is(
    grower, pair, prompts, row, run, plain, monkeypatch
):
    target, draft = pair
    make = lambda: [row(p, 12, max_new_tokens=30) for p in prompts]  # noqa: E731
    found, told = {}, {}
    for unread in (1, growing.UNREAD):
        monkeypatch.setattr(growing, "UNREAD", unread)
        model = Counted(draft, target)
        drafter = asked_seldom(grower(model), every=5)
        text, records = run(target, drafter, make(), verifier=Recursive(), depth=3, nodes=9)
        assert text == plain(target, make())
        found[unread] = [one.drafts for one in records]
        told[unread] = model.told
    assert [[d.tree for d in step] for step in found[1]] == [
        [d.tree for d in step] for step in found[growing.UNREAD]
    ]
    assert any(len(d.tree) > 1 for step in found[1] for d in step)
    assert len(told[growing.UNREAD]) <= 0.6 * len(told[1])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_after_a_pause_as_one_that_read_every_step(name, monkeypatch):
    drafts = {}
    for unread in (1, growing.UNREAD):
        monkeypatch.setattr(growing, "UNREAD", unread)
        lm = TableLM.random(7, seed=5)
        head = random_head(HEADS[name].head, lm.vocab_size, lm.hidden_size)
        engine = assemble(name, lm, draft_head=head, controller="fixed", depth=3)
        assert asked_seldom(engine.drafter, every=6).reads_late
        texts = [
            make_row(p, SamplingParams(max_new_tokens=40, temperature=0.8), SeededCoins(3), 7)
            for p in ([1, 2, 3], [4, 5, 6, 0, 2])
        ]
        records = list(decode(texts, engine))
        drafts[unread] = [[d.tree for d in one.drafts] for one in records]
        assert any(len(tree) > 1 for step in drafts[unread] for tree in step)
    assert drafts[1] == drafts[growing.UNREAD]


def test_a_row_that_could_not_be_read_is_written_without_the_model(
    pair, prompts, row, run, plain, monkeypatch
):
    target, draft = pair
    model = Counted(draft, target)
    keep, tried = model.keep, []

    def broken(rows, paths, features):
        keep(rows[:1], paths[:1], features[:1])
        tried.append(len(rows))
        raise torch.OutOfMemoryError("no room for it")

    make = lambda: [row(p, 12, max_new_tokens=30) for p in prompts]  # noqa: E731
    monkeypatch.setattr(model, "keep", broken)
    found, records = run(target, asked_seldom(Chain(model), every=5), make(), verifier=Recursive())
    assert found == plain(target, make()) and len(records) >= 29
    assert tried == [len(prompts)] and not model.known and draft.rows_held == 0


def test_what_waits_is_read_before_it_is_much(pair, row, run, plain, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(growing, "UNREAD", 8)
    model = Counted(draft, target)
    one = row([1, 2, 3], 12, max_new_tokens=30)
    run(target, asked_seldom(Chain(model), every=1000), [one], verifier=Recursive(), depth=3)
    assert model.told == [8, 8, 8], "of 30 tokens, one each step"


@pytest.mark.parametrize("grower", GROWERS)
def test_a_row_that_the_model_refuses_is_decoded_plainly(grower, pair, prompts, row, run, plain):
    target, draft = pair
    make = lambda: [row(p, 12, max_new_tokens=12) for p in prompts]  # noqa: E731
    drafter = grower(ReadsTarget(draft, target, fits=False))
    found, _ = run(target, drafter, make(), verifier=Recursive(), depth=3, nodes=9)
    assert found == plain(target, make())
    assert draft.forwards == 0


@pytest.mark.parametrize("grower", GROWERS)
def test_nothing_is_drafted_behind_an_end_that_nobody_has_judged(grower, pair, row):
    _, draft = pair
    drafter = grower(OrdinaryModel(draft))
    one = row([1, 2], 12, max_new_tokens=12, eos=frozenset({5}))
    drafter.start(one, None)
    one.tokens.append(5)
    (found,) = drafter.propose([one], [Budget(3, 9)])
    assert len(found.tree) == 1 and draft.forwards == 0


def test_a_draft_that_others_pruned_is_found_again(pair, row, step):
    """The model keeps the accepted nodes, and calibration counts the nodes that were judged."""
    _, draft = pair
    drafter = BestFirst(OrdinaryModel(draft), BestFirst.Config(min_gain=0.0))
    one = row([1, 2], 12, max_new_tokens=30)
    drafter.start(one, None)
    (found,) = drafter.propose([one], [Budget(3, 12)])
    children = found.tree.children()
    first = next(node for node in children[0][1:] if children[node])  # not the favourite
    below = children[first][0]
    pruned = found.keep([0, first, below])
    assert pruned.origin == (0, first, below) and pruned.keep([0, 1]).origin == (0, first)
    text = [found.tree.tokens[node] for node in (first, below)]
    promised = sum(drafter.ranker.calibration.promised)
    one.extend([*text, 7])
    drafter.observe(step([one], [pruned], [Verdict((1, 2), 7)], [Scores(torch.zeros(3, 12))]))
    assert draft.cached(one) in ([1, 2, text[0]], [1, 2, *text]), "the last one may not be fed"
    laws = [float(draft.after([1, 2]).softmax(-1)[text[0]])]
    laws.append(float(draft.after([1, 2, text[0]]).softmax(-1)[text[1]]))
    gained = sum(drafter.ranker.calibration.promised) - promised
    assert gained == pytest.approx(sum(laws), rel=0.01), "of the two nodes judged, and no others"


def test_no_text_is_read_for_longer_than_is_left_of_it(row):
    """Four tokens more are soon written plainly, a hundred are not."""
    lm = TableLM.random(vocab=8, seed=0)
    grower = BestFirst(OrdinaryModel(lm))
    short, long = (row([1] * 40, 8, max_new_tokens=count) for count in (4, 100))
    for one in (short, long):
        grower.start(one, None)
    grower.source.unread.pace = 0.01  # 0.39 seconds, in which plain steps write 20 tokens
    budget = Budget(4, 8, Prices(0.1, tuple(0.01 * n for n in range(9)), 1.0, second=50.0))
    drafts = grower.propose([short, long], [budget] * 2)
    assert len(drafts[0].tree) == 1 < len(drafts[1].tree)
    assert short in grower.source.unread and long not in grower.source.unread


def test_a_text_with_a_seed_is_drafted_for_whatever_the_clock_says(row):
    lm = TableLM.random(vocab=8, seed=0)
    grower = Chain(OrdinaryModel(lm))
    seeded = row([1] * 40, 8, max_new_tokens=4, temperature=1.0, seed=3)
    grower.start(seeded, None)
    grower.source.unread.pace = 0.01
    prices = Prices(0.1, tuple(0.01 * n for n in range(9)), 1.0, second=50.0)
    [draft] = grower.propose([seeded], [Budget(3, 3, prices)])
    assert len(draft.tree) > 1

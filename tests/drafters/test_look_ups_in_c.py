"""Look-ups in C decide as those in Python do, number by number, and learn the same."""

import hashlib
import random
import struct

import pytest
import torch

from foretoken.drafters.fusion import Fusion
from foretoken.drafters.lookahead import Lookahead
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.suffix import SuffixDecoding
from foretoken.drafters.token_recycling import TokenRecycling
from foretoken.lm.table import TableLM
from foretoken.native import library, look_ups
from foretoken.types import (
    Budget,
    Draft,
    Draw,
    Finish,
    Prices,
    Scores,
    Shape,
    TokenTree,
    Traits,
    Verdict,
)

VOCAB = 20
TARGET = TableLM.random(vocab=VOCAB, order=2, seed=3, scale=2.0)
pytestmark = pytest.mark.skipif(
    isinstance(library.library(), library.Unavailable), reason="no operations in C"
)


def suffix(**options):
    return lambda: SuffixDecoding(SuffixDecoding.Config(**options))


def copies(**options):
    return lambda: PromptLookup(PromptLookup.Config(**options))


def recycling(**options):
    return lambda: TokenRecycling(TARGET, TokenRecycling.Config(**options))


LOOK_UPS = {
    "copy": copies(),
    "copies": copies(matches=4, max_ngram=2),
    "suffix": suffix(),
    "suffix-chain": suffix(branching=False),
    "suffix-few": suffix(occurrences=2, max_match=3, max_spec=5, factor=2.5, offset=1.0),
    "suffix-forgetful": suffix(remember=60, min_prob=0.0),
    "suffix-one": suffix(max_match=1, remember=0),
    "recycling": recycling(),
    "recycling-few": recycling(keep=2, from_prompt=False),
    "recycling-template": recycling(template=(3, 2, 1)),
    "fused": lambda: Fusion(copies()(), suffix()(), recycling()()),
    "fused-one": lambda: Fusion(suffix()()),
    "fused-others": lambda: Fusion(Lookahead(), copies(matches=3)()),
}


def budgets(rng):
    """Named sizes, and prices of all kinds, free ones and of fewer nodes than are allowed too."""
    for _ in range(1000):
        depth, nodes = rng.choice([0, 1, 3, 10, 40]), rng.choice([0, 1, 2, 7, 40, 80])
        price = rng.choice([0.0, 0.003, 0.04, 0.2, 0.7])
        steps = [price * n + rng.choice([0.0, 0.1]) * (n > 5) for n in range(rng.choice([3, 81]))]
        yield rng.choice(
            [
                Budget(depth, nodes),
                Budget(depth, nodes, Prices(0.01, tuple(steps), 1.0)),
                Budget(depth, nodes, None, price),
            ]
        )


def known(drafter):
    """What tells all that it has learned."""
    counts = []
    for one in (drafter, *getattr(drafter, "members", ())):
        odds = getattr(one, "odds", getattr(one, "trust", ()))
        for some in odds if isinstance(odds, tuple) else (odds,):
            counts += [*some.hits, *some.promised, *some.factors]
        levels = [*getattr(one, "calibrations", ()), getattr(one, "agreed", ())]
        for calibration in (one for some in levels for one in some):
            counts += [*calibration.hits, *calibration.promised]
        if hasattr(one, "tokens"):
            counts += one.tokens.numbers
    return hashlib.sha256(struct.pack(f"{len(counts)}d", *counts)).digest()


def transcript(make, row, step, seed, texts=6, steps=40):
    """What a drafter proposes and knows while rows are written by a loop with errors."""
    rng, drafter, told = random.Random(seed), make(), []
    sizes = budgets(rng)
    logits = torch.Generator().manual_seed(seed)
    for text in range(texts):
        period = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 12))]
        one = row(
            (period * 20)[: rng.choice([1, 2, 9, 60])], VOCAB, max_new_tokens=500,
            temperature=float(text % 2), eos=frozenset(rng.sample(range(VOCAB), text % 3)),
        )  # fmt: skip
        drafter.start(one, None)
        for turn in range(steps):
            one.rehearsal = turn == 7
            [draft] = drafter.propose([one], [next(sizes)])
            found = getattr(one.private.get(drafter), "found", None)
            marked = None if found is None else (found.tree, found.marks, found.shares, found.paths)
            told.append((draft.tree, draft.chances, draft.origin, marked))
            path, tree = [], draft.tree
            while rng.random() < 0.8:
                below = [n for n in range(len(tree)) if tree.parents[n] == (path or [0])[-1]]
                if not below:
                    break
                path.append(rng.choice(below))
            likely = period[turn % len(period)]
            last = likely if rng.random() < 0.7 else rng.randrange(VOCAB)
            verdict = Verdict(tuple(path), last)
            scores = Scores(torch.randn(len(tree), VOCAB, generator=logits))
            round_ = step([one], [draft], [verdict], [scores])
            one.extend(round_.emitted[0])
            drafter.observe(round_)
            odds = getattr(one.private.get(drafter), "odds", None)
            told.append((known(drafter), odds and odds.numbers.tobytes()))
        one.finish = Finish(rng.choice(["stop", "length", "cancelled"]))
        drafter.finish(one)
    return told


@pytest.mark.parametrize("name", LOOK_UPS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_both_ways_propose_and_learn_the_same(name, seed, row, step, monkeypatch):
    in_c = transcript(LOOK_UPS[name], row, step, seed)
    monkeypatch.setattr(look_ups, "plain", lambda name: None)
    in_python = transcript(LOOK_UPS[name], row, step, seed)
    assert sum(len(one[0]) > 1 for one in in_c[::2]) > 20, "something was proposed"
    for at, (one, other) in enumerate(zip(in_c, in_python, strict=True)):
        assert one == other, f"turn {at // 2}"


class Twice(RowDrafter):
    """Proposes one token twice, which no trie would."""

    traits = Traits(shape=Shape.TREE, prices=True)

    def propose_one(self, row, budget):
        tree = TokenTree((row.tokens[-1], 5, 5, 6, 5), (-1, 0, 0, 1, 0))
        return Draft(tree, Draw.POINT, chances=(1.0, 0.5, 0.3, 0.2, 0.1))


def test_equal_siblings_are_one_vote(row, step, monkeypatch):
    found = []
    for way in ("in C", "in Python"):
        if way == "in Python":
            monkeypatch.setattr(look_ups, "plain", lambda name: None)
        fusion, one = Fusion(Twice()), row([1, 2], VOCAB, max_new_tokens=9)
        fusion.start(one, None)
        [draft] = fusion.propose([one], [Budget(9, 9)])
        fusion.observe(step([one], [draft], [Verdict((1,), 6)]))
        found.append((draft, one.private[fusion].merged.marks, known(fusion)))
    assert found[0] == found[1] and found[0][0].tree.tokens == (2, 5, 6)
    assert found[0][1] == [0, 1, 1]


@pytest.mark.parametrize("options", [{"occurrences": 10**18}, {"factor": 1e30}])
def test_settings_without_a_bound_are_taken(options, row, monkeypatch):
    trees = []
    for _ in range(2):
        drafter = SuffixDecoding(SuffixDecoding.Config(**options))
        one = row([1, 2, 3] * 9, VOCAB, max_new_tokens=9)
        drafter.start(one, None)
        trees.append(drafter.propose_one(one, Budget(12, 12)).tree)
        monkeypatch.setattr(look_ups, "plain", lambda name: None)
    assert trees[0] == trees[1] and len(trees[0]) > 3


@pytest.mark.parametrize(("turns", "found"), [(3, True), (60, False)])
def test_as_few_places_are_visited_in_a_text_that_goes_round_in_circles(
    turns, found, row, monkeypatch
):
    """Behind its last token alone there is one other place, too far back in the longer text."""
    trees = []
    for _ in range(2):
        drafter = SuffixDecoding(SuffixDecoding.Config(occurrences=1, offset=10.0))
        one = row([5, 2, 7, *[1, 2] * turns], VOCAB, max_new_tokens=9)
        drafter.start(one, None)
        trees.append(drafter.propose_one(one, Budget(12, 12)).tree)
        monkeypatch.setattr(look_ups, "plain", lambda name: None)
    assert trees[0] == trees[1] and (7 in trees[0].tokens) == found


def test_every_operation_is_called(row, step, monkeypatch):
    called = set()

    def plain(name):
        call = library.plain(name)
        return lambda *given: (called.add(name), call(*given))[1]

    monkeypatch.setattr(look_ups, "plain", plain)
    transcript(LOOK_UPS["fused"], row, step, 0, texts=2)
    assert called == set(library.PLAIN)

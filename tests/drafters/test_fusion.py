import random

import pytest

from foretoken.drafters.fusion import Fusion
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.lookahead import Lookahead
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.suffix import SuffixDecoding
from foretoken.drafters.token_recycling import TokenRecycling
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError, PairingError
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain, from_paths
from foretoken.types import Budget, Draft, Draw, Prices, Shape, Traits, Verdict

pytestmark = pytest.mark.usefixtures("way")


class Says(RowDrafter):
    """Proposes these paths, all with the same chance per token."""

    traits = Traits(shape=Shape.TREE, prices=True)

    def __init__(self, paths, chance=0.5):
        self.paths, self.chance = paths, chance
        self.saw = []

    def start(self, row, seen):
        row.private[self] = f"the state of {self.paths}"

    def propose_one(self, row, budget):
        assert row.private[self] == f"the state of {self.paths}" and budget.prices is None
        tree = from_paths(row.tokens[-1], [path[: budget.depth] for path in self.paths])
        chances = tuple(self.chance**depth for depth in tree.depths())
        return Draft(tree, Draw.POINT, chances=chances)

    def observe(self, step):
        assert all(row.private[self] == f"the state of {self.paths}" for row in step.rows)
        self.saw += [(d.tree, v) for d, v in zip(step.drafts, step.verdicts, strict=True)]


class Silent(RowDrafter):
    """Names no chances."""

    def propose_one(self, row, budget):
        return Draft(chain(row.tokens[-1], [7, 8][: min(budget.depth, budget.nodes)]), Draw.POINT)


def paths_of(tree):
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(1, len(tree))}


def drafted(fusion, one, budget):
    return fusion.propose([one], [budget])[0]


def test_equal_paths_merge_and_the_best_nodes_stay(row):
    fusion = Fusion(Says([[1, 2, 3]], 0.9), Says([[1, 2, 4], [5]], 0.4))
    one = row([0], 12, max_new_tokens=30)
    fusion.start(one, None)
    whole = paths_of(drafted(fusion, one, Budget(9, 20)).tree)
    assert whole == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}
    best = paths_of(drafted(fusion, one, Budget(9, 3)).tree)
    assert best == {(1,), (1, 2), (1, 2, 3)}
    assert paths_of(drafted(fusion, one, Budget(1, 20)).tree) == {(1,), (5,)}
    for budget in (Budget(0, 20), Budget(9, 0)):
        assert len(drafted(fusion, one, budget).tree) == 1


def test_a_source_that_is_wrong_loses_its_nodes_to_one_that_is_right(row, step):
    boaster, modest = Says([[1, 2]], 0.95), Says([[3, 4]], 0.3)
    fusion = Fusion(boaster, modest)
    one = row([0], 12, max_new_tokens=500)
    fusion.start(one, None)
    assert paths_of(drafted(fusion, one, Budget(9, 2)).tree) == {(1,), (1, 2)}
    for _ in range(60):  # what a source would have guessed counts, even if it was not scored
        draft = drafted(fusion, one, Budget(9, 2))
        fusion.observe(step([one], [draft], [Verdict((), 3)]))
    assert paths_of(drafted(fusion, one, Budget(9, 2)).tree) == {(3,), (3, 4)}
    assert boaster.saw == modest.saw and len(modest.saw) == 60, "every source sees every outcome"


def test_sources_that_name_no_chance_take_part(row):
    fusion = Fusion(Silent(), Says([[1]], 0.4))
    one = row([0], 12, max_new_tokens=30)
    fusion.start(one, None)
    assert paths_of(drafted(fusion, one, Budget(9, 9)).tree) == {(7,), (7, 8), (1,)}
    prices = Prices(0.0, tuple(0.35 * n for n in range(10)), 1.0)
    assert paths_of(drafted(fusion, one, Budget(9, 9, prices)).tree) == {(7,), (1,)}


def test_a_text_in_which_guesses_fail_gets_fewer_than_another(row, step):
    """What all texts taught is corrected by what this one teaches."""
    fusion = Fusion(Says([[1, 2, 3]], 0.6))
    one, other = (row([0], 12, max_new_tokens=500) for _ in range(2))
    prices = Prices(0.0, tuple(0.25 * n for n in range(10)), 1.0)
    sizes = {}
    for text in (one, other):
        fusion.start(text, None)
    for _ in range(40):
        for text, verdict in ((one, Verdict((), 9)), (other, Verdict((1, 2, 3), 4))):
            draft = drafted(fusion, text, Budget(9, 9, prices))
            sizes[text.uid] = len(draft.tree) - 1
            said = Draft(from_paths(0, [[1, 2, 3]]), Draw.POINT)
            fusion.observe(step([text], [said], [verdict]))
    assert sizes[one.uid] < sizes[other.uid] == 3


def test_sources_that_agree_are_believed_as_far_as_that_came_true(row, step):
    fusion = Fusion(Says([[1], [2]], 0.3), Says([[1], [3]], 0.3))
    one = row([0], 12, max_new_tokens=500)
    fusion.start(one, None)
    for turn in range(200):  # of what both say every second one comes, of what one says nothing
        draft = drafted(fusion, one, Budget(1, 9))
        fusion.observe(step([one], [draft], [Verdict((), 1 if turn % 2 else 7)]))
    chances = dict(zip(draft.tree.tokens, draft.chances, strict=True))
    assert chances[1] > 0.4 and max(chances[2], chances[3]) < 0.1


def test_a_zero_budget_asks_nobody(row, step):
    fusion = Fusion(PromptLookup(), SuffixDecoding(), TokenRecycling(TableLM.random(12)))
    one = row([1, 2, 3, 1, 2], 12, max_new_tokens=30)
    fusion.start(one, None)
    draft = drafted(fusion, one, Budget(0, 0))
    fusion.observe(step([one], [draft], [Verdict((), 3)]))
    assert len(draft.tree) == 1 and one.private[fusion].merged.tree == draft.tree
    one.extend([3])
    assert len(drafted(fusion, one, Budget(3, 3)).tree) > 1, "what was missed is caught up with"


def all_sources(target):
    return [PromptLookup(), SuffixDecoding(), TokenRecycling(target), Lookahead()]


def test_greedy_text_is_plains_in_batches(prompts, row, run, plain):
    target = TableLM.random(vocab=12, order=2, seed=3)
    make = lambda: [  # noqa: E731
        row(p, 12, max_new_tokens=50 + 7 * i, eos=frozenset({11}), min_new_tokens=30)
        for i, p in enumerate(prompts)
    ]
    fusion = Fusion(*all_sources(target))
    for _ in range(2):
        found, records = run(target, fusion, make(), depth=6, nodes=30)
        assert found == plain(target, make())
    assert len(records) < 25


def test_on_the_same_budget_a_fusion_needs_no_more_steps_than_its_best_source(row, run):
    target = TableLM.random(vocab=60, order=2, seed=5, scale=2.5)
    rng = random.Random(0)
    prompts = [[rng.randrange(60) for _ in range(20)] for _ in range(12)]

    def steps(drafter):
        rows = [row(prompt, 60, max_new_tokens=60, temperature=0.5, seed=1) for prompt in prompts]
        return sum(len(run(target, drafter, [one], depth=6, nodes=12)[1]) for one in rows)

    alone = [steps(source) for source in all_sources(target)[:3]]
    assert steps(Fusion(*all_sources(target)[:3])) <= 1.05 * min(alone)


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(ConfigError, match="no sources"):
        Fusion()
    for grower in (Chain, BestFirst):
        with pytest.raises(PairingError, match=grower.__name__):
            Fusion(grower(OrdinaryModel(TableLM.random(4))))
    for wrong, told in (("chain", "as a source"), ("fused", "as a source"), ("rest", "datastore")):
        with pytest.raises(ConfigError, match=told):
            assemble("fused", TableLM.random(4), sources=[wrong])
    with pytest.raises(ConfigError, match="did you mean"):
        assemble("fused", TableLM.random(4), sources=["sufix"])


def test_the_row_takes_any_sources_by_name():
    built = assemble("fused", TableLM.random(4), sources=["lookahead", "suffix"]).drafter
    assert [type(source) for source in built.members] == [Lookahead, SuffixDecoding]
    with pytest.raises(ConfigError, match="sources"):
        assemble("fused", TableLM.random(4), sources="suffix")
    default = assemble("fused", TableLM.random(4), remember=7, keep=2).drafter
    assert default.members[1].config.remember == 7 and default.members[2].known.keep == 2
    assert [type(s) for s in default.members] == [PromptLookup, SuffixDecoding, TokenRecycling]

"""Sampled trees: their shapes, the laws of their siblings, and what they refuse."""

import math
from collections import Counter

import pytest
import torch

from foretoken.audit.law import BOUND, law_gap
from foretoken.coins import enumerate_outcomes
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.levels import distinct, independent
from foretoken.drafters.growers.sampled_tree import (
    ConstantBranching,
    IndependentChains,
    SampledTree,
)
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError, PairingError
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw, Go, Shape
from foretoken.verifiers.k_sequential import KSequential
from foretoken.verifiers.recursive import Recursive

WIDE = Budget(9, 99)
HOT = {"temperature": 1.0}


def grown(drafter, row, budget=WIDE, stop=None):
    drafter.start(row, None)
    (found,) = drafter.propose([row], [budget], stop)
    return found


def tree_of(lm, **options):
    return SampledTree(OrdinaryModel(lm), SampledTree.Config(**options))


@pytest.mark.parametrize("replacement", [False, True])
def test_every_level_has_its_width(pair, row, replacement):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=1)
    found = grown(tree_of(draft, k=(3, 2, 1), replacement=replacement), one)
    assert found.draw is (Draw.IID if replacement else Draw.DISTINCT)
    assert [len(c) for c in found.tree.children()] == [3] + [2] * 3 + [1] * 6 + [0] * 6
    assert draft.forwards == 3, "one draft forward per level"
    for node, children in enumerate(found.tree.children()):
        assert (found.q[node] is None) == (not children)
        if children:
            text = [*one.tokens, *(found.tree.tokens[i] for i in found.tree.path(node))]
            law = one.warp.law(text, draft.after(text))
            torch.testing.assert_close(found.q[node], law)
            tokens = [found.tree.tokens[child] for child in children]
            assert replacement or len(set(tokens)) == len(tokens)


def test_replacement_repeats_itself_sooner_or_later(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=1)
    found = grown(tree_of(draft, k=(12,), replacement=True), one)
    assert len(set(found.tree.tokens[1:])) < 12


def test_distinct_siblings_are_successive_draws():
    """The law of Gumbel top-k: each token from what the ones before left over."""
    q = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)
    seen = Counter()
    for drawn, chance in enumerate_outcomes(lambda coins: tuple(distinct(q, 2, coins))):
        seen[drawn] += chance
    assert len(seen) == 6 and sum(seen.values()) == pytest.approx(1.0)
    for (a, b), chance in seen.items():
        assert chance == pytest.approx(float(q[a] * q[b] / (1 - q[a])), abs=1e-12)
    assert all(
        sorted(drawn) == [0, 1, 2]
        for drawn, _ in enumerate_outcomes(lambda coins: tuple(distinct(q, 9, coins)))
    )
    repeated = dict(enumerate_outcomes(lambda coins: tuple(independent(q, 2, coins))))
    assert repeated[(0, 0)] == pytest.approx(0.25)


def test_gumbel_noise_gives_the_same_order():
    q = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise = -torch.empty(60_000, 3, dtype=torch.float64).exponential_(generator=generator).log()
    top = (q.log() + noise).topk(2).indices
    counts = Counter(map(tuple, top.tolist()))
    for drawn, chance in enumerate_outcomes(lambda coins: tuple(distinct(q, 2, coins))):
        assert counts[drawn] / 60_000 == pytest.approx(chance, abs=0.01)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda lm: tree_of(lm, k=(1, 1, 1)),
        lambda lm: tree_of(lm, k=1),
        lambda lm: tree_of(lm, k=1, replacement=True),
        lambda lm: IndependentChains(OrdinaryModel(lm), IndependentChains.Config(k=1)),
    ],
)
def test_one_candidate_is_plain_speculative_sampling(pair, prompts, row, run, drafter):
    """Token for token under the same seeds, with the recursive rule and k-sequential selection."""
    target, draft = pair
    make = lambda: [  # noqa: E731
        row(p, 12, temperature=1.0, max_new_tokens=40, seed=i, eos=frozenset({5}))
        for i, p in enumerate(prompts)
    ]
    expected, _ = run(target, Chain(OrdinaryModel(draft)), make(), verifier=Recursive(), depth=3)
    made = drafter(draft)
    assert run(target, made, make(), verifier=Recursive(), depth=3)[0] == expected
    if Draw.IID in made.traits.draws:
        assert run(target, made, make(), verifier=KSequential(), depth=3)[0] == expected


def test_recursive_speculation_is_mcsd_without_replacement(pair, prompts, row, run):
    target, draft = pair
    make = lambda: [row(p, 12, temperature=0.8, max_new_tokens=40, seed=7) for p in prompts]  # noqa: E731
    texts = [
        run(target, made, make(), verifier=Recursive(), depth=3, nodes=14)[0]
        for made in (
            tree_of(draft, k=(2, 2, 2)),
            ConstantBranching(OrdinaryModel(draft), ConstantBranching.Config(k=(2, 2, 2))),
            ConstantBranching(OrdinaryModel(draft)),
        )
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("replacement", [False, True])
def test_a_perfect_draft_is_accepted_to_the_end(pair, row, run, replacement):
    target, _ = pair
    made = tree_of(TableLM(target.logits), k=(2, 2, 2), replacement=replacement)
    rows = [row([3, 1], 12, temperature=1.0, max_new_tokens=40, seed=1)]
    for rule in (Recursive(), *([KSequential()] if replacement else [])):
        _, records = run(target, made, rows, verifier=rule, depth=3, nodes=14)
        assert all(len(record.verdicts[0].path) == 3 for record in records)
        rows = [row([3, 1], 12, temperature=1.0, max_new_tokens=40, seed=2)]


def test_at_temperature_zero_the_best_tokens_stand_in_a_fixed_tree(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, top_k=1)
    for made in (tree_of(draft, k=(3, 2)), IndependentChains(OrdinaryModel(draft))):
        found = grown(made, one)
        assert found.draw is Draw.POINT and found.q is None
        width = len(found.tree.children()[0])
        best = draft.after([1, 2]).topk(width).indices.tolist()
        assert list(found.tree.tokens[1 : 1 + width]) == best
        assert one.coins.flip(1.0)
        made.finish(one)


def test_nothing_is_drawn_below_an_end_token_or_where_all_is_forbidden(pair, row, dead_ends):
    _, draft = pair
    ends = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=0, eos=frozenset({0, 4, 9}))
    found = grown(tree_of(draft, k=(6, 3)), ends)
    assert {0, 4, 9} & set(found.tree.tokens[1:7])
    for node, children in enumerate(found.tree.children()):
        assert not children or found.tree.tokens[node] not in (0, 4, 9)
    dead = row([2, 4], 12, max_new_tokens=30, temperature=1.0, seed=3, processors=dead_ends)
    found = grown(tree_of(draft, k=(6, 3)), dead)
    odd = [node for node in range(1, 7) if found.tree.tokens[node] % 2]
    assert odd and all(found.q[node] is None for node in odd)


@pytest.mark.parametrize("replacement", [False, True])
def test_nothing_is_drawn_where_chances_are_no_numbers(pair, row, replacement):
    """Half precision overflows at guesses that no text reaches: there the draft ends."""
    logits = pair[1].logits.clone()
    logits[1, 2, [4, 6]] = 50.0  # so both are drawn
    logits[2, 4] = torch.nan
    trees = []
    for table in (logits, torch.full_like(logits, torch.nan)):
        one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=1)
        trees.append(grown(tree_of(TableLM(table), k=(12, 2), replacement=replacement), one))
    found, nothing = trees
    tokens, children = found.tree.tokens, found.tree.children()
    assert {4, 6} <= {tokens[node] for node in children[0]} and len(nothing.tree) == 1
    for node in children[0]:
        assert len(children[node]) == (0 if tokens[node] == 4 else 2)
        assert (found.q[node] is None) == (tokens[node] == 4)


def test_a_controller_that_stops_is_asked_before_any_coin(pair, row):
    class NoCoins:
        def draw(self, law):
            raise AssertionError("drawn before the controller was asked")

    class Never:
        taps = ()
        branches = False

        def after(self, row, level):
            return Go.STOP

    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0)
    one.coins = NoCoins()
    found = grown(tree_of(draft), one, stop=Never())
    assert len(found.tree) == 1 and draft.forwards == 1


def test_a_budget_of_zero_never_calls_the_draft_model(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0)
    for budget in (Budget(0, 0), Budget(0, 5), Budget(3, 0)):
        drafter = tree_of(draft)
        assert len(grown(drafter, one, budget).tree) == 1 and draft.forwards == 0
        drafter.finish(one)


def test_the_draft_models_positions_limit_the_depth(pair, row):
    _, draft = pair
    draft.max_length = 4
    one = row([1, 2, 3], 12, max_new_tokens=30, temperature=1.0, seed=0)
    assert max(grown(tree_of(draft, k=(2, 1, 1)), one).tree.depths()) == 2
    two = row([1, 2, 3, 4, 5], 12, max_new_tokens=30, temperature=1.0)
    assert len(grown(tree_of(draft), two).tree) == 1


def built(name, vocab=12, **options):
    return assemble(name, TableLM.random(vocab), TableLM.random(vocab, seed=1), **options)


@pytest.mark.parametrize(
    ("name", "options", "budget"),
    [
        ("mcsd", {}, Budget(3, 28)),
        ("mcsd", {"depth": 2}, Budget(2, 12)),
        ("mcsd", {"nodes": 10}, Budget(3, 10)),
        ("mcsd", {"k": (4, 2, 2, 1)}, Budget(4, 44)),
        ("mcsd", {"k": (4, 2, 2, 1), "depth": 1, "nodes": 9}, Budget(1, 9)),
        ("mcsd", {"k": 3, "depth": 5}, Budget(5, 15)),
        ("spectr", {}, Budget(4, 16)),
        ("spectr", {"k": 8, "depth": 8}, Budget(8, 64)),
        ("rsd-c", {}, Budget(3, 14)),
        ("rsd-s", {}, Budget(4, 16)),
        ("rsd-s", {"depth": 6}, Budget(6, 24)),
        ("rsd-s", {"width": 2, "depth": 3, "nodes": 9}, Budget(3, 9)),
        ("mcsd", {"depth": 0}, Budget(0, 0)),
        ("chain", {"depth": 4}, Budget(4, 4)),
    ],
)
def test_who_names_a_method_gets_its_whole_tree(name, options, budget):
    assert built(name, controller="fixed", **options).controller.budget == budget


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mcsd", {"k": (4, 2, 2), "nodes": 20}, r"4 \+ 8 \+ 16 = 28 nodes"),
        ("mcsd", {"k": (4, 2, 2), "nodes": 20}, r"nodes=28 .* k=\(2, 2, 2\)"),
        ("spectr", {"k": 8, "nodes": 20}, r"8 \+ 8 \+ 8 \+ 8 = 32"),
        ("rsd-s", {"width": 4, "depth": 4, "nodes": 15}, "4 x 4 = 16"),
        ("mcsd", {"k": (13, 1)}, "12 or less"),
        ("rsd-c", {"k": (2, 0)}, "one child per node or more"),
        ("rsd-c", {"k": (2, -1)}, "one child per node or more"),
        ("mcsd", {"k": ()}, "one child per node or more"),
        ("spectr", {"k": 0}, "one child per node or more"),
        ("rsd-s", {"width": 0}, "1 path per level or more"),
        ("mcsd", {"nodes": -1}, "nodes=-1"),
        ("rsd-s", {"depth": -1}, "depth=-1"),
        ("mcsd", {"k": "wide"}, "k is a list"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(name, options, told):
    with pytest.raises(ConfigError, match=rf"(?s){told}"):
        built(name, **options)


def test_a_shape_that_was_not_asked_for_gives_way_to_small_vocabularies():
    for name in ("mcsd", "spectr", "rsd-c", "rsd-s"):
        assert built(name, vocab=2).drafter.traits.shape is Shape.TREE


def test_selection_among_distinct_siblings_is_refused():
    with pytest.raises(PairingError, match="KSequential"):
        built("mcsd", verifier="k_sequential")
    assert built("mcsd", verifier="k_sequential", replacement=True)


def test_shapes_can_be_written_on_a_command_line():
    from foretoken.bench.rows import parse_methods

    (spec,) = parse_methods("mcsd[k=4x2x2,replacement=true]")
    assert spec.options == {"k": (4, 2, 2), "replacement": True}
    assert spec.label == "mcsd[k=4x2x2,replacement=true]"
    assert math.prod(built("mcsd", **spec.options).drafter.form) == 16


@pytest.mark.parametrize("rule", ["recursive", "naive", "k_sequential", "traversal"])
def test_repeating_siblings_leave_the_law_alone(rule):
    """MCSD with replacement; the rows of METHODS cover all the other trees."""

    def build():
        models = TableLM.random(3, seed=21), TableLM.random(3, seed=22)
        return assemble("mcsd", *models, k=(2, 1), replacement=True, verifier=rule)

    gap = law_gap(build, TableLM.random(3, seed=21), {"temperature": 1.0})
    assert gap.law.accepted > 0 and gap.variation <= BOUND


def greedily(cls, lm, **options):
    return cls(OrdinaryModel(lm), cls.Config(greedy_draft=True, **options))


@pytest.mark.parametrize("cls", [SampledTree, ConstantBranching, IndependentChains])
def test_a_greedy_draft_fixes_the_best_and_draws_one(cls, pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=1)
    found = grown(greedily(cls, draft, k=(3, 2)), one)
    assert found.draw is Draw.MIXED
    for node, children in enumerate(found.tree.children()):
        if not children:
            assert found.q[node] is None
            continue
        text = [*one.tokens, *(found.tree.tokens[i] for i in found.tree.path(node))]
        law = one.warp.law(text, draft.after(text))
        *best, drawn = [found.tree.tokens[child] for child in children]
        assert best == law.topk(len(best)).indices.tolist()
        rest = law.clone()
        rest[best] = 0.0
        torch.testing.assert_close(found.q[node], rest / rest.sum())
        assert float(found.q[node][drawn]) > 0.0


def test_a_greedy_draft_of_a_law_with_few_tokens_draws_nothing(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, top_k=2, seed=1)
    found = grown(greedily(SampledTree, draft, k=(3,)), one)
    assert len(found.tree) == 3 and float(found.q[0].sum()) == 0.0


@pytest.mark.parametrize("verifier", ["mixed", "traversal"])
@pytest.mark.parametrize("method", ["mcsd", "rsd-c", "spectr"])
@pytest.mark.parametrize("setting", [HOT, {**HOT, "top_p": 0.7}, {"temperature": 0.0}])
def test_a_greedy_draft_keeps_the_law(method, verifier, setting):
    target, guess = TableLM.random(4, seed=21), TableLM.random(4, seed=22)

    def build():
        return assemble(method, target, guess, verifier=verifier, k=(2, 1), greedy_draft=True)

    gap = law_gap(build, target, setting)
    assert gap.law.drafted > 0 and gap.variation <= BOUND


def test_a_greedy_draft_needs_a_rule_for_it():
    lm = TableLM.random(4)
    for method in ("mcsd", "rsd-c", "spectr"):
        with pytest.raises(PairingError, match="mixed") as caught:
            assemble(method, lm, lm, greedy_draft=True)
        assert "verifier traversal or mixed" in caught.value.do
    with pytest.raises(ConfigError, match="leave one of the two out"):
        assemble("mcsd", lm, lm, greedy_draft=True, replacement=True)

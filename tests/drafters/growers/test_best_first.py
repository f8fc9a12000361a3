import itertools
from dataclasses import replace

import pytest
import torch

from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.tree_growth import ranking
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine, decode
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.templates import Template
from foretoken.trees.worth import Calibration, paying
from foretoken.types import Budget, Draw, Prices
from foretoken.verifiers.point import Point


def settings(**options):
    return BestFirst.Config(**{"min_gain": 0.0, "calibrate": False, "branch": 12, **options})


def tree_of(lm, config):
    return BestFirst(OrdinaryModel(lm), config)


def grown(draft, row, budget, **options):
    drafter = tree_of(draft, settings(**options))
    drafter.start(row, None)
    (found,) = drafter.propose([row], [budget])
    return drafter, found


def scoring(*nodes):
    """Prices of scoring so many nodes."""
    return Prices(0.0, nodes, 1.0)


def value_of(draft, row, tree):
    """Sum over nodes of the product of draft probabilities along the path."""
    total = 0.0
    for node in range(1, len(tree)):
        text, value = list(row.tokens), 1.0
        for step in tree.path(node):
            value *= float(draft.after(text).softmax(-1)[tree.tokens[step]])
            text.append(tree.tokens[step])
        total += value
    return total


def best_by_brute_force(draft, tokens, nodes, depth):
    """The largest value sum over all prefix-closed sets of `nodes` paths."""
    vocab = draft.vocab_size
    values = {}
    for size in range(1, depth + 1):
        for path in itertools.product(range(vocab), repeat=size):
            above = values.get(path[:-1], 1.0)
            law = draft.after([*tokens, *path[:-1]]).softmax(-1)
            values[path] = above * float(law[path[-1]])

    def grow(chosen, frontier, left):
        if left == 0 or not frontier:
            return 0.0
        best = 0.0
        for i, path in enumerate(frontier):
            below = [(*path, t) for t in range(vocab)] if len(path) < depth else []
            rest = frontier[i + 1 :] + below
            best = max(best, values[path] + grow(chosen, rest, left - 1))
        return best

    return grow((), [(t,) for t in range(vocab)], nodes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 3), (5, 2), (6, 4)])
def test_growth_is_optimal_for_its_node_budget(row, seed, nodes, depth):
    draft = TableLM.random(vocab=3, order=2, seed=seed)
    one = row([0, 1], 3, max_new_tokens=20)
    _, found = grown(draft, one, Budget(depth, nodes))
    assert found.draw is Draw.POINT and found.q is None
    assert len(found.tree) == nodes + 1
    depths = found.tree.depths()
    assert depths == sorted(depths) and max(depths) <= depth
    expected = best_by_brute_force(draft, one.tokens, nodes, min(depth, nodes))
    assert value_of(draft, one, found.tree) == pytest.approx(expected, abs=1e-9)


def test_one_draft_forward_per_level(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30)
    _, found = grown(draft, one, Budget(4, 16))
    assert draft.forwards <= 4
    assert len(found.tree) == 17 and not found.tree.is_chain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"template": (3, 2, 1)}, {"min_gain": 0.3}, {"branch": 2}])
def test_text_equals_plain_text_in_a_ragged_batch(
    pair, prompts, row, run, plain, options, temperature
):
    """The point rule spends one draw per token, so even sampled text is plain's, seed for seed."""
    target, draft = pair
    extra = [
        {"max_new_tokens": 40, "seed": 1},
        {"max_new_tokens": 33, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 2},
        {"max_new_tokens": 60, "eos": frozenset({5}), "min_new_tokens": 20, "seed": 3},
    ]
    make = lambda: [  # noqa: E731
        row(p, 12, temperature=temperature, **o) for p, o in zip(prompts, extra, strict=True)
    ]
    expected = plain(target, make())
    drafter = tree_of(draft, BestFirst.Config(**options))
    found, records = run(target, drafter, make(), depth=4, nodes=12)
    assert found == expected
    assert len(records) < 50
    assert target.rows_held == draft.rows_held == 0


def test_penalties_rank_along_the_path(row):
    """Every node's children are the best ones of the penalised law after its own path."""
    draft = TableLM.random(vocab=6, order=1, seed=2)
    one = row([0, 1, 2], 6, max_new_tokens=30, frequency_penalty=3.0)
    _, found = grown(draft, one, Budget(3, 9), branch=6)
    tree, warp = found.tree, ranking(one)
    for node, children in enumerate(tree.children()):
        if children:
            text = [*one.tokens, *(tree.tokens[i] for i in tree.path(node))]
            law = warp.law(text, draft.after(text))
            best = law.topk(len(children)).indices.tolist()
            assert [tree.tokens[child] for child in children] == best


def test_no_node_follows_an_end_token(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, eos=frozenset(range(0, 12, 2)))
    _, found = grown(draft, one, Budget(4, 20))
    for node, children in enumerate(found.tree.children()):
        assert node == 0 or not children or found.tree.tokens[node] % 2


def test_a_budget_of_zero_never_calls_the_draft_model(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30)
    _, found = grown(draft, one, Budget(0, 0))
    assert len(found.tree) == 1 and draft.forwards == 0


def test_static_templates_give_their_shape(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30)
    _, found = grown(draft, one, Budget(9, 64), template=(3, 2, 1))
    assert [len(c) for c in found.tree.children()] == [3] + [2] * 3 + [1] * 6 + [0] * 6
    two = row([1, 2], 12, max_new_tokens=30)
    _, listed = grown(draft, two, Budget(9, 64), template=((0,), (1,), (0, 0), (0, 2), (0, 0, 0)))
    assert len(listed.tree) == 6
    first = draft.after([1, 2]).topk(3).indices.tolist()
    assert [listed.tree.tokens[i] for i in (1, 2)] == first[:2]
    below = draft.after([2, first[0]]).topk(3).indices.tolist()
    assert [listed.tree.tokens[i] for i in (3, 4)] == [below[0], below[2]]


def test_a_template_is_cut_to_the_budget(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30)
    _, found = grown(draft, one, Budget(2, 4), template=(3, 2, 1))
    assert len(found.tree) == 5 and max(found.tree.depths()) <= 2


def test_broken_templates_are_refused():
    for template in ((), (0, 2), ((),), ((0,), 3)):
        with pytest.raises(ConfigError, match="template"):
            Template(template)


def test_a_level_without_hope_is_not_drafted(row):
    flat = TableLM(torch.zeros(12, 12))
    one = row([1], 12, max_new_tokens=30)
    _, found = grown(flat, one, Budget(6, 2), min_gain=0.3)  # two nodes of 1/12 promise 1/6
    assert flat.forwards == 1 and len(found.tree) == 3


def test_growth_ends_behind_a_level_that_adds_too_little(row):
    """A chain whose levels are worth 0.6, 0.3, 0.18, ...: two of them under the paper's 0.5."""
    laws = torch.tensor([[0.2, 0.6, 0.2], [0.25, 0.25, 0.5], [0.2, 0.6, 0.2]])
    draft = TableLM(laws.log())
    for level_gain, tokens in ((0.5, (0, 1, 2)), (0.25, (0, 1, 2, 1)), (0.7, (0, 1))):
        one = row([0], 3, max_new_tokens=30)
        _, found = grown(draft, one, Budget(10, 60), branch=1, level_gain=level_gain)
        assert found.tree.tokens == tokens
    _, found = grown(draft, row([0], 3, max_new_tokens=30), Budget(10, 60), branch=1)
    assert len(found.tree) == 11, "by default any gain will do"
    with pytest.raises(ConfigError, match="level_gain"):
        tree_of(draft, settings(level_gain=-0.1))


def test_trees_that_grow_in_one_call_are_told_what_a_level_must_add(row):
    drafter = tree_of(TableLM(torch.zeros(12, 12)), settings(level_gain=0.5))
    one = row([1], 12, max_new_tokens=30)
    rule = drafter.begin(one, 4, Budget(4, 12)).rule()
    assert rule.decline is None and rule.level > 0.5, "more than that, whatever was added before"
    assert rule.level == pytest.approx(0.5)
    prices = scoring(*(0.01 * n for n in range(13)))
    assert drafter.begin(one, 4, Budget(4, 12, prices)).rule() is None, "two bars are no rule"


def test_the_papers_setting_considers_as_many_children_as_the_tree_may_have(row):
    flat = TableLM(torch.zeros(64, 64))
    engine = assemble("tree", TableLM(torch.zeros(64, 64)), flat, preset="paper")
    one = row([1], 64, max_new_tokens=30)
    engine.drafter.start(one, None)
    (found,) = engine.drafter.propose([one], engine.controller.budgets([one]))
    assert len(found.tree) == 61 and len(found.tree.children()[0]) == 60
    assert engine.drafter.ranker.calibration is None and engine.drafter.ranker.level_gain == 0.5


def test_calibration_learns_how_overconfident_the_draft_is(row):
    """The draft promises its own law; the target's law is flatter. The chance finds the truth."""
    target = TableLM.random(vocab=6, order=2, seed=0, scale=1.0)
    draft = TableLM(3.0 * target.logits)
    drafter = tree_of(draft, settings(calibrate=True, branch=6))
    rows = [row([i], 6, max_new_tokens=400, temperature=1.0, seed=i) for i in range(6)]
    # Ranked by the sharpened law, accepted by the flat one.
    engine = Engine(target, drafter, Point(), Fixed(Fixed.Config(depth=3, nodes=6)))
    list(decode(rows, engine, max_rows=2))
    for law, most in ((0.97, 0.9), (0.9, 0.7)):
        assert 0.3 < drafter.ranker.calibration.chance(law, 0, greedy=False) < most
    fresh = Calibration()
    assert fresh.chance(0.4, 1, greedy=True) == pytest.approx(0.4)
    assert drafter.ranker.calibration.chance(0.4, 1, greedy=True) == pytest.approx(0.4), (
        "nothing greedy ran"
    )


def test_a_greedy_target_takes_favourites_more_often_than_their_law_says(row):
    logits = TableLM.random(vocab=8, order=2, seed=3).logits
    drafter = tree_of(TableLM(logits), settings(calibrate=True, branch=4))
    rows = [row([i], 8, max_new_tokens=300, seed=i) for i in range(4)]
    engine = Engine(TableLM(logits), drafter, Point(), Fixed(Fixed.Config(depth=3, nodes=6)))
    list(decode(rows, engine, max_rows=2))
    assert drafter.ranker.calibration.chance(0.4, 0, greedy=True) > 0.6
    assert drafter.ranker.calibration.chance(0.25, 1, greedy=True) < 0.15


def test_prices_cut_what_does_not_pay(pair, row):
    _, draft = pair
    grow = lambda level=0.0, nodes=(): grown(  # noqa: E731
        draft,
        row([1, 2], 12, max_new_tokens=30),
        Budget(4, 12, Prices(level, nodes, 1.0)),
        min_gain=0.0,
    )[1]
    free = grow()
    assert len(free.tree) == 13
    steep = grow(nodes=tuple(0.12 * n for n in range(13)))
    assert 1 < len(steep.tree) < 13
    assert grow(nodes=tuple(2.0 * n for n in range(13))).tree.tokens == (2,)
    before = draft.forwards
    assert max(grow(level=1.0).tree.depths()) == 1, "no level is worth a whole token"
    assert draft.forwards == before + 1
    assert paying([0.5, 0.4, 0.3], scoring(0.0, 0.6, 0.7, 0.8))[0] == 3, (
        "a dear first node may still pay"
    )
    assert paying([0.5, 0.1], scoring(0.0, 0.2, 0.4)) == (1, 0.3)
    assert scoring(0.0, 0.6, 0.7, 0.9).cheapest == pytest.approx(0.3)


def test_a_path_that_nothing_may_follow_has_no_children(row, run, plain, dead_ends):
    logits = TableLM.random(vocab=12, order=1, seed=5).logits
    logits[:, ::2] += 4.0
    target = TableLM(logits)
    draft = TableLM.random(vocab=12, order=1, seed=6, scale=4.0)
    make = lambda: [row([2, 4], 12, max_new_tokens=40, processors=dead_ends)]  # noqa: E731
    expected = plain(target, make())
    found, records = run(target, tree_of(draft, settings()), make(), depth=4, nodes=12)
    assert found == expected
    odd = 0
    for record in records:
        tree = record.drafts[0].tree
        for node, children in enumerate(tree.children()):
            if node and tree.tokens[node] % 2:
                odd += 1
                assert not children
    assert odd


def test_what_ranks_a_row_follows_its_forks_and_the_row_again(row):
    """Else a grammar's row would count its whole text anew at every node."""
    one = row([1, 2, 3], 12, temperature=0.0)
    fork = replace(one, tokens=[*one.tokens, 3])
    assert ranking(fork)._source is fork.tokens
    assert ranking(one)._source is one.tokens


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_draft_that_says_nan_guesses_nothing(row, calibrate):
    draft = TableLM(torch.full((12, 12), torch.nan))
    one = row([1], 12, max_new_tokens=30)
    _, found = grown(draft, one, Budget(4, 12), calibrate=calibrate)
    assert len(found.tree) == 1 and draft.forwards == 1

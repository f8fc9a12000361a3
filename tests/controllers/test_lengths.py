"""How many tokens are drafted, and for whom."""

import itertools
import random
from math import log

import pytest

from foretoken.controllers.cost_model import CostModel
from foretoken.controllers.lengths import (
    Acceptance,
    Likeness,
    Outline,
    Seconds,
    allot,
    best_length,
    cut,
    expected_length,
)
from foretoken.controllers.smartspec import SmartSpec
from foretoken.controllers.survival import Ranks
from foretoken.types import TokenTree


@pytest.mark.parametrize("a", [0.3, 0.7, 0.95])
def test_expected_length_is_what_steps_come_to(a):
    chance = random.Random(0)
    for k in range(9):
        total, steps = 0, 40_000
        for _ in range(steps):
            accepted = 0
            while accepted < k and chance.random() < a:
                accepted += 1
            total += accepted + 1
        assert total / steps == pytest.approx(expected_length(a, k), rel=0.01)
    assert expected_length(1.0, 5) == 6.0


def linear(rows, fixed=1.0, token=0.02, level=0.05):
    """Seconds of a step in which every row drafts k tokens."""
    return lambda k: fixed + token * rows * (k + 1) + level * k


def test_the_length_falls_with_rows_and_rises_with_acceptance():
    acceptances, rows = (0.1, 0.3, 0.5, 0.7, 0.9, 0.999), (1, 2, 4, 8, 16, 32, 64)
    chosen = {(a, b): best_length(a, b, 8, linear(b)) for a in acceptances for b in rows}
    for a in acceptances:
        lengths = [chosen[a, b] for b in rows]
        assert lengths == sorted(lengths, reverse=True)
    for b in rows:
        lengths = [chosen[a, b] for a in acceptances]
        assert lengths == sorted(lengths)
    assert chosen[0.1, 64] == 0
    assert chosen[0.999, 1] == 8


def test_linear_costs_have_one_peak():
    """Stopping at the first length that is worse finds the same as looking at all."""
    chance = random.Random(0)
    for _ in range(500):
        rows, a = chance.randint(1, 64), chance.random()
        seconds = linear(rows, chance.random(), chance.random(), chance.random())
        rates = [rows * expected_length(a, k) / seconds(k) for k in range(13)]
        first = next((k for k in range(12) if rates[k + 1] <= rates[k]), 12)
        assert first == best_length(a, rows, 12, seconds)


def test_a_noisy_table_has_several_peaks_and_all_are_looked_at():
    table = (1.0, 2.0, 1.1, 1.2)
    assert best_length(0.9, 1, 3, table.__getitem__) == 3


def seconds(rows, most, token=0.02, level=0.05):
    scoring = [1.0 + token * (rows + n) for n in range(most + 1)]
    return Seconds(scoring, [level * k for k in range(9)])


def offers_of(acceptances, longest):
    return [[a**k for k in range(1, longest + 1)] for a in acceptances]


@pytest.mark.parametrize("a", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_equal_rows_get_the_best_length(a, rows):
    given = allot(offers_of([a] * rows, 8), range(1, 9), seconds(rows, 8 * rows), 1.0)
    best = best_length(a, rows, 8, lambda k: 1.0 + 0.02 * rows * (k + 1) + 0.05 * k)
    assert max(given.nodes) - min(given.nodes) <= 1
    assert min(abs(best - n) for n in given.nodes) <= 1


def test_no_other_way_to_deal_nodes_out_is_better():
    chance = random.Random(0)
    for _ in range(60):
        acceptances = [chance.uniform(0.1, 0.95) for _ in range(3)]
        offers = offers_of(acceptances, 4)
        costs = seconds(3, 12, chance.uniform(0.01, 0.3), chance.uniform(0.0, 0.1))
        given = allot(offers, range(1, 5), costs, 1.0)

        def goodput(nodes, offers=offers, costs=costs):
            won = sum(log(1.0 + sum(own[:n])) for own, n in zip(offers, nodes, strict=True))
            spent = costs.drafted(sum(n > 0 for n in nodes), max(nodes), sum(nodes))
            return won / 3 - log(spent)

        best = max(map(goodput, itertools.product(range(5), repeat=3)))
        assert goodput(given.nodes) == pytest.approx(given.goodput)
        assert given.goodput == pytest.approx(best)


def test_nodes_go_where_they_help_most():
    nodes = allot(offers_of([0.9, 0.3], 8), range(1, 9), seconds(2, 16, 0.05), 1.0).nodes
    assert nodes[0] > nodes[1] > 0
    assert allot(offers_of([0.9, 0.3], 8), range(1, 9), seconds(2, 16, 1.5), 1.0).nodes == [0, 0]


def test_drafting_has_to_beat_plain_decoding_by_the_margin():
    offers, costs = offers_of([0.5], 1), seconds(1, 1, 0.3, 0.05)  # 1.5 tokens in 1.65 for 1.3
    assert allot(offers, [1], costs, 1.0).nodes == [1]
    assert allot(offers, [1], costs, 1.25).nodes == [0]


def test_acceptance_does_not_depend_on_the_length():
    """Accepted over proposed would: what follows a rejection was never tried."""
    chance = random.Random(0)
    for k in (1, 3, 8):
        known, proposed, kept = Acceptance(1e9), 0, 0
        for _ in range(4000):
            accepted = 0
            while accepted < k and chance.random() < 0.7:
                accepted += 1
            known.update(accepted, accepted < k)
            proposed, kept = proposed + k, kept + accepted
        assert known.chance(0.5, 4.0) == pytest.approx(0.7, abs=0.02)
        assert k == 1 or kept / proposed < 0.68


def test_nothing_proposed_changes_nothing():
    known = Acceptance(64.0)
    known.update(0, False)
    assert known.chance(0.6, 8.0) == 0.6


@pytest.mark.parametrize(("spread", "told_apart"), [((0.7, 0.7), False), ((0.95, 0.2), True)])
def test_requests_are_told_apart_where_they_differ(spread, told_apart):
    chance, likeness, everybody = random.Random(0), Likeness(), Acceptance(256.0)
    for request in range(60):
        own, a = Acceptance(64.0), spread[request % 2]
        for _ in range(20):
            accepted = 0
            while accepted < 4 and chance.random() < a:
                accepted += 1
            likeness.update(own, everybody.chance(0.7, 4.0), accepted, accepted < 4)
            own.update(accepted, accepted < 4)
            everybody.update(accepted, accepted < 4)
    assert (likeness.weight <= 4.0) if told_apart else (likeness.weight >= 64.0)


def test_an_outline_is_a_chain_or_the_best_tree():
    chain = Outline.chain(0.5, 3)
    assert chain.values == (0.5, 0.25, 0.125) and chain.deepest == (1, 2, 3)
    assert chain.of_row(1.5, 1.0) == pytest.approx([0.75, 0.5625, 0.421875])
    ranks = Ranks(64.0)
    for _ in range(50):  # half of the time the first child, else the second
        ranks.update(TokenTree((0, 1, 2), (-1, 0, 0)), (1,))
        ranks.update(TokenTree((0, 1, 2), (-1, 0, 0)), (2,))
    tree = Outline.tree(ranks, 0.7, 8, 3)
    assert tree.depths[:2] == (1, 1), "a second candidate is worth as much as the first"
    assert list(tree.values) == sorted(tree.values, reverse=True)
    assert list(tree.deepest) == sorted(tree.deepest) and max(tree.deepest) <= 3
    assert all(b <= a for a, b in itertools.pairwise(tree.of_row(1.4, 1.0)))


def test_proposals_are_cut_to_trees():
    chance = random.Random(0)
    for _ in range(100):
        parents, promises = [], []
        for _ in range(3):
            above = [-1]
            own = [1.0]
            for node in range(1, chance.randint(1, 9)):
                above.append(chance.randrange(node))
                own.append(own[above[-1]] * chance.choice((0.5, 0.9, 1.0)))
            parents.append(above)
            promises.append(own[1:])
        most = sum(map(len, promises))
        scoring = [1.0 + chance.uniform(0.0, 0.2) * n for n in range(most + 1)]
        for kept, above in zip(cut(promises, scoring, 0.1), parents, strict=True):
            assert kept == sorted(kept) and kept[0] == 0
            assert all(above[node] in kept for node in kept[1:])


def test_a_lone_proposal_is_cut_where_the_next_token_would_not_pay():
    promises = [[0.8, 0.64, 0.512, 0.41], []]
    scoring = [1.0 + 0.1 * n for n in range(5)]
    [kept, nothing] = cut(promises, scoring, 0.0)
    assert kept == [0, 1, 2, 3] and nothing == [0]
    assert cut(promises, [1.0] * 5, 0.0)[0] == [0, 1, 2, 3, 4]
    assert cut(promises, [1.0, 3.0, 5.0, 7.0, 9.0], 0.0)[0] == [0]


@pytest.mark.parametrize("chance", [0.0, 0.95])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("kind", [CostModel, SmartSpec])
def test_no_draft_has_more_nodes_than_it_may(machine, kind, most, chance):
    """Neither a chain, which is chosen by its depth, nor a probe of a drafter that does not pay."""
    one, controller = machine(lambda token, slot: chance), kind(kind.Config(max_nodes=most))
    budgets, granted = controller.budgets, []

    def noted(rows):
        found = budgets(rows)
        granted.extend(budget for budget in found if budget.depth)
        return found

    controller.budgets = noted
    controller.learn(one.table())
    one.run(controller, 400)
    assert granted and max(budget.nodes for budget in granted) <= most
    assert max(budget.depth for budget in granted) <= most


def test_a_cheaper_larger_forward_is_looked_at():
    """Blocks of kernels: three nodes may take less than one, so costs do not only rise."""
    offers, costs = [[0.5, 0.25, 0.125]], Seconds([1.0, 1.2, 1.4, 1.1], [0.0] * 4)
    assert allot(offers, [1, 2, 3], costs, 1.02).nodes == [3]

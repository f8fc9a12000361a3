"""Trees of the likeliest combinations of several depths' laws."""

import itertools

import pytest
import torch

from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.product import Product
from foretoken.engine.engine import Engine, decode
from foretoken.lm.table import TableLM
from foretoken.trees.worth import paying
from foretoken.types import Budget, Draw, Layer, Prices
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive


class Heads:
    """Parallel heads on a table: depth d follows the token d places before, whatever is between."""

    context = 1
    depth = 3

    def __init__(self, table, fits=True):
        self.table, self.fits, self.vocab_size = table, fits, table.vocab_size
        self.taps = (Layer(-1),)
        self.seen, self.calls = {}, 0

    def open(self, row, features):
        assert features.shape[1:] == (1, self.vocab_size)
        self.seen[row.uid] = len(row.tokens) - 1
        return self.fits

    def laws(self, rows, depth):
        self.calls += 1
        return [
            torch.stack([self.table.after([row.tokens[-1 - d], 0]) for d in range(depth)])
            for row in rows
        ]

    def keep(self, rows, features):
        for row, states in zip(rows, features, strict=True):
            self.seen[row.uid] += len(states)
            assert self.seen[row.uid] == len(row.tokens) - 1, "one state per committed token"

    def close(self, row):
        self.seen.pop(row.uid, None)


def settings(**options):
    return Product.Config(**{"calibrate": False, "branch": 12, **options})


def grown(row, budget, vocab=12, **options):
    heads = Heads(TableLM.random(vocab, seed=3))
    drafter = Product(heads, settings(**options))
    drafter.start(row, torch.zeros(1, 1, vocab))
    (found,) = drafter.propose([row], [budget])
    return heads, found


@pytest.mark.parametrize("options", [{}, {"template": (3, 2, 1)}, {"branch": 2}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_plains_in_a_ragged_batch(temperature, options, pair, prompts, row, run, plain):
    target, draft = pair
    make = lambda: [  # noqa: E731
        row(p, 12, max_new_tokens=30, temperature=temperature, seed=i, repetition_penalty=penalty)
        for i, (p, penalty) in enumerate(zip(prompts, (1.0, 1.3, 1.0), strict=True))
    ]
    for prompt in prompts:
        prompt[:0] = [1, 2]
    expected = plain(target, make())
    heads = Heads(draft)
    for rule in (Point(), Recursive()):
        drafter = Product(heads, Product.Config(**options))
        found, records = run(target, drafter, make(), verifier=rule, depth=3, nodes=10)
        assert found == expected
        assert any(verdict.path for record in records for verdict in record.verdicts)
    assert target.rows_held == 0 and not heads.seen


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_the_best_paths_are_taken_with_one_call_for_all_depths(row, nodes):
    one = row([0, 1, 2], 4, max_new_tokens=20)
    heads, found = grown(one, Budget(3, nodes), vocab=4)
    assert found.draw is Draw.POINT and found.q is None and heads.calls == 1
    laws = [law.softmax(-1).tolist() for law in heads.laws([one], 3)[0]]
    values = {
        path: float(torch.tensor([laws[d][t] for d, t in enumerate(path)]).double().prod())
        for size in (1, 2, 3)
        for path in itertools.product(range(4), repeat=size)
    }
    best = sorted(values.values(), reverse=True)[:nodes]
    assert sorted(found.chances[1:], reverse=True) == pytest.approx(best)
    for node in range(1, len(found.tree)):
        path = tuple(found.tree.tokens[i] for i in found.tree.path(node))
        assert found.chances[node] == pytest.approx(values[path])


def test_prices_leave_what_pays(row):
    free = grown(row([0, 1, 2], 12, max_new_tokens=20), Budget(3, 12))[1]
    prices = Prices(9.0, tuple(0.1 * n for n in range(13)), 1.0)
    _, found = grown(row([0, 1, 2], 12, max_new_tokens=20), Budget(3, 12, prices))
    count, _ = paying(sorted(free.chances[1:], reverse=True), prices)
    assert 0 < count < 12
    assert len(found.tree) == 1 + count, "levels cost nothing more, only nodes do"


def test_templates_and_end_tokens_shape_the_tree(row):
    _, found = grown(row([0, 1, 2], 12, max_new_tokens=20), Budget(3, 64), template=(3, 2, 1))
    assert [len(c) for c in found.tree.children()] == [3] + [2] * 3 + [1] * 6 + [0] * 6
    ends = frozenset(range(0, 12, 2))
    _, found = grown(row([0, 1, 2], 12, max_new_tokens=20, eos=ends), Budget(3, 20))
    for node, children in enumerate(found.tree.children()):
        assert node == 0 or not children or found.tree.tokens[node] % 2


def test_a_row_that_does_not_fit_is_decoded_plainly(pair, row, run, plain):
    target, draft = pair
    make = lambda: [row([1, 2, 3], 12, max_new_tokens=9)]  # noqa: E731
    heads = Heads(draft, fits=False)
    assert run(target, Product(heads), make(), depth=3)[0] == plain(target, make())
    assert heads.calls == 0


def test_calibration_learns_that_heads_promise_too_much(row):
    target = TableLM.random(vocab=6, order=2, seed=0, scale=1.0)
    drafter = Product(Heads(TableLM(4.0 * target.logits)), Product.Config(branch=6))
    rows = [row([1, 2, i], 6, max_new_tokens=300, temperature=1.0, seed=i) for i in range(6)]
    list(decode(rows, Engine(target, drafter, Point(), Fixed(Fixed.Config(depth=3, nodes=6)))))
    assert drafter.ranker.calibration.chance(0.97, 0, greedy=False) < 0.8

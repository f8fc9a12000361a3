"""Laws of logits and draws from them: those of torch, wherever the numbers lie."""

from __future__ import annotations

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.errors import ConfigError
from foretoken.native import library as module
from foretoken.native.laws import drawn, softmax
from foretoken.native.laws import owed as owed_in_c
from foretoken.native.laws import without as without_in_c
from foretoken.native.library import NARROW, Library, library
from foretoken.warp.residual import chances, left_over, owed, residual, without

TYPES = [torch.float32, torch.bfloat16, torch.float64]
in_c = pytest.mark.skipif(not isinstance(library(), Library), reason="no operations in C here")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [5, NARROW, NARROW + 133, 49152])
@pytest.mark.parametrize(("rows", "temperature"), [(1, 1.0), (3, 0.7), (2, 3.0)])
def test_a_law_is_the_softmax(dtype, width, rows, temperature):
    torch.manual_seed(width)
    logits = (5 * torch.randn(rows, width + 3)).to(dtype)[:, :width]  # rows lie apart
    logits[0, 2] = -float("inf")
    law = softmax(logits, temperature)
    assert law.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    wanted = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(law.double(), wanted, rtol=2e-6, atol=1e-12)
    assert law[0, 2] == 0.0
    torch.testing.assert_close(law.double().sum(-1), torch.ones(rows).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [9, 700])
@pytest.mark.parametrize("dtype", TYPES)
def test_columns_lie_at_their_names_and_the_others_are_zero(width, dtype):
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    names = 3 * torch.arange(width) + 1
    law = softmax(logits, 0.9, names, 4 * width)
    assert law.shape == (2, 4 * width)
    torch.testing.assert_close(law[:, names], softmax(logits, 0.9))
    rest = law.clone()
    rest[:, names] = 0.0
    assert not rest.any()


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_the_hottest_and_the_coldest_of_temperatures_have_laws(dtype):
    logits = torch.randn(1, 1003, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[0, 500] = 9.0
    torch.testing.assert_close(softmax(logits, 1e308), torch.full((1, 1003), 1 / 1003))
    assert softmax(logits, 1e-30)[0, 500] == 1.0


@in_c
@pytest.mark.parametrize("width", [NARROW, 511, 512, 513, 8193])
def test_a_coin_falls_where_the_running_sum_exceeds_its_share(width):
    torch.manual_seed(width)
    law = torch.randn(width).mul(3).softmax(-1)
    law[torch.rand(width) < 0.5] = 0.0
    law[-3:] = 0.0
    total = law.double().cumsum(0)
    for coin in [0.0, *torch.rand(300).double().tolist(), 1.0 - 2**-53]:
        found = drawn(law, coin)
        assert law[found] > 0.0
        before = float(total[found] - law[found].double())
        assert before - 1e-12 <= coin * float(total[-1]) <= float(total[found]) + 1e-12


@in_c
def test_rounding_never_pushes_a_coin_off_the_end():
    """A coin at the very end takes the last token that can be, however far before it lies."""
    law = torch.zeros(5000)
    law[7] = 1.0
    assert drawn(law, 1.0 - 2**-53) == drawn(law, 0.0) == drawn(law, 1.0) == 7
    law[4900] = 1e-30
    assert drawn(law, 1.0) == 4900


@in_c
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_law_is_told(odd):
    logits = torch.zeros(1, 1000)
    logits[0, 5] = odd
    [law] = softmax(logits)
    for no_law in (law, torch.zeros(1000)):
        assert drawn(no_law, 0.5) == -1
        with pytest.raises(ConfigError, match="NaN"):
            SeededCoins(0).draw(no_law)
        with pytest.raises(ConfigError, match="NaN"):
            SeededCoins(0).draw_many(no_law[None], [0])


def test_draws_follow_the_law():
    """Pearson's statistic of 40,000 draws over 300 columns, and the same by torch's operations."""
    law = torch.linspace(0.2, 1.8, 300)
    law /= law.sum()
    for kind in (law, law.double()):
        coins = SeededCoins(11)
        seen = torch.zeros(300)
        for _ in range(40_000):
            seen[coins.draw(kind)] += 1
        expected = 40_000 * law
        assert ((seen - expected) ** 2 / expected).sum() < 299 + 4 * (2 * 299) ** 0.5


@pytest.mark.parametrize("width", [40, 3000])
def test_one_draw_and_many_agree(width):
    laws = torch.randn(6, width, generator=torch.Generator().manual_seed(2)).softmax(-1)
    one, many = SeededCoins(5), SeededCoins(5)
    assert [one.draw(law) for law in laws] == many.draw_many(laws, range(6)).tolist()


def test_what_cannot_be_had_in_c_is_left_to_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "operation", lambda *what: asked.append(what))
    logits = torch.randn(2, 1000)
    torch.testing.assert_close(softmax(logits), logits.softmax(-1))
    assert asked == [("law", torch.float32)] and drawn(logits[0], 0.5) is None
    turned = torch.randn(1000, 2).t()  # columns lie apart
    torch.testing.assert_close(softmax(turned), turned.softmax(-1))
    assert len(asked) == 2


def test_gradients_go_through_a_law():
    logits = torch.randn(1, 1000, requires_grad=True)
    softmax(logits)[0, 3].backward()
    assert logits.grad is not None and logits.grad[0, 3] > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_law_does_not_follow_the_default_type(dtype):
    logits = torch.randn(3, 1000)
    wanted = logits.softmax(-1)
    torch.set_default_dtype(dtype)
    try:
        law = softmax(logits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert law.dtype is torch.float32 and torch.allclose(law, wanted, atol=1e-6)


def two_laws(width, dtype=torch.float32):
    torch.manual_seed(width)
    p, q = torch.randn(2, width).mul(3).to(dtype).softmax(-1)
    q[torch.rand(width) < 0.5] = 0.0  # as of a draft that scores part of the tokens
    return p, q / q.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [7, NARROW, NARROW + 133, 49152])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_what_is_owed_is_what_lies_above(width, weight, dtype):
    p, q = two_laws(width, dtype)
    rest = (weight * p.double() - q.double()).clamp(min=0.0)
    [mass, none] = owed([p, q], [q, q], [weight, weight])
    assert mass == pytest.approx(float(rest.sum()), rel=1e-5)
    assert none == 0.0
    law = left_over(p, q, weight, mass)
    torch.testing.assert_close(law.double(), rest / rest.sum(), rtol=1e-4, atol=1e-8)
    assert float(law.double().sum()) == pytest.approx(1.0, abs=1e-5)
    assert left_over(p, q, weight, 0.0) is p
    assert (owed_in_c(p, q) is not None) == (
        dtype is torch.float32 and width >= NARROW and isinstance(library(), Library)
    )


@pytest.mark.parametrize("width", [7, NARROW + 133])
def test_a_law_owes_itself_nothing(width):
    p, q = two_laws(width)
    assert residual(q, q) is None
    left = residual(p, q)
    wanted = (p - q).clamp(min=0.0)
    torch.testing.assert_close(left, wanted / wanted.sum(), rtol=1e-4, atol=1e-8)


def test_laws_that_lie_apart_or_are_no_numbers_are_left_alone():
    p, q = two_laws(1024)
    apart = torch.stack([p, p], -1)[:, 0]
    assert owed_in_c(apart, q) is None and owed_in_c(p, q[:1000]) is None
    assert owed([apart], [q], [1.0]) == pytest.approx(owed([p], [q], [1.0]), rel=1e-5)
    p[5] = float("nan")
    assert residual(p, q) is None


@pytest.mark.parametrize("width", [7, NARROW, NARROW + 133])
@pytest.mark.parametrize("tokens", [3, [0, 5, 5], []])
def test_a_law_without_some_tokens(width, tokens):
    p, _ = two_laws(width)
    rest = p.double().clone()
    rest[tokens] = 0.0
    before = p.clone()
    torch.testing.assert_close(without(p, tokens).double(), rest / rest.sum(), rtol=1e-5, atol=1e-9)
    assert torch.equal(p, before)


@pytest.mark.parametrize("width", [7, NARROW + 133])
def test_without_all_that_is_possible_nothing_is_left(width):
    law = torch.zeros(width)
    law[2], law[6] = 0.25, 0.75
    assert without(law, [2, 6]) is None
    assert without(law, 2)[6] == 1.0


def test_tokens_beyond_a_law_are_left_to_torch():
    law = torch.ones(NARROW) / NARROW
    assert without_in_c(law, [NARROW]) is None and without_in_c(law, [-1]) is None
    assert without(law, [-1])[NARROW - 1] == 0.0
    with pytest.raises(IndexError):
        without(law, [NARROW])


@pytest.mark.parametrize("width", [7, NARROW + 133])
def test_what_is_left_may_be_the_smallest_of_numbers(width):
    """One over such a mass is none any more."""
    p, q = torch.zeros(2, width)
    p[0], q[0] = 1.0, 1.0
    p[3], q[3] = 3e-39, 1e-39
    left = residual(p, q)
    assert left[3] == pytest.approx(1.0) and float(left.sum()) == pytest.approx(1.0)
    rest = without(p, 0)
    assert rest[3] == pytest.approx(1.0) and float(rest.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("width", [7, 600])
def test_chances_of_tokens(width):
    p, q = two_laws(width)
    assert chances([p, q], [1, 4]) == [float(p[1]), float(q[4])]

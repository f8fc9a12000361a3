"""Seeded coins follow their laws, enumerated ones cover them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from foretoken import coins as coins_module
from foretoken.coins import Coins, EnumeratingCoins, SeededCoins, enumerate_outcomes


def test_equal_seeds_give_equal_coins() -> None:
    law = torch.tensor([0.1, 0.2, 0.7])

    def run(seed: int) -> list[int]:
        coins = SeededCoins(seed)
        return [coins.draw(law) + 3 * coins.flip(0.5) for _ in range(50)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(-1) == run(-1) != run(1), "row i of a batch has the seed s + i: -1, 0, 1, ..."
    assert run(2**2000) != run(1)


def test_draws_follow_the_law() -> None:
    law = torch.tensor([0.0, 0.25, 0.0, 0.6, 0.15, 0.0])
    coins = SeededCoins(5)
    counts = Counter(coins.draw(law) for _ in range(4000))
    assert set(counts) == {1, 3, 4}
    # Five standard errors: fails by chance about once in a million seeds, and the seed is fixed.
    for token, p in ((1, 0.25), (3, 0.6), (4, 0.15)):
        assert abs(counts[token] / 4000 - p) < 5 * (p * (1 - p) / 4000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_looked_at_ahead_are_the_draws_themselves(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(50):
        laws = torch.rand(6, 9, generator=generator, dtype=dtype)
        laws[torch.rand(6, 9, generator=generator) < 0.4] = 0.0
        laws[:, 4] += 0.1
        laws /= laws.sum(-1, keepdim=True)
        turns = [0, 1, 1, 2, 0, 3]
        coins = SeededCoins(seed)
        coins.skip(seed % 3)
        found = coins.draw_many(laws, turns).tolist()
        for law, turn, token in zip(laws, turns, found, strict=True):
            alone = SeededCoins(seed)
            alone.skip(seed % 3 + turn)
            assert alone.draw(law) == token
        assert coins.used == seed % 3, "looking uses none"
        after, alone = SeededCoins(seed), coins
        after.skip(seed % 3)
        assert [alone.flip(0.5) for _ in range(9)] == [after.flip(0.5) for _ in range(9)]


def test_coins_can_be_taken_back() -> None:
    law = torch.tensor([0.1, 0.2, 0.7])
    coins = SeededCoins(3)
    coins.skip(2)
    first = [coins.draw(law) for _ in range(20)]
    coins.draw_many(law[None], [5])
    coins.rewind(2)
    assert [coins.draw(law) for _ in range(20)] == first and coins.used == 22


def test_flip_at_the_ends_is_certain() -> None:
    coins = SeededCoins(0)
    assert not any(coins.flip(0.0) for _ in range(200))
    assert all(coins.flip(1.0) for _ in range(200))


def test_enumeration_covers_everything_once() -> None:
    law = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)

    def run(coins: Coins) -> tuple[int, ...]:
        first = coins.draw(law)
        if coins.flip(0.25):
            return (first,)
        return (first, coins.draw(law))

    seen: dict[tuple[int, ...], float] = {}
    for outcome, probability in enumerate_outcomes(run):
        assert outcome not in seen
        seen[outcome] = probability
    assert sum(seen.values()) == pytest.approx(1.0, abs=1e-12)
    assert len(seen) == 3 + 9
    assert seen[(2,)] == pytest.approx(0.3 * 0.25)
    assert seen[(3, 0)] == pytest.approx(0.2 * 0.75 * 0.5)


def test_enumeration_goes_on_from_given_choices() -> None:
    law = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)

    def run(coins: Coins) -> tuple[int, ...]:
        return tuple(coins.draw(law) for _ in range(3))

    found = dict(enumerate_outcomes(run, [1, 0]))  # the second and the first possible index
    assert list(found) == [(2, 0, 0), (2, 0, 2), (2, 0, 3)]
    assert sum(found.values()) == pytest.approx(0.3 * 0.5)
    coins = EnumeratingCoins([2])
    run(coins)
    assert coins.taken == [2, 0, 0]


def test_enumeration_of_a_certain_run_is_one_outcome() -> None:
    assert list(enumerate_outcomes(lambda coins: 7)) == [(7, 1.0)]
    assert list(enumerate_outcomes(lambda coins: coins.flip(1.0))) == [(True, 1.0)]


def test_a_flip_outside_zero_and_one_is_clipped() -> None:
    coins = EnumeratingCoins([])
    assert coins.flip(1.5) and coins.probability == 1.0


def test_coins_ahead_are_those_that_are_used_next() -> None:
    coins, same = SeededCoins(4), SeededCoins(4)
    seen = coins.ahead(5)
    assert seen == coins.ahead(5) and coins.ahead(2) == seen[:2] and coins.used == 0
    coins.skip(2)
    same.skip(2)
    law = torch.tensor([0.3, 0.3, 0.4])
    assert [coins.draw(law) for _ in range(9)] == [same.draw(law) for _ in range(9)]
    assert coins.used == same.used == 11


def test_a_law_of_nan_is_told_from_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nothing is read back before a verdict."""
    monkeypatch.setattr(coins_module, "in_c", lambda law, coin: None)
    laws = torch.tensor([[0.5, 0.5], [float("nan"), 1.0], [0.0, 1.0]])
    assert SeededCoins(1).draw_many(laws, [0, 1, 2]).tolist()[1:] == [-1, 1]

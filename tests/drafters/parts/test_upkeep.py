"""What rides for later use is paid for by what it brought."""

import pytest

from foretoken.drafters.parts.upkeep import EXPLORED, Upkeep
from foretoken.types import Budget, Prices


def priced(node: float) -> Budget:
    return Budget(10, 60, Prices(0.0, tuple(node * n for n in range(61)), 1.0, 1.0))


def ridden(upkeep: Upkeep, budget: Budget, brings: float, steps: int = 3000) -> list[int]:
    """Columns by step, where each brings so many tokens, in whole ones now and then."""
    found, owed = [], 0.0
    for _ in range(steps):
        count = upkeep.columns(budget, 0, 7)
        owed += brings * count
        upkeep.update(int(owed), count)
        owed -= int(owed)
        found.append(count)
    return found


def test_what_brings_more_than_its_price_rides_and_what_does_not_is_found_out() -> None:
    assert min(ridden(Upkeep(4), priced(0.001), 0.1)[500:]) == 7
    assert max(ridden(Upkeep(4), priced(0.1), 0.0)[500:]) <= 1


@pytest.mark.parametrize("node", [0.01, 0.05, 0.3])
def test_finding_out_takes_a_small_share_of_all_time(node: float) -> None:
    counts = ridden(Upkeep(4), priced(node), 0.0)
    paid = sum(priced(node).prices.nodes[4 * count] for count in counts)
    assert sum(counts) > 0 and paid <= EXPLORED * len(counts)


def test_a_burst_finds_a_window_that_has_become_worth_its_price() -> None:
    upkeep = Upkeep(4)
    ridden(upkeep, priced(0.02), 0.0)
    late = ridden(upkeep, priced(0.02), 0.5)
    assert sum(late[-500:]) > 500


def test_nothing_rides_where_nobody_prices_or_has_room() -> None:
    assert Upkeep(4).columns(Budget(9, 60), 0, 7) == 0
    assert Upkeep(4).columns(Budget(9, 60, None, 0.01), 0, 7) == 0
    assert Upkeep(4).columns(Budget(9, 3, priced(0.0).prices), 0, 7) == 0
    assert Upkeep(4).columns(Budget(9, 60, priced(0.0).prices), 56, 7) == 1

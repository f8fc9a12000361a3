import pytest

from foretoken.controllers.fixed import Fixed
from foretoken.errors import ConfigError
from foretoken.types import Budget


def test_every_row_gets_the_same_budget():
    assert Fixed(Fixed.Config(depth=3)).budgets([None] * 3) == [Budget(3, 3)] * 3
    assert Fixed(Fixed.Config(depth=3, nodes=20)).budgets([None]) == [Budget(3, 20)]


@pytest.mark.parametrize("options", [{"depth": -1}, {"nodes": -2}])
def test_negative_budgets_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Fixed(Fixed.Config(**options))

"""Which row a target checks itself on, and which is left until it is alone."""

from foretoken.coins import SeededCoins
from foretoken.engine.length_checks import LengthChecks
from foretoken.row import make_row
from foretoken.types import SamplingParams


def row_of(length: int):
    return make_row([1] * length, SamplingParams(), SeededCoins(0), 9)


def test_a_check_beside_others_grows_from_what_was_checked_and_not_from_what_failed() -> None:
    long, short = row_of(9000), row_of(10)
    checks = LengthChecks(unverified=4200)  # for want of memory
    assert checks.due([long, short], 9000, 1024, [[long, short]]) == []
    assert checks.due([long], 9000, 1024, [[long], []]) == [long]
    assert LengthChecks().due([row_of(4000), short], 4000, 1024, [[long, short]])


def test_a_text_that_has_just_ended_is_no_reason_to_check_a_short_one() -> None:
    """The step that ended it was of its length."""
    short = row_of(60)
    assert LengthChecks().due([short], 10_000, 1024, [[short]]) == []
    assert LengthChecks().due([short], 10_000, 1024, [[short], [short]]) == []

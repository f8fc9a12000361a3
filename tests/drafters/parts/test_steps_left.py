"""How many steps a text is likely to take yet."""

import pytest

from foretoken.drafters.parts.steps_left import LAST, USUAL, StepsLeft
from foretoken.sampling import Finish

VOCAB = 9


def test_texts_that_ended_and_what_steps_bring_say_how_long_another_goes_on(row):
    left = StepsLeft()
    long = row([1, 2], VOCAB, max_new_tokens=4000)
    assert left.of(long) == USUAL / 2
    for _ in range(400):
        left.stepped(4)
    assert left.of(long) == pytest.approx(USUAL / 4, rel=0.01)
    for _ in range(80):
        ended = row([1, 2], VOCAB)
        ended.extend([3] * 20)
        ended.finish = Finish("stop")
        left.ended(ended)
    assert left.of(long) == pytest.approx(20 / 4, rel=0.02)
    long.extend([3] * 500)
    assert left.of(long) == pytest.approx(20 / 4, rel=0.02), "it may end at any time"


def test_no_text_goes_on_beyond_what_it_may_have(row):
    left = StepsLeft()
    assert left.of(row([1], VOCAB, max_new_tokens=6)) == 3.0
    assert left.of(row([1], VOCAB, max_new_tokens=1)) == 1.0


@pytest.mark.parametrize("how", ["error", "running", "rehearsal", "cancelled"])
def test_a_text_that_was_broken_off_says_nothing(row, how):
    left, one = StepsLeft(), row([1], VOCAB)
    one.extend([3])
    if how != "running":
        one.finish = Finish("cancelled" if how == "cancelled" else "stop")
    one.error = ValueError() if how == "error" else None
    one.rehearsal = how == "rehearsal"
    left.ended(one)
    assert left.tokens == USUAL
    one.error, one.rehearsal, one.finish = None, False, Finish("stop")
    left.ended(one)
    assert left.tokens == pytest.approx(USUAL + LAST * (1 - USUAL))

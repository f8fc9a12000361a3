"""Arms are judged by their pace, in this text first of all, and get their turns."""

from itertools import pairwise
from math import inf

import pytest

from foretoken.drafters.parts.bandit import (
    ENOUGH,
    EXPLORED,
    FIRST,
    MOST,
    PAUSE,
    PURSE,
    Bandit,
    paces,
)
from foretoken.trees.counts import Pace


def ran(bandit: Bandit, text: list[Pace], arm: int | None, tokens: int, spent: float) -> None:
    bandit.update(arm, [text], [tokens], spent)


def tried(bandit: Bandit, text: list[Pace], arm: int, tokens: int, spent: float) -> None:
    """The steps in which a new arm is given its chance."""
    turns = 0
    while (chosen := bandit.choose([text], 1.5))[1] == inf:
        assert chosen[0] == arm
        bandit.update(arm, [text], [tokens], spent, forced=True)
        turns += 1
    assert turns == ENOUGH if tokens > spent else turns < ENOUGH


def test_an_arm_promises_its_gain_above_a_plain_step() -> None:
    bandit, text = Bandit(1), paces(1)
    tried(bandit, text, 0, 4, 2.0)
    speed = 1.8
    arm, promised = bandit.choose([text], speed)
    gain = bandit.gain(0, [text], speed)
    assert arm == 0 and promised == pytest.approx(gain + speed - 1.0)
    assert gain == pytest.approx(4 - speed * 2.0) and promised > 0.5


def test_an_arm_that_brings_less_than_its_time_is_worth_is_left_alone() -> None:
    bandit, text = Bandit(1), paces(1)
    tried(bandit, text, 0, 1, 2.0)
    assert bandit.choose([text], 2.0) == (None, 0.0)


def test_it_may_be_good_in_one_text_and_not_in_another() -> None:
    bandit = Bandit(1)
    good, bad = paces(1), paces(1)
    tried(bandit, good, 0, 5, 2.0)
    for _ in range(6):
        ran(bandit, good, 0, 5, 2.0)
        ran(bandit, bad, 0, 1, 3.0)
        ran(bandit, bad, None, 2, 1.1)
    assert bandit.choose([good], 1.8)[0] == 0
    assert bandit.choose([bad], 1.8)[0] is None


def test_the_better_of_two_arms_is_chosen() -> None:
    bandit, text = Bandit(2), paces(2)
    for _ in range(ENOUGH):
        ran(bandit, text, 0, 4, 2.5)
        ran(bandit, text, 1, 4, 2.0)
    assert bandit.choose([text], 1.5)[0] == 1
    for _ in range(30):
        ran(bandit, text, 1, 1, 2.0)
    assert bandit.choose([text], 1.5)[0] == 0


def trials(tokens: int, spent: float, steps: int = 4000) -> list[int]:
    """The steps in which an arm is tried that never pays beside one of 1.5 plain speeds."""
    bandit, text = Bandit(1), paces(1)
    turns = []
    for step in range(steps):
        arm, promised = bandit.choose([text], 1.5)
        if arm is None:
            bandit.update(None, [text], [2], 4 / 3)
        else:
            turns.append(step)
            bandit.update(arm, [text], [tokens], spent, promised == inf, 1.5)
    return turns


def test_an_unused_arm_is_tried_more_and_more_rarely() -> None:
    turns = [turn for turn in trials(1, 1.0) if turn > 4 * ENOUGH]
    gaps = [b - a for a, b in pairwise(turns)]
    assert gaps == sorted(gaps) and MOST - 1 <= gaps[-1] <= MOST + 1


@pytest.mark.parametrize("spent", [1.0, 2.0, 4.0])
def test_trials_lose_a_small_share_of_all_time(spent: float) -> None:
    turns = trials(1, spent)
    lost = (1.5 * spent - 1.0) * len(turns)
    assert turns[-1] > 3000, "they never end"
    assert lost <= PURSE + 1.5 * spent + EXPLORED * 4000 * 4 / 3


def test_an_arm_that_is_chosen_again_need_not_wait_so_long() -> None:
    bandit, text = Bandit(1), paces(1)
    tried(bandit, text, 0, 1, 3.0)
    bandit.every = [MOST]
    ran(bandit, text, 0, 9, 1.0)
    assert bandit.every == [FIRST]


def test_a_pause_of_the_machine_is_nobodys_loss() -> None:
    bandit, text = Bandit(1), paces(1)
    bandit.update(0, [text], [4], 1000.0, forced=True, speed=1.5)
    assert bandit.all[0].steps == text[0].steps == 0 and bandit.purse == PURSE
    assert bandit.choose([text], 1.5) == (0, inf), "its trial is still to come"
    ran(bandit, text, 0, 4, 1000.0)  # once more: the arm is as slow as that
    assert bandit.all[0].spent == text[0].spent == PAUSE


def test_without_arms_nobody_is_chosen() -> None:
    assert Bandit(0).choose([[]], 1.5) == (None, 0.0)

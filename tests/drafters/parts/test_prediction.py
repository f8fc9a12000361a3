"""A prediction is followed along the text, and found again behind every kind of edit."""

import pytest

from foretoken.drafters.parts.prediction import NEAREST, OPENING, Place, Prediction

EXPECTED = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
PROMPT = [1, 2, 10, 11]  # whose tokens are no part of the text


def place_after(written: list[int], expected: list[int] = EXPECTED) -> Place:
    prediction = Prediction(expected, len(PROMPT))
    for size in range(len(written) + 1):  # token by token, and all at once
        prediction.follow([*PROMPT, *written[:size]])
    whole = Prediction(expected, len(PROMPT))
    whole.follow([*PROMPT, *written])
    assert whole.place == prediction.place
    return whole.place


def guess_after(written: list[int], expected: list[int] = EXPECTED, count: int = 4) -> list[int]:
    prediction = Prediction(expected, len(PROMPT))
    tokens = [*PROMPT, *written]
    prediction.follow(tokens)
    return prediction.copied(tokens, count, 0.0, True, frozenset()).tokens


def test_the_beginning_is_guessed_before_anything_is_written() -> None:
    assert guess_after([]) == [10, 11, 12, 13]
    assert place_after([]) == Place(0, OPENING)
    assert guess_after([10, 11, 12]) == [13, 14, 15, 16]


@pytest.mark.parametrize(
    ("written", "following"),
    [
        pytest.param([10, 11, 12, 90, 91, 13, 14], [15, 16, 17, 18], id="insertion"),
        pytest.param([10, 11, 12, 16, 17], [18, 19, 20, 21], id="deletion"),
        pytest.param([10, 11, 12, 90, 14, 15], [16, 17, 18, 19], id="replacement"),
        pytest.param([90, 91, 12, 13], [14, 15, 16, 17], id="another beginning"),
        pytest.param([18, 19, 20, 11, 12], [13, 14, 15, 16], id="moved back"),
    ],
)
def test_the_place_is_found_again_behind_an_edit(written, following) -> None:
    assert guess_after(written) == following


def test_one_token_alone_is_no_match_and_nothing_follows_the_end() -> None:
    assert guess_after([10, 11, 90]) == []
    assert guess_after([10, 11, 90, 13]) == [], "two tokens in a row tell the place"
    assert guess_after(EXPECTED) == []
    assert guess_after([*EXPECTED, 13, 14]) == [15, 16, 17, 18]


def test_the_longest_match_further_on_wins_and_of_equals_the_nearest() -> None:
    rows = [[5, 6, 7, n, 8] for n in range(60, 66)]
    expected = [token for row in rows for token in row]
    edited = [*rows[0], 5, 6, 7, 99, 8, 5, 6, 7]
    assert guess_after(edited, expected, 2) == [62, 8], "the next one, not the first or last"
    longer = [1, 2, 3, 4, 50, 1, 2, 51, 0, 2, 3, 52]
    assert guess_after([7, 2, 3], longer, 1) == [4], "nearest"
    assert guess_after([7, 0, 2, 3], longer, 1) == [52], "longest"


def test_matches_in_a_text_of_one_token_are_bounded() -> None:
    prediction = Prediction([5] * 4000, 0)
    prediction.follow([9, 5, 5])
    assert prediction.place.at <= NEAREST + 2


def test_guesses_end_where_they_are_unlikely_and_at_end_tokens() -> None:
    prediction = Prediction(EXPECTED, 0)
    short = prediction.copied([], 14, 0.5, True, frozenset())
    long = prediction.copied([], 14, 0.01, True, frozenset())
    assert 0 < len(short.tokens) < len(long.tokens)
    assert all(chance >= 0.5 for chance in short.chances)
    assert prediction.copied([], 14, 0.0, True, frozenset({12})).tokens == [10, 11, 12]


def test_a_wrong_prediction_is_believed_less_and_a_right_one_more() -> None:
    good, bad = Prediction(EXPECTED, 0), Prediction(EXPECTED, 0)
    before = good.copied([], 8, 0.0, True, frozenset())
    for _ in range(20):
        good.tried(before, EXPECTED, True)
        bad.tried(before, [99], True)
    better, worse = (one.copied([], 8, 0.0, True, frozenset()) for one in (good, bad))
    assert sum(better.chances) > sum(before.chances) + 1
    assert worse.chances[0] < 0.5 * before.chances[0]

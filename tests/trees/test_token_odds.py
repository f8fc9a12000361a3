"""What tokens are known for: shifts of promised log-odds, learned online."""

import math
import random

import pytest

from foretoken.trees import token_odds
from foretoken.trees.token_odds import TextOdds, TokenOdds

DIGIT, WORD, BEFORE = 7, 8, 3


def written(odds, chances, promised=0.8, trials=400, seed=0, text=None):
    """Guesses of each token come true as often as `chances` say, in turns."""
    rng, text = random.Random(seed), text or TextOdds()
    for _ in range(trials):
        for token, chance in chances.items():
            odds.tried(promised, token, BEFORE, text, rng.random() < chance)
    return text


@pytest.mark.parametrize("promised", [0.002, 0.1, 0.5, 0.97])
def test_a_promise_is_kept_before_anything_was_seen(promised):
    assert TokenOdds().chance(promised, WORD, BEFORE, TextOdds()) == pytest.approx(promised)


def test_what_is_not_promised_at_all_stays_so():
    odds, text = TokenOdds(), TextOdds()
    odds.tried(0.0, WORD, BEFORE, text, True)
    assert odds.chance(0.0, WORD, BEFORE, text) == 0.0
    assert text.numbers[0] == 0.0


def test_a_promise_of_certainty_can_be_corrected():
    odds = TokenOdds()
    text = written(odds, {DIGIT: 0.3}, promised=1.0)
    assert odds.chance(1.0, DIGIT, BEFORE, text) == pytest.approx(0.3, abs=0.12)


def test_tokens_are_told_apart_however_alike_their_promises_are():
    odds = TokenOdds()
    text = written(odds, {DIGIT: 0.4, WORD: 0.95})
    assert odds.chance(0.8, DIGIT, BEFORE, text) == pytest.approx(0.4, abs=0.12)
    assert odds.chance(0.8, WORD, BEFORE, text) == pytest.approx(0.95, abs=0.05)


def test_what_a_token_says_of_likely_guesses_is_not_said_of_doubtful_ones():
    odds = TokenOdds()
    written(odds, {DIGIT: 0.1})
    assert odds.chance(0.3, DIGIT, BEFORE, TextOdds()) == pytest.approx(0.3)


def test_the_token_before_counts_where_the_guess_itself_is_new():
    odds = TokenOdds()
    written(odds, dict.fromkeys(range(100, 200), 0.2), trials=4)
    new = 500
    assert odds.chance(0.8, new, BEFORE, TextOdds()) < 0.6
    assert odds.chance(0.8, new, BEFORE + 1, TextOdds()) == pytest.approx(0.8)


def test_a_text_of_its_own_kind_leaves_other_texts_as_they_are():
    odds, usual = TokenOdds(), TextOdds()
    misled = TextOdds()
    for token in range(1000, 1040):
        odds.tried(0.8, token, token + 4000, misled, False)
    assert odds.chance(0.8, 1, 2, misled) < 0.5
    assert odds.chance(0.8, 1, 2, usual) == pytest.approx(0.8)


def test_what_changes_after_a_thousand_guesses_is_noticed():
    odds = TokenOdds()
    written(odds, {DIGIT: 0.95}, trials=3000)
    text = written(odds, {DIGIT: 0.2}, trials=150, seed=1)
    assert odds.chance(0.8, DIGIT, BEFORE, text) < 0.4


@pytest.mark.parametrize("hit", [False, True])
def test_chances_stay_chances_whatever_comes(hit):
    odds, text = TokenOdds(), TextOdds()
    for _ in range(5000):
        odds.tried(0.9, WORD, WORD, text, hit)
    chance = odds.chance(0.9, WORD, WORD, text)
    assert 0.0 < chance < 1.0 and math.isfinite(sum(odds.numbers))


def test_tokens_with_the_same_last_bits_share_their_numbers():
    odds = TokenOdds()
    text = written(odds, {DIGIT: 0.2})
    far = DIGIT + 5 * token_odds.KINDS
    assert odds.chance(0.8, far, BEFORE, text) == odds.chance(0.8, DIGIT, BEFORE, text)

import numpy as np
import pytest

from foretoken.datastore.suffixes import sort_suffixes


def by_python(tokens, depth):
    """All suffixes cut to `depth` tokens, sorted; equal ones by position."""
    text = list(tokens)
    return sorted(range(len(text)), key=lambda i: (text[i : i + depth], i))


@pytest.mark.parametrize("vocab", [1, 2, 5, 4096, 150_000])
def test_the_array_is_the_sorted_suffixes(vocab):
    rng = np.random.default_rng(vocab)
    for size in (1, 2, 3, 17, 300):
        tokens = rng.integers(0, vocab, size)
        place = sort_suffixes(tokens, size)
        assert place.tolist() == by_python(tokens, size)


def test_a_bounded_array_is_in_order_as_far_as_was_asked():
    rng = np.random.default_rng(0)
    phrase = rng.integers(0, 3, 25)
    tokens = np.concatenate([phrase, phrase, rng.integers(0, 3, 200), phrase])
    for depth in (1, 2, 7, 8, 32):
        place = sort_suffixes(tokens, depth).tolist()
        cut = [tokens[i : i + depth].tolist() for i in place]
        assert cut == sorted(cut) and sorted(place) == list(range(len(tokens)))


def test_repetitions_do_not_cost_more_sorts():
    """The worst text of all for plain comparison: one token."""
    place = sort_suffixes(np.zeros(5000, np.int64), 5000)
    assert place.tolist() == list(range(4999, -1, -1))


def test_an_empty_text_has_no_suffixes():
    assert len(sort_suffixes(np.empty(0, np.int64), 8)) == 0

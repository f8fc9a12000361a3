import random
from array import array

import pytest

from foretoken.drafters.parts.suffix_index import END, LOOKED, Followers, SuffixIndex

ALL = 10**6


def texts_of(rng, vocab, count, longest):
    return [[rng.randrange(vocab) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def index_of(texts, limit=None):
    index = SuffixIndex(limit)
    for text in texts:
        index.extend(text)
        index.close()
    return index


def occurrences(texts, suffix):
    """Texts cut after every occurrence of `suffix`: what followed, the end included."""
    n = len(suffix)
    return [
        [*text[end:], END]
        for text in texts
        for end in range(n, len(text) + 1)
        if text[end - n : end] == suffix
    ]


def test_places_and_counts_equal_a_search_through_all_texts():
    rng = random.Random(0)
    for case in range(60):
        vocab = 2 + case % 4
        texts = texts_of(rng, vocab, 6, 25)
        index = index_of(texts)
        context = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
        found = index.matches(context, 8, ALL)
        assert found == sorted(found, reverse=True), "newest first"
        for n in range(1, min(8, len(context)) + 1):
            after = occurrences(texts, context[-n:])
            places = [place for place, length in found if length >= n]
            assert len(places) == len(after)
            trie = Followers(index, places, 5, frozenset())
            assert trie.total == len(after)
            for node in range(1, len(trie.tokens)):
                path = path_of(trie, node)
                assert trie.counts[node] == sum(f[: len(path)] == path for f in after)
            # Children are all there is, unless an occurrence ends here.
            ended = sum(f[0] == END for f in after)
            below = sum(c for c, p in zip(trie.counts, trie.parents, strict=True) if p == 0)
            assert below == trie.total - ended


def path_of(trie, node):
    path = []
    while node:
        path.append(trie.tokens[node])
        node = trie.parents[node]
    return path[::-1]


def test_a_growing_text_does_not_find_its_own_end():
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 2])
    assert index.matches([1, 2], 4, ALL) == [(2, 2)]
    index.extend([3])
    assert index.matches([1, 2, 3], 4, ALL) == [(3, 3)]
    assert index.matches([9], 4, ALL) == [] == index.matches([], 4, ALL)


def test_texts_do_not_run_into_each_other():
    index = index_of([[1, 2], [3, 4]])
    assert index.matches([2, 3], 4, ALL) == [(4, 1)], "2 and 3 never stood together"
    assert Followers(index, [2], 4, frozenset()).tokens == [END], "nothing follows an end"
    assert all(token >= 0 for token in index.latest[0])


@pytest.mark.parametrize("count", [1, 7, 40, 60])
def test_forgetting_restores_what_was_known_without_the_oldest(count):
    rng = random.Random(count)
    texts = texts_of(rng, 3, 12, 15)
    index = index_of(texts)
    size = len(index)
    index.forget(count)
    dropped = size - len(index)
    gone = next(k for k in range(13) if sum(len(t) + 1 for t in texts[:k]) == dropped)
    assert dropped >= count and sum(len(t) + 1 for t in texts[: gone - 1]) < count
    fresh = index_of(texts[gone:])
    assert index.tokens == fresh.tokens
    for kind in (0, 1):
        assert set(index.latest[kind]) == set(fresh.latest[kind]), "no key is left behind"
    for _ in range(50):
        context = [rng.randrange(3) for _ in range(6)]
        assert index.matches(context, 6, ALL) == fresh.matches(context, 6, ALL)


def test_memory_is_bounded_whatever_is_added():
    index = SuffixIndex(limit=100)
    for i in range(300):
        index.extend([i, i + 1, i + 2, i + 3])
        index.close()
        assert len(index) <= 100
    assert len(index.latest[1]) <= 100 and len(index.links[0]) == len(index)
    assert index.matches([300, 301], 4, ALL)
    index.extend(range(500))  # a text longer than everything that may be kept
    index.close()
    assert len(index) == 0 and index.matches([3, 4], 4, ALL) == []
    index.extend([1, 2, 3])
    assert index.matches([1, 2], 4, ALL) == [(2, 2)]


def test_only_the_newest_places_are_looked_at():
    index = SuffixIndex()
    index.extend([1, 2] * 50)
    assert [place for place, length in index.matches([1, 2], 2, 3)] == [98, 96, 94]


def test_the_best_nodes_and_the_chain():
    index = SuffixIndex()
    texts = [[0, 5, 6], [0, 5, 7], [0, 5, 6, 8], [0, 9]]
    for text in texts:
        index.extend(text)
        index.close()
    places = [place for place, _ in index.matches([0], 1, ALL)]
    trie = Followers(index, places, 3, frozenset())
    named = [(trie.tokens[n], trie.counts[n]) for n in trie.best(3, 1)]
    assert sorted(named) == [(5, 3), (6, 2), (9, 1)]
    assert [trie.tokens[n] for n in trie.chain(9, 1)] == [5, 6, 8]
    assert [trie.tokens[n] for n in trie.chain(9, 2)] == [5, 6]
    assert [trie.tokens[n] for n in trie.chain(1, 1)] == [5]
    assert trie.best(9, 5) == [] == trie.chain(9, 5)
    ended = Followers(index, places, 3, frozenset({5}))
    assert 6 not in ended.tokens, "nothing follows an end token"


class Counted(array):
    """Links that count how often they are followed."""

    read = 0

    def __getitem__(self, at):
        Counted.read += 1
        return super().__getitem__(at)


def test_few_places_are_visited_in_a_text_that_goes_round_in_circles():
    index = SuffixIndex()
    index.extend([5, 2, *[1, 2] * 50_000])
    index.links = tuple(Counted("q", links) for links in index.links)
    found = index.matches([1, 2], 24, 32)
    assert len(found) == 32 and {length for _, length in found} == {2}
    assert Counted.read <= 32 + LOOKED * 32
    assert (2, 1) in index.matches([1, 2], 24, ALL), "the oldest place is behind the last alone"

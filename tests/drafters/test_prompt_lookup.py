import pytest
import torch

from foretoken.drafters.prompt_lookup import NgramIndex, PromptLookup, continuation
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw, Prices, Shape, Verdict

pytestmark = pytest.mark.usefixtures("way")


def brute_force(tokens, shortest, longest, limit):
    """Ends of earlier occurrences by search through the whole text."""
    found = []
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        suffix = tokens[-n:]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix and end not in found and len(found) < limit:
                found.append(end)
    return found


def test_the_index_equals_a_search_on_random_texts():
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        vocab = 2 + case % 4
        tokens = torch.randint(vocab, (80,), generator=generator).tolist()
        shortest, longest = 1 + case % 2, 2 + case % 3
        index = NgramIndex(shortest, longest)
        for size in range(1, len(tokens), 1 + case % 3):  # several tokens may arrive at once
            text = tokens[:size]
            index.grow(text)
            for limit in (1, 3):
                expected = brute_force(text, shortest, longest, limit)
                assert list(index.matches(text, limit)) == expected


def test_growing_costs_the_same_at_any_length():
    """Each token enters the index once, whatever the text's length."""

    class Counting(list):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    text = Counting([1, 2, 3, 4] * 2000)
    index = NgramIndex(1, 3)
    index.grow(text)
    Counting.reads = 0
    text += [5, 1, 2]
    index.grow(text)
    list(index.matches(text, 1))
    assert Counting.reads <= 3 * 3 + 3


def test_a_continuation_follows_a_loop_beyond_the_text():
    assert continuation([1, 2, 3, 1, 2], 2, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert continuation([7, 7], 1, 4) == [7, 7, 7, 7]
    assert continuation([1, 2, 9, 1], 1, 5, frozenset({9})) == [2, 9]


def test_the_draft_continues_the_latest_longest_match(row):
    drafter = PromptLookup()
    one = row([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 12, max_new_tokens=30)
    drafter.start(one, None)
    draft = drafter.propose_one(one, Budget(3, 3))
    assert draft.draw is Draw.POINT and draft.q is None
    assert draft.tree.tokens == (3, 4, 9, 2)  # after (1, 2, 3), not after the later (2, 3)
    assert draft.tree.is_chain


def test_no_match_and_no_budget_give_the_root_alone(row):
    drafter = PromptLookup()
    one = row([1, 2, 3], 12, max_new_tokens=30)
    drafter.start(one, None)
    assert len(drafter.propose_one(one, Budget(3, 3)).tree) == 1
    one.extend([1])
    assert len(drafter.propose_one(one, Budget(0, 0)).tree) == 1
    assert len(drafter.propose_one(one, Budget(2, 2)).tree) == 3


def test_several_matches_make_a_trie_within_the_node_budget(row):
    drafter = PromptLookup(PromptLookup.Config(matches=3))
    assert drafter.traits.shape is Shape.TREE
    one = row([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2], 12, max_new_tokens=30)
    drafter.start(one, None)
    for nodes in range(1, 10):
        tree = drafter.propose_one(one, Budget(3, nodes)).tree
        assert len(tree) <= nodes + 1
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert max(tree.depths()) <= 3
    # latest first: 3 5 1, then 4 1 2, then 3 1 2, which shares its first token with the first path
    assert tree.tokens == (2, 3, 5, 1, 4, 1, 2, 1, 2)
    assert tree.parents == (-1, 0, 1, 2, 0, 4, 5, 1, 7)


@pytest.mark.parametrize("matches", [1, 4])
def test_greedy_text_equals_plain_text(prompts, row, run, plain, matches):
    target = TableLM.random(vocab=12, order=2, seed=3)
    make = lambda: [  # noqa: E731
        row(p, 12, max_new_tokens=50 + 7 * i, eos=frozenset({11}), min_new_tokens=30)
        for i, p in enumerate(prompts)
    ]
    expected = plain(target, make())
    drafter = PromptLookup(PromptLookup.Config(matches=matches))
    found, records = run(target, drafter, make(), depth=4, nodes=8)
    assert found == expected
    assert len(records) < 50  # a table at temperature 0 loops, and loops are found


def priced(node, nodes=32):
    return Budget(nodes, nodes, Prices(0.0, tuple(node * n for n in range(nodes + 1)), 1.0, 1.0))


def test_a_copy_goes_on_as_far_as_it_is_likely_to_pay(row):
    """Behind a match of one token hardly at all, behind a long one for long."""
    drafter = PromptLookup()
    short = row([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1], 12, max_new_tokens=60)
    long = row(list(range(11)) * 5, 12, max_new_tokens=60)
    sizes = {}
    for one in (short, long):
        drafter.start(one, None)
        for node in (0.0, 0.05, 0.2, 0.6):
            sizes[one.uid, node] = len(drafter.propose_one(one, priced(node)).tree) - 1
    by_price = [[sizes[one.uid, node] for node in (0.0, 0.05, 0.2, 0.6)] for one in (short, long)]
    assert all(found == sorted(found, reverse=True) for found in by_price)
    assert by_price[0][2:] == [0, 0] and by_price[1][1] > 12 and by_price[1][3] > 3


def test_what_never_comes_true_is_soon_not_drafted(row, step):
    drafter = PromptLookup()
    one = row([1, 2, 3, 4, 1, 2], 12, max_new_tokens=500)
    drafter.start(one, None)
    sizes = []
    for _ in range(30):
        draft = drafter.propose_one(one, priced(0.1))
        sizes.append(len(draft.tree) - 1)
        drafter.observe(step([one], [draft], [Verdict((), 9)]))
    assert sizes[0] > 0 == sizes[-1], "it is looked up all the same, and learned from"


def test_a_row_that_is_timed_only_teaches_nothing(row, step):
    drafter = PromptLookup()
    one = row([1, 2, 3, 4, 1, 2], 12, max_new_tokens=500)
    one.rehearsal = True
    drafter.start(one, None)
    draft = drafter.propose_one(one, priced(0.0))
    drafter.observe(step([one], [draft], [Verdict((), 9)]))
    assert drafter.odds.factors == PromptLookup().odds.factors


@pytest.mark.parametrize(
    "options", [{"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}, {"matches": 0}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        PromptLookup(PromptLookup.Config(**options))

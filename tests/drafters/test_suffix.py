import random
from collections import Counter

import pytest

from foretoken.drafters.suffix import SuffixDecoding
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain
from foretoken.types import Budget, Finish, Prices, Verdict

pytestmark = pytest.mark.usefixtures("way")

ROOMY = Budget(32, 32)


def started(row, tokens, vocab=50, **config):
    drafter = SuffixDecoding(SuffixDecoding.Config(**config))
    one = row(tokens, vocab, max_new_tokens=500)
    drafter.start(one, None)
    return drafter, one


def tree_of(drafter, one, budget=ROOMY):
    return drafter.propose_one(one, budget).tree


class Trie:
    """The published structure, plainly: every suffix of a text, with counts."""

    def __init__(self, text, depth):
        self.counts = Counter()
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + depth) + 1):
                self.counts[tuple(text[start:end])] += 1

    def speculate(self, text, longest, most, min_prob):
        """Score and tokens of the best chain over all match lengths, longer ones first in ties."""
        best = (0.0, [])
        for m in range(1, min(longest, len(text)) + 1):
            suffix = tuple(text[-m:])
            total, path, score = self.counts[suffix], [], 0.0
            while len(path) < min(most, m):
                options = {
                    key[-1]: count
                    for key, count in self.counts.items()
                    if key[:-1] == (*suffix, *path)
                }
                if not options or max(options.values()) / total < min_prob:
                    break
                top = max(options.values())
                ties = [token for token, count in options.items() if count == top]
                if len(ties) > 1:
                    return None  # the trie does not know which was seen last
                path.append(ties[0])
                score += top / total
            if score >= best[0] and path:
                best = (score, path)
        return best


def test_the_chain_equals_that_of_a_trie_with_counts(row):
    rng, compared = random.Random(3), 0
    for case in range(250):
        vocab = 2 + case % 5
        text = [rng.randrange(vocab) for _ in range(rng.randrange(4, 40))]
        expected = Trie(text, 64).speculate(text, 8, 5, 0.1)
        if expected is None:
            continue
        drafter, one = started(
            row, text, branching=False, occurrences=10**6, max_match=8, max_spec=5
        )
        assert list(tree_of(drafter, one).tokens[1:]) == expected[1]
        compared += 1
    assert compared > 50


def test_a_tree_promises_at_least_what_the_chain_does(row):
    rng = random.Random(4)
    for _ in range(50):
        text = [rng.randrange(4) for _ in range(60)]
        scores = []
        for branching in (True, False):
            drafter, one = started(row, text, branching=branching)
            tree = tree_of(drafter, one)
            scores.append(one.private[drafter].found.score)
            assert branching or tree.is_chain
        assert scores[0] >= scores[1] - 1e-12


@pytest.mark.parametrize("branching", [True, False])
def test_greedy_text_is_plains_whatever_was_answered_before(prompts, row, run, plain, branching):
    target = TableLM.random(vocab=12, order=2, seed=3)
    make = lambda: [row(p, 12, max_new_tokens=50 + 7 * i) for i, p in enumerate(prompts)]  # noqa: E731
    expected = plain(target, make())
    drafter = SuffixDecoding(SuffixDecoding.Config(branching=branching))
    rng = random.Random(1)
    for _ in range(30):
        drafter.remember("", [rng.randrange(12) for _ in range(40)])
    first, records = run(target, drafter, make(), depth=8, nodes=12)
    again, fewer = run(target, drafter, make(), depth=8, nodes=12)
    assert first == again == expected
    assert len(fewer) <= len(records), "a second time the answers are known"


def test_a_period_is_followed_as_far_as_the_match_reaches(row):
    drafter, one = started(row, list(range(10)) * 3, remember=0)
    tree = tree_of(drafter, one)
    assert tree.tokens == chain(9, list(range(10)) * 2).tokens[: len(tree)]
    # The match of 20 has 10 tokens behind it; that of 10, twice seen, promises more.
    assert len(tree) - 1 == 10
    drafter, one = started(row, list(range(10)) * 9, remember=0)
    assert len(tree_of(drafter, one)) - 1 == 24, "as long as the longest match told apart"
    drafter, one = started(row, list(range(10)) * 9, remember=0, factor=5.0)
    assert len(tree_of(drafter, one)) - 1 == 32, "never more than max_spec"


def papers(row, tokens, vocab=50):
    drafter = assemble("suffix", TableLM.random(2), preset="paper").drafter
    one = row(tokens, vocab, max_new_tokens=500)
    drafter.start(one, None)
    return drafter, one


def test_the_papers_setting_tells_longer_matches_apart(row):
    assert len(tree_of(*papers(row, list(range(10)) * 20))) - 1 == 32, "max_spec"
    drafter, one = started(row, list(range(10)) * 20, branching=False)
    assert len(tree_of(drafter, one)) - 1 == 24


def test_the_papers_setting_counts_every_occurrence(row):
    """Of what followed a token, the first 60 times were 1 and the newest 32 were 2."""
    text = [token for before in range(10, 70) for token in (before, 0, 1)]
    text += [token for before in range(70, 102) for token in (before, 0, 2)]
    text += [102, 0]
    drafter, one = started(row, text, 120, branching=False)
    assert tree_of(drafter, one).tokens == (0, 2)
    assert tree_of(*papers(row, text, 120)).tokens == (0, 1)


def priced(node, nodes=32):
    return Budget(nodes, nodes, Prices(0.0, tuple(node * n for n in range(nodes + 1)), 1.0, 1.0))


def test_with_prices_a_draft_is_as_long_as_its_match_is_believed(row):
    short, one = started(row, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1])
    assert len(tree_of(short, one, priced(0.2))) == 1, "one token that matched says little"
    long, two = started(row, list(range(10)) * 9)
    assert len(tree_of(long, two, priced(0.2))) - 1 > 5
    assert len(tree_of(long, two, priced(0.02))) - 1 > 15


def test_shares_are_believed_as_far_as_they_came_true(row, step):
    drafter, one = started(row, [1, 2, 3, 4, 1, 2, 3])
    sizes = []
    for _ in range(40):
        draft = drafter.propose_one(one, priced(0.1))
        sizes.append(len(draft.tree) - 1)
        drafter.observe(step([one], [draft], [Verdict((), 9)]))
    assert sizes[0] > 0 == sizes[-1]
    own, answers = drafter.odds
    assert answers.factors == SuffixDecoding().odds[0].factors != own.factors


def test_paths_seen_too_rarely_are_not_drafted(row):
    text = [token for other in range(1, 41) for token in (0, other)] + [0]
    drafter, one = started(row, text, occurrences=100)
    assert len(tree_of(drafter, one)) == 1, "forty equally rare followers"
    drafter, one = started(row, text, occurrences=100, min_prob=0.0)
    assert len(tree_of(drafter, one)) == 2


def test_the_better_of_request_and_answers_is_taken(row):
    drafter, one = started(row, [1, 2, 3, 9, 1, 2])
    assert tree_of(drafter, one).tokens == (2, 3, 9)  # seen once, and once not followed: score 1
    drafter.remember("", [1, 2, 7, 8, 7])
    assert tree_of(drafter, one).tokens == (2, 7, 8)  # seen once in a whole text: score 2


def test_answers_are_remembered_once_complete_and_only_if_asked(row):
    for remember, finish, size in (
        (100, Finish("stop"), 4),
        (100, None, 0),
        (100, Finish("cancelled"), 0),
        (100, Finish("error"), 0),
        (0, Finish("stop"), 0),
    ):
        drafter, one = started(row, [1, 2], remember=remember)
        one.extend([5, 6, 7])
        one.finish = finish
        drafter.finish(one)
        assert sum(map(len, drafter.answers.values())) == size


def test_answers_are_followed_for_their_owner_alone(row):
    drafter, one = started(row, [1, 2])
    one.owner = "a"
    one.extend([5, 6, 7])
    one.finish = Finish("stop")
    drafter.finish(one)
    found = {}
    for owner in ("a", "b", ""):
        other = row([9, 5, 6], 50, max_new_tokens=500)
        other.owner = owner
        drafter.start(other, None)
        found[owner] = tree_of(drafter, other).tokens
    assert found == {"a": (6, 7), "b": (6,), "": (6,)}


def test_who_was_quiet_longest_forgets_first():
    """All owners together keep so many tokens; an end is one."""
    drafter = SuffixDecoding(SuffixDecoding.Config(remember=20))

    def kept(owner, answer):
        drafter.remember(owner, answer)
        return {owner: len(index) for owner, index in drafter.answers.items()}

    for owner in ("a", "b", "a"):
        kept(owner, [1, 2, 3, 4, 5])
    assert kept("c", [1, 2, 3, 4, 5]) == {"a": 12, "c": 6}
    assert kept("d", [1, 2, 3, 4, 5]) == {"a": 6, "c": 6, "d": 6}, "the older of two answers"
    assert kept("a", [1] * 30) == {"c": 6, "d": 6}, "longer than all that is kept"


def test_every_budget_is_kept(row):
    rng = random.Random(2)
    drafter, one = started(row, [rng.randrange(3) for _ in range(300)], factor=9.0)
    for depth in (0, 1, 3, 32):
        for nodes in (0, 1, 4, 32):
            tree = tree_of(drafter, one, Budget(depth, nodes))
            assert len(tree) - 1 <= nodes and max(tree.depths()) <= depth
            assert (len(tree) > 1) == (depth > 0 and nodes > 0)


@pytest.mark.parametrize(
    "options", [{"max_match": 0}, {"factor": -1.0}, {"occurrences": 0}, {"remember": -1}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SuffixDecoding(SuffixDecoding.Config(**options))

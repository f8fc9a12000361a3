import numpy as np
import pytest
import torch

from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.guided_retrieval import Evidence, Fused, GuidedRetrieval
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.errors import ConfigError, PairingError
from foretoken.lm.table import TableLM
from foretoken.trees.build import from_paths
from foretoken.types import Budget, Draft, Draw, Prices, Scores, Verdict

VOCAB = 12


@pytest.fixture
def guided(tmp_path, pair):
    """Makes a drafter over the pair's draft and a datastore of texts."""

    def make(documents, draft=None, grower=None, **options):
        where = tmp_path / f"d{len(list(tmp_path.iterdir()))}"
        Datastore.create(where, Vocabulary.of_ids(VOCAB)).add(documents)
        model = OrdinaryModel(draft or pair[1])
        inner = BestFirst(model, BestFirst.Config(min_gain=0.0, **(grower or {})))
        return GuidedRetrieval(pair[0], inner, GuidedRetrieval.Config(datastore=where, **options))

    return make


def noise(seed=0, count=80):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, 30).tolist() for _ in range(count)]


def proposed(drafter, row, depth=8, nodes=12):
    """Steps of drafting alone: nothing is ever accepted, so nothing is learned."""
    drafter.start(row, None)
    [draft] = drafter.propose([row], [Budget(depth, nodes)])
    return draft


def test_every_tree_is_a_tree_within_its_budget(guided, run, row, pair, prompts):
    drafter = guided(noise(), draft_depth=1, min_match=2)
    rows = [row(p, VOCAB, max_new_tokens=30, temperature=1.0, seed=3) for p in prompts]
    _, records = run(pair[0], drafter, rows, depth=9, nodes=11)
    deeper = 0
    for draft in (draft for record in records for draft in record.drafts):
        tree = draft.tree
        assert draft.draw is Draw.POINT and len(tree) - 1 <= 11 and max(tree.depths()) <= 9
        siblings = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings)
        deeper += max(tree.depths()) > 1
    assert deeper, "retrieved branches go below the drafter's last level"


def test_what_only_the_datastore_knows_begins_plausibly(guided, row, pair):
    """With k = V nothing is held back, with k = 0 the drafter's tree is left alone."""
    documents = [[3, first, 5, 5, 5, 5] for first in range(VOCAB)] * 4
    law = pair[1].after([0, 3]).softmax(-1)
    begun = {}
    for plausible in (0, 2, VOCAB):
        drafter = guided(documents, grower={"branch": 1}, plausible=plausible, draft_depth=1)
        tree = proposed(drafter, row([0, 3], VOCAB), depth=3, nodes=60).tree
        begun[plausible] = {tree.tokens[i] for i in range(1, len(tree)) if tree.parents[i] == 0}
    likeliest = law.topk(VOCAB).indices.tolist()
    assert begun[0] == {likeliest[0]}
    assert begun[2] == set(likeliest[:2])
    assert begun[VOCAB] == set(range(VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(guided, run, plain, row, pair, prompts, temperature):
    def rows():
        return [row(p, VOCAB, max_new_tokens=40, temperature=temperature, seed=9) for p in prompts]

    expected = plain(pair[0], rows())
    assert run(pair[0], guided(noise()), rows(), depth=8, nodes=12)[0] == expected
    assert run(pair[0], guided([[0]]), rows(), depth=8, nodes=12)[0] == expected


def test_the_text_in_the_datastore_lifts_the_drafters_cap(guided, run, plain, row, pair, prompts):
    """A useless draft with the reference at hand, and a good one whose depth ends early."""

    def rows():
        return [row(p, VOCAB, max_new_tokens=60, temperature=0.0) for p in prompts]

    texts = [[*p, *t] for p, t in zip(prompts, plain(pair[0], rows()), strict=True)]
    alone = guided([[0]], draft_depth=2)
    both = guided(texts, draft_depth=2)
    steps = [len(run(pair[0], d, rows(), depth=10, nodes=16)[1]) for d in (alone, both)]
    assert steps[1] < 0.75 * steps[0]


def test_the_inner_drafter_learns_from_its_own_part_only(guided, run, row, pair, prompts):
    """A strict cache of the draft model sees every commit; nothing may be left over."""
    drafter = guided(noise(), draft_depth=3)
    rows = [row(p, VOCAB, max_new_tokens=25, temperature=0.0) for p in prompts]
    _, records = run(pair[0], drafter, rows, depth=8, nodes=10)
    assert len(records) > 3 and pair[1].rows_held == 0


def test_evidence_believes_what_it_has_seen():
    evidence = Evidence()
    fresh, dubious = evidence.place(9, 0, False), evidence.place(9, 0, True)
    assert evidence.chance(fresh, 1.0) > evidence.chance(dubious, 1.0)
    assert (
        len({evidence.place(n, r, p) for n in (1, 2, 4, 8, 16) for r in (0, 1) for p in (0, 1)})
        == 20
    )
    for _ in range(400):
        evidence.tried(dubious, 0.5, True)
        evidence.tried(fresh, 0.5, False)
    assert evidence.chance(dubious, 0.5) > 0.9 and evidence.chance(fresh, 0.5) < 0.05
    assert evidence.chance(dubious, 1.0) == 1.0


def test_retrieved_nodes_are_judged_where_the_target_went():
    """Also those that were never scored; not those whose parent was not reached."""
    fused = Fused(Draft(from_paths(0, [[1, 2]]), Draw.POINT, chances=(1.0, 0.9, 0.8)))
    fused.tree = from_paths(0, [[1, 2], [3], [1, 4], [3, 5]])
    fused.retrieved = {3: (0, 0.5), 4: (1, 0.5), 5: (2, 0.5)}
    judged = []

    class Seen(Evidence):
        def tried(self, place, share, hit):
            judged.append((place, hit))

    fused.teach([1, 4], Seen())
    assert judged == [(0, False), (1, True)]


def test_prices_decide_how_many_nodes_go_to_the_target(guided, row):
    drafter = guided(noise())
    one = row([1, 2, 3], VOCAB)
    drafter.start(one, None)
    dear = Budget(8, 12, Prices(0.0, tuple(0.6 * n for n in range(13)), 1.0))
    [draft] = drafter.propose([one], [dear])
    chances = one.private[drafter].chances
    assert len(draft.tree) - 1 == sum(chance > 0.6 for chance in chances[1:])
    assert draft.chances == tuple(chance for chance in chances if chance > 0.6)


def test_what_cannot_be_used_is_refused(guided, pair, tmp_path):
    for wrong in ({"plausible": -1}, {"draft_depth": 0}, {"min_match": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            guided([[1]], **wrong)
    with pytest.raises(PairingError, match="Chain"):
        GuidedRetrieval(pair[0], Chain(OrdinaryModel(pair[1])))
    with pytest.raises(ConfigError, match="another tokenizer"):
        guided([[1]]).check_vocabulary({"a": 0})
    with pytest.raises(ConfigError, match="a target of 4 tokens"):
        where = guided([[1]]).config.datastore
        small = TableLM(torch.zeros(4, 4))
        inner = BestFirst(OrdinaryModel(small))
        GuidedRetrieval(small, inner, GuidedRetrieval.Config(datastore=where))


def test_below_the_drafters_nodes_a_share_is_of_what_is_left_unsaid():
    """0.3 is left at the root for the half of the occurrences that the drafter does not have."""
    fused = Fused(Draft(from_paths(0, [[1], [2]]), Draw.POINT, chances=(1.0, 0.5, 0.2)))
    fused.tree = from_paths(0, [[1], [2], [3], [1, 4]])
    worth = fused.unsaid([1, 3, 4], [0.5, 0.4, 1.0])
    assert worth == pytest.approx({0: 0.3 / 0.5})


@pytest.fixture
def by_itself(pair):
    """The same drafter with the text itself to look things up in."""

    def make(grower=None, **options):
        inner = BestFirst(OrdinaryModel(pair[1]), BestFirst.Config(min_gain=0.0, **(grower or {})))
        return GuidedRetrieval(pair[0], inner, GuidedRetrieval.Config(**options))

    return make


def test_without_a_datastore_the_text_itself_is_looked_up(by_itself, row):
    """The longest match alone, at all its places, but never with itself."""
    text = [3, 1, 2, 7, 7, 9, 1, 2, 8, 3, 1, 2]
    drafter = by_itself(grower={"branch": 1}, plausible=VOCAB, draft_depth=1)
    tree = proposed(drafter, row(text, VOCAB), depth=4, nodes=40).tree
    [own, *_] = drafter.inner.propose([row(text, VOCAB)], [Budget(1, 1)])
    paths = {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(1, len(tree))}
    assert {(7,), (7, 7), (7, 7, 9), (7, 7, 9, 1)} <= paths, "3 1 2 stood once before"
    assert (8,) not in paths, "1 2 stood more often, but 3 1 2 is longer"
    assert len(paths) <= 4 + len(own.tree)
    nothing = by_itself(plausible=0, draft_depth=1)
    tree = proposed(nothing, row(text, VOCAB), depth=4, nodes=40).tree
    assert max(tree.depths()) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own_without_a_datastore(
    by_itself, run, plain, row, pair, prompts, temperature
):
    def rows():
        return [row(p, VOCAB, max_new_tokens=40, temperature=temperature, seed=9) for p in prompts]

    drafter = by_itself()
    found, records = run(pair[0], drafter, rows(), depth=8, nodes=12)
    assert found == plain(pair[0], rows())
    assert any(draft.tree.parents for record in records for draft in record.drafts)
    assert pair[1].rows_held == 0


def test_a_text_that_repeats_itself_is_followed_beyond_the_drafters_depth(
    by_itself, run, row, pair
):
    loop = TableLM(torch.eye(VOCAB, dtype=torch.float64).roll(1, 1) * 20.0)
    inner = BestFirst(OrdinaryModel(pair[1]), BestFirst.Config(min_gain=0.0))
    steps = []
    for plausible in (0, VOCAB):
        config = GuidedRetrieval.Config(draft_depth=1, plausible=plausible)
        one = row([0, 1], VOCAB, max_new_tokens=60)
        _, records = run(loop, GuidedRetrieval(loop, inner, config), [one], depth=8, nodes=24)
        steps.append(len(records))
    assert steps[1] < 0.5 * steps[0]


def test_a_text_that_is_only_timed_says_nothing_of_what_retrieved_nodes_are_worth(
    by_itself, row, step
):
    for rehearsal in (True, False):
        drafter = by_itself(grower={"branch": 1}, plausible=VOCAB, draft_depth=1)
        one = row([3, 1, 2, 7, 7, 9, 1, 2, 8, 3, 1, 2], VOCAB)
        one.rehearsal = rehearsal
        draft = proposed(drafter, one, depth=4, nodes=40)
        before = [*drafter.evidence.hits]
        one.extend([7])
        drafter.observe(
            step([one], [draft], [Verdict((), 7)], [Scores(torch.zeros(len(draft.tree), VOCAB))])
        )
        assert (drafter.evidence.hits == before) == rehearsal

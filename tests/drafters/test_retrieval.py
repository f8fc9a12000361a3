import numpy as np
import pytest

from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.parts.text_source import TextSource
from foretoken.drafters.retrieval import Retrieval
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw

VOCAB = 12


@pytest.fixture
def stored(tmp_path):
    """Makes a datastore of texts and the drafter over it."""

    def make(documents, **options):
        store = Datastore.create(tmp_path / f"d{len(list(tmp_path.iterdir()))}", words())
        store.add(documents)
        config = Retrieval.Config(datastore=store.folder, **options)
        return Retrieval(TableLM.random(VOCAB), config)

    def words():
        return Vocabulary.of_ids(VOCAB)

    return make


def guess(drafter, row, depth=10, nodes=64):
    return drafter.propose_one(row, Budget(depth, nodes))


def test_what_followed_most_often_comes_first(stored, row):
    drafter = stored([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [0, 2, 7]])
    draft = guess(drafter, row([9, 1, 2], VOCAB), nodes=2)
    assert draft.draw is Draw.POINT and draft.q is None
    assert draft.tree.tokens == (2, 3, 6) or draft.tree.tokens == (2, 3, 4)
    assert guess(drafter, row([9, 1, 2], VOCAB), nodes=1).tree.tokens == (2, 3)
    whole = guess(drafter, row([9, 1, 2], VOCAB)).tree
    assert sorted(whole.tokens[1:]) == [3, 4, 5, 6], "7 followed a shorter match only"


def test_the_papers_setting_follows_no_match_of_a_single_token(stored, row):
    drafter = stored([[5, 2, 7], [3, 4, 6]])
    assert guess(drafter, row([9, 1, 2], VOCAB)).tree.tokens == (2, 7)
    paper = assemble(
        "rest", TableLM.random(VOCAB), datastore=drafter.config.datastore, preset="paper"
    ).drafter
    assert guess(paper, row([9, 1, 2], VOCAB)).tree.tokens == (2,)
    assert guess(paper, row([9, 3, 4], VOCAB)).tree.tokens == (4, 6)
    assert paper.config.occurrences == 5000


def test_the_budget_is_kept(stored, row):
    rng = np.random.default_rng(0)
    drafter = stored([rng.integers(0, VOCAB, 40).tolist() for _ in range(50)])
    for depth, nodes in ((0, 5), (5, 0), (1, 9), (3, 4), (10, 64)):
        tree = guess(drafter, row([3, 4], VOCAB), depth, nodes).tree
        assert len(tree) - 1 <= nodes and max(tree.depths()) <= depth
        siblings = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings)


def test_nothing_is_guessed_behind_an_end_token(stored, row):
    drafter = stored([[1, 2, 3, 4]])
    assert guess(drafter, row([1], VOCAB)).tree.tokens == (1, 2, 3, 4)
    assert guess(drafter, row([1], VOCAB, eos=frozenset({3}))).tree.tokens == (1, 2, 3)


@pytest.mark.parametrize("content", ["nothing", "noise", "the text"])
def test_greedy_text_is_plains_whatever_is_stored(stored, run, plain, row, prompts, content):
    target = TableLM.random(VOCAB, seed=1)

    def rows():
        return [row(prompt, VOCAB, max_new_tokens=44, temperature=0.0) for prompt in prompts]

    expected = plain(target, rows())
    rng = np.random.default_rng(0)
    documents = {
        "nothing": [[0]],  # which nothing follows
        "noise": [rng.integers(0, VOCAB, 60).tolist() for _ in range(40)],
        "the text": [[*p, *text] for p, text in zip(prompts, expected, strict=True)],
    }[content]
    got, records = run(target, stored(documents), rows(), depth=10, nodes=64)
    assert got == expected
    if content == "the text":  # 10 accepted and one of the target's own, four times
        assert len(records) == 4
    if content == "nothing":
        assert all(len(draft.tree) == 1 for record in records for draft in record.drafts)


def test_an_adversarial_store_leaves_the_law_alone(stored, run, row):
    """The store always says the unlikeliest token; sampled frequencies are the target's."""
    target = TableLM.random(3, order=1, seed=4, scale=2.0)
    worst = target.logits.argmin(-1).tolist()
    drafter = stored([[a, worst[a], worst[worst[a]]] for a in range(3)] * 3)
    rows = [
        row([0], 3, max_new_tokens=2, temperature=1.0, seed=seed, top_k=0) for seed in range(3000)
    ]
    texts, records = run(target, drafter, rows, depth=3, nodes=6)
    assert any(verdict.path for record in records for verdict in record.verdicts)
    law = target.logits.softmax(-1)
    seen = np.zeros((3, 3))
    for first, second in texts:
        seen[first, second] += 1 / len(texts)
    expected = (law[0][:, None] * law).numpy()
    assert np.abs(seen - expected).sum() / 2 < 0.04


def test_what_cannot_be_used_is_refused(stored, tmp_path):
    lm = TableLM.random(4)
    with pytest.raises(ConfigError, match="without a datastore"):
        Retrieval(lm)
    with pytest.raises(ConfigError, match="no such folder"):
        Retrieval(lm, Retrieval.Config(datastore=tmp_path / "none"))
    drafter = stored([[1, 2]])
    where = drafter.config.datastore
    with pytest.raises(ConfigError, match="a target of 4 tokens"):
        Retrieval(lm, Retrieval.Config(datastore=where))
    for wrong in (
        {"min_match": 0}, {"min_match": 5, "max_match": 4}, {"occurrences": 0}, {"max_match": 33},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Retrieval(TableLM.random(VOCAB), Retrieval.Config(datastore=where, **wrong))
    with pytest.raises(ConfigError, match="another tokenizer"):
        drafter.check_vocabulary({"a": 0, "b": 11})


def test_a_tokenizer_may_have_more_ids_than_its_model(tmp_path, row):
    """What the ids mean decides whose they are; none beyond the model's is guessed."""
    words = {f"w{n}": n for n in range(VOCAB + 2)}
    store = Datastore.create(tmp_path / "d", Vocabulary.of(words))
    store.add([[1, 2, VOCAB, 3]] * 3 + [[1, 2, 4, VOCAB + 1], [5, VOCAB]])
    drafter = Retrieval(TableLM.random(VOCAB), Retrieval.Config(datastore=store.folder))
    drafter.check_vocabulary(words)
    assert guess(drafter, row([1, 2], VOCAB)).tree.tokens == (2, 4)
    assert guess(drafter, row([5], VOCAB)).tree.tokens == (5,)
    with pytest.raises(ConfigError, match="another tokenizer"):
        drafter.check_vocabulary({f"v{n}": n for n in range(VOCAB + 2)})


def test_only_what_is_sorted_bounds_a_match(stored, row):
    """A datastore's suffixes are in order of their first tokens only; a text is read as it is."""
    text = np.random.default_rng(0).integers(0, 2, 300).tolist()
    longest = stored([text], max_match=32)
    for at in range(200):
        found = longest.source.look_up(row(text[at : at + 32], VOCAB), Budget(1, 1))
        assert found.length == 32 and found.paths.tolist() == [[text[at + 32]]]
    assert TextSource(Retrieval.Config(max_match=33), VOCAB).config.max_match == 33

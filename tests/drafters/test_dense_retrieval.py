from dataclasses import replace

import numpy as np
import pytest

from foretoken.datastore.capture import capture
from foretoken.datastore.dense import write
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.drafters.dense_retrieval import DenseRetrieval
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.types import Budget

VOCAB = 12


@pytest.fixture
def keyed(tmp_path):
    """Makes the drafter of a target over texts that this target has read."""

    def make(target, documents, dims=VOCAB, dtype="float8_e4m3", **options):
        where = tmp_path / f"k{len(list(tmp_path.iterdir()))}"
        known = Vocabulary.of_ids(VOCAB)
        write(where, capture(target, documents, known, dims=dims, dtype=dtype))
        return DenseRetrieval(target, DenseRetrieval.Config(keys=where, **options))

    return make


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own_and_comes_sooner(keyed, run, plain, row, prompts, temperature):
    target = TableLM.random(VOCAB, seed=1)

    def rows():
        return [row(p, VOCAB, max_new_tokens=44, temperature=temperature, seed=4) for p in prompts]

    expected = plain(target, rows())
    texts = [[*p, *t] for p, t in zip(prompts, expected, strict=True)]
    got, records = run(target, keyed(target, texts), rows(), depth=10, nodes=32)
    assert got == expected
    assert len(records) < 25, "what was written is found again by its states"
    assert target.rows_held == 0


def test_few_bits_cost_guesses_and_nothing_else(keyed, run, plain, row, prompts):
    target = TableLM.random(VOCAB, seed=1)

    def rows():
        return [row(p, VOCAB, max_new_tokens=44, temperature=0.0) for p in prompts]

    expected = plain(target, rows())
    texts = [[*p, *t] for p, t in zip(prompts, expected, strict=True)]
    steps = {}
    for dims, dtype in ((VOCAB, "float32"), (VOCAB, "float8_e4m3"), (1, "binary")):
        got, records = run(target, keyed(target, texts, dims, dtype), rows(), depth=10, nodes=8)
        assert got == expected
        steps[dims, dtype] = len(records)
    assert abs(steps[VOCAB, "float8_e4m3"] - steps[VOCAB, "float32"]) <= 3
    assert steps[1, "binary"] > steps[VOCAB, "float32"]


def test_what_cannot_be_used_is_refused(keyed):
    target = TableLM.random(VOCAB, seed=1)
    drafter = keyed(target, [[1, 2, 3, 4]])
    where = drafter.config.keys
    with pytest.raises(ConfigError, match="without keys"):
        DenseRetrieval(target)
    with pytest.raises(ConfigError, match="a target of 4 tokens"):
        DenseRetrieval(TableLM.random(4), DenseRetrieval.Config(keys=where))
    with pytest.raises(ConfigError, match="13 hidden numbers"):
        DenseRetrieval(TableLM.random(13), DenseRetrieval.Config(keys=where))
    for wrong in ({"neighbours": 0}, {"sharpness": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DenseRetrieval(target, DenseRetrieval.Config(keys=where, **wrong))
    with pytest.raises(ConfigError, match="another tokenizer"):
        drafter.check_vocabulary({"a": 0, "b": 11})


def test_keys_of_a_layer_that_the_target_lacks_are_refused(tmp_path):
    deep, flat = TableLM.random(VOCAB, seed=1), TableLM.random(VOCAB, seed=1, layers=2)
    known = Vocabulary.of_ids(VOCAB)
    write(tmp_path / "keys", capture(deep, [[1, 2, 3, 4]], known, dims=2, tap=3))
    with pytest.raises(ConfigError, match="2 layers"):
        DenseRetrieval(flat, DenseRetrieval.Config(keys=tmp_path / "keys"))


def test_a_tokenizer_may_have_more_ids_than_its_model(tmp_path, row):
    """What the ids mean decides whose they are; none beyond the model's is guessed."""
    target, words = TableLM.random(VOCAB, seed=1), {f"w{n}": n for n in range(VOCAB + 2)}
    found = capture(target, [[1, 2, 3, 4, 5]], Vocabulary.of(words), dims=2)
    tokens = np.where(found.tokens == 4, np.uint32(VOCAB), found.tokens)  # one it has no score for
    write(tmp_path / "keys", replace(found, tokens=tokens))
    drafter = DenseRetrieval(target, DenseRetrieval.Config(keys=tmp_path / "keys"))
    drafter.check_vocabulary(words)
    [seen] = target.prefill([asked := row([1, 2], VOCAB)], drafter.traits.taps, last=1)
    drafter.start(asked, seen)
    assert drafter.propose_one(asked, Budget(4, 4)).tree.tokens == (2, 3)
    with pytest.raises(ConfigError, match="another tokenizer"):
        drafter.check_vocabulary({f"v{n}": n for n in range(VOCAB + 2)})

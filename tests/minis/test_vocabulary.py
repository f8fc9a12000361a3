"""The minis' tokenizer."""

import pytest

from foretoken.minis import vocabulary
from foretoken.minis.corpus import code_modules, texts


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.learn(texts(seed=0, count=20), 512)


@pytest.mark.parametrize(
    "text", ["Mia has 12 pears.", "Zoë — 東京 ☃\n\ttabs  spaces", "", "x = {'a': 1}\n"]
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_every_text_begins_with_the_begin_token_and_digits_are_single(tokenizer):
    ids = tokenizer("2048").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert [tokenizer.decode([i]) for i in ids[1:]] == list("2048")


def test_special_tokens_are_defined_and_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert len(again) == 512
    assert (again.bos_token, again.eos_token, again.pad_token) == ("<s>", "</s>", "<pad>")
    assert again("Mia has 12").input_ids == tokenizer("Mia has 12").input_ids


def test_held_out_modules_are_not_trained_on():
    train, held_out = code_modules("train"), code_modules("valid")
    assert train and held_out
    assert not set(train) & set(held_out)

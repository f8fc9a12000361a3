"""Procedural tasks: the same for the same seed, disjoint splits, checked by what they state."""

import random

import pytest

from foretoken.errors import ConfigError
from foretoken.minis import tasks
from foretoken.minis.families import translation

families = pytest.mark.parametrize("family", tasks.FAMILIES)


@families
def test_same_seed_same_examples(family):
    first = tasks.examples(family, "test", 20, seed=3)
    assert first == tasks.examples(family, "test", 20, seed=3)
    assert first != tasks.examples(family, "test", 20, seed=4)


@families
def test_no_held_out_prompt_is_ever_a_training_prompt(family):
    prompts = {s: {e.prompt for e in tasks.examples(family, s, 150)} for s in tasks.SPLITS}
    assert not prompts["train"] & prompts["valid"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["valid"] & prompts["test"]
    for split, found in prompts.items():
        assert {tasks.split_of(prompt) for prompt in found} == {split}


@families
def test_checks_accept_the_answer_and_reject_wrong_ones(family):
    examples = tasks.examples(family, "train", 60)
    for i, example in enumerate(examples):
        assert example.check(example.answer)
        assert not example.check("")
        for fact in example.facts:
            assert not example.check(example.answer.replace(fact, "nothing"))
        for wrong in example.wrong:
            assert not example.check(f"{example.answer} Or {wrong}.")
        other = examples[i - 1]
        assert example.facts == other.facts or not example.check(other.answer)


@families
def test_prompts_wear_the_frame_and_turns_hold_what_the_user_said(family):
    for example in tasks.examples(family, "test", 20):
        assert example.prompt.startswith(f"### Task: {family}\n")
        assert example.prompt.endswith("### Answer:\n")
        assert all(turn in example.prompt for turn in example.turns)
        assert len(example.turns) == (2 if family == "dialogue" else 1)


def test_a_whole_word_is_needed():
    example = tasks.examples("mathematical reasoning", "test", 1)[0]
    (fact,) = example.facts
    assert example.check(f"So {fact}.")
    assert not example.check(f"So {fact}x.")


def test_adjectives_follow_their_noun_in_velan():
    words = "the old baker sees a lamp".split()
    velan = [translation.LEXICON[w] for w in words]
    assert translation.translate(words) == [velan[0], velan[2], velan[1], *velan[3:]]
    assert len(set(translation.LEXICON.values())) == len(translation.LEXICON)


def test_sums_in_worked_answers_are_right():
    for example in tasks.examples("mathematical reasoning", "train", 100):
        for part in example.answer.split(". "):
            if " = " in part:
                left, result = part.rstrip(".").split(" = ")
                a, sign, b = left.split()[-3:]
                right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
                assert int(result) == right[sign]


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="dialogue"):
        tasks.examples("poetry")
    with pytest.raises(ConfigError, match="valid"):
        next(tasks.stream("dialogue", "dev", random.Random(0)))

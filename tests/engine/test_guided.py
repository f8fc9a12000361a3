"""Guided texts: they match, they end with their grammar, and speculation changes none of them."""

import asyncio
import json
import re
import sys

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.coins import SeededCoins
from foretoken.engine.foretold import Foretelling
from foretoken.engine.guided import KEPT_TEXT, Grammar, Grammars
from foretoken.errors import ConfigError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob", "Christine"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}
LITERAL = {"regex": r'\{"first_name_of_the_author": "[a-z]{1,4}", "published": (true|false)\}'}
PROMPTS = ["Question: who is it?\nAnswer: ", "def f(", "The river", "1 + 1 = "]
METHODS = ("chain", "tree", "prompt-lookup", "auto", "hybrid", "auto-draft", "pearl")


@pytest.fixture(scope="module")
def plain():
    with foretoken.load("text-target", "plain", kernels="dense", compile="off") as session:
        yield session


@pytest.fixture(scope="module")
def drafted():
    with foretoken.load(
        "text-target", "chain", draft="text-draft", kernels="dense", compile="off",
        controller="fixed",
    ) as session:  # fmt: skip
        yield session


def is_person(text: str) -> bool:
    found = json.loads(text)
    name, age, tags, note = found["name"], found["age"], found["tags"], found["note"]
    return (
        list(found) == ["name", "age", "tags", "note"]
        and name in PERSON["properties"]["name"]["enum"]
        and type(age) is int
        and 0 <= age <= 120
        and len(tags) <= 2
        and set(tags) <= {"red", "green"}
        and isinstance(note, str)
        and len(note) <= 12
    )


@pytest.mark.parametrize("method", METHODS)
def test_speculation_changes_no_guided_text(plain, drafted, method):
    """Ragged batches in which guided and free rows sit together."""
    guided = [{"json": PERSON}, None, LITERAL, {"choice": ["yes", "no", "no idea"]}]
    session = drafted.using(method, controller="fixed")
    expected = plain.generate(PROMPTS, 40, guided=guided)
    found = session.generate(PROMPTS, 40, guided=guided)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert [r.finish_reason for r in found] == ["stop", expected[1].finish_reason, "stop", "stop"]
    assert found[0].stats.accepted > 0
    alone = session.generate(PROMPTS[2], 40, guided=LITERAL)
    assert alone.tokens == found[2].tokens


@pytest.mark.parametrize("method", ["chain", "tree"])
def test_a_seeds_guided_text_is_the_same_in_company(drafted, method):
    guided = [{"json": PERSON}, None, LITERAL, {"json": PERSON}]
    session = drafted.using(method, controller="fixed")
    together = session.generate(PROMPTS, 32, temperature=1.0, seed=11, guided=guided)
    for i in (0, 3):
        alone = session.generate(PROMPTS[i], 32, temperature=1.0, seed=11 + i, guided=guided[i])
        assert alone.tokens == together[i].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_parses_and_validates(drafted, temperature):
    seeds = 3 if temperature == 0.0 else 24
    results = drafted.generate(
        ["Answer: "] * seeds, 90, temperature=temperature, seed=7, guided={"json": PERSON}
    )
    assert all(r.finish_reason == "stop" and is_person(r.text) for r in results)
    assert temperature == 0.0 or len({r.text for r in results}) > 12
    again = drafted.generate("Answer: ", 90, temperature=temperature, seed=9, guided=as_text())
    assert again.text == results[2].text


def as_text():
    return {"json": json.dumps(PERSON)}


def test_whole_forced_literals_take_fewer_steps_and_no_draft(plain, drafted):
    expected = plain.generate(PROMPTS[0], 60, guided=LITERAL)
    found = drafted.generate(PROMPTS[0], 60, guided=LITERAL)
    assert found.tokens == expected.tokens and re.fullmatch(LITERAL["regex"], found.text)
    assert expected.stats.target_steps == len(expected.tokens)
    assert found.stats.target_steps <= len(expected.tokens) // 3
    first = found.steps[0]
    assert first.accepted >= 6, "the literal, of which the draft model was asked nothing"


def test_a_draft_model_is_not_asked_about_forced_tokens(drafted):
    asked = []
    model = drafted.engine.drafter.model
    grow = model.grow

    def noting(rows, tokens, parents, taps=()):
        asked.append([len(row.tokens) for row in rows])
        return grow(rows, tokens, parents, taps)

    model.grow = noting
    try:
        result = drafted.generate("Answer: ", 40, guided={"choice": ["an entirely forced text"]})
    finally:
        del model.grow
    assert result.text == "an entirely forced text" and result.stats.target_steps == 1
    assert asked == []


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,6}( [0-9]{1,2})?"}, r"[A-Z][a-z]{2,6}( [0-9]{1,2})?"),
        ({"choice": ["naïve", 'a "quoted"\nline', "yes", "yes, sir"]}, None),
        ({"grammar": 'start: "<" WORD ">" \nWORD: /[a-z]{1,5}/'}, r"<[a-z]{1,5}>"),
        ({"grammar": 'root ::= "(" [0-9]{1,3} ")"'}, r"\([0-9]{1,3}\)"),
        ({"json": True}, None),
    ],
)
def test_every_kind_of_grammar(drafted, guided, pattern):
    for seed in range(4):
        result = drafted.generate(PROMPTS[2], 60, temperature=1.0, seed=seed, guided=guided)
        if "choice" in guided:
            assert result.text in guided["choice"]
        elif pattern:
            assert re.fullmatch(pattern, result.text)
        elif result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)
        else:
            assert result.text.startswith("{")


def test_the_end_is_possible_where_the_grammar_may_end_and_nowhere_else(drafted):
    """Greedily, with a bias for the end token that nothing else could stand against."""
    [end] = drafted.eos
    eager = {"logit_bias": {end: 100.0}, "guided": {"regex": "ab(ab)?(cd)*"}}
    result = drafted.generate(PROMPTS[0], 30, **eager)
    assert result.text == "ab" and result.tokens[-1] == end and result.finish_reason == "stop"
    never = drafted.generate(PROMPTS[0], 30, ignore_eos=True, **eager)
    assert end not in never.tokens and never.finish_reason == "length"
    closed = drafted.generate(PROMPTS[0], 30, ignore_eos=True, guided={"regex": "ab(ab)?"})
    assert closed.text == "abab" and closed.finish_reason == "stop"
    at_least = drafted.generate(PROMPTS[0], 30, min_new_tokens=20, guided={"choice": ["ab cd"]})
    assert at_least.text == "ab cd" and at_least.finish_reason == "stop"


def test_end_tokens_that_change_after_load_end_guided_texts(drafted, monkeypatch):
    end = drafted.tokenizer.pad_token_id
    assert end not in drafted.eos
    monkeypatch.setattr(drafted.generation.model.generation_config, "eos_token_id", end)
    eager = {"logit_bias": {end: 100.0}, "guided": {"regex": "ab(ab)?(cd)*"}}
    result = drafted.generate(PROMPTS[0], 30, **eager)
    assert result.text == "ab" and result.tokens[-1] == end and result.finish_reason == "stop"


def test_stop_texts_and_caps_end_a_guided_text_too(drafted):
    assert (
        drafted.generate("x", 40, guided={"json": PERSON}, stop='"age"').text
        == (drafted.generate("x", 40, guided={"json": PERSON}).text.split('"age"')[0])
    )
    capped = drafted.generate("x", 3, guided={"choice": ["an entirely forced text"]})
    assert len(capped.tokens) == 3 and capped.finish_reason == "length"


def test_streams_and_tasks(drafted):
    whole = drafted.generate(PROMPTS[0], 60, guided={"json": PERSON})
    stream = drafted.stream(PROMPTS[0], 60, guided={"json": PERSON})
    assert "".join(piece.text for piece in stream) == whole.text
    assert stream.result.finish_reason == "stop"

    async def both():
        return await asyncio.gather(
            drafted.agenerate(PROMPTS[0], 60, guided={"json": PERSON}),
            drafted.agenerate(PROMPTS[1], 20),
        )

    guided, free = asyncio.run(both())
    assert guided.tokens == whole.tokens
    assert free.tokens == drafted.generate(PROMPTS[1], 20).tokens


def test_a_prediction_is_read_once_for_all_rows_that_share_it(drafted):
    """Only what became of it is a row's own; of one that was read before, a beginning may do."""
    rows = drafted.rows(["x", "y", "z"], 8, prediction="the same text for all of them")
    first, *others = [row.prediction for row in rows]
    assert all(one.tokens is first.tokens and one.ends is first.ends for one in others)
    assert len({id(one.odds) for one in (first, *others)}) == 3
    read = drafted.foretelling.expected("the same text for all of them", 4)
    assert read.tokens == first.tokens[:4]
    [row] = drafted.rows(["x"], 8, prediction=read)
    assert row.prediction.tokens is read.tokens


def test_a_predicted_text_ends_before_ids_that_the_model_has_no_scores_for():
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [3, 8, 9, 2] if text == "long" else [9]}

    foretelling = Foretelling(tokenizer, 9, frozenset())
    assert foretelling.ids("long") == (3, 8) and foretelling.expected("beyond").tokens == ()


def test_beams_match_their_grammar(plain):
    session = plain.using("beam-sampling", num_beams=3)
    guided = {"choice": ["red", "green", "blue sky"]}
    result = session.generate("x", 20, temperature=1.0, seed=1, guided=guided)
    assert set(result.texts) <= set(guided["choice"])
    for options in ({"guided": guided, "ignore_eos": True}, {"prediction": "red"}):
        with pytest.raises(ConfigError, match="beams"):
            session.generate("x", 20, **options)


def test_options_that_forbid_what_the_grammar_leaves_end_their_own_row(drafted):
    ids = drafted.tokenizer("yes", add_special_tokens=False)["input_ids"]
    other = drafted.stream(PROMPTS[1], 12)
    next(other)
    with pytest.raises(ConfigError, match="forbid every token"):
        drafted.generate("x", 9, guided={"choice": ["yes"]}, banned_tokens=ids)
    rest = [token for piece in other for token in piece.tokens]
    assert drafted.generate(PROMPTS[1], 12).tokens[-len(rest) :] == rest


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        ("[0-9]+", "mapping"),
        ({}, "names nothing"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regexp": "a"}, "did you mean regex"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": ""}, "at least one character"),
        ({"regex": "(b{0})"}, "empty text"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": []}, "list of texts"),
        ({"json": "{no"}, "no JSON"),
        ({"json": 3}, "JSON object"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater"),
        ({"grammar": "start: foo"}, "foo"),
        ([{"regex": "a"}, {"regex": "b"}], "1 prompt"),
    ],
)
def test_a_bad_grammar_is_refused_before_any_work(drafted, guided, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        drafted.rows(["x"], 8, guided=guided)
    told = refused.value
    assert told.asked and told.possible and told.do
    assert drafted.engine.idle


def test_what_is_missing_is_said(drafted, make_llama, monkeypatch):
    unread = foretoken.load(make_llama(61), "plain", kernels="dense", compile="off")
    with pytest.raises(ConfigError, match="no tokenizer"):
        unread.generate([1, 2], 4, guided={"regex": "a"})
    monkeypatch.delitem(sys.modules, "foretoken.engine.guided")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    told = Foretelling(drafted.tokenizer, drafted.target.vocab_size, drafted.eos)
    with pytest.raises(ConfigError, match=r"foretoken\[guided\]"):
        _ = told.grammars


def test_masks_follow_from_the_tokens_alone(drafted):
    """A matcher that was led to and fro through a tree says what a fresh one says."""
    width = drafted.target.vocab_size
    grammars = Grammars(drafted.tokenizer, width, drafted.eos)
    coins = SeededCoins(1)
    for asked in ({"json": PERSON}, {"json": True}, {"regex": "(foo|[a-z]{2,5} [0-9]+)+[.]?"}):
        text, path = [5, 6, 7], ()
        wanderer = grammars.begin(asked, len(text), drafted.eos)
        for _ in range(120):
            following = wanderer.following(wanderer.behind(text) + path)
            fresh = grammars.begin(asked, 3, drafted.eos).following((*text[3:], *path))
            assert following.only == fresh.only and following.over == fresh.over
            if fresh.forbidden is not None:
                assert following.forbidden.equal(fresh.forbidden)
            open_ = [following.only]
            if following.forbidden is not None:
                open_ = np.flatnonzero(~following.forbidden.numpy()).tolist()
            if following.over or following.only in drafted.eos or (path and coins.flip(0.4)):
                path = path[: len(path) // 2]  # back to where other branches leave
                if path and coins.flip(0.3) and not following.over:
                    text.append(path[0])
                    assert not wanderer.complete(text)
                    path = path[1:]
                continue
            token = open_[coins.draw(torch.full((len(open_),), 1.0 / len(open_)))]
            if token not in drafted.eos:
                path = (*path, token)


def lettered(letters, *pieces):
    """Grammars over these letters, some of them joined to pieces, and two end tokens."""
    vocab = {word: i for i, word in enumerate([*letters, *pieces])}
    joined = [(piece[:-1], piece[-1]) for piece in pieces]
    words = Tokenizer(models.BPE(vocab=vocab, merges=joined))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", additional_special_tokens=["<turn>"]
    )
    size = len(tokenizer)
    return Grammars(tokenizer, size, frozenset(range(len(vocab), size)))


def test_a_mask_is_never_that_of_another_branch():
    """The same word is waited for in both, at one depth; only what follows it differs."""
    grammars = lettered("abx12")
    a, b, x, one, two = range(5)
    asked = {"grammar": 'start: "a" X "1" | "b" X "2"\nX: /x+/'}
    led, fresh = (grammars.begin(asked, 0, frozenset(grammars.ends)) for _ in range(2))
    for path, last in (((a, x), one), ((b, x), two), ((a, x, x), one), ((b, x, x), two)):
        assert (~led.following(path).forbidden).nonzero().flatten().tolist() == [x, last]
    assert led.following((b, x)).forbidden.equal(fresh.following((b, x)).forbidden)


def test_a_matcher_that_gives_up_does_not_end_its_text():
    grammars = lettered("ab()", "ab", "ba")
    rules = 'start: one+\none: A | B | "(" one ")"\nA: "a"\nB: "b"'
    limits = LLParserLimits(step_max_items=1)
    matcher = LLMatcher(grammars.words, rules, log_level=0, limits=limits)
    assert not matcher.is_error()
    grammar = Grammar(matcher, 0, grammars.ends, [], grammars.width)
    with pytest.raises(ConfigError, match="too complex"):
        grammar.following(())


def test_a_text_that_the_tokenizer_cannot_write_does_not_end_halfway():
    grammars = lettered("abc")
    ends = frozenset(grammars.ends)
    with pytest.raises(ConfigError):
        grammars.begin({"choice": ["abz"]}, 0, ends).following((0, 1))
    halfway = grammars.begin({"choice": ["ay", "az"]}, 0, ends)
    with pytest.raises(ConfigError, match="no token that may come next"):
        halfway.following((0,))
    with pytest.raises(ConfigError, match="no token that may come next"):
        grammars.begin({"choice": ["y", "z"]}, 0, ends)


def test_behind_a_finished_text_all_end_tokens_are_left_and_no_others():
    grammars = lettered("abc")
    ends = grammars.ends
    grammar = grammars.begin({"choice": ["ab"]}, 0, frozenset(ends))
    scores = torch.zeros(2, grammars.width)
    scores[1, ends] = -torch.inf  # by another option: nobody waits for what is then written
    grammar.restrict([0, 1], [(), ()], scores)
    assert len(ends) == 2
    assert scores[0].isfinite().nonzero().flatten().tolist() == ends
    assert scores[1].isfinite().nonzero().flatten().tolist() == [0, 1, 2]


def test_a_choice_of_thousands_of_texts(drafted):
    texts = [f"{i:04d}" for i in range(2500)]
    result = drafted.generate("x", 9, temperature=1.0, seed=2, guided={"choice": texts})
    assert result.text in texts and result.finish_reason == "stop"


def test_what_is_kept_of_grammars_is_bounded_by_their_texts(drafted):
    """Not by their number alone: each of these has a megabyte, of which nothing is written."""
    grammars = Grammars(drafted.tokenizer, drafted.target.vocab_size, drafted.eos)
    for number in range(12):
        schema = {"type": "boolean", "description": f"{number} " + "x" * (1 << 20)}
        grammars.begin({"json": schema}, 0, drafted.eos)
    sizes = [size for _, size in grammars.read.values()]
    assert 1 < len(sizes) < 9 and min(sizes) > 1 << 20
    assert sum(sizes) == grammars.kept <= KEPT_TEXT
    last = grammars.matcher({"json": schema})
    assert grammars.matcher({"json": schema}) is last, "it is kept"


def test_a_grammar_that_was_read_before_is_followed_as_any(drafted):
    asked = {"choice": ["yes", "no", "no idea"]}
    read = drafted.foretelling.grammar(asked)
    assert drafted.foretelling.grammar(read) is read
    expected = [one.tokens for one in drafted.generate(PROMPTS, 8, guided=asked)]
    for _ in range(2):  # texts take copies of it
        assert [one.tokens for one in drafted.generate(PROMPTS, 8, guided=read)] == expected

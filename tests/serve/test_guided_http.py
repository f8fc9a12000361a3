"""Texts that match a grammar or are foretold, through the server: as in Python, however asked."""

import json
import re

import pytest

import foretoken.engine.guided
from foretoken.serve.asking import guided_of, prompts_of, rows_of
from foretoken.serve.wire.errors import Refusal
from foretoken.serve.wire.requests import CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "published": {"type": "boolean"},
    },
    "required": ["name", "age", "published"],
    "additionalProperties": False,
}
REGEX = "[a-c]{2,5} and then [0-9]{1,3}!"
CHOICE = ["the first of them", "the second"]
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
KINDS = {  # what is asked through the client, and in Python
    "schema": ({"response_format": FORM}, {"json": SCHEMA}),
    "object": ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
    "regex": ({"extra_body": {"guided_regex": REGEX}}, {"regex": REGEX}),
    "choice": ({"extra_body": {"guided_choice": CHOICE}}, {"choice": CHOICE}),
}
METHODS = ("chain", "tree", "auto-draft")
MOST = 64


@pytest.fixture(scope="module", params=["chain", *(
    pytest.param(one, marks=pytest.mark.slow) for one in METHODS[1:]
)])  # fmt: skip
def guiding(request, make_session, running):
    """A server of each method."""
    options = {} if request.param == "auto-draft" else {"controller": "fixed", "depth": 3}
    with make_session(request.param, **options) as session, running(session) as server:
        yield server


def asked(kind: str, temperature: float, **more) -> dict:
    """Two texts of a kind, for the client."""
    fields = {**KINDS[kind][0]}
    extra = {**fields.pop("extra_body", {}), **more.pop("extra_body", {})}
    most = {"max_tokens": MOST, "temperature": temperature, "seed": 5, "n": 2}
    return {"model": "tiny", "messages": MESSAGES, **most, **fields, "extra_body": extra, **more}


def wanted(session, kind: str, temperature: float) -> list:
    guided = KINDS[kind][1]
    return session.generate([MESSAGES] * 2, MOST, guided=guided, temperature=temperature, seed=5)


def matches(kind: str, text: str) -> bool:
    if kind == "schema":
        found = json.loads(text)
        ages = type(found["age"]) is int and 0 <= found["age"] <= 120
        return list(found) == SCHEMA["required"] and ages and type(found["published"]) is bool
    if kind == "object":
        return isinstance(json.loads(text), dict)
    return text in CHOICE if kind == "choice" else re.fullmatch(REGEX, text) is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_guided_texts_match_and_are_those_of_the_session(guiding, kind, temperature) -> None:
    told = wanted(guiding.session, kind, temperature)
    whole = guiding.client().chat.completions.create(
        **asked(kind, temperature, logprobs=True, top_logprobs=2)
    )
    for choice, one in zip(whole.choices, told, strict=True):
        text = choice.message.content
        assert text == one.text and choice.finish_reason == one.finish_reason
        assert choice.finish_reason == "length" or matches(kind, text)
        logs = choice.logprobs.content
        written = b"".join(bytes(token.bytes) for token in logs)
        # A text that was cut ends in the middle of a character, perhaps; an end token is no text.
        assert written.decode(errors="replace").removesuffix("<eos>") == text
        assert all(token.logprob <= 0.0 and len(token.top_logprobs) == 2 for token in logs)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"} or kind == "object"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_guided_texts_say_where_each_token_came_from(guiding, kind, temperature) -> None:
    """What a grammar forces was guessed and stands; nothing forced is ever corrected."""
    told = wanted(guiding.session, kind, temperature)
    fields = asked(kind, temperature, extra_body={"include_speculation": True})
    texts, marked, kinds = ["", ""], ["", ""], [[], []]
    accepted, ended = [0, 0], {}
    stream = guiding.client().chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for choice, own in ((one, chunk.model_extra.get("foretoken", {})) for chunk in chunks
                        for one in chunk.choices):  # fmt: skip
        at = choice.index
        texts[at] += choice.delta.content or ""
        for token in own.get("tokens", ()):
            marked[at] += token["text"]
            kinds[at].append(token["kind"])
        accepted[at] += own.get("accepted", 0)
        if choice.finish_reason:
            ended[at] = choice.finish_reason, own["stats"]["accepted"]
    assert texts == marked == [one.text for one in told]
    assert ended == {at: (one.finish_reason, accepted[at]) for at, one in enumerate(told)}
    assert chunks[-1].usage.completion_tokens == sum(len(one.tokens) for one in told)
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 0  # nothing was predicted by the client
    for text, marks in zip(texts, kinds, strict=True):
        assert set(marks) <= {"guessed", "corrected", "own"}
        if kind == "schema":  # most of it is forced: punctuation and keys
            assert marks.count("guessed") > len(marks) // 2 and len(text) > 30


def test_a_completion_is_guided_as_well(guiding) -> None:
    client = guiding.client()
    for kind, (_, guided) in KINDS.items():
        one = guiding.session.generate("a", MOST, guided=guided, temperature=0.0)
        fields = asked(kind, 0.0)
        del fields["messages"], fields["n"]
        form = {k: fields.pop(k) for k in ("response_format",) if k in fields}
        extra = {**fields.pop("extra_body"), **form}
        told = client.completions.create(prompt="a", **fields, extra_body=extra, logprobs=1)
        assert told.choices[0].text == one.text
        assert len(told.choices[0].logprobs.tokens) == len(one.tokens)


def test_a_stop_and_a_cap_end_a_guided_text(guiding) -> None:
    client = guiding.client()
    told = client.chat.completions.create(**asked("regex", 0.0, stop=[" then"]))
    assert all(one.message.content.endswith(" and") for one in told.choices)
    short = client.chat.completions.create(**asked("schema", 0.0, max_tokens=5))
    assert [one.finish_reason for one in short.choices] == ["length"] * 2
    assert short.usage.completion_tokens == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("right", [True, False])
def test_a_prediction_changes_no_greedy_text_and_its_tokens_are_counted(
    guiding, temperature, right
) -> None:
    """A right one saves steps; usage tells how much of the prediction stood, as at OpenAI."""
    options = {"temperature": temperature, "seed": 3, "ignore_eos": True}
    one = guiding.session.generate(MESSAGES, 40, **options)
    words = one.text if right else "something else entirely, which is not written"
    fields = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": temperature,
        "seed": 3, "prediction": {"type": "content", "content": words},
        "extra_body": {"ignore_eos": True, "include_speculation": True},
    }  # fmt: skip
    client = guiding.client()
    whole = client.chat.completions.create(**fields)
    text = whole.choices[0].message.content
    assert temperature or text == one.text  # sampled, a drawn chain uses other coins
    stats = whole.model_extra["foretoken"]["stats"]
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == stats["accepted_prediction"]
    assert details.rejected_prediction_tokens == stats["rejected_prediction"]
    assert stats["accepted_prediction"] <= stats["accepted"]
    assert stats["rejected_prediction"] <= stats["drafted"] - stats["accepted"]
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    told = chunks[-1].usage.completion_tokens_details
    assert told.accepted_prediction_tokens + told.rejected_prediction_tokens > 0
    assert right or told.accepted_prediction_tokens < 8


def test_a_grammar_and_a_prediction_go_together(guiding) -> None:
    one = wanted(guiding.session, "schema", 0.0)[0]
    for words in (one.text, '{"name": "Bob", "age": 7', "no such thing"):
        prediction = {"type": "content", "content": words}
        told = guiding.client().chat.completions.create(
            **asked("schema", 0.0, prediction=prediction)
        )
        assert [choice.message.content for choice in told.choices] == [one.text] * 2


def completion(**fields) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))


@pytest.mark.parametrize(
    ("outputs", "guided"),
    [
        ({"json": SCHEMA}, {"json": SCHEMA}),
        ({"json": json.dumps(SCHEMA), "choice": None}, {"json": json.dumps(SCHEMA)}),
        ({"regex": REGEX, "disable_any_whitespace": True}, {"regex": REGEX}),
        ({"choice": CHOICE}, {"choice": CHOICE}),
        ({"json_object": True}, {"json": {"type": "object"}}),
        ({"json_object": False, "whitespace_pattern": None}, None),
        ({}, None),
    ],
)
def test_structured_outputs_are_what_guided_fields_are(outputs, guided) -> None:
    assert guided_of(completion(structured_outputs=outputs)) == guided


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "response_format"),
    ],
)
def test_structured_outputs_that_are_not_there_are_refused(fields, param) -> None:
    with pytest.raises(Refusal) as refused:
        guided_of(completion(**fields))
    assert refused.value.param == param


def test_structured_outputs_guide_a_text(guiding) -> None:
    one = guiding.session.generate("a", MOST, guided={"choice": CHOICE}, temperature=0.0)
    fields = {"prompt": "a", "temperature": 0, "max_tokens": MOST}
    told = guiding.post(
        "/v1/completions", json={**fields, "structured_outputs": {"choice": CHOICE}}
    )
    assert told.json()["choices"][0]["text"] == one.text and one.text in CHOICE


def test_a_prediction_is_read_once_for_a_request_and_as_far_as_a_text_can_go(guiding) -> None:
    session = guiding.session
    asked = completion(prompt=["a", "b"], n=3, prediction={"content": "the cat " * 5000})
    rows = rows_of(session, asked, prompts_of(asked), {}, None)
    assert len(rows) == 6 and len({id(row.prediction.ends) for row in rows}) == 1
    assert 0 < len(rows[0].prediction.tokens) <= session.target.max_length


def test_a_grammar_is_read_once_for_a_request(guiding, monkeypatch) -> None:
    texts, read = [], foretoken.engine.guided.grammar_text

    def noting(asked):
        texts.append(read(asked))
        return texts[-1]

    monkeypatch.setattr(foretoken.engine.guided, "grammar_text", noting)
    asked = completion(n=8, response_format=FORM)
    rows = rows_of(guiding.session, asked, prompts_of(asked), {}, None)
    assert len(texts) == 1
    assert len({id(row.params.grammar.matcher) for row in rows}) == 8

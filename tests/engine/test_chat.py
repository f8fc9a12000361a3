"""Chat messages as prompts: the ids of the tokenizer's chat template, alone and in a batch."""

import copy

import pytest

import foretoken
from foretoken.engine.chat import chat_ids
from foretoken.engine.requests import as_batch
from foretoken.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
# as templates of models that see pictures have it
PARTS = (
    "{% for m in messages %}<turn>{{ m['role'] }}: {% for line in m['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "on the cat"}]
LONGER = [
    {"role": "system", "content": "the"},
    {"role": "user", "content": "a cat"},
    {"role": "assistant", "content": "in"},
    {"role": "user", "content": "then"},
]


@pytest.fixture(scope="module")
def chatty(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def session(tiny_pair, chatty):
    with foretoken.load(
        *tiny_pair[:1], "chain", tiny_pair[1], chatty, kernels="dense", depth=5
    ) as session:
        yield session


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_conversation_is_written_by_the_template(chatty):
    text = "<turn>user: on the cat<eos><turn>assistant: "
    assert chat_ids(HELLO, chatty) == ids_of(chatty, text)
    assert chat_ids(tuple(HELLO), chatty) == ids_of(chatty, text)


def test_an_answer_that_was_begun_goes_on(chatty):
    begun = [*HELLO, {"role": "assistant", "content": "in th"}]
    text = "<turn>user: on the cat<eos><turn>assistant: in th"
    assert chat_ids(begun, chatty) == ids_of(chatty, text)


def test_one_conversation_gives_one_result_and_several_a_list(session, chatty):
    alone = [session.generate(messages, 12) for messages in (HELLO, LONGER)]
    assert [out.tokens for out in session.generate([HELLO, LONGER], 12)] == [
        out.tokens for out in alone
    ]
    by_ids = session.generate(chat_ids(HELLO, chatty), 12)
    assert alone[0].tokens == by_ids.tokens
    mixed = session.generate([HELLO, "the cat", chat_ids(LONGER, chatty)], 12)
    assert mixed[0].tokens == alone[0].tokens and mixed[2].tokens == alone[1].tokens


def test_a_stream_takes_a_conversation(session):
    told = "".join(piece.text for piece in session.stream(HELLO, 12))
    assert told == session.generate(HELLO, 12).text


def test_conversations_are_told_from_batches():
    assert as_batch(HELLO) == ([HELLO], False)
    assert as_batch([HELLO, LONGER]) == ([HELLO, LONGER], True)
    assert as_batch([HELLO]) == ([HELLO], True)


def test_without_a_chat_template_the_way_out_is_named(tiny_pair, byte_tokenizer):
    for tokenizer, missing in ((byte_tokenizer, "without a chat template"), (None, "no tokenizer")):
        session = foretoken.load(tiny_pair[0], "plain", tokenizer=tokenizer, kernels="dense")
        with pytest.raises(ConfigError, match=missing):
            session.generate(HELLO, 4)


@pytest.mark.parametrize(
    "messages",
    [
        [{"content": "no role"}],
        [{"role": "user"}],
        [{"role": 3, "content": "x"}],
        [*HELLO, "a text"],
        ["a text", *HELLO],
    ],
    ids=str,
)
def test_broken_messages_are_refused(session, messages):
    with pytest.raises(ConfigError, match=r"role|chat messages"):
        session.generate(messages, 4)


def test_parts_of_text_are_one_text_and_others_are_refused_by_name(session, chatty):
    parts = [{"type": "text", "text": "on the "}, {"type": "text", "text": "cat"}]
    assert chat_ids([{"role": "user", "content": parts}], chatty) == chat_ids(HELLO, chatty)
    shown = [{"type": "image", "url": "x.png"}, *parts]
    with pytest.raises(ConfigError, match="'image'"):
        session.generate([{"role": "user", "content": shown}], 4)


@pytest.mark.parametrize("content", [5, {"text": "a"}, {"type": "text", "text": "a"}], ids=str)
def test_a_content_of_another_type_is_refused_by_name(chatty, content):
    with pytest.raises(ConfigError, match="message 0") as caught:
        chat_ids([{"role": "user", "content": content}], chatty)
    assert f"of type {type(content).__name__}" in str(caught.value)


def test_a_template_that_reads_parts_is_given_parts(chatty):
    reader = copy.deepcopy(chatty)
    reader.chat_template = PARTS
    for messages in (HELLO, LONGER, [*HELLO, {"role": "assistant", "content": "in th"}]):
        assert chat_ids(messages, reader) == chat_ids(messages, chatty)
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        assert chat_ids(parts, reader) == chat_ids(messages, chatty)
    assert "on the cat" in reader.decode(chat_ids(HELLO, reader))


def test_a_template_that_leaves_contents_out_is_refused(chatty):
    silent = copy.deepcopy(chatty)
    silent.chat_template = "{% for m in messages %}<turn>{{ m.role }}<eos>{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out what a user says"):
        chat_ids(HELLO, silent)


def test_what_is_empty_is_answered_and_not_continued(chatty):
    for role in ("user", "tool"):
        text = f"<turn>user: on the cat<eos><turn>{role}: <eos><turn>assistant: "
        assert chat_ids([*HELLO, {"role": role, "content": ""}], chatty) == ids_of(chatty, text)
    with pytest.raises(ConfigError, match="the last one, is an empty one"):
        chat_ids([*HELLO, {"role": "assistant", "content": ""}], chatty)
    called = {"role": "assistant", "content": None, "tool_calls": []}
    with pytest.raises(ConfigError, match="no content"):
        chat_ids([*HELLO, called, *HELLO], chatty)

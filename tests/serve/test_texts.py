"""What is written for a client is what the session writes, whatever is asked for and however."""

import json
import threading

import pytest
import torch
from live_server import DENSE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.serve import answering
from foretoken.serve.logprobs import LEAST, Chosen, Names, chosen_tokens
from foretoken.serve.wire.words import Words
from foretoken.types import Scores, Step, StepTimes, Verdict

PROMPT = "the cat is in the "
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
PARAMETERS = [
    ({}, {}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.2}, {"min_p": 0.2}),
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"presence_penalty": 0.8}, {"presence_penalty": 0.8}),
    ({"frequency_penalty": 0.9}, {"frequency_penalty": 0.9}),
    ({"logit_bias": {"70": 6.0, "71": -100}}, {"logit_bias": {70: 6.0, 71: -100.0}}),
    (
        {"min_tokens": 20, "logit_bias": {"262": 50}},
        {"min_new_tokens": 20, "logit_bias": {262: 50}},
    ),
    ({"ignore_eos": True, "logit_bias": {"262": 9}}, {"ignore_eos": True, "logit_bias": {262: 9}}),
    ({"stop": ["e", "zz"]}, {"stop": ["e", "zz"]}),
    ({"stop": " "}, {"stop": " "}),
    ({"stop": ["e", "a"], "min_tokens": 12}, {"stop": ["e", "a"], "min_new_tokens": 12}),
    ({"speculation": False}, {"guesses": 0}),
    ({"speculation": {"max_tokens": 2}}, {"guesses": 2}),
    ({"priority": 3, "user": "somebody"}, {}),
]
OPENAI = {
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "user",
}


def split(fields):
    """Fields as the openai client takes them: those that it does not know in extra_body."""
    known = {name: value for name, value in fields.items() if name in OPENAI}
    return {**known, "extra_body": {k: v for k, v in fields.items() if k not in OPENAI}}


@pytest.mark.parametrize(("fields", "options"), PARAMETERS, ids=[str(f) for f, _ in PARAMETERS])
def test_every_parameter_does_what_it_does_in_python(served, fields, options) -> None:
    wanted = served.session.generate(PROMPT, 24, **{"temperature": 1.0, "seed": 5, **options})
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "seed": 5, **split(fields)}
    whole = served.client().completions.create(**asked)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage.completion_tokens == len(wanted.tokens)
    pieces = list(served.client().completions.create(**asked, stream=True))
    assert "".join(one.choices[0].text for one in pieces) == wanted.text
    assert [one.choices[0].finish_reason for one in pieces][-1] == wanted.finish_reason


def test_a_chat_goes_through_the_template(served) -> None:
    wanted = served.session.generate(CHAT, 20, temperature=0.0)
    asked = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 20, "temperature": 0}
    whole = served.client().chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text and wanted.text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        served.client().chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [one.choices[0] for one in chunks[:-1]]
    assert "".join(one.delta.content or "" for one in told) == wanted.text
    assert told[-1].finish_reason == wanted.finish_reason
    assert all(one.finish_reason is None for one in told[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {one.id for one in chunks} == {chunks[0].id} and chunks[0].id != whole.id


def test_contents_may_come_in_parts(served) -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    roles = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    whole = served.client().chat.completions.create(messages=roles, **asked)
    assert (
        whole.choices[0].message.content == served.session.generate(CHAT, 12, temperature=0.0).text
    )


def test_several_prompts_and_texts_are_those_of_a_batch(served) -> None:
    prompts = [PROMPT, "on and on"]
    batch = [prompt for prompt in prompts for _ in range(3)]
    wanted = served.session.generate(batch, 10, temperature=1.0, seed=40)
    asked = {"model": "tiny", "prompt": prompts, "n": 3, "seed": 40, "max_tokens": 10}
    whole = served.client().completions.create(**asked)
    assert [one.text for one in whole.choices] == [one.text for one in wanted]
    assert [one.index for one in whole.choices] == list(range(6))
    texts = [""] * 6
    for one in served.client().completions.create(**asked, stream=True):
        texts[one.choices[0].index] += one.choices[0].text
    assert texts == [one.text for one in wanted]
    ids = [served.session.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert whole.usage.prompt_tokens == sum(map(len, ids))
    by_ids = served.client().completions.create(**{**asked, "prompt": ids})
    assert [one.text for one in by_ids.choices] == [one.text for one in wanted]


def test_echo_begins_with_the_prompt(served) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    client = served.client()
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == PROMPT + plain
    stream = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(one.choices[0].text for one in stream) == PROMPT + plain


def words_tokenizer():
    """Marked spaces, of which the decoder takes the first of all, as that of Llama-2 does."""
    words = ["<unk>", "</s>", "▁The", "▁capital", "▁is", "▁Paris"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def test_a_continuation_keeps_the_space_of_its_first_word(make_llama, running) -> None:
    tokenizer, prompt, text = words_tokenizer(), "The capital is", " Paris Paris"
    ids, paris = tokenizer(prompt)["input_ids"], tokenizer.convert_tokens_to_ids("▁Paris")
    assert tokenizer.decode([*ids, paris, paris], skip_special_tokens=True) == prompt + text
    options = {"max_tokens": 2, "temperature": 0, "logit_bias": {str(paris): 100}}
    asked = {"model": "tiny", "prompt": prompt, **options}
    user, own = {"role": "user", "content": prompt}, {"role": "assistant", "content": " capital is"}
    with (
        foretoken.load(make_llama(6), "plain", tokenizer=tokenizer, **DENSE) as session,
        running(session) as server,
    ):
        assert session.generate(prompt, 2, logit_bias={paris: 100.0}).text == text
        ask = server.client().completions.create
        for fields in ({}, {"prompt": ids}, {"echo": True}, {"logprobs": 0}):
            whole = ask(**{**asked, **fields}).choices[0]
            pieces = [one.choices[0].text for one in ask(**{**asked, **fields}, stream=True)]
            assert whole.text == "".join(pieces) == (prompt if "echo" in fields else "") + text
        assert "".join(whole.logprobs.tokens) == text and whole.logprobs.text_offset == [0, 6]
        assert ask(**asked, stop=" Paris").choices[0].text == ""
        for messages, told in (([user], text[1:]), ([{**user, "content": "The"}, own], text)):
            chat = server.client().chat.completions.create(
                model="tiny", messages=messages, **options
            )
            assert chat.choices[0].message.content == told


def test_a_completion_has_sixteen_tokens_and_a_chat_what_the_context_holds(served) -> None:
    client = served.client()
    bias = {"logit_bias": {"262": -100}, "temperature": 0}
    short = client.completions.create(model="tiny", prompt=PROMPT, **bias)
    assert short.usage.completion_tokens == 16 and short.choices[0].finish_reason == "length"
    newer = {"prompt": PROMPT, "max_completion_tokens": 24, "ignore_eos": True}
    usage = served.post("/v1/completions", json=newer).json()["usage"]
    assert usage["completion_tokens"] == 24
    longest = served.session.target.max_length
    long = [{"role": "user", "content": "z" * (longest - 40)}]
    whole = client.chat.completions.create(model="tiny", messages=long, **bias)
    assert whole.usage.total_tokens == longest + 1
    assert whole.choices[0].finish_reason == "length"


def fresh_logprobs(session, ids: list[int], new: list[int]) -> torch.Tensor:
    """Log-softmax of a forward over the whole text, at each new token's place."""
    model = session.target.model
    with torch.no_grad():
        logits = model(torch.tensor([ids + new])).logits[0]
    return logits.log_softmax(-1)[len(ids) - 1 : -1]


@pytest.mark.parametrize("method", ["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_fresh_forward(make_session, running, method, temperature) -> None:
    """Also where rows of a batch accept paths of several lengths, and options change the law."""
    prompts = [PROMPT, "on and on and on", "a"]
    options = {"temperature": temperature, "seed": 3, "presence_penalty": 0.5}
    with make_session(method, controller="fixed") as session:
        wanted = session.generate(prompts, 20, ignore_eos=True, **options)
        with running(session) as server:
            whole = server.client().completions.create(
                model="tiny", prompt=prompts, max_tokens=20, logprobs=4, **options,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        assert sum(result.stats.accepted for result in wanted) > 5, "no path was accepted"
        for prompt, choice, result in zip(prompts, whole.choices, wanted, strict=True):
            laws = fresh_logprobs(session, session.tokenizer(prompt)["input_ids"], result.tokens)
            told = choice.logprobs
            assert len(told.token_logprobs) == 20
            right = laws[range(20), result.tokens]
            assert torch.allclose(torch.tensor(told.token_logprobs), right, atol=2e-4)
            for found, law, token in zip(told.top_logprobs, laws, result.tokens, strict=True):
                ids = sorted({*law.topk(4).indices.tolist(), token})
                best = law[ids].sort(descending=True).values
                values = torch.tensor(sorted(found.values(), reverse=True))
                assert torch.allclose(values, best[: len(values)], atol=2e-4)


def test_streamed_logprobs_are_the_same_and_belong_to_the_text(served) -> None:
    """A stop text that is cut off takes its tokens along."""
    client = served.client()
    text = served.session.generate(PROMPT, 40, temperature=0.0, ignore_eos=True).text
    for stop in (None, text[9:12]):
        asked = {
            "model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop,
            "logprobs": 2, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        whole = client.completions.create(**asked).choices[0]
        told = [one.choices[0] for one in client.completions.create(**asked, stream=True)]
        logs = [one.logprobs for one in told if one.logprobs]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [part for one in logs for part in getattr(one, name)]
            assert parts == getattr(whole.logprobs, name)
        assert whole.text == "".join(one.text for one in told)
        assert all(at < len(whole.text) or not whole.text for at in whole.logprobs.text_offset)
        assert (len(whole.text) == 9) == (stop is not None)


def test_logprobs_of_a_chat_come_with_bytes(served) -> None:
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "temperature": 0}
    client = served.client()
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    entries = whole.logprobs.content
    text = b"".join(bytes(one.bytes) for one in entries).decode(errors="replace")
    assert text == whole.message.content and all(len(one.top_logprobs) == 3 for one in entries)
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    told = [one.choices[0].logprobs for one in stream]
    assert [e for one in told if one for e in one.content] == entries


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_long_answer_is_written_beside_the_event_loop(served, monkeypatch, path) -> None:
    threads, document = [], Words.document

    def noting(self):
        threads.append(threading.current_thread().name)
        return document(self)

    monkeypatch.setattr(Words, "document", noting)
    asked = {"max_tokens": 12, "temperature": 0, "n": 2, "include_speculation": True}
    if path.endswith("chat/completions"):
        asked |= {"messages": CHAT, "logprobs": True, "top_logprobs": 3}
    else:
        asked |= {"prompt": PROMPT, "logprobs": 3, "echo": False}
    served.post(path, json=asked)  # both below start from what this keeps of the prompt
    threads.clear()
    told = []
    for long in (answering.LONG_ANSWER, 2 * 12 * 4):
        monkeypatch.setattr(answering, "LONG_ANSWER", long)
        told.append(served.post(path, json=asked).json())
    assert told[0]["choices"] == told[1]["choices"] and told[0]["choices"][0]["logprobs"]
    assert told[0]["usage"] == told[1]["usage"]
    assert threads[0] != threads[1] and len(told[1]["foretoken"]["texts"]) == 2


def test_tokens_are_told_as_json_whatever_their_texts(byte_tokenizer) -> None:
    names = Names(byte_tokenizer)
    tokens = byte_tokenizer('"\\\né')["input_ids"]
    for token in tokens:
        one = Chosen(token, -0.25, [(token, -0.25), (tokens[0], -9999.0)])
        said = json.loads(names.in_chat(one))
        own = {"token": names.text(token), "logprob": -0.25, "bytes": list(names.bytes(token))}
        assert said.pop("top_logprobs")[0] == said == own
        assert json.loads(names.in_chat(Chosen(token, -0.25, []))) == {**own, "top_logprobs": []}
    chosen = [Chosen(tokens[0], -1.5, [(tokens[0], -1.5)]), Chosen(tokens[1], -2.0, [])]
    assert json.loads(names.in_completion(chosen, [0, 1])) == {
        "tokens": [names.text(token) for token in tokens[:2]],
        "token_logprobs": [-1.5, -2.0],
        "top_logprobs": [{names.text(tokens[0]): -1.5}, None],
        "text_offset": [0, 1],
    }


def test_what_is_no_number_is_told_as_impossible(byte_tokenizer) -> None:
    logits = torch.zeros(1, len(byte_tokenizer))
    logits[0, 70] = torch.inf
    times = StepTimes(1, 1, 1, 0.0, 0.0, 0.0)
    step = Step((), (), (Scores(logits),), (Verdict((), 70),), ([70],), times)
    [one] = chosen_tokens(step, 0, 2)
    assert [one.logprob, *(value for _, value in one.top)] == [LEAST] * 3
    told = json.loads(Names(byte_tokenizer).in_chat(one), parse_constant=pytest.fail)
    assert told["logprob"] == LEAST


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_stop_texts_are_held_back_as_long_as_end_tokens_are(served, stream, logprobs) -> None:
    """A text of three letters, each a token."""
    bias = {str(token): 50 for token in served.session.tokenizer("xyz")["input_ids"]}
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "logit_bias": bias, "model": "tiny"}
    client = served.client()
    long = client.completions.create(**asked).choices[0].text
    stop = long[3]
    found = client.completions.create(
        **asked, stop=stop, stream=stream, logprobs=logprobs, extra_body={"min_tokens": 12}
    )
    text = "".join(one.choices[0].text for one in found) if stream else found.choices[0].text
    assert text == long[: long.index(stop, 12)] and stop in text


def test_the_token_that_was_written_is_told_beside_likelier_ones(byte_tokenizer) -> None:
    names = Names(byte_tokenizer)
    [a, b, c] = byte_tokenizer("xyz")["input_ids"]
    chosen = [Chosen(c, -3.0, [(a, -0.5), (b, -1.0)]), Chosen(b, -1.0, [(a, -0.5), (b, -1.0)])]
    told = json.loads(names.in_completion(chosen, [0, 1]))["top_logprobs"]
    assert told == [{"x": -0.5, "y": -1.0, "z": -3.0}, {"x": -0.5, "y": -1.0}]


def test_what_was_guessed_is_told_beside_the_text(served) -> None:
    asked = {
        "model": "tiny", "messages": CHAT, "max_tokens": 30, "temperature": 0,
        "extra_body": {"include_speculation": True},
    }  # fmt: skip
    client = served.client()
    chunks = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(one.choices[0].delta.content or "" for one in chunks)
    steps = [one.foretoken for one in chunks[1:-1]]
    tokens = [token for step in steps for token in step["tokens"]]
    assert "".join(token["text"] for token in tokens) == text
    assert {token["kind"] for token in tokens} <= {"guessed", "corrected", "own"}
    stats = chunks[-1].foretoken["stats"]
    assert sum(step["accepted"] for step in steps) == stats["accepted"] > 0
    assert sum(step["drafted"] for step in steps) == stats["drafted"]
    assert [t["kind"] for t in tokens].count("guessed") == stats["accepted"]
    for step in steps:
        tree = step["tree"]
        assert len(tree["tokens"]) == len(tree["parents"]) == step["drafted"] + 1
        assert len(tree["accepted"]) == step["accepted"] and tree["parents"][0] == -1
    assert chunks[-1].foretoken["estimate"]["speedup"] > 0
    whole = client.chat.completions.create(**asked)
    assert whole.foretoken["stats"]["accepted"] == stats["accepted"]
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == stats["accepted_prediction"] == 0
    assert details.rejected_prediction_tokens == stats["rejected_prediction"] == 0


def test_a_prompt_that_begins_as_an_earlier_one_is_taken_from_the_cache(served) -> None:
    system = {"role": "system", "content": "this is said before each and every conversation"}
    client = served.client()
    used = []
    for said in ("hello", "good day"):
        messages = [system, {"role": "user", "content": said}]
        asked = {"messages": messages, "temperature": 0, "max_tokens": 8}
        whole = client.chat.completions.create(model="tiny", **asked)
        assert (
            whole.choices[0].message.content
            == served.session.generate(messages, 8, temperature=0.0).text
        )
        used.append(whole.usage.prompt_tokens_details.cached_tokens)
    assert used[0] == 0 and used[1] > len(system["content"]) // 2


def test_no_key_learns_what_another_has_asked(make_session, running) -> None:
    """How much of a prompt came from the cache would tell its beginning."""
    asked = {"prompt": "what one of two customers has asked before", "max_tokens": 4}
    with make_session() as session, running(session, api_keys=("one", "two")) as server:
        found = [
            server.client(key).completions.create(model="tiny", **asked).usage
            for key in ("one", "two", "one", "two")
        ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in found]
    assert cached[:2] == [0, 0] and min(cached[2:]) > len(asked["prompt"]) // 2


def test_a_lossy_method_says_so_in_every_answer(make_session, running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6}
    with make_session("mcsd-target-init") as session, running(session) as server:
        why = session.engine.promise.why
        whole = server.post("/v1/completions", json=asked)
        assert whole.json()["foretoken"]["lossy"] == why and whole.headers["x-foretoken-lossy"]
        assert whole.json()["system_fingerprint"] == "mcsd-target-init-lossy"
        told = list(server.client().completions.create(model="tiny", **asked, stream=True))
        assert all(one.foretoken["lossy"] == why for one in told)
        [model] = server.get("/v1/models").json()["data"]
        assert model["foretoken"]["lossless"] is False

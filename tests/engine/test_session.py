"""The front door: prompts, options, streams, batches, limits and counts."""

import copy
import json
import shutil
import time

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

import foretoken
from foretoken.engine.record import trace_of
from foretoken.errors import CapabilityError, CheckpointError, ConfigError

PROMPT = "the cat is in the "
METHODS = ["plain", "chain", "pearl", "tree", "prompt-lookup"]


@pytest.fixture(scope="module")
def spec(tiny_pair, byte_tokenizer):
    target, draft = tiny_pair
    session = foretoken.load(
        target, method="chain", draft=draft, tokenizer=byte_tokenizer, kernels="dense", depth=5
    )
    yield session
    session.close()


@pytest.fixture(scope="module")
def sessions(spec):
    return {name: spec.using(name, controller="fixed") for name in METHODS}


def ids_of(spec, text):
    return spec.tokenizer(text)["input_ids"]


def test_greedy_text_is_what_transformers_writes(spec, tiny_pair):
    out = spec.generate(PROMPT, max_new_tokens=60)
    ids = torch.tensor([ids_of(spec, PROMPT)])
    theirs = tiny_pair[0].generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False
    )
    assert out.tokens == theirs[0, ids.shape[1] :].tolist()
    assert out.text == spec.tokenizer.decode(out.tokens, skip_special_tokens=True)
    assert out.stats.accepted > 0  # or this proves nothing


@pytest.mark.parametrize("method", METHODS)
def test_ids_and_text_give_the_same(sessions, method):
    spec = sessions[method]
    assert spec.generate(ids_of(spec, PROMPT), 20).tokens == spec.generate(PROMPT, 20).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_ordered_ragged_and_equal_to_each_row_alone(sessions, method, temperature):
    spec = sessions[method]
    prompts = [PROMPT, ids_of(spec, "a"), "on and on and on and on", "é"]
    options = {"max_new_tokens": 24, "temperature": temperature}
    together = spec.generate(prompts, seed=5, **options)
    alone = [spec.generate(p, seed=5 + i, **options) for i, p in enumerate(prompts)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    listed = spec.generate(prompts, seed=[5, 6, 7, 8], **options)
    assert [r.tokens for r in listed] == [r.tokens for r in alone]


def test_more_prompts_than_rows_take_turns(spec):
    narrow = spec.using("chain", max_rows=2)
    prompts = [PROMPT[: 3 + i] for i in range(5)]
    assert [r.tokens for r in narrow.generate(prompts, 12)] == [
        spec.generate(p, 12).tokens for p in prompts
    ]


@pytest.mark.parametrize("rows", [0, -1, "4", True])
def test_another_method_over_the_same_models_decodes_a_row_at_least(spec, rows):
    with pytest.raises(ConfigError, match="max_rows"):
        spec.using("chain", max_rows=rows)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("method", METHODS)
def test_pieces_join_to_the_text(sessions, method, temperature):
    spec = sessions[method]
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 50}
    whole = spec.generate(PROMPT, **options)
    stream = spec.stream(PROMPT, **options)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    # Drafters learn, so a second run may be accepted otherwise: the stream is held to its own.
    assert sum(piece.accepted for piece in pieces) == stream.result.stats.accepted
    assert len(pieces) == stream.result.stats.target_steps
    assert stream.result.text == whole.text and stream.result.tokens == whole.tokens


def stop_inside(spec, length=50):
    """A stop text that occurs in the middle of what the model writes, across two tokens."""
    text = spec.generate(PROMPT, length).text
    middle = next(i for i in range(len(text) // 3, len(text)) if "\ufffd" not in text[i : i + 2])
    return text[middle : middle + 2], text


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_text_ends_the_row_at_the_token_that_completes_it(sessions, method):
    spec = sessions[method]
    stop, text = stop_inside(spec)
    out = spec.generate(PROMPT, 50, stop=stop)
    decode = spec.tokenizer.decode
    assert out.finish_reason == "stop"
    assert out.text == text[: text.index(stop)]
    assert stop in decode(out.tokens) and stop not in decode(out.tokens[:-1])
    assert "".join(p.text for p in spec.stream(PROMPT, 50, stop=[stop])) == out.text
    assert sum(len(s.emitted) for s in out.steps) == len(out.tokens) == out.stats.tokens


def test_a_special_token_may_be_a_stop_text(spec):
    turn = spec.tokenizer.convert_tokens_to_ids("<turn>")
    out = spec.generate(PROMPT, 30, stop="<turn>", logit_bias={turn: 1e4}, min_new_tokens=0)
    assert out.tokens == [turn] and out.finish_reason == "stop" and out.text == ""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_token_limits_are_exact(sessions, method, limit):
    out = sessions[method].generate(PROMPT, max_new_tokens=limit)
    assert len(out.tokens) == limit == out.stats.tokens
    assert out.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_an_end_token_ends_the_row_and_is_not_text(sessions, method):
    spec = sessions[method]
    [eos] = spec.eos
    out = spec.generate(PROMPT, 40, logit_bias={eos: 9.0}, temperature=1.0, seed=4)
    assert out.finish_reason == "stop" and out.tokens[-1] == eos and eos not in out.tokens[:-1]
    assert out.text == spec.tokenizer.decode(out.tokens[:-1])
    longer = spec.generate(PROMPT, 40, logit_bias={eos: 9.0}, temperature=1.0, ignore_eos=True)
    assert len(longer.tokens) == 40 and longer.finish_reason == "length"


OPTIONS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"logit_bias": {10: 4.0, 11: 4.0, 12: -5.0}},
    {"banned_tokens": list(range(40, 90))},
    {"min_new_tokens": 12, "logit_bias": {262: 9.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_new_tokens": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("method", METHODS[1:])
def test_every_option_writes_what_plain_decoding_writes(sessions, method, options):
    plain = sessions["plain"].generate([PROMPT, "on"], 40, **options)
    guessed = sessions[method].generate([PROMPT, "on"], 40, **options)
    assert [r.tokens for r in guessed] == [r.tokens for r in plain]
    without = sessions["plain"].generate([PROMPT, "on"], 40)
    assert [r.tokens for r in plain] != [r.tokens for r in without]  # the option did something


def test_a_logits_processor_list_is_honoured(sessions):
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    plain = sessions["plain"].generate(PROMPT, 30, processors=processors)
    assert len(set(plain.tokens)) == 30
    for method in METHODS[1:]:
        assert sessions[method].generate(PROMPT, 30, processors=processors).tokens == plain.tokens


def test_seeds_repeat_and_differ(spec):
    def write(seed):
        return spec.generate(PROMPT, 20, temperature=1.0, seed=seed).tokens

    assert write(1) == write(1) != write(2)
    assert write(None) != write(None)


def test_the_context_ends_a_text(spec):
    longest = spec.target.max_length
    ids = (ids_of(spec, PROMPT) * 100)[: longest - 3]
    out = spec.generate(ids, 50)
    assert len(out.tokens) == 4 and out.finish_reason == "context"  # the last one is not fed
    assert spec.generate(ids, 4).finish_reason == "length"


def test_a_result_becomes_plain_values(spec):
    out = spec.generate(PROMPT, 9)
    told = json.loads(json.dumps(out.to_dict()))
    assert told["tokens"] == out.tokens and told["text"] == out.text
    assert told["finish_reason"] == "length"
    assert told["stats"]["tokens"] == 9 and "steps" not in told


def test_results_and_sessions_say_what_they_are_on_one_line(spec):
    out = spec.generate(PROMPT, 200, ignore_eos=True)
    assert repr(out).startswith("Result('") and "200 tokens" in repr(out)
    assert "finish_reason='length'" in repr(out) and len(repr(out)) < 300
    assert repr(spec) == (
        "Session(method='chain', target=LlamaForCausalLM, draft=LlamaForCausalLM, "
        "with a tokenizer, lossless: the target's own law)"
    )


def test_statistics_add_up(spec):
    out = spec.generate(PROMPT, 50)
    stats = out.stats
    assert stats.tokens == len(out.tokens) == sum(len(s.emitted) for s in out.steps)
    assert stats.target_steps == len(out.steps)
    assert stats.mean_accepted_length == pytest.approx(50 / stats.target_steps)
    assert stats.accepted == sum(s.accepted for s in out.steps) <= stats.drafted
    assert sum(n * c for n, c in stats.emitted_per_step.items()) == 50
    assert sum(stats.shares.values()) == pytest.approx(1.0)
    assert 0 < stats.prefill_seconds < stats.target_seconds < stats.seconds
    rates = stats.acceptance_per_depth
    assert len(rates) == 5 and all(0 <= r <= 1 for r in rates)
    assert json.loads(json.dumps(stats.to_dict()))["tokens"] == 50


def test_time_the_caller_spends_between_pieces_is_not_counted(spec):
    stream, slept = spec.stream(PROMPT, 10), 0.0
    began = time.perf_counter()
    for _ in stream:
        at = time.perf_counter()
        time.sleep(0.05)
        slept += time.perf_counter() - at
    assert slept > 0.0
    assert stream.result.stats.seconds <= time.perf_counter() - began - slept


def test_a_stream_that_is_left_early_forgets_its_row(spec):
    stream = spec.stream(PROMPT, 50)
    next(stream)
    assert spec.target.rows_held == 1 and spec.draft.rows_held == 1
    assert stream.result.finish_reason == "unfinished"
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert spec.target.rows_held == 0 and spec.draft.rows_held == 0
    assert stream.result.stats.tokens == len(stream.result.tokens) > 0


def test_a_stream_that_nobody_reads_any_more_forgets_its_row(spec):
    stream = spec.stream(PROMPT, max_new_tokens=200)
    next(stream)
    assert spec.target.rows_held == 1
    del stream
    assert spec.target.rows_held == 0 and spec.engine.idle


def test_two_streams_may_take_turns(spec):
    pair = [spec.stream(p, 20) for p in (PROMPT, "on the ")]
    texts = ["", ""]
    for first, second in zip(*pair, strict=False):
        texts[0] += first.text
        texts[1] += second.text
    for i, stream in enumerate(pair):
        texts[i] += "".join(piece.text for piece in stream)
    # zip may have taken one piece too many from the first
    assert texts[1] == spec.generate("on the ", 20).text


def test_without_a_tokenizer_ids_work_and_texts_are_refused(tiny_pair):
    target, draft = tiny_pair
    session = foretoken.load(target, draft=draft, kernels="dense")
    out = session.generate([1, 2, 3], 5)
    assert out.text == "" and len(out.tokens) == 5
    assert [p.tokens for p in session.stream([1, 2, 3], 2)]
    with pytest.raises(ConfigError, match="no tokenizer"):
        session.generate(PROMPT)
    with pytest.raises(ConfigError, match="stop texts are found in text"):
        session.generate([1, 2], stop="x")


def test_a_closed_session_gives_loaded_models_back_as_they_were(tiny_pair):
    target, draft = (copy.deepcopy(model) for model in tiny_pair)
    before = [sorted(module.__dict__) for module in target.modules()]
    with foretoken.load(target, draft=draft, kernels="packed") as session:
        assert len(session.generate([1, 2, 3], 5).tokens) == 5
        assert any("forward" in module.__dict__ for module in target.modules())
    assert [sorted(module.__dict__) for module in target.modules()] == before


def test_a_closed_session_and_a_model_in_training_mode_refuse(tiny_pair):
    target, draft = (copy.deepcopy(model) for model in tiny_pair)
    with foretoken.load(target, draft=draft, kernels="dense") as session:
        beside = foretoken.load(target, "prompt-lookup", kernels="dense")
        text = beside.generate([1, 2, 3], 5).tokens
        draft.train()
        for call in (session.generate, session.stream):
            with pytest.raises(ConfigError, match="training mode"):
                call([1, 2, 3], 5)
        draft.eval()
        assert session.generate([1, 2, 3], 5).tokens == text
    for call in (session.generate, session.stream):
        with pytest.raises(ConfigError, match="closed"):
            call([1, 2, 3], 5)
    assert beside.generate([1, 2, 3], 5).tokens == text
    beside.close()


def test_a_session_over_anothers_models_leaves_them_open(spec):
    """Its own texts end with it."""
    wanted = spec.generate(PROMPT, 2).tokens
    with spec.using("plain") as other:
        assert other.generate(PROMPT, 2).tokens == wanted
        stream = other.stream(PROMPT, 50)
        next(stream)
        assert spec.target.rows_held == 1
    assert spec.target.rows_held == 0 and list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    assert spec.generate(PROMPT, 2).tokens == wanted


class Broken(Exception):
    """What a caller's own code raises."""


class BreaksFor:
    """A processor that breaks down in one prompt's text, after two tokens."""

    def __init__(self, ids):
        self.ids, self.asked = ids, 0

    def __call__(self, ids, scores):
        self.asked += 1
        if ids[0, : len(self.ids)].tolist() == self.ids and ids.shape[1] > len(self.ids) + 2:
            raise Broken("own")
        return scores


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_ends_its_batch_passes_unchanged_and_leaves_the_session_usable(
    sessions, method
):
    spec = sessions[method]
    expected = spec.generate(PROMPT, 12).tokens
    broken = BreaksFor(ids_of(spec, "on"))
    with pytest.raises(Broken):
        spec.generate([PROMPT, "on"], 200, processors=broken)
    assert broken.asked < 200  # the other row was not written to its end
    assert spec.engine.idle and spec.target.rows_held == 0
    assert spec.draft is None or spec.draft.rows_held == 0
    with pytest.raises(Broken):
        list(spec.stream("on", 20, processors=broken))
    assert spec.generate(PROMPT, 12).tokens == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-42},  # scores leave what their type can hold
        {"temperature": 1.0, "logit_bias": {5: 1e300}},
        {"temperature": 1.0, "processors": lambda ids, scores: scores * float("nan")},
        {"temperature": 0.0, "processors": lambda ids, scores: scores * float("nan")},
    ],
    ids=["temperature", "bias", "processor", "greedy processor"],
)
@pytest.mark.parametrize("method", METHODS)
def test_chances_that_are_no_numbers_choose_no_token(sessions, method, options):
    spec = sessions[method]
    with pytest.raises(ConfigError, match="no numbers"):
        spec.generate(PROMPT, 6, seed=1, **options)
    assert spec.engine.idle and spec.target.rows_held == 0


def test_every_row_of_a_batch_reads_options_that_can_be_read_once(spec):
    banned = spec.generate(PROMPT, 8).tokens
    both = spec.generate([PROMPT, PROMPT], 8, banned_tokens=iter(banned))
    assert both[0].tokens == both[1].tokens and not set(banned) & set(both[0].tokens)


def test_the_one_shot_form(tiny_pair, byte_tokenizer, spec):
    target, draft = tiny_pair
    out = foretoken.generate(
        target, PROMPT, draft=draft, tokenizer=byte_tokenizer, kernels="dense", max_new_tokens=9,
        temperature=None,
    )  # fmt: skip
    assert out.tokens == spec.generate(PROMPT, 9).tokens


def test_directories_load_with_their_tokenizer(pair_folders, spec):
    target, draft = pair_folders
    session = foretoken.load(str(target), draft=draft, kernels="dense", depth=3)
    assert session.generate(PROMPT, 12).tokens == spec.generate(PROMPT, 12).tokens
    assert max(s.depth for s in session.generate(PROMPT, 12).steps) == 3


def test_the_cost_model_measures_once_and_changes_nothing(spec):
    session = spec.using("chain", controller="cost_model")
    assert session.generate(PROMPT, 40).tokens == spec.generate(PROMPT, 40).tokens


BAD_PROMPTS = [
    ("", "is empty"),
    ([], "empty prompt"),
    ([[]], "is empty"),
    ([1, 2, 265], "run from 0 to 264"),
    ([1, -1], "run from 0 to 264"),
    ([1, 2.5], "run from 0 to 264"),
    (["fine", ""], "prompt 1 is empty"),
    (["fine", 3], "do not mix"),
    (7, "a prompt is a text"),
    (None, "a prompt is a text"),
    ([1] * 513, "context of this model is 512"),
    (b"the", "is a bytes"),  # a sequence of numbers, which no tokenizer made
    ([bytearray(b"the"), b"cat"], "prompt 0 is a bytearray"),
    ("half \ud83d of it", "no character, at 5"),
    ([{"role": "user", "content": "half \ud83d"}], "no character, at 5|chat template"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda v: str(v)[:20])
def test_bad_prompts_are_refused_in_three_parts(spec, prompt, message):
    with pytest.raises(ConfigError, match=message) as caught:
        spec.generate(prompt)
    assert "possible here" in str(caught.value) and "what to do" in str(caught.value)
    assert spec.target.rows_held == 0 and spec.draft.rows_held == 0


def test_padding_is_no_text(spec):
    given = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    ids = spec.tokenizer([PROMPT, "on"], **given)["input_ids"]
    for padded in (ids, ids.flip(1)):
        for call in (spec.generate, spec.stream):
            with pytest.raises(ConfigError, match="list of unpadded ids"):
                call(padded, 4)
    whole = ids[:, :1]
    alone = [spec.generate(row, 4).tokens for row in whole.tolist()]
    assert [out.tokens for out in spec.generate(whole, 4)] == alone


BAD_OPTIONS = [
    ({"temperature": -0.1}, "0 \\(greedy\\) or more"),
    ({"temperature": float("nan")}, "finite number"),
    ({"temperature": "hot"}, "finite number"),
    ({"top_p": 0.0}, "in \\(0, 1\\]"),
    ({"top_p": 1.5}, "in \\(0, 1\\]"),
    ({"top_k": -1}, "0 \\(off\\) or more"),
    ({"top_k": 1.5}, "whole number"),
    ({"min_p": 2.0}, "in \\[0, 1\\]"),
    ({"max_new_tokens": 0}, "1 or more"),
    ({"max_new_tokens": True}, "whole number"),
    ({"repetition_penalty": 0.0}, "above 0"),
    ({"stop": ""}, "at least one character"),
    ({"stop": ["ok", 3]}, "at least one character"),
    ({"seed": "x"}, "a seed is"),
    ({"seed": [1, 2]}, "one for each prompt"),
    ({"logit_bias": {999: 1.0}}, "run from 0 to 264"),
    ({"logit_bias": {1: "much"}}, "a bias is a number"),
    ({"logit_bias": {1: float("inf")}}, "finite"),
    ({"temperature": 10**400}, "temperature.*finite number"),
    ({"banned_tokens": [999]}, "run from 0 to 264"),
    ({"banned_tokens": list(range(265))}, "banned"),
    ({"processors": [1]}, "LogitsProcessorList"),
    ({"temprature": 1.0}, "did you mean temperature"),
    ({"logit_bias": [1, 2]}, "a mapping from token ids"),
    ({"logit_bias": 5}, "a mapping from token ids"),
    ({"banned_tokens": 5}, "a list or set of token ids"),
    ({"stop": 5}, "at least one character"),
    ({"ignore_eos": "no"}, "True or False"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:30])
def test_bad_options_are_refused_in_three_parts(spec, options, message):
    for call in (spec.generate, spec.stream):
        with pytest.raises(ConfigError, match=message) as caught:
            call(PROMPT, **options)
        assert "possible here" in str(caught.value) and "what to do" in str(caught.value)
    assert spec.target.rows_held == 0


def test_bad_loads_are_refused(tiny_pair, tmp_path, pair_folders):
    target, draft = tiny_pair
    with pytest.raises(ConfigError, match="did you mean chain"):
        foretoken.load(target, method="chian", draft=draft)
    with pytest.raises(ConfigError, match="without a draft model"):
        foretoken.load(target, method="tree")
    with pytest.raises(ConfigError, match="depth"):
        foretoken.load(target, draft=draft, kernels="dense", dept=3)
    with pytest.raises(ConfigError, match="1 or more"):
        foretoken.load(target, draft=draft, max_rows=0)
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError):
            foretoken.load(place, method="prompt-lookup")
    assert not (tmp_path / "nowhere").exists()


def test_drafts_with_another_vocabulary_are_refused(tiny_pair, pair_folders, tmp_path, make_llama):
    with pytest.raises(ConfigError, match="share one vocabulary"):
        foretoken.load(tiny_pair[0], draft=make_llama(100), kernels="dense")
    renamed = tmp_path / "renamed"
    shutil.copytree(pair_folders[1], renamed)
    words = renamed / "tokenizer.json"
    table = json.loads(words.read_text())
    foreign = ["nothing", "of", "this"]
    table["model"] |= {"vocab": {word: i for i, word in enumerate(foreign)}, "merges": []}
    words.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="not, for instance, '!'"):
        foretoken.load(pair_folders[0], draft=renamed, kernels="dense")


def test_a_token_is_a_correction_only_where_another_one_was_guessed(tiny_pair, byte_tokenizer):
    """Behind a leaf nothing was, however deep other branches of the tree went."""
    target, draft = tiny_pair
    kinds = set()
    with foretoken.load(
        target, "tree", draft, byte_tokenizer, kernels="dense", compile="off", nodes=8, depth=4,
        controller="fixed",
    ) as spec:  # fmt: skip
        stream = spec.stream("the cat is in the ", max_new_tokens=200, ignore_eos=True)

        def look(step):
            trace, tree = trace_of(step, 0), step.drafts[0].tree
            node = step.verdicts[0].path[-1] if step.verdicts[0].path else 0
            own = len(step.emitted[0]) > trace.accepted
            assert trace.corrected == (own and bool(tree.children()[node]))
            kinds.add((trace.corrected, trace.accepted < trace.depth))

        spec.engine.listeners.append(look)
        corrected = [piece.corrected for piece in stream]
    assert any(corrected) and {(True, True), (False, True), (False, False)} <= kinds


def test_processors_that_know_rows_of_a_batch_are_told_of_their_own(sessions):
    plain = sessions["plain"]
    by_row = LogitsProcessorList([PrefixConstrainedLogitsProcessor(lambda row, ids: [20 + row], 1)])
    for processors in (by_row, by_row[0]):
        with pytest.raises(CapabilityError, match="PrefixConstrained"):
            plain.generate([PROMPT, "on"], 4, processors=processors)
    assert plain.generate(PROMPT, 4, processors=by_row, ignore_eos=True).tokens == [20] * 4

    class Wants:
        """Wants the tokens that each row of the batch was given."""

        def __init__(self):
            self.generated_ngrams = [20, 21]

        def __call__(self, ids, scores):
            return scores.index_fill(1, torch.tensor(self.generated_ngrams), 50.0)

    for processors in (LogitsProcessorList([Wants()]), Wants()):
        found = plain.generate([PROMPT, "on"], 3, processors=processors)
        assert [out.tokens for out in found] == [[20] * 3, [21] * 3]


def test_a_stream_that_is_dropped_behind_its_last_piece_leaves_nothing(sessions):
    session = sessions["plain"]
    stream = session.stream(PROMPT, 1)
    next(stream)
    assert stream.row.finish is not None
    del stream
    assert not session.scheduler.watchers

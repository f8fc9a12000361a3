"""A model's generation config in a session: the texts of generate, explicit options first."""

import copy
import logging

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

import foretoken
from foretoken.engine.generation_config import GenerationDefaults
from foretoken.errors import CapabilityError, ConfigError
from foretoken.types import TokenTree

PROMPT = "the cat is in the "
LENGTH = 24


@pytest.fixture
def model(tiny_pair):
    """A model whose generation config a test may change."""
    model = copy.copy(tiny_pair[0])  # the same weights
    model.generation_config = copy.deepcopy(tiny_pair[0].generation_config)
    return model


@pytest.fixture
def session(model, tiny_pair, byte_tokenizer):
    with foretoken.load(
        model, "chain", tiny_pair[1], byte_tokenizer, kernels="dense", depth=5
    ) as session:
        yield session


def ids_of(tokenizer, text=PROMPT):
    return tokenizer(text, return_tensors="pt")["input_ids"]


def by_generate(model, ids, **options):
    options.setdefault("max_new_tokens", LENGTH)
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


GREEDY = [
    {"repetition_penalty": 1.4},
    {"suppress_tokens": list(range(40, 90))},
    {"suppress_tokens": [1, 10**6]},
    {"begin_suppress_tokens": list(range(1, 250, 2))},
    {"bad_words_ids": [[t] for t in range(30, 120)]},
    {"bad_words_ids": [[33, 126], [208, 247, 33], [130]]},
    {"no_repeat_ngram_size": 1},
    {"sequence_bias": [[[221, 33], -20.0], [[70], 2.0]]},
    {"eos_token_id": [208, 223, 258]},
    {"eos_token_id": [208, 223, 258], "min_new_tokens": 12},
    {"eos_token_id": [208, 223, 258], "min_length": 30},
    {"eos_token_id": [208, 223, 258], "forced_eos_token_id": 223, "min_new_tokens": 20},
    {"eos_token_id": [7, 30], "exponential_decay_length_penalty": [2, 1.9]},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"watermarking_config": WatermarkingConfig(bias=4.0)},
    {"do_sample": False, "temperature": 0.5, "top_k": 5, "top_p": 0.4, "min_p": 0.2},
    {"repetition_penalty": 1.3, "suppress_tokens": [70, 71], "sequence_bias": [[[72], 4.0]]},
]


@pytest.mark.parametrize("fields", GREEDY, ids=lambda fields: "+".join(fields))
def test_greedy_texts_are_those_of_generate(model, session, byte_tokenizer, fields):
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    fresh = foretoken.load(
        model, "chain", session.draft.model, byte_tokenizer, kernels="dense", depth=5
    )
    ids = ids_of(byte_tokenizer)
    expected = by_generate(model, ids)
    assert fresh.generate(PROMPT, LENGTH).tokens == expected
    assert session.generate(PROMPT, LENGTH).tokens == expected, "set after load"


def test_most_of_these_settings_change_the_text(model, byte_tokenizer):
    """Otherwise the test above could not fail."""
    ids = ids_of(byte_tokenizer)
    plain = by_generate(model, ids)
    same = []
    for fields in GREEDY:
        config = GenerationConfig(**fields)
        if by_generate(model, ids, generation_config=config) == plain:
            same.append("+".join(fields))
    assert same == [
        "suppress_tokens",  # the one with ids outside the vocabulary
        "renormalize_logits+remove_invalid_values",
        "do_sample+temperature+top_k+top_p+min_p",
    ]


@pytest.mark.parametrize("fields", [{"max_new_tokens": 9}, {"max_length": 31}, {}], ids=str)
def test_lengths_come_from_the_config(model, session, byte_tokenizer, fields):
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    out = session.generate(PROMPT)
    if fields:
        ids = ids_of(byte_tokenizer)
        assert out.tokens == model.generate(ids)[0, ids.shape[1] :].tolist()
    else:
        assert len(session.generate(PROMPT, ignore_eos=True).tokens) == 256
        return
    assert out.finish_reason == "length"
    assert len(session.generate(PROMPT, 5).tokens) == 5


def test_a_prompt_that_fills_max_length_is_refused(model, session, byte_tokenizer):
    model.generation_config.max_length = ids_of(byte_tokenizer).shape[1]
    with pytest.raises(ConfigError, match="leaves no room"):
        session.generate(PROMPT)
    assert len(session.generate(PROMPT, 3).tokens) == 3


def test_stop_strings_of_the_config_end_a_text(model, session, byte_tokenizer):
    whole = session.generate(PROMPT, LENGTH)
    stop = next(
        whole.text[i : i + 2] for i in range(6, 20) if "\ufffd" not in whole.text[i : i + 2]
    )
    model.generation_config.stop_strings = [stop]
    out = session.generate(PROMPT, LENGTH)
    ids = ids_of(byte_tokenizer)
    assert out.tokens == by_generate(model, ids, tokenizer=byte_tokenizer)
    assert out.finish_reason == "stop" and len(out.tokens) < LENGTH
    assert session.generate(PROMPT, LENGTH, stop=None).tokens == out.tokens
    assert session.generate(PROMPT, LENGTH, stop=[]).tokens == whole.tokens, "none was asked for"


def law(session, ids, **options):
    """The law a row would sample its next token from."""
    [row] = session.rows([ids[0].tolist()], LENGTH, **options)
    with torch.no_grad():
        logits = session.target.model(ids).logits[0, -1:]
    tree = TokenTree((int(ids[0, -1]),), (-1,))
    return row.warp.laws(row.tokens, tree, logits)[0]


def law_of_generate(model, ids, **options):
    """The same, as transformers warps it."""
    config, _ = model._prepare_generation_config(None, **options)
    model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
    config.max_length = ids.shape[1] + LENGTH
    processors = model._get_logits_processor(
        config, input_ids_seq_length=ids.shape[1], encoder_input_ids=ids, device="cpu"
    )
    with torch.no_grad():
        return processors(ids, model(ids).logits[:, -1]).softmax(-1)[0]


SAMPLED = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.7, "top_k": 0},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"top_h": 0.5},
    {"suppress_tokens": [70, 71, 72], "no_repeat_ngram_size": 2, "top_k": 30},
]


@pytest.mark.parametrize("fields", SAMPLED, ids=lambda fields: "+".join(fields) or "top_k 50")
def test_the_law_of_a_sampling_config_is_that_of_generate(model, session, byte_tokenizer, fields):
    for name, value in {"do_sample": True, **fields}.items():
        setattr(model.generation_config, name, value)
    ids = ids_of(byte_tokenizer)
    expected = law_of_generate(model, ids)
    torch.testing.assert_close(law(session, ids), expected, rtol=1e-5, atol=1e-7)
    assert 1 < int((expected > 0).sum()) <= 257


def test_a_sampling_config_samples(model, session):
    model.generation_config.do_sample = True
    written = {tuple(session.generate(PROMPT, 12, seed=seed).tokens) for seed in range(4)}
    assert len(written) == 4
    assert (
        session.generate(PROMPT, 12, seed=2).tokens == session.generate(PROMPT, 12, seed=2).tokens
    )


def test_a_nucleus_of_nothing_keeps_the_best_token(model, session, byte_tokenizer):
    """generate takes it; named in a request of ours, it is refused."""
    ids = ids_of(byte_tokenizer)
    options = {"do_sample": True, "top_p": 0.0, "max_new_tokens": 8}
    expected = by_generate(model, ids, **options)
    faster = foretoken.custom_generate("prompt-lookup", kernels="dense")
    assert by_generate(model, ids, custom_generate=faster, **options) == expected
    model.generation_config.do_sample, model.generation_config.top_p = True, 0.0
    for seed in range(3):
        assert session.generate(PROMPT, 8, seed=seed).tokens == expected
    with pytest.raises(ConfigError, match="top_p"):
        session.generate(PROMPT, 8, top_p=0.0)


def test_explicit_options_win(model, session, byte_tokenizer):
    ids = ids_of(byte_tokenizer)
    plain = session.generate(PROMPT, LENGTH).tokens
    config = model.generation_config
    config.repetition_penalty, config.max_new_tokens, config.do_sample = 1.4, 9, True
    config.top_k = 3
    assert session.generate(PROMPT, LENGTH, temperature=0, repetition_penalty=1.0).tokens == plain
    for options in ({"top_k": 11}, {"temperature": 0.4}, {"top_p": 0.5, "repetition_penalty": 1.2}):
        torch.testing.assert_close(
            law(session, ids, **options), law_of_generate(model, ids, **options)
        )
    named = {"temperature": None, "top_k": None, "seed": 3}
    assert session.generate(PROMPT, **named).tokens == session.generate(PROMPT, seed=3).tokens


def test_an_explicit_temperature_alone_samples_from_the_whole_law(session, byte_tokenizer):
    """generate's own top_k of 50 comes with a config that samples, not with a temperature."""
    assert int((law(session, ids_of(byte_tokenizer), temperature=5.0) > 0).sum()) > 200


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"temperature": np.float32(0.7)}, {"temperature": float(np.float32(0.7))}),
        ({"temperature": 1, "top_k": np.int64(5)}, {"temperature": 1.0, "top_k": 5}),
    ],
    ids=str,
)
def test_numbers_of_any_type_are_as_good_as_pythons_own(session, given, same):
    """transformers takes a float for what is one, and an int for what is counted."""
    written = session.generate(PROMPT, 12, seed=1, **given).tokens
    assert written == session.generate(PROMPT, 12, seed=1, **same).tokens


def test_own_processors_stand_behind_those_of_the_config(model, session, byte_tokenizer):
    model.generation_config.no_repeat_ngram_size = 2
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    ids = ids_of(byte_tokenizer)
    expected = by_generate(model, ids, logits_processor=own)
    assert session.generate(PROMPT, LENGTH, processors=own).tokens == expected

    def shifted(ids, scores):
        return scores - 4.0 * (torch.arange(scores.shape[-1]) % 2)

    [processor] = [shifted]
    expected = by_generate(model, ids, logits_processor=LogitsProcessorList([processor]))
    assert session.generate(PROMPT, LENGTH, processors=processor).tokens == expected


def test_common_settings_become_options_of_our_own(model, session, byte_tokenizer):
    config = model.generation_config
    config.do_sample, config.temperature, config.top_k, config.top_p = True, 0.7, 20, 0.8
    config.repetition_penalty, config.suppress_tokens = 1.05, [4, 5]
    [row] = session.rows([ids_of(byte_tokenizer)[0].tolist()], banned_tokens=[9])
    params = row.params
    assert params.processors is None, "nothing is left to slow calls per node"
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 20, 0.8)
    assert params.repetition_penalty == 1.05 and params.banned_tokens == {4, 5, 9}


@pytest.mark.parametrize(
    ("ids", "given"),
    [([0], np.array([0])), ([5, 7], np.array([5, 7])), ([5, 7], torch.tensor([5, 7]))],
    ids=["zero", "array", "tensor"],
)
@pytest.mark.parametrize("fields", [{}, {"suppress_tokens": [4, 5]}], ids=str)
def test_banned_tokens_may_be_an_array_or_a_tensor(model, session, fields, ids, given):
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    [row] = session.rows([[1, 2]], banned_tokens=given)
    assert row.params.banned_tokens == {*ids, *fields.get("suppress_tokens", ())}


def test_end_tokens_that_change_after_load_count(model, session):
    whole = session.generate(PROMPT, LENGTH).tokens
    model.generation_config.eos_token_id = whole[2]
    out = session.generate(PROMPT, LENGTH)
    assert out.tokens == whole[: whole.index(whole[2]) + 1] and out.finish_reason == "stop"
    assert session.eos == {whole[2]}


def test_a_config_may_be_passed_or_left_aside(model, tiny_pair, byte_tokenizer):
    plain = by_generate(model, ids_of(byte_tokenizer))
    model.generation_config.repetition_penalty = 1.4
    given = GenerationConfig(no_repeat_ngram_size=2)
    parts = (model, "chain", tiny_pair[1], byte_tokenizer)
    aside = foretoken.load(*parts, generation_config=False, kernels="dense")
    assert aside.generate(PROMPT, LENGTH).tokens == plain
    passed = foretoken.load(*parts, generation_config=given, kernels="dense")
    both = by_generate(model, ids_of(byte_tokenizer), generation_config=given)
    assert passed.generate(PROMPT, LENGTH).tokens == both
    assert passed.using("plain").generate(PROMPT, LENGTH).tokens == both
    with pytest.raises(ConfigError, match="GenerationConfig"):
        foretoken.load(*parts, generation_config={"top_k": 3})
    ends = GenerationConfig(eos_token_id=[plain[5]])
    ended = foretoken.load(*parts, generation_config=ends, kernels="dense")
    assert ended.eos == {plain[5]}
    assert given.to_dict() == GenerationConfig(no_repeat_ngram_size=2).to_dict()


REFUSED = [
    {"num_beams": 4},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "high"},
    {"guidance_scale": 2.0},
    {"num_return_sequences": 2, "do_sample": True},
    {"token_healing": True},
    {"max_time": 3.0},
    {"cache_implementation": "quantized"},
]


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: next(iter(fields)))
def test_what_no_session_can_honour_is_refused_at_load(model, byte_tokenizer, fields):
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(CapabilityError, match=next(iter(fields))) as refused:
        foretoken.load(model, "prompt-lookup", tokenizer=byte_tokenizer)
    assert "generation_config=False" in str(refused.value)
    foretoken.load(
        model, "prompt-lookup", tokenizer=byte_tokenizer, generation_config=False, kernels="dense"
    ).generate(PROMPT, 3)


def test_a_bad_value_is_named_whatever_the_config_says(session):
    for options in ({"temperature": -1.0}, {"top_p": 0.0}, {"repetition_penalty": 0.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            session.generate(PROMPT, 4, **options)
    with pytest.raises(ConfigError, match="processors of type int"):
        session.generate(PROMPT, 4, processors=3)


def test_the_models_own_config_is_left_as_it_was(model, session):
    before = model.generation_config.to_dict()
    GenerationDefaults(model)
    session.generate(PROMPT, 4, temperature=0.5, top_k=3)
    assert model.generation_config.to_dict() == before


UNUSED = [{"top_k": 7}, {"temperature": 0.6, "top_p": 0.9}, {"do_sample": False, "min_p": 0.1}]


@pytest.mark.parametrize("given", [None, GenerationConfig(max_new_tokens=4)], ids=["own", "passed"])
@pytest.mark.parametrize("fields", UNUSED, ids=lambda fields: "+".join(fields))
def test_transformers_does_not_warn_of_sampling_flags_that_greedy_text_ignores(
    model, byte_tokenizer, fields, given
):
    told = []
    handler = logging.Handler()
    handler.emit = told.append
    heard = logging.getLogger("transformers")
    heard.addHandler(handler)
    type(heard).warning_once.cache_clear()  # it may have been told before
    try:
        for name, value in fields.items():
            setattr(model.generation_config, name, value)
        options = {"tokenizer": byte_tokenizer, "kernels": "dense", "generation_config": given}
        with foretoken.load(model, "prompt-lookup", **options) as session:
            session.generate(PROMPT, 4)
            session.generate(PROMPT, 4, temperature=0.0)
            session.generate(PROMPT, 4, temperature=1.0, top_k=3)
    finally:
        heard.removeHandler(handler)
    assert [record.getMessage() for record in told] == []


@pytest.mark.parametrize("fields", [{}, {"no_repeat_ngram_size": 3}], ids=str)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_new_tokens_holds_back_stop_texts_whatever_else_is_asked(
    model, session, fields, ignore_eos
):
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    asked = {"ignore_eos": ignore_eos, "min_new_tokens": 15}
    free = session.generate(PROMPT, 30, **asked)
    stop = free.text[2]
    out = session.generate(PROMPT, 30, stop=stop, **asked)
    assert len(out.tokens) >= 15 and out.tokens == free.tokens[: len(out.tokens)]


@pytest.mark.parametrize("config", [None, False])
def test_a_processor_that_keeps_a_state_is_refused(model, byte_tokenizer, config):
    own = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)])
    with foretoken.load(model, "plain", tokenizer=byte_tokenizer, generation_config=config) as spec:
        for processors in (own, own[0]):
            with pytest.raises(CapabilityError, match="ClassifierFreeGuidance"):
                spec.generate(PROMPT, 4, processors=processors)

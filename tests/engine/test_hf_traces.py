"""What a call inside transformers' generate leaves behind: a filled cache, warnings, no more."""

import dataclasses
import warnings

import pytest
import torch
from hf_calls import PROMPTS, Collect, encoded
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import foretoken
from foretoken.errors import CapabilityError


@pytest.fixture(scope="module", params=["chain", "pearl", "tree", "exspec", "prompt-lookup"])
def faster(request, tiny_pair):
    draft = None if request.param == "prompt-lookup" else tiny_pair[1]
    return foretoken.custom_generate(
        method=request.param, draft=draft, kernels="dense", controller="fixed"
    )


@pytest.fixture(scope="module")
def chain(tiny_pair):
    return foretoken.custom_generate(draft=tiny_pair[1], kernels="dense", depth=5)


def cache_of(model):
    return DynamicCache(config=model.config)


def columns(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("stops", [{}, {"eos_token_id": [7, 30, 126, 208]}], ids=["cap", "end"])
def test_a_passed_cache_is_left_as_generate_leaves_it(tiny_pair, byte_tokenizer, faster, stops):
    target = tiny_pair[0]
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 14, **stops}
    theirs, ours = cache_of(target), cache_of(target)
    alone = target.generate(**inputs, **options, past_key_values=theirs)
    got = target.generate(**inputs, **options, past_key_values=ours, custom_generate=faster)
    assert torch.equal(got, alone)
    assert ours.get_seq_length() == theirs.get_seq_length() == got.shape[1] - 1
    for mine, wanted in zip(columns(ours), columns(theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    more = torch.cat([got, torch.tensor([[70, 71, 72]])], dim=1)
    onward = [
        target.generate(more, do_sample=False, max_new_tokens=12, past_key_values=cache)
        for cache in (ours, theirs, cache_of(target))
    ]
    assert torch.equal(onward[0], onward[1]) and torch.equal(onward[1], onward[2])


@pytest.mark.parametrize("kind", ["static", "windows"])
def test_caches_of_other_kinds_are_filled_too(byte_tokenizer, make_llama, kind):
    if kind == "static":
        model = make_llama(len(byte_tokenizer))
        caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
        ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        config = MistralConfig(vocab_size=len(byte_tokenizer), **sizes, **heads, **ends)
        model = MistralForCausalLM(config).eval()
        caches = [cache_of(model) for _ in range(2)]
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    own = foretoken.custom_generate("prompt-lookup", kernels="dense")
    written = [
        model.generate(
            **inputs, do_sample=False, max_new_tokens=20, past_key_values=cache, custom_generate=how
        )
        for cache, how in zip(caches, (None, own), strict=True)
    ]
    assert torch.equal(*written)
    for mine, wanted in zip(columns(caches[1]), columns(caches[0]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    more = torch.cat([written[0], torch.tensor([[70, 71]])], dim=1)
    onward = [
        model.generate(more, do_sample=False, max_new_tokens=12, past_key_values=cache)
        for cache in caches
    ]
    assert torch.equal(*onward)


def test_a_dictionary_brings_the_cache_and_batches_fill_none(tiny_pair, byte_tokenizer, chain):
    target = tiny_pair[0]
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 6, "custom_generate": chain}
    out = target.generate(**inputs, **options, return_dict_in_generate=True)
    assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1
    with pytest.raises(CapabilityError, match="past_key_values for several rows"):
        target.generate(
            **encoded(byte_tokenizer, PROMPTS), **options, past_key_values=cache_of(target)
        )
    assert not chain._kept[-1].listeners


BESIDE = [
    ({"streamer": True}, "streamer", "pass streamer="),
    ({"assistant_model": True}, "assistant_model", "pass draft="),
    ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens", "prompt-lookup"),
    ({"assistant_early_exit": 1}, "assistant_early_exit", "layerskip"),
    ({"cache_implementation": "static"}, "cache_implementation", "leave it out"),
]


@pytest.mark.parametrize(("options", "name", "instead"), BESIDE, ids=lambda v: str(v)[:24])
def test_an_argument_that_would_do_nothing_warns_once_per_call(
    tiny_pair, byte_tokenizer, chain, options, name, instead
):
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = dict(options)
    if "streamer" in options:
        options["streamer"] = Collect()
    if "assistant_model" in options:
        options["assistant_model"] = tiny_pair[1]
    alone = tiny_pair[0].generate(**inputs, do_sample=False, max_new_tokens=8)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ours = tiny_pair[0].generate(
                **inputs, do_sample=False, max_new_tokens=8, custom_generate=chain, **options
            )
        told = [one for one in told if "foretoken" in str(one.message)]
        assert len(told) == 1 and told[0].category is UserWarning
        assert name in str(told[0].message) and instead in str(told[0].message)
        assert told[0].filename == __file__
        assert torch.equal(ours, alone)


def test_nothing_is_warned_of_where_nothing_is_ignored(tiny_pair, byte_tokenizer, faster):
    own = dataclasses.replace(faster, streamer=Collect())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_pair[0].generate(
            **encoded(byte_tokenizer, PROMPTS[:1]),
            do_sample=False,
            max_new_tokens=4,
            custom_generate=own,
        )


def test_a_method_of_another_law_says_so_once(tiny_pair, byte_tokenizer, chain):
    lossy = foretoken.custom_generate(
        "mcsd-target-init", tiny_pair[1], kernels="dense", controller="fixed"
    )
    assert repr(lossy).endswith(", LOSSY)") and "LOSSY" not in repr(chain)
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 4, "custom_generate": lossy}
    with pytest.warns(UserWarning, match="LOSSY") as told:
        tiny_pair[0].generate(**inputs, **options)
    assert [one.filename for one in told if "LOSSY" in str(one.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_pair[0].generate(**inputs, **options)
    assert repr(lossy).endswith(", LOSSY)")


def test_what_was_learnt_is_kept_and_a_text_is_not_lost_where_it_cannot_be(
    tiny_pair, byte_tokenizer, tmp_path
):
    kept = tmp_path / "learnt"
    faster = foretoken.custom_generate("token-recycling", memory=str(kept), kernels="dense")
    inputs = encoded(byte_tokenizer, PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 6, "custom_generate": faster}
    first = tiny_pair[0].generate(**inputs, **options)
    assert kept.is_file()
    kept.unlink()
    kept.mkdir()  # where no file can be written
    with pytest.warns(UserWarning, match="saving recycled tokens") as told:
        assert torch.equal(tiny_pair[0].generate(**inputs, **options), first)
    assert [one.filename for one in told if "saving" in str(one.message)] == [__file__]


class Fails:
    """Raises at one of its calls."""

    def __init__(self, error, last):
        self.error, self.last, self.calls = error, last, 0

    def fail(self):
        self.calls += 1
        if self.calls == self.last:
            raise self.error


class FailingProcessor(Fails, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.fail()
        return scores


class FailingCriterion(Fails, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.fail()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(Fails, BaseStreamer):
    def put(self, value):
        self.fail()

    def end(self):
        raise AssertionError("never reached")


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("own"), KeyboardInterrupt()], ids=["own", "interrupt"])
@pytest.mark.parametrize("last", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("place", ["logits_processor", "stopping_criteria", "streamer"])
@pytest.mark.parametrize("method", ["chain", "pearl", "tree", "layerskip", "auto", "prompt-lookup"])
def test_an_exception_passes_unchanged_and_leaves_no_trace(
    tiny_pair, byte_tokenizer, method, place, last, error
):
    target, draft = tiny_pair
    inputs = encoded(byte_tokenizer, PROMPTS if place != "streamer" else PROMPTS[:1])
    options = {"do_sample": False, "max_new_tokens": 16}
    given = draft if method in ("chain", "pearl", "tree") else None
    steady = {} if method == "auto" else {"controller": "fixed"}
    how = foretoken.custom_generate(method, given, **steady)
    alone = target.generate(**inputs, **options)
    beside, cache = {}, {}
    if place == "streamer":
        how.streamer = broken = FailingStreamer(error, last)
        cache["past_key_values"] = cache_of(target)
    elif place == "logits_processor":
        broken = FailingProcessor(error, last)
        beside[place] = LogitsProcessorList([broken])
    else:
        broken = FailingCriterion(error, last)
        beside[place] = StoppingCriteriaList([broken])
    forwards = [module.__dict__.get("forward") for module in target.modules()]
    target.train()
    with pytest.raises(type(error)) as raised:
        target.generate(**inputs, **options, **beside, **cache, custom_generate=how)
    assert raised.value is error and broken.calls >= last  # rows beside it may end their step
    assert all(module.training for module in target.modules())
    target.eval()
    assert [module.__dict__.get("forward") for module in target.modules()] == forwards
    engine = how._kept[-1]
    assert engine.target.rows_held == 0 and not engine.listeners
    assert given is None or engine.drafter.model.lm.rows_held == 0
    how.streamer = None
    assert torch.equal(target.generate(**inputs, **options, custom_generate=how), alone)

"""Texts around the context's end and the switches of rotary scaling: as generate, or refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

import foretoken
from foretoken.engine.hf_arguments import left_padding, refuse
from foretoken.errors import CapabilityError, ConfigError

VOCAB, CONTEXT, SWITCH, NEW = 100, 64, 32, 24
SHORT, LONG = [1.0] * 8, [4.0 + i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": SWITCH,
}


def phi3(seed=0):
    torch.manual_seed(seed)
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        original_max_position_embeddings=SWITCH,
        sliding_window=None,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 1.0},
    )
    return livelier(Phi3ForCausalLM(config))


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    ends = {"eos_token_id": None, "bos_token_id": None, "initializer_range": 0.15}
    return livelier(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **ends)))


def livelier(model):
    with torch.no_grad():
        model.lm_head.weight *= 3.0
    return model.eval()


@pytest.fixture(scope="module")
def make(make_llama):
    """A model by its rotary type, always fresh: `dynamic` remembers how far it was called."""

    def llama(rope):
        return make_llama(VOCAB, max_position_embeddings=CONTEXT, rope_parameters=rope)

    def made(kind):
        match kind:
            case "phi3":
                return phi3()
            case "gpt2":
                return gpt2()
            case "llama-longrope":
                return llama(dict(LONGROPE))
            case "default":
                return llama({"rope_type": kind, "rope_theta": 10000.0})
            case _:
                return llama({"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0})

    return made


def draft_of(model):
    """A model that agrees with the first one often."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return draft


def prompt(length):
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def ours(model, method, ids, **options):
    draft = draft_of(model) if method in ("chain", "tree", "pearl") else None
    faster = foretoken.custom_generate(method, draft, kernels="dense", controller="fixed")
    return model.generate(ids, do_sample=False, custom_generate=faster, **options)


# Phi-3 starts anew at its switch, and all others have none: on both sides, and across, as generate.
AGREES = [
    *[(kind, length) for kind in ("default", "linear", "yarn") for length in (20, 50, 64, 65, 90)],
    *[("dynamic", length) for length in (8, 41)],
    *[("gpt2", length) for length in (8, 41)],
    *[("phi3", length) for length in (8, 9, 10, 20, 31, 32, 33, 40, 60, 70)],
    *[("llama-longrope", length) for length in (8, 9, 33, 40, 70)],
]


@pytest.mark.parametrize(("kind", "length"), AGREES)
@pytest.mark.parametrize(
    "method",
    ["chain", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tree", "prompt-lookup"))],
)
def test_ids_are_those_of_generate_on_both_sides_of_every_limit(make, kind, length, method):
    ids = prompt(length)
    expected = make(kind).generate(ids, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(ours(make(kind), method, ids, max_new_tokens=NEW), expected)


REFUSED = [
    *[("dynamic", length) for length in (42, 60, 64, 65, 90)],
    *[("gpt2", length) for length in (42, 60, 64)],
    *[("llama-longrope", length) for length in (10, 31, 32)],
]


@pytest.mark.parametrize(("kind", "length"), REFUSED)
def test_what_cannot_be_repeated_is_refused_before_any_work(make, kind, length):
    with pytest.raises(CapabilityError, match="positions") as refused:
        ours(make(kind), "prompt-lookup", prompt(length), max_new_tokens=NEW)
    limit = SWITCH if kind == "llama-longrope" else CONTEXT
    if length <= limit:
        room = limit + 1 - length
        assert f"max_new_tokens={room} or less" in str(refused.value)
        ids = prompt(length)
        expected = make(kind).generate(ids, do_sample=False, max_new_tokens=room)
        assert torch.equal(ours(make(kind), "chain", ids, max_new_tokens=room), expected)
    else:
        assert "shorter prompt" in str(refused.value)


def padded(lengths):
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :], mask[row, width - length :] = prompt(length)[0], 1
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


@pytest.mark.parametrize("planes", [3, 4])
def test_planes_of_positions_are_text_where_they_are_all_equal(planes):
    """Qwen2.5-VL and Qwen3-VL prepare one for the text, and for time, height and width one each."""
    inputs = padded((5, 8))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    text = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    positions = text.expand(planes, -1, -1).clone()
    asked = {"attention_mask": mask, "position_ids": positions}
    assert left_padding(ids, asked) == [3, 0]
    positions[-1, 1, 4] += 1
    with pytest.raises(CapabilityError, match="positions of images"):
        left_padding(ids, asked)
    with pytest.raises(ConfigError, match="position_ids of your own"):
        left_padding(ids, {**asked, "position_ids": positions[-1]})


def refuse_for(family, **given):
    """Ask whether generate of a model of this family may hand these on."""
    config = SimpleNamespace(model_type=family, is_encoder_decoder=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    refuse(SimpleNamespace(config=config), ids, GenerationConfig(), False, given)


MARKS = torch.tensor([[0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("family", "name", "text", "images"),
    [
        ("qwen2_vl", "mm_encoder_outputs", {}, {"image": MARKS}),
        ("qwen2_vl", "mm_token_type_ids", 0 * MARKS, MARKS),
        ("gemma3", "token_type_ids", 0 * MARKS, MARKS),
    ],
)
def test_what_tells_of_images_is_refused_where_there_are_some(family, name, text, images):
    """transformers hands these on for text alone, too."""
    refuse_for(family, **{name: text})
    refuse_for(family, **{name: None})
    with pytest.raises(CapabilityError, match=r"asked for images or videos\."):
        refuse_for(family, **{name: images})


@pytest.mark.parametrize("family", ["paligemma", "gpt2"])
def test_zeros_that_say_something_are_refused(family):
    """A prefix that sees itself whole, or a vector that is added to every token."""
    with pytest.raises(CapabilityError, match=r"asked for token_type_ids\."):
        refuse_for(family, token_type_ids=0 * MARKS)


def test_a_padded_batch_across_a_longrope_switch_is_refused(make):
    for lengths, agrees in (((5, 8), True), ((20, 31), False), ((8, 40), False), ((34, 40), True)):
        inputs = padded(lengths)
        if agrees:
            expected = make("phi3").generate(**inputs, do_sample=False, max_new_tokens=NEW)
            got = ours(make("phi3"), "chain", inputs.pop("input_ids"), **inputs, max_new_tokens=NEW)
            assert torch.equal(got, expected)
        else:
            with pytest.raises(CapabilityError, match="row by row"):
                ours(make("phi3"), "chain", inputs.pop("input_ids"), **inputs, max_new_tokens=NEW)
    same = {"input_ids": torch.cat([prompt(20), prompt(20).flip(1)]), "max_new_tokens": NEW}
    expected = make("phi3").generate(**same, do_sample=False)
    assert torch.equal(ours(make("phi3"), "chain", same.pop("input_ids"), **same), expected)


def test_a_padded_batch_beyond_the_context_is_as_generate(make):
    inputs = padded((40, 61, 70))
    expected = make("linear").generate(**inputs, do_sample=False, max_new_tokens=NEW)
    got = ours(make("linear"), "chain", inputs.pop("input_ids"), **inputs, max_new_tokens=NEW)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "phi3", "gpt2"])
@pytest.mark.parametrize(
    "method",
    [
        "tree",
        "plain",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("chain", "prompt-lookup")),
    ],
)
def test_a_session_writes_what_generate_writes_until_the_context_ends(make, kind, method):
    model = make(kind)
    draft = draft_of(model) if method in ("chain", "tree") else None
    with foretoken.load(model, method, draft, kernels="dense", controller="fixed") as session:
        for length in (8, 30, 40, 45, 62, 64):
            ids = prompt(length)
            out = session.generate(ids[0].tolist(), NEW)
            room = CONTEXT + 1 - length  # the last token is not fed
            count = min(NEW, room)
            expected = make(kind).generate(ids, do_sample=False, max_new_tokens=count)
            assert out.tokens == expected[0, length:].tolist()
            assert out.finish_reason == ("length" if room >= NEW else "context")
        with pytest.raises(ConfigError, match="context of this model is 64"):
            session.generate(prompt(65)[0].tolist(), NEW)


def test_an_end_token_on_the_last_position_is_a_stop(make):
    model = make("default")
    ids = prompt(60)[0].tolist()
    with foretoken.load(model, "plain", kernels="dense") as session:
        whole = session.generate(ids, NEW)
        assert len(whole.tokens) == 5 and whole.finish_reason == "context"
        assert session.generate(ids, 5).finish_reason == "length"
        session.eos = frozenset({whole.tokens[-1]})
        assert session.generate(ids, NEW).finish_reason == "stop"


def test_beams_tell_the_contexts_end_too(make):
    model = make("default")
    with foretoken.load(model, "dsbd", draft_of(model), kernels="dense") as session:
        out = session.generate(prompt(60)[0].tolist(), NEW, temperature=1.0, seed=1)
        assert {len(tokens) for tokens in out.sequences} == {5}
        assert set(out.finish_reasons) == {"context"}

"""What is refused at the door, by name, and what a probe finds out."""

import copy

import pytest
import torch
import transformers as hf
from families import COMMON, OTHERS

import foretoken
from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import attention, probe
from foretoken.lm.runtime.family import describe
from foretoken.lm.runtime.plan import Plan
from foretoken.lm.runtime.rounding import allowed


@pytest.mark.parametrize("family", OTHERS)
def test_recurrent_models_are_refused_by_name(family, make_tiny):
    with pytest.raises(CapabilityError, match=f"{family} keeps recurrent state"):
        open_lm(make_tiny(family), kernels="dense")


def test_a_hybrid_family_is_decoded_where_all_its_layers_attend():
    """The class of Granite 4 says that it keeps a state; small ones of the family keep none."""
    torch.manual_seed(0)
    config = hf.GraniteMoeHybridConfig(
        **COMMON, layer_types=["full_attention"] * 4, num_local_experts=0, mamba_n_heads=8,
        shared_intermediate_size=96, position_embedding_type="rope",
    )  # fmt: skip
    model, text = hf.GraniteMoeHybridForCausalLM(config).eval(), [3, 4, 5]
    with foretoken.load(model, "prompt-lookup", kernels="dense", compile="off") as session:
        assert session.target.caps.tree == "mask"
        written = session.generate(text, 12, ignore_eos=True).tokens
    for _ in range(12):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
        text = [*text, int(logits[0, -1].argmax())]
    assert written == text[3:]
    model.config.layer_types = ["full_attention"] * 3 + ["linear_attention"]
    with pytest.raises(CapabilityError, match="granitemoehybrid keeps recurrent state"):
        open_lm(model, kernels="dense")


def test_encoder_decoders_are_refused_by_name():
    config = hf.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(CapabilityError, match="t5 is an encoder-decoder"):
        open_lm(hf.T5ForConditionalGeneration(config), kernels="dense")


def test_models_without_a_head_are_refused():
    model = hf.LlamaModel(hf.LlamaConfig(**COMMON))
    with pytest.raises(CapabilityError, match="LlamaModel has no language-model head"):
        open_lm(model, kernels="dense")


def test_layers_of_an_unknown_kind_are_refused(make_tiny):
    model = make_tiny("qwen2")
    model.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(CapabilityError, match="chunked_attention"):
        open_lm(model, kernels="dense")


class Forgetful(hf.LlamaForCausalLM):
    """A model whose logits also depend on how many tokens a call brings."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + 0.5 * output.logits.roll(1, -1) * input_ids.shape[1]
        return output


def test_a_model_that_is_wrong_under_every_plan_is_refused_by_name():
    model = Forgetful(hf.LlamaConfig(**COMMON)).eval()
    with pytest.raises(CapabilityError, match="llama cannot be decoded"):
        open_lm(model, kernels="dense")


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon_alibi"])
def test_the_probe_itself_would_refuse_trees_where_places_count(family, make_tiny):
    """`family.BY_PLACE` spares work; it is not what keeps these families from wrong numbers."""
    lm = open_lm(make_tiny(family), kernels="dense")
    truth, _ = probe.fresh_logits(lm.model)
    for name in (attention.NAME, None, "eager"):
        lm.plan = Plan(tree=True, ragged=True, attention=name)
        try:
            error = probe.trial(lm, truth)
        except probe.RAISED:
            continue
        finally:
            lm.reset()
        assert error > 100 * allowed(torch.float32)


def test_the_probe_sees_a_missing_window(make_tiny):
    """A window shorter than the probe's text, forgotten on one side, is noticed."""
    model = make_tiny("mistral")
    lm = open_lm(model, kernels="dense")
    truth, _ = probe.fresh_logits(model)
    assert probe.trial(lm, truth) < allowed(torch.float32)
    lm.reset()
    lm.family = type(lm.family)(
        **{name: getattr(lm.family, name) for name in lm.family.__slots__}
        | {"windows": (None,) * 4}
    )
    assert probe.trial(lm, truth) > 100 * allowed(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_lower_precision_passes_the_probe(family, dtype, make_tiny):
    lm = open_lm(make_tiny(family).to(dtype), kernels="dense")
    assert lm.caps.tree == "mask" and lm.masks.nothing.dtype == dtype


def test_limits_of_positions_are_read(make_tiny):
    assert open_lm(make_tiny("gpt2"), kernels="dense").max_length == 4096
    assert open_lm(make_tiny("mpt"), kernels="dense").max_length == 4096
    assert open_lm(make_tiny("phi3_longrope"), kernels="dense").max_length == 400


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}, 40),
        ({"rope_type": "default"}, 40),
    ],
)
def test_positions_that_yarn_stretches_reach_as_far_as_they_were_stretched(
    rope, longest, make_tiny
):
    """Published recipes leave max_position_embeddings at what was trained first."""
    model = copy.deepcopy(make_tiny("llama"))
    model.config.max_position_embeddings = 40
    model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    assert describe(model).max_length == longest

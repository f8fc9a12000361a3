"""Modules that change under a loaded model: followed, or refused; never another model's text."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_calls import greedy_text
from torch import nn

import foretoken
from foretoken.errors import ConfigError, ForetokenError

PROMPT = [5, 9, 2, 41, 9, 2]
VOCAB = 97
METHODS = ("plain", "prompt-lookup", "layerskip")


@pytest.fixture
def model(make_llama):
    made = make_llama(VOCAB, num_hidden_layers=4, hidden_act="gelu")
    assert made.model.layers[1].mlp.act_fn.act is nn.functional.gelu
    return made


def plain_text(model, count=16):
    return greedy_text(model, PROMPT, count)


def text(session, count=16):
    return session.generate(PROMPT, count).tokens


def scaled(factor):
    return lambda module, given, output: factor * output


def hook_swapped(model):
    mlp = model.model.layers[1].mlp
    mlp._forward_hooks.clear()
    mlp.register_forward_hook(scaled(-1.0))


def attention_scaled(model):
    model.model.layers[1].self_attn.scaling = 0.01


def rotations_scaled(model):
    model.model.rotary_emb.attention_scaling = 2.0


def epsilon_raised(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 100.0


def frequencies_written(model):
    model.model.rotary_emb.inv_freq.data.mul_(0.37)


def class_replaced(model):
    mlp = model.model.layers[1].mlp
    kind = type(mlp)
    negated = {"forward": lambda self, states: -kind.forward(self, states)}
    mlp.__class__ = type("Negated", (kind,), negated)


def activation_replaced(model):
    model.model.layers[1].mlp.act_fn.act = torch.relu  # a function, no module


CHANGES = [
    attention_scaled, rotations_scaled, epsilon_raised, frequencies_written, class_replaced,
    activation_replaced,
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_text_follows_values_and_code_of_modules(model, change, method):
    with foretoken.load(model, method) as session:
        before = plain_text(model)
        assert text(session) == before
        change(model)
        after = plain_text(model)
        assert text(session) == after != before


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_in_place_of_another_is_noticed(model, method):
    model.model.layers[1].mlp.register_forward_hook(scaled(1.0))
    with foretoken.load(model, method) as session:
        before = text(session)
        hook_swapped(model)
        assert text(session) == plain_text(model) != before


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_what_a_hook_reads_may_change(model, how):
    """A model with hooks is not captured: the numbers that they read would be constants in it."""
    strength = {"of": 1.0}
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    if how == "hook":
        mlp.register_forward_hook(lambda module, given, output: strength["of"] * output)
    else:
        mlp.forward = lambda states: strength["of"] * own(states)
    with foretoken.load(model, "prompt-lookup") as session:
        assert session.target.lean is None
        assert "layers.1.mlp has a hook" in session.target.kernels.uncaptured
        before = text(session)
        strength["of"] = -1.0
        assert text(session) == plain_text(model) != before


def test_hooks_of_transformers_for_hidden_states_cost_no_capture(model):
    with foretoken.load(model, "plain") as session:
        model(torch.tensor([PROMPT]), output_hidden_states=True)
        assert any(module._forward_hooks for module in model.modules())
        assert text(session) == plain_text(model) and session.target.lean is not None
    with foretoken.load(model, "plain") as session:
        assert session.target.lean is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_training_leaves_behind_costs_no_capture(model):
    """Checkpoints of gradients, forwards that wrappers took off again, hooks of adapters."""
    with foretoken.load(model, "plain") as session:
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        model.enable_input_require_grads()
        mlp = model.model.layers[1].mlp
        mlp.forward = mlp.forward
        model.add_model_tags(["tagged"])
        assert text(session) == plain_text(model) and session.target.lean is not None
    with foretoken.load(model, "plain") as session:
        assert session.target.lean is not None


def test_hooks_of_all_modules_are_noticed(model):
    from torch.nn.modules.module import register_module_forward_hook

    def halved(module, given, output):
        return 0.5 * output if type(module) is type(model.model.layers[0].mlp) else None

    with foretoken.load(model, "plain") as session:
        before = text(session)
        hook = register_module_forward_hook(halved)
        try:
            assert text(session) == plain_text(model) != before
            with foretoken.load(model, "plain") as other:
                assert other.target.lean is None and text(other) == plain_text(model)
        finally:
            hook.remove()
        assert text(session) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_no_obstacle(model):
    model.extra = torch.jit.script(nn.ReLU())
    with foretoken.load(model, "plain") as session:
        assert text(session) == plain_text(model)


def test_inside_generate_a_replaced_layer_is_followed(model):
    ours = foretoken.custom_generate(method="prompt-lookup")
    before = greedy_text(model, PROMPT, custom_generate=ours)
    layer_copied(model)
    model.model.layers[1].mlp.up_proj.weight.data *= -1
    assert greedy_text(model, PROMPT, custom_generate=ours) == plain_text(model) != before


def test_a_change_that_a_look_refused_is_told_by_the_next(model):
    with foretoken.load(model, "plain") as session:
        borrowing, weight = session.target.borrowing, model.model.layers[0].mlp.up_proj.weight
        whole = weight.detach().clone()
        model.model.layers[1].mlp.register_forward_hook(scaled(-1.0))
        weight.data.fill_(float("nan"))
        with pytest.raises(ForetokenError, match=r"NaN|nan|number"):
            session.target.refresh()
        weight.data.copy_(whole)
        found = borrowing.refresh(False)
        assert found.patched and found.hooked and not borrowing.refresh(False).patched


def layer_copied(model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def attention_copied(model):
    model.model.layers[1].self_attn = copy.deepcopy(model.model.layers[1].self_attn)


def layers_swapped(model):
    layers = model.model.layers
    first, third = layers[0], layers[2]
    layers[0], layers[2] = third, first


def layer_removed(model):
    del model.model.layers[3]


@pytest.mark.parametrize("method", [*METHODS, "auto", "swift"])
@pytest.mark.parametrize(
    "change",
    [layer_copied, attention_copied, layers_swapped, layer_removed],
    ids=lambda change: change.__name__,
)
def test_other_layers_are_refused_until_the_old_ones_are_back(model, change, method):
    whole = model.model
    before = [*whole.layers], [layer.self_attn for layer in whole.layers]
    with foretoken.load(model, method) as session:
        written = text(session)
        change(model)
        for _ in range(2):
            with pytest.raises(ConfigError, match="layers of a loaded model"):
                session.generate(PROMPT, 16)
        whole.layers = nn.ModuleList(before[0]).eval()
        for layer, attention in zip(*before, strict=True):
            layer.self_attn = attention
        assert text(session) == written == plain_text(model)


def test_texts_begun_under_another_hook_are_not_taken_up_again(model):
    prompt = [1 + i % 90 for i in range(80)]
    with foretoken.load(model, "plain") as session:
        session.keep_prefixes(1 << 20)
        before = session.generate(prompt, 16).tokens
        model.model.layers[1].mlp.register_forward_hook(scaled(-1.0))
        assert session.generate(prompt, 16).tokens == greedy_text(model, prompt) != before

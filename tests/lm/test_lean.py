"""The captured forward is the model's own, is cheaper, and says by name where it cannot be had."""

import copy
import random

import numpy as np
import pytest
import torch
from families import CHAINS, FURTHER, REQUIRED, slowly
from play import change_weight, closeness, fresh_tree, point, random_tokens, random_tree, row_of
from torch import nn

from foretoken.errors import ConfigError
from foretoken.lm.kernels import capture as captures
from foretoken.lm.kernels import choosing
from foretoken.lm.kernels.few_tokens import rms_norm, rotated
from foretoken.lm.kernels.merged import Merged
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import batch_forward
from foretoken.lm.runtime.captured import Cut, Sublayer
from foretoken.types import Embedding, FinalNorm, Layer

NOT_CAPTURED = ("falcon", "gptj", "deepseek_v3")
CLOSE = 2e-5
TAPS = (Embedding(), Layer(0), Layer(2), Layer(-1), FinalNorm())


def calls_of(lm, target):
    graph = lm.lean.capture.graph
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


@pytest.mark.parametrize(
    "family", [*REQUIRED, *slowly(f for f in FURTHER if f not in NOT_CAPTURED)]
)
def test_every_family_is_captured_and_taps_read_what_hooks_read(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm, own = open_lm(model), open_lm(copy.deepcopy(model), compile="off")
    assert lm.kernels.captured and not own.kernels.captured
    rows = [row_of(random_tokens(dice, count)) for count in (31, 1, 12)]
    sizes = zip(rows, (9, 1, 4), strict=True)
    trees = [point(random_tree(dice, row.tokens[-1], nodes)) for row, nodes in sizes]
    for one in (lm, own):
        one.prefill(rows)
    for some in ([0, 1, 2], [1], [2]):
        mine, theirs = (
            one.score([rows[i] for i in some], [trees[i] for i in some], TAPS) for one in (lm, own)
        )
        for a, b in zip(mine, theirs, strict=True):
            assert closeness(a.logits, b.logits) < CLOSE
            assert a.hidden.shape == b.hidden.shape
            assert closeness(a.hidden, b.hidden) < CLOSE


@pytest.mark.parametrize("wasted", [0, 1 << 40])
def test_rows_laid_end_to_end_are_the_rows_alone(wasted, make_tiny, monkeypatch):
    """Of equal width as a padded batch or each by itself, of other widths each by itself."""
    monkeypatch.setattr(batch_forward, "MOST_WASTED", wasted)
    dice = random.Random(wasted)
    model = make_tiny("llama")
    lm = open_lm(model)
    rows = [row_of(random_tokens(dice, count)) for count in (31, 1, 12, 90)]
    lm.prefill(rows)
    for sizes in ((1, 1, 1, 1), (5, 5, 5, 5), (1, 7, 3, 4), (6, 1)):
        some = dice.sample(rows, len(sizes))
        trees = [random_tree(dice, row.tokens[-1], n) for row, n in zip(some, sizes, strict=True)]
        scores = lm.score(some, [point(tree) for tree in trees], TAPS)
        for row, tree, score in zip(some, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
            assert score.hidden.shape == (len(tree), len(TAPS), 64)
            lm.commit([row], [tree.path(len(tree) - 1)])
            row.tokens += [tree.tokens[n] for n in tree.path(len(tree) - 1)] + [3]
    late = [row_of(random_tokens(dice, count)) for count in (8, 40)]
    lm.prefill(late)  # prompts beside each other
    trees = [random_tree(dice, row.tokens[-1], 4) for row in late]
    for row, tree, score in zip(
        late, trees, lm.score(late, [point(t) for t in trees]), strict=True
    ):
        assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


@pytest.mark.parametrize("family", [*NOT_CAPTURED, *CHAINS, "phi3_longrope"])
def test_what_cannot_be_captured_says_why_and_runs_as_it_is(family, make_tiny):
    lm = open_lm(make_tiny(family))
    assert not lm.kernels.captured and lm.kernels.uncaptured
    assert lm.lean is None


def test_compile_is_auto_max_or_off(make_tiny):
    assert open_lm(make_tiny("llama"), compile="off").lean is None
    with pytest.raises(ConfigError, match="compile is one of auto, max, off"):
        open_lm(make_tiny("llama"), compile="fast")


def test_linears_with_one_input_become_one_product_and_norms_one_operation(make_tiny):
    lm = open_lm(make_tiny("llama"))
    merged = [site for site in lm.lean.sites if isinstance(site, Merged)]
    assert [len(site.parts) for site in merged] == [3, 2] * 4  # q k v, gate and up
    assert len(lm.lean.sites) == 4 * 4 + 1
    assert len(calls_of(lm, rms_norm)) == 2 * 4 + 1
    assert len(calls_of(lm, rotated)) == 2 * 4
    assert not calls_of(lm, torch.ops.aten.rsqrt.default)


def test_packed_products_of_several_layers_are_the_dense_ones(make_tiny):
    lm = open_lm(make_tiny("qwen2"))  # with biases
    site = next(site for site in lm.lean.sites if isinstance(site, Merged))
    x = torch.randn(1, 3, site.width)
    with torch.inference_mode():
        site.pack_once()
        for kernel in range(5):
            for found, part in zip(site.run(kernel, x), site.parts, strict=True):
                right = nn.functional.linear(x, part.matrix, part.bias)
                assert closeness(found, right) < CLOSE


@pytest.mark.parametrize("how", ["in place", "data", "parameter", "norm"])
def test_changed_weights_are_followed(how, make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model, kernels="auto")
    change_weight(model.model.layers[1], how)
    if how in ("data", "parameter"):
        assert lm.refresh() == 1
    row, tree = row_of([3, 1, 4, 1, 5]), random_tree(random.Random(1), 5, 7)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


def test_models_of_one_structure_share_a_tracing_and_no_weight(make_tiny, monkeypatch):
    first, second = make_tiny("llama", seed=1), make_tiny("llama", seed=2)
    open_lm(first)
    monkeypatch.setattr(captures, "trace", None)  # not called again
    lm = open_lm(second)
    row, tree = row_of([2, 7, 1]), random_tree(random.Random(2), 1, 5)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(second, row.tokens, tree)) < CLOSE


def test_a_model_that_somebody_hooked_into_is_not_captured(make_tiny):
    open_lm(make_tiny("llama"))
    model = make_tiny("llama")
    model.model.layers[2].mlp.register_forward_hook(lambda module, given, output: 0.5 * output)
    lm = open_lm(model)
    assert not lm.kernels.captured and "layers.2.mlp has a hook" in lm.kernels.uncaptured
    row, tree = row_of([2, 7, 1]), random_tree(random.Random(2), 1, 5)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


def test_kernels_of_our_own_in_its_modules_are_no_patch(make_tiny):
    """Whoever puts products into the modules of a model that is open leaves it its capture."""
    lm = open_lm(make_tiny("llama"))
    choosing.choose_kernels(lm.model, "packed")
    assert list(choosing.installed(lm.model))
    lm.refresh()
    assert lm.lean is not None


@pytest.mark.parametrize("how", ["hook", "forward", "module"])
def test_what_is_patched_after_loading_is_not_passed_over(how, make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model)
    mlp = model.model.layers[2].mlp
    if how == "hook":
        mlp.register_forward_hook(lambda module, given, output: 0.5 * output)
    elif how == "forward":
        own = mlp.forward
        mlp.forward = lambda states: 0.5 * own(states)
    else:
        model.model.layers[2].mlp = nn.Sequential(mlp, nn.Softsign())
    lm.refresh()
    assert lm.lean is None and "after it was captured" in lm.borrowing.kernels.report.uncaptured
    row, tree = row_of([2, 7, 1]), random_tree(random.Random(2), 1, 5)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


@pytest.mark.parametrize("seen", [True, False])
def test_a_layer_changed_behind_the_configuration_is_found_out(seen, make_tiny):
    """Plain values tell structures apart; whatever runs is compared with the model all the same."""
    for factor in (1, 4):
        model = make_tiny("llama")
        attention = model.model.layers[1].self_attn
        scaled = factor * attention.scaling
        attention.scaling = scaled if seen else np.float64(scaled)  # no plain number
        lm = open_lm(model)
    assert lm.kernels.captured == seen and ("off by" in lm.kernels.uncaptured) != seen
    row, tree = row_of([2, 7, 1]), random_tree(random.Random(2), 1, 5)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


def test_borrowers_of_one_model_share_its_capture(make_tiny):
    model = make_tiny("llama")
    first, second = open_lm(model), open_lm(model)
    assert first.lean is second.lean is not None
    first.close()
    assert first.lean is None and second.lean is not None


def test_parts_of_a_captured_model_run_no_other_layer(make_tiny):
    lm = open_lm(make_tiny("llama"))
    ran = []

    def attend(layer, query, *rest):
        ran.append(layer)
        return query.transpose(1, 2).contiguous()

    ids, places = torch.tensor([[1, 2, 3]]), torch.arange(3)
    states = torch.randn(1, 3, 64)
    parts = {
        Cut(): [0, 1, 2, 3],
        Cut(stop=2): [0, 1],
        Cut(start=2): [2, 3],
        Cut(start=4): [],
        Cut(stop=2, head=False): [0, 1],
        Cut(without=frozenset({Sublayer(1, 0), Sublayer(1, 1), Sublayer(2, 0)})): [0, 3],
        Cut(without=frozenset({Sublayer(2, 1)})): [0, 1, 2, 3],
    }
    with torch.inference_mode():
        for cut, layers in parts.items():
            ran.clear()
            [last] = lm.lean.run(ids, ids, places, attend, (), cut, states if cut.start else None)
            assert ran == layers
            assert last.shape == ((3, 97) if cut.head else (1, 3, 64))


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "granite", "gpt2"])
def test_norm_and_head_alone_are_the_models_own(family, make_tiny):
    """With their scalings and caps; of states as a call's taps give them."""
    lm = open_lm(make_tiny(family))
    row, tree = row_of([5, 8, 13]), random_tree(random.Random(3), 13, 6)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)], (Layer(-1), FinalNorm()))
    assert closeness(lm.read_out(score.hidden[:, 0]), score.logits) < CLOSE
    assert closeness(lm.unembed(score.hidden[:, 1]), score.logits) < CLOSE


def test_a_module_in_two_places_is_no_obstacle(make_tiny):
    model = make_tiny("llama")
    model.model.layers[3].mlp = model.model.layers[2].mlp
    lm = open_lm(model, kernels="dense")
    row = row_of([3, 1, 4, 1, 5])
    lm.prefill([row])
    tree = random_tree(random.Random(0), 5, 6)
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < 2e-5

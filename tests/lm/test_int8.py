"""Models whose linear weights torchao holds as int8: captured, scored and refused as any other."""

import random

import pytest
import torch
from play import closeness, fresh_tree, point, random_tokens, random_tree, row_of

import foretoken
from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm

quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
CLOSE = 2e-5


def quantised(make_tiny, family, dtype=torch.float32, seed=0):
    model = make_tiny(family, seed=seed).to(dtype)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_trees_of_an_int8_model_get_its_own_logits(family, make_tiny):
    whole = open_lm(make_tiny(family))  # of the same structure, but for the kind of its weights
    model = quantised(make_tiny, family)
    lm = open_lm(model)
    assert lm.kernels.captured, lm.kernels.uncaptured
    dice = random.Random(1)
    row = row_of(random_tokens(dice, 12))
    tree = random_tree(dice, row.tokens[-1], 7)
    lm.prefill([row])
    whole.prefill([row])
    [score], [before] = lm.score([row], [point(tree)]), whole.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
    assert closeness(score.logits, before.logits) > 100 * CLOSE  # int8 was not passed over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "layerskip"])
def test_greedy_text_of_an_int8_model_is_its_own(method, dtype, make_tiny):
    model = quantised(make_tiny, "llama", dtype)
    prompt = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        right = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
    with foretoken.load(model, method) as session:
        found = session.generate(prompt, max_new_tokens=30, temperature=0.0)
    mine, theirs = list(found.tokens), right[0, len(prompt) :].tolist()
    if mine != theirs:  # both texts are its own where the same weights in 32 bits tell no more
        assert dtype is torch.bfloat16
        at = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        text = torch.tensor([prompt + mine[:at]])
        with torch.inference_mode():
            rough = model(text).logits[0, -1].float()
            logits = quantised(make_tiny, "llama")(text).logits[0, -1]
        error = (rough - logits).abs().max()
        assert logits.max() - logits[[mine[at], theirs[at]]].min() <= 2 * error


def test_a_layer_quantised_again_is_noticed(make_tiny):
    model, other = (quantised(make_tiny, "llama", seed=seed) for seed in (1, 2))
    lm = open_lm(model)
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    lm.refresh()
    dice = random.Random(2)
    row = row_of(random_tokens(dice, 9))
    tree = random_tree(dice, row.tokens[-1], 5)
    lm.prefill([row])
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


def test_equal_bits_of_an_int8_model_are_refused_by_name(make_tiny):
    with pytest.raises(CapabilityError, match="q_proj has a forward of its own"):
        open_lm(quantised(make_tiny, "llama"), exact_bits=True)

"""What a configuration says of memory is what the tensors of the model take, byte for byte."""

import itertools
import json

import pytest
import torch
import transformers as hf
from families import COMMON, REQUIRED
from torch.profiler import profile

from foretoken.engine.memory.layout import layout_of
from foretoken.errors import CapabilityError
from foretoken.lm.footprint import footprint
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cache import rounded
from foretoken.lm.runtime.probe import probe_row
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, TokenTree

ROWS, PROMPT = 3, 21
TREE = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1))


def tensors(model):
    """Bytes of a loaded model's parameters and buffers, tied ones once."""
    found = {one.data_ptr(): one.nbytes for one in (*model.parameters(), *model.buffers())}
    return sum(found.values())


@pytest.mark.parametrize("family", sorted(REQUIRED))
def test_weights_and_cache_are_counted_before_they_are_there(family, make_tiny):
    model = make_tiny(family)
    found = footprint(model.config)
    assert found.weights == tensors(model)
    with open_lm(model, compile="off", kernels="dense") as lm:
        lm.grant(ROWS, PROMPT + len(TREE))
        rows = [probe_row(range(1, PROMPT + 1)) for _ in range(ROWS)]
        lm.prefill(rows)
        lm.score(rows, [Draft(TREE if lm.caps.tree == "mask" else chain(5, [6]), Draw.POINT)] * 3)
        groups = lm.cache.groups
        assert (lm.cache.slots, lm.cache.columns) == (ROWS, rounded(PROMPT + len(TREE)))
        held = sum(group.keys.nbytes + group.values.nbytes for group in groups)
        assert held == ROWS * rounded(PROMPT + len(TREE)) * found.column


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_masks_of_a_step_are_counted(dtype, make_llama, monkeypatch):
    kind = getattr(torch, dtype)
    model = make_llama(97).to(kind)
    found = footprint(model.config, dtype)
    with open_lm(model, compile="off", kernels="dense") as lm:
        rows = [probe_row(range(1, PROMPT + 1)) for _ in range(ROWS)]
        lm.prefill(rows)
        made, full = [], lm.masks.full

        def noting(*given):
            made.append(full(*given))
            return made[-1]

        monkeypatch.setattr(lm.masks, "full", noting)
        scores = lm.score(rows, [Draft(TREE, Draw.POINT)] * ROWS)
    nodes = len(TREE)
    assert sum(score.logits.nbytes for score in scores) == found.logits(ROWS * nodes)
    columns = PROMPT - 1 + nodes
    assert [mask.nbytes for mask in made] == [found.mask(ROWS, nodes, columns)]


def test_a_type_scales_what_is_made_of_numbers(make_llama):
    whole, half = (footprint(make_llama(97).config, dtype) for dtype in ("float32", "bfloat16"))
    assert whole.column == 2 * half.column and whole.logits(7) == 2 * half.logits(7)
    assert half.weights < whole.weights < 2 * half.weights, "rotations stay float32"


def test_tied_outputs_are_counted_once_and_packed_as_a_copy(make_llama):
    tied = footprint(make_llama(97, tie_word_embeddings=True).config)
    own = footprint(make_llama(97, tie_word_embeddings=False).config)
    assert own.weights - tied.weights == 97 * 64 * 4
    assert own.copies == tied.copies


def test_a_reduced_output_layer_is_one_more(make_llama):
    whole = footprint(make_llama(97).config)
    few = whole.with_outputs(40)
    assert few.weights == whole.weights + 40 * 64 * 4
    assert few.logits(1) == 40 * 4 and few.copies <= whole.copies


def test_what_grows_takes_more(make_llama):
    found = footprint(make_llama(97).config)
    for size in (found.logits, found.activations, found.tables):
        assert size(8) <= size(9) <= size(2000)
    for rows in (1, 4):
        assert found.scores(rows, 100, 200) == 0, "one kernel does it all"
        assert found.prompt_mask(rows, 600, 700) <= found.prompt_mask(rows + 1, 600, 700)


def test_models_that_keep_recurrent_state_are_refused_by_name():
    from transformers import MambaConfig

    with pytest.raises(CapabilityError, match="mamba"):
        footprint(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50))


def test_a_loaded_model_of_images_and_text_is_planned_by_its_own_class():
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=8, patch_size=4,
    )  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**COMMON), image_token_index=96
    )
    model = hf.LlavaForConditionalGeneration(config).eval()
    found = layout_of(model, "plain", dtype="float32", device="cpu").target
    text = footprint(config.text_config, "float32", "cpu")
    assert found.weights == tensors(model) > text.weights
    assert (found.column, found.vocab, found.layers) == (text.column, 97, 4)


def test_a_name_of_a_model_of_images_and_text_is_told_its_own_class(make_tiny, tmp_path):
    make_tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(CapabilityError, match="AutoModelForImageTextToText") as told:
        layout_of(tmp_path, "plain")
    assert str(tmp_path) in str(told.value) and "memory_budget" not in str(told.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_tokens_are_counted_once_for_each_of_their_experts(family, make_tiny):
    """What goes through an expert layer holds the states of two experts, gates and products."""
    found = footprint(make_tiny(family).config)
    inner = {"mixtral": 96, "qwen3_moe": 48, "gpt_oss": 96}[family]
    assert found.spread == 2 * max(found.hidden + 4 * inner, 4 * found.hidden)
    assert found.activations(10) == 10 * (found.spread + 3 * found.hidden) * found.element
    assert footprint(make_tiny("llama").config).spread == 0


def test_what_experts_hold_is_no_more_than_is_planned(make_tiny):
    model = make_tiny("mixtral")
    found, tokens = footprint(model.config), 300
    block = model.model.layers[0].mlp
    with torch.inference_mode(), profile(profile_memory=True) as watched:
        block(torch.randn(1, tokens, found.hidden))
    steps = [event.nbytes() for event in watched.profiler.kineto_results.events()
             if event.name() == "[memory]"]  # fmt: skip
    peak = max(itertools.accumulate(steps))
    dense = tokens * 6 * found.hidden * found.element  # as if no token were repeated
    assert dense < peak <= found.activations(tokens)

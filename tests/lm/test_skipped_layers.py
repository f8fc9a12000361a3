"""Drafting without some sublayers: right logits, a cache left as it was, searches that see what
they should."""

import copy
import random

import pytest
import torch
from families import FURTHER, REQUIRED, SCALED, few, sharing_keys, slowly
from play import closeness, fresh, fresh_tree, point, random_chain, random_tokens, row_of

from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.views.wrapping import skipped_layers

CLOSE = 2e-5
NO_MLP = ("opt",)  # its MLP is written out in the layer
SILENT = {"self_attn": "o_proj", "mlp": "down_proj"}
ZEROED = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "qwen2", "phi3", "granite")


def silenced(model, skipped):
    """The same model, whose skipped sublayers add nothing by their weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for unit in skipped:
            part = "mlp" if unit % 2 else "self_attn"
            inner = getattr(model.base_model.layers[1 + unit // 2], part)
            getattr(inner, SILENT[part]).weight.zero_()
    return model


@pytest.mark.parametrize(
    "family",
    [*few(f for f in REQUIRED if f not in NO_MLP), *slowly(f for f in FURTHER if f not in NO_MLP)],
)
def test_drafts_without_sublayers_and_scores_with_them(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    view = skipped_layers(lm)
    assert view.units == 4
    rows = [row_of(random_tokens(dice, count)) for count in (1, 17)]
    for row in rows:
        lm.prefill([row])
    for skipped in (frozenset(), frozenset({1}), frozenset({0, 1, 2}), frozenset(range(4))):
        trees = [random_chain(dice, row.tokens[-1], 4) for row in rows]
        grown = [[], []]
        for node in range(3):
            found = view.draft(
                rows,
                [tree.tokens[node : node + 1] for tree in trees],
                [tree.parents[node : node + 1] for tree in trees],
                skipped,
            )
            for part, logits in zip(grown, found, strict=True):
                part.append(logits)
        if family in ZEROED or not skipped:
            lesser = silenced(model, skipped)
            for row, tree, part in zip(rows, trees, grown, strict=True):
                mixed = drafted_over(lm, lesser, row, tree)
                assert closeness(torch.cat(part), mixed[:3]) < CLOSE
        scores = view.score(rows, [point(tree) for tree in trees])
        for row, tree, score in zip(rows, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
            lm.commit([row], [[1]])
            row.tokens += [tree.tokens[1], *random_tokens(dice, 1)]


@torch.inference_mode()
def drafted_over(lm, lesser, row, tree):
    """Logits of the lesser model over keys and values that the whole model made of the prefix."""
    other = open_lm(lesser, kernels="dense")
    twin = row_of(row.tokens)
    other.prefill([twin])
    count = len(row.tokens) - 1
    for ours, theirs in zip(lm.cache.rows_of, other.cache.rows_of, strict=True):
        if count:
            slots = lm._memory(row).slot, other._memory(twin).slot
            theirs.keys[slots[1], :, :count] = ours.keys[slots[0], :, :count]
            theirs.values[slots[1], :, :count] = ours.values[slots[0], :, :count]
    return other.score([twin], [point(tree)])[0].logits


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "gpt_neox"])
def test_a_search_reads_the_texts_first_tokens_after_its_prompt(family, make_tiny):
    """Nothing of the text may leak in; without skips it says what plain decoding says."""
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    view = skipped_layers(lm)
    for prompt in (1, 13):
        row = row_of(random_tokens(dice, prompt))
        lm.prefill([row])
        row.tokens += random_tokens(dice, 30)
        lm.score([row], [point(random_chain(dice, row.tokens[-1], 2))])
        lm.commit([row], [[]])
        row.tokens += random_tokens(dice, 1)
        before = [layer.keys.clone() for layer in lm.cache.rows_of]
        right = fresh(model, row.tokens).argmax(-1)[prompt : prompt + 12].tolist()
        assert view.guesses(row, 12, frozenset()) == right
        held = lm._memory(row).cached
        slot = lm._memory(row).slot
        for old, layer in zip(before, lm.cache.rows_of, strict=True):
            assert torch.equal(old[slot, :, :held], layer.keys[slot, :, :held])
        (score,) = lm.score([row], [point(random_chain(dice, row.tokens[-1], 1))])
        assert closeness(score.logits, fresh(model, row.tokens)[-1:]) < CLOSE
        lm.free([row])


def test_skipped_sublayers_do_not_run(make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model, kernels="dense", compile="off")  # the captured one: test_lean
    view = skipped_layers(lm)
    runs = []
    for index, layer in enumerate(model.base_model.layers):
        layer.self_attn.q_proj.register_forward_hook(lambda *_, i=index: runs.append(("a", i)))
        layer.mlp.up_proj.register_forward_hook(lambda *_, i=index: runs.append(("m", i)))
    row = row_of([5, 8])
    lm.prefill([row])
    runs.clear()
    view.draft([row], [(8,)], [(-1,)], frozenset({1, 2}))
    assert runs == [("a", 0), ("m", 0), ("a", 1), ("m", 2), ("a", 3), ("m", 3)]
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_models_without_such_parts_are_refused(make_tiny):
    with pytest.raises(CapabilityError, match="no modules of their own"):
        skipped_layers(open_lm(make_tiny("opt"), kernels="dense"))
    with pytest.raises(CapabilityError, match="longrope"):
        skipped_layers(open_lm(make_tiny(next(iter(SCALED))), kernels="dense"))
    with pytest.raises(CapabilityError, match="three or more"):
        skipped_layers(TableLM.random(4, layers=2))
    with pytest.raises(CapabilityError, match="cannot be left out: KeyError"):
        skipped_layers(open_lm(sharing_keys(), kernels="dense", compile="off"))


def test_a_load_that_is_short_of_memory_says_so(make_tiny, monkeypatch):
    def short(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.")

    monkeypatch.setattr("foretoken.lm.views.skipped_layers.draft_once", short)
    with pytest.raises(RuntimeError, match="you tried 9 bytes"):
        skipped_layers(open_lm(make_tiny("llama"), kernels="dense"))

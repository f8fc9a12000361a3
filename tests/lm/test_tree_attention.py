"""Prefix without a mask, tree under its own, merged: the same as one mask over all columns."""

import random

import pytest
import torch
from families import tiny
from play import closeness, fresh_tree, point, random_tokens, random_tree, row_of
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import attention, slot_attention, tree_attention
from foretoken.lm.runtime.attention import NAME, attend
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.slot_attention import InSlots, Reading
from foretoken.lm.runtime.tree_attention import hybrid, merged
from foretoken.trees.masks import Sight, ancestors

LEAST = torch.finfo(torch.float32).min
RIGHT = {"llama", "llama_one_kv", "gpt2"}
CAPPED = {"gemma2", "gpt_oss"}  # scores are capped, or have sinks beside them
WINDOWED = {"mistral"}  # in all layers
MIXED = {"gemma3", "qwen2_mixed"}  # in every second
OTHERS = {"falcon", "deepseek_v3"}  # modules of their own; values narrower than keys


def tree_mask(dice, nodes, columns, dtype=torch.float32):
    """[1, 1, nodes, columns] of a random tree in the last columns, all before them seen."""
    parents = [-1, *(dice.randrange(i) for i in range(1, nodes))]
    mask = torch.zeros(1, 1, nodes, columns, dtype=dtype)
    sight = Sight(dtype, torch.device("cpu"))
    mask[0, 0, :, columns - nodes :] = sight.unpack(ancestors(parents, []), nodes)
    return mask


def by_softmax(query, key, value, mask, scaling):
    """In double precision, heads one by one."""
    fold = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(fold, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scaling + mask.double()
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("heads, groups", [(4, 4), (9, 3), (6, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 2, 31, 700, 5000])
@pytest.mark.parametrize("nodes", [1, 2, 16, 130])
def test_hybrid_equals_masked_attention_for_any_tree(heads, groups, prefix, nodes):
    dice = random.Random(prefix * 1000 + nodes)
    torch.manual_seed(prefix + nodes)
    columns = prefix + nodes
    buffers = [torch.randn(1, groups, columns + 40, 64) for _ in range(2)]
    key, value = (buffer[:, :, :columns] for buffer in buffers)  # not contiguous, as in the cache
    query = 3 * torch.randn(1, nodes, heads, 64).transpose(1, 2)
    mask = tree_mask(dice, nodes, columns)
    exact = by_softmax(query, key, value, mask, 0.2)
    for less in {0, prefix // 2, prefix}:  # what of it is known to be seen by all
        for given in (mask, mask.repeat(1, 1, heads // groups, 1)):
            made = hybrid(query, key, value, given, less, 0.2)
            assert (made - exact).abs().max() < 1e-5


@pytest.mark.parametrize("columns", [1, 9, 5000])
def test_without_a_tree_all_columns_are_seen(columns):
    torch.manual_seed(columns)
    query, key, value = torch.randn(1, 6, 3, 64), *torch.randn(2, 1, 2, columns, 64)
    exact = by_softmax(query, key, value, torch.zeros(1), 0.125)
    for prefix in (0, columns // 2, columns):
        assert (hybrid(query, key, value, None, prefix) - exact).abs().max() < 1e-5


def test_rows_of_different_length_share_the_shortest_prefix():
    dice = random.Random(3)
    torch.manual_seed(3)
    bases, nodes = (2100, 2400, 3000), 16
    longest = max(bases) + nodes
    mask = torch.full((3, 1, nodes, longest), LEAST)
    for row, base in zip(mask, bases, strict=True):
        row[..., : base + nodes] = tree_mask(dice, nodes, base + nodes)[0]
    query, (key, value) = torch.randn(3, 9, nodes, 64), torch.randn(2, 3, 3, longest, 64)
    exact = by_softmax(query, key, value, mask, 0.125)
    assert (hybrid(query, key, value, mask, min(bases)) - exact).abs().max() < 1e-5


def test_merging_neither_overflows_nor_loses_a_side():
    one, other = torch.randn(2, 1, 1, 3, 8)
    sums = torch.tensor([[[2000.0, -2000.0, 1.0]]]), torch.tensor([[[-2000.0, 2000.0, 1.0]]])
    made = merged((one, sums[0]), (other, sums[1]))
    assert torch.equal(made[0, 0, 0], one[0, 0, 0]) and torch.equal(made[0, 0, 1], other[0, 0, 1])
    assert torch.allclose(made[0, 0, 2], (one + other)[0, 0, 2] / 2)
    assert torch.equal(merged(None, (other, sums[1])), other)
    assert torch.equal(merged((one, sums[0]), None), one)


def test_bfloat16_is_as_near_as_under_one_mask():
    dice = random.Random(4)
    torch.manual_seed(4)
    prefix, nodes = 6000, 16
    states = torch.randn(1, 9, nodes, 64), *torch.randn(2, 1, 3, prefix + nodes, 64)
    query, key, value = (x.bfloat16() for x in states)
    mask = tree_mask(dice, nodes, prefix + nodes, torch.bfloat16)
    exact = by_softmax(query, key, value, mask, 0.125)
    wide = (x.repeat_interleave(3, 1) for x in (key, value))
    usual = F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
    made = hybrid(query, key, value, mask, prefix)
    assert made.dtype is torch.bfloat16
    assert (made - exact).abs().max() < 2 * (usual - exact).abs().max()


@pytest.fixture
def short(monkeypatch):
    """Counts hybrids, which are used for any prefix."""
    monkeypatch.setattr(tree_attention, "LARGE", {torch.float32: 1})
    return counted(monkeypatch)


def counted(monkeypatch):
    calls = []

    def counting(*given):
        calls.append(given)
        return hybrid(*given)

    monkeypatch.setattr(attention, "hybrid", counting)
    return calls


ALL = sorted(RIGHT | CAPPED | WINDOWED | MIXED | OTHERS)
CAPTURED = ["llama", "gemma2", "gemma3", "mistral"]


@pytest.mark.parametrize(
    "family, compile", [*((one, "off") for one in ALL), *((one, "auto") for one in CAPTURED)]
)
def test_it_is_used_only_where_it_is_right(family, compile, short):
    dice = random.Random(family)
    model = tiny(family)
    lm = open_lm(model, kernels="dense", compile=compile)
    rows = [row_of(random_tokens(dice, count)) for count in (30, 47, 19)]
    for some in (rows[:1], rows):
        lm.prefill([row for row in some if lm.missing(row)])
        trees = [random_tree(dice, row.tokens[-1], 9) for row in some]
        del short[:]
        scores = lm.score(some, [point(tree) for tree in trees])
        # a model's own modules know one prefix for all layers
        used = family in RIGHT or (family in MIXED and lm.lean is not None)
        assert bool(short) == used
        if used and len(some) == 1:
            assert len(short) == lm.layers // (2 if family in MIXED else 1)
        for row, tree, score in zip(some, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < 2e-5


def test_the_registered_function_takes_a_prefix():
    """As transformers calls it: a capped layer ignores it, others give the same numbers."""
    registered = AttentionInterface()[NAME]
    assert registered is attend
    torch.manual_seed(5)
    mask = tree_mask(random.Random(5), 16, 6016)
    query, (key, value) = torch.randn(1, 9, 16, 64), torch.randn(2, 1, 3, 6016, 64)
    for odd in ({}, {"softcap": 5.0}, {"s_aux": torch.randn(9)}):
        right, _ = registered(None, query, key, value, mask, 0.125, **odd)
        made, _ = registered(None, query, key, value, mask, 0.125, prefix=6000, **odd)
        assert made.shape == (1, 16, 9, 64) and made.is_contiguous()
        assert torch.equal(made, right) if odd else (made - right).abs().max() < 1e-5


def long_model(places=16384):
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=places, head_dim=64,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("lengths", [(4700,), (4400, 4500)])
def test_a_long_context_gives_the_logits_of_masked_attention(lengths, compile, monkeypatch):
    dice = random.Random(len(lengths))
    calls = counted(monkeypatch)
    monkeypatch.setattr(slot_attention, "library", lambda: None)  # a machine without a compiler
    lm = open_lm(long_model(), kernels="dense", compile=compile)
    rows = [row_of(random_tokens(dice, count), 16) for count in lengths]
    lm.prefill(rows)
    trees = [random_tree(dice, row.tokens[-1], 16) for row in rows]
    drafts = [point(tree) for tree in trees]
    del calls[:]
    made = [score.logits for score in lm.score(rows, drafts)]
    assert calls and all(prefix == min(lengths) - 1 for *_, prefix, _ in calls[: lm.layers])
    used = len(calls)
    monkeypatch.setattr(tree_attention, "LARGE", {})
    right = [score.logits for score in lm.score(rows, drafts)]
    assert len(calls) == used
    for mine, theirs in zip(made, right, strict=True):
        assert closeness(mine, theirs) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_c_reads_a_mask_of_the_tree_alone(dtype):
    """Bit for bit what a mask of zeros before it gives, on any number of threads."""
    torch.manual_seed(7)
    dice = random.Random(7)
    slots = SlotCache(1, 1, 64)
    slots.update(*torch.randn(2, 1, 3, 1, 64).to(dtype), 0)
    slots.reserve([0], [2000])
    slots.groups[0].keys.normal_(), slots.groups[0].values.normal_()
    own = InSlots(slots, 3, 4096)
    before = torch.get_num_threads()
    for base, nodes in ((0, 5), (3, 1), (61, 16), (64, 33), (1001, 100), (1900, 64)):
        mask = tree_mask(dice, nodes, base + nodes, dtype)[0, 0]
        query, key, value = (torch.randn(1, n, nodes, 64).to(dtype) for n in (9, 3, 3))
        made = []
        for threads, given in ((1, mask), (1, mask[:, base:]), (2, mask[:, base:])):
            torch.set_num_threads(threads)
            rows = [Reading.of(0, 0, nodes, base, given)]
            made.append(own.over(rows, [given])(0, query, key, value, None))
        torch.set_num_threads(before)
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        keys, values = (
            buffer[0, :, :, : base + nodes]
            for buffer in (slots.groups[0].keys, slots.groups[0].values)
        )
        exact = by_softmax(query, keys, values, mask, 0.125).transpose(1, 2)
        assert (made[0] - exact).abs().max() < (1e-5 if dtype is torch.float32 else 3e-2)

"""exact_bits: the same bits alone, in chains, in trees and beside other rows; or a refusal."""

from __future__ import annotations

import random

import families
import pytest
import torch
from families import tiny

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.lm.kernels import bits, bits_probe, choosing
from foretoken.lm.kernels.bits import Order, Span
from foretoken.lm.kernels.bits_probe import noise, probe_span, sums_in_order
from foretoken.lm.kernels.choosing import installed
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.cached import CachedLM
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, TokenTree

PROMISED = ["llama", "qwen3", "gpt_neox", "phi3", "opt"]
VOCAB = 97


@pytest.fixture(scope="module")
def exact():
    """CachedLMs that promise bits, by family; a machine where the probe refuses skips."""
    made: dict[str, CachedLM] = {}

    def get(family: str) -> CachedLM:
        if family not in made:
            try:
                made[family] = open_lm(tiny(family), exact_bits=True)
            except CapabilityError as refusal:
                pytest.skip(f"this machine makes no promise: {refusal}")
        lm = made[family]
        lm.reset()
        return lm

    return get


def row_of(lm: CachedLM, tokens: list[int]) -> DecodeState:
    row = DecodeState(
        list(tokens), len(tokens), SamplingParams(max_new_tokens=999), SeededCoins(0), None
    )
    lm.prefill([row])
    return row


def tree_with(text: list[int], at: int, depth: int, nodes: int, rng: random.Random):
    """A tree rooted at text[at] that holds the next `depth` tokens among random others."""
    tokens, parents, path = [text[at]], [-1], [0]
    while len(tokens) < nodes or len(path) <= depth:
        if len(path) <= depth and rng.random() < 0.4:
            parents.append(path[-1])
            path.append(len(tokens))
            tokens.append(text[at + len(path) - 1])
        else:
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(VOCAB))
    return TokenTree(tuple(tokens), tuple(parents)), path[1:]


def decode(lm: CachedLM, texts, starts, lengths, tree_nodes, seed):
    """Walk every text to its end, all rows together; the logits of each token, the cache."""
    rng = random.Random(seed)
    rows = [row_of(lm, text[:start]) for text, start in zip(texts, starts, strict=True)]
    logits = [[] for _ in rows]
    live = list(range(len(rows)))
    while live:
        pairs = []
        for i in live:
            left = len(texts[i]) - len(rows[i].tokens)
            depth = min(rng.randrange(lengths), left)
            nodes = rng.randrange(depth, tree_nodes + 1) + 1 if tree_nodes else depth + 1
            pairs.append(tree_with(texts[i], len(rows[i].tokens) - 1, depth, nodes, rng))
        active = [rows[i] for i in live]
        scores = lm.score(active, [Draft(tree, Draw.POINT) for tree, _ in pairs])
        lm.commit(active, [path for _, path in pairs])
        for i, score, (_, path) in zip(live, scores, pairs, strict=True):
            logits[i] += list(score.logits[[0, *path]].clone())
            have = len(rows[i].tokens) + len(path)
            rows[i].tokens[:] = texts[i][: have + 1]
        live = [i for i in live if len(logits[i]) < len(texts[i]) - starts[i] + 1]
    return [torch.stack(found) for found in logits], [cached(lm, row, len(t)) for row, t in
                                                      zip(rows, texts, strict=True)]  # fmt: skip


def cached(lm: CachedLM, row: DecodeState, stop: int) -> list[torch.Tensor]:
    slot = lm._memory(row).slot
    return [
        buffer[slot, :, :stop].clone()
        for layer in lm.cache.layers
        for buffer in (layer.keys, layer.values)
    ]


def texts_of(lengths, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", PROMISED)
@pytest.mark.parametrize(("kind", "lengths", "nodes"), [("chain", 6, 0), ("tree", 4, 18)])
def test_logits_and_cache_are_bit_identical_to_plain_decoding(exact, family, kind, lengths, nodes):
    lm = exact(family)
    texts, starts = texts_of([150, 40]), [100, 1]
    for text, start in zip(texts, starts, strict=True):
        lm.reset()
        plain, kept = decode(lm, [text], [start], 1, 0, seed=0)
        lm.reset()
        fast, kept_fast = decode(lm, [text], [start], lengths, nodes, seed=1)
        assert plain[0].shape == (len(text) - start + 1, VOCAB)
        assert torch.equal(plain[0], fast[0])
        assert all(torch.equal(a, b) for a, b in zip(kept[0], kept_fast[0], strict=True))


@pytest.mark.parametrize("family", PROMISED)
def test_rows_of_a_ragged_batch_have_the_bits_they_have_alone(exact, family):
    lm = exact(family)
    texts, starts = texts_of([140, 30, 9, 77]), [120, 20, 1, 50]
    plain = []
    for text, start in zip(texts, starts, strict=True):
        lm.reset()
        plain.append(decode(lm, [text], [start], 1, 0, seed=0))
    lm.reset()
    logits, kept = decode(lm, texts, starts, 5, 12, seed=2)
    for (alone, alone_kept), found, found_kept in zip(plain, logits, kept, strict=True):
        assert torch.equal(alone[0], found)
        assert all(torch.equal(a, b) for a, b in zip(alone_kept[0], found_kept, strict=True))


def test_without_the_mode_bits_do_differ():
    """The property is no accident of small models: the usual attention and products lack it."""
    lm = open_lm(tiny("llama"), kernels="dense")
    [text] = texts_of([150])
    plain, _ = decode(lm, [text], [100], 1, 0, seed=0)
    lm.reset()
    fast, _ = decode(lm, [text], [100], 4, 18, seed=1)
    assert not torch.equal(plain[0], fast[0])
    torch.testing.assert_close(plain[0], fast[0], atol=1e-3, rtol=1e-3)


def test_exact_numbers_are_those_of_the_model(exact):
    lm = exact("llama")
    [text] = texts_of([40])
    logits, _ = decode(lm, [text], [5], 4, 9, seed=4)
    with torch.inference_mode():
        right = tiny("llama")(torch.tensor([text])).logits[0, 4:]
    torch.testing.assert_close(logits[0], right, atol=2e-4, rtol=2e-4)


def test_a_width_whose_activation_rounds_by_place_is_refused_by_name(monkeypatch):
    config, _ = families.FAMILIES["llama"]
    monkeypatch.setitem(families.FAMILIES, "llama", (config, {"intermediate_size": 100}))
    model = tiny("llama")
    try:
        open_lm(model, exact_bits=True)
    except CapabilityError as refusal:
        assert "act_fn" in str(refusal) and "width 100" in str(refusal)
        assert not list(installed(model))
    else:
        pytest.skip("this machine rounds odd widths alike")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_are_refused(family):
    model = tiny(family)
    with pytest.raises(CapabilityError, match="experts"):
        open_lm(model, exact_bits=True)
    assert not list(installed(model))


def test_other_types_are_refused():
    with pytest.raises(CapabilityError, match="float32"):
        open_lm(tiny("llama").double(), exact_bits=True)


def test_soft_caps_are_refused():
    with pytest.raises(CapabilityError, match="soft-capped"):
        open_lm(tiny("gemma2"), exact_bits=True)


def test_a_torch_without_onednn_is_refused_by_name(monkeypatch):
    for module in (bits_probe, choosing):
        monkeypatch.setattr(module, "can_pack", lambda _: False)
    model = tiny("llama")
    with pytest.raises(CapabilityError, match="oneDNN"):
        open_lm(model, exact_bits=True)
    assert not list(installed(model))


def test_a_tree_beyond_reach_is_refused(exact):
    lm = exact("llama")
    row = row_of(lm, texts_of([20])[0])
    nodes = lm.span.reach + 3
    star = TokenTree(tuple([row.tokens[-1]] + [1] * (nodes - 1)), (-1, *[0] * (nodes - 1)))
    with pytest.raises(CapabilityError, match="draft at most"):
        lm.score([row], [Draft(star, Draw.POINT)])


def test_closing_gives_the_model_back():
    model = tiny("opt")
    with torch.inference_mode():
        before = model(torch.tensor([[3, 5, 8]])).logits
    try:
        lm = open_lm(model, exact_bits=True)
    except CapabilityError as refusal:
        pytest.skip(str(refusal))
    assert list(installed(model)) and lm.kernels.mode == "packed"
    lm.close()
    assert not list(installed(model))
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([[3, 5, 8]])).logits, before)


def test_order_cuts_by_position_and_reaches_as_far_as_columns_are_pushed():
    span = Span(block=8, reach=4)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 8, 9]])  # a tree from column 7 on
    order = Order.of(span, positions, plain=7, pushed=2)
    assert [piece[:2] for piece in order.pieces] == [(0, 10), (8, 12)]
    first, second = (piece[2] for piece in order.pieces)
    assert first.flatten().tolist() == [1] * 9 + [0]
    assert second.flatten().tolist() == [0, 1, 1, 1]
    with pytest.raises(CapabilityError):
        Order.of(span, positions, plain=7, pushed=5)


def test_ordered_sums_equal_ordinary_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 300, 16), None
    value = torch.randn(2, 2, 300, 16)
    mask = torch.zeros(2, 1, 3, 300)
    mask[0, ..., 280:] = torch.finfo(torch.float32).min
    order = Order.of(Span(64, 32), torch.arange(300).repeat(2, 1), plain=300, pushed=0)
    mixed, _ = bits.attend_in_order(None, query, key, value, mask, scaling=0.25, order=order)
    right = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(mixed, right.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_the_span_probe_tells_split_sums_from_whole_ones(exact):
    lm = exact("llama")
    assert probe_span(lm) == lm.span
    assert sums_in_order(lm.span, 2, 16, seed=5)
    assert not all(sums_in_order(Span.of(3 * 2**k), 2, 16, seed=1) for k in range(9, 12))


def test_noise_is_irregular_and_bounded():
    x = noise(50, 50)
    assert x.abs().max() <= 1 and x.unique().numel() > 2300 and abs(float(x.mean())) < 0.1

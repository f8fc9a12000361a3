"""Norms, rotations and attention in C: what torch computes, for every shape that is asked for."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.lm.kernels import few_tokens, segments
from foretoken.lm.kernels.choosing import take_native
from foretoken.lm.kernels.lowering import KIND, Place, Step
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import batch_forward, slot_attention
from foretoken.lm.runtime.attention import attend
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.probe import probe_row, some_tokens
from foretoken.lm.runtime.slot_attention import InSlots, Reading
from foretoken.native import library as native
from foretoken.types import Draft, Draw, TokenTree

pytestmark = pytest.mark.skipif(
    isinstance(native.library(), native.Unavailable), reason="no C compiler or no OpenMP here"
)
TYPES = [torch.float32, torch.bfloat16]
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def near(made, exact):
    assert made.shape == exact.shape
    error = EXACT[made.dtype]
    torch.testing.assert_close(made.double(), exact.double(), rtol=error, atol=error)


def counted(monkeypatch):
    """The operations in C that are called from now on."""
    calls = []
    own = few_tokens.operation

    def operation(asked, dtype):
        found = own(asked, dtype)
        assert found is not None
        return lambda *given: calls.append(asked) or found(*given)

    monkeypatch.setattr(few_tokens, "operation", operation)
    return calls


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_are_those_of_the_formula_for_all_views(dtype, monkeypatch):
    torch.manual_seed(0)
    calls = counted(monkeypatch)
    weight = torch.randn(64).to(dtype)
    widened = torch.cat((weight, torch.zeros_like(weight)))
    wide = torch.randn(1, 9, 3 * 64).to(dtype)
    for x in (wide, wide.view(1, 9, 3, 64), wide[..., 64:128], wide[..., ::3], wide[0, :, :64]):
        x = x[..., :64]
        full = x.double()
        exact = full * (full.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
        near(few_tokens.rms_norm(x, weight, widened, 1e-3), exact.to(dtype))
    assert len(calls) == 5
    many = torch.randn(1, few_tokens.FEW + 1, 64).to(dtype)
    alone = torch.cat([few_tokens.rms_norm(x, weight, widened, 1e-3) for x in many[0].split(1)])
    near(few_tokens.rms_norm(many, weight, widened, 1e-3)[0], alone)
    assert len(calls) == 5 + few_tokens.FEW + 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 64])
def test_rotations_are_those_of_the_formula(dtype, width, monkeypatch):
    torch.manual_seed(1)
    calls = counted(monkeypatch)
    half = width // 2
    for tokens in (1, 5):
        angles = torch.randn(1, 1, tokens, half).double()
        cos, sin = (torch.cat((f(angles), f(angles)), -1).to(dtype) for f in (torch.cos, torch.sin))
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        x = torch.randn(1, tokens, 3, 2 * width).to(dtype)[..., :width].transpose(1, 2)
        swapped = torch.cat((-x[..., half:], x[..., :half]), -1).double()
        exact = (x.double() * cos.double() + swapped * sin.double()).to(dtype)
        near(few_tokens.rotated(x, cos, signed, half), exact)
    assert calls == ["rotate"] * 2
    batch = x.repeat(2, 1, 1, 1)  # several rows: torch's way, the same numbers
    near(few_tokens.rotated(batch, cos, signed, half)[1:], exact)
    assert len(calls) == 2


@pytest.fixture
def cache():
    """Three layers of two groups of heads; buffers with something in every column."""

    def make(dtype, width=64, value_width=32):
        torch.manual_seed(2)
        slots = SlotCache(3, 4, 64)
        states = (torch.randn(1, 2, 1, n).to(dtype) for n in (width, value_width))
        keys, values = states
        for layer in range(3):
            slots.update(keys, values, layer)
        slots.reserve(range(4), [200] * 4)
        for group in slots.groups:
            group.keys.normal_(), group.values.normal_()
        return slots

    return make


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fold", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_attends_to_its_own_columns(cache, dtype, fold, threads):
    slots = cache(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lengths = {2: (1, 17), 0: (45, 150), 3: (2, 2), 1: (23, 96)}  # slot -> tokens, columns
        rows, kept, at = [], [], 0
        for slot, (tokens, stop) in lengths.items():
            mask = torch.zeros(tokens, stop).to(dtype)
            mask.masked_fill_(torch.rand(tokens, stop) < 0.3, torch.finfo(dtype).min)
            mask[:, :70] = -torch.inf if slot == 1 else mask[:, :70]  # nothing seen for a while
            mask[:, -1] = 0
            rows.append(Reading.of(slot, at, at + tokens, stop - tokens, mask if slot else None))
            kept.append(mask)
            at += tokens
        states = torch.randn(1, at, 2, 96 + 64 * fold).to(dtype).transpose(1, 2)
        value, key = states[..., :32], states[..., 32:96]
        query = states[..., 96:].reshape(1, 2, at, fold, 64).transpose(2, 3).reshape(1, -1, at, 64)
        own = InSlots(slots, fold, 64).over(rows, kept)
        made = own(1, query, key, value, 0.2)
        for row, mask in zip(rows, kept, strict=True):
            part = slice(row.first, row.last)
            keys, values = (
                getattr(slots.rows_of[1], name)[row.slot, :, : row.stop][None]
                for name in ("keys", "values")
            )
            assert torch.equal(keys[:, :, row.start :], key[:, :, part])
            assert torch.equal(values[:, :, row.start :], value[:, :, part])
            if not row.slot:  # no mask: each sees what is before it, and itself
                hidden = torch.ones(mask.shape, dtype=torch.bool).triu(row.start + 1)
                mask = torch.zeros(mask.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
            double = (x.double() for x in (query[:, :, part], keys, values))
            exact, _ = attend(None, *double, mask.double()[None, None], 0.2)
            near(made[:, part], exact.to(dtype))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [2, 3, 5, 7, 9, 16, 21])
def test_a_node_has_the_bits_of_a_token_behind_its_path_alone(cache, dtype, tokens, vectors_alone):
    """However many queries are in its tile: compilers may not round copies of the code apart."""
    dice, slots = random.Random(tokens), cache(dtype)
    layer = slots.rows_of[1]
    own = InSlots(slots, 3, 64)
    for start in (61, 117, 128, 149, 150, 181):
        parents = [-1, *(dice.randrange(max(0, i - 3), i) for i in range(1, tokens))]
        paths = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if node else []), node])
        mask = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype)
        for node, path in enumerate(paths):
            mask[node, path] = 0
        forms = (6, 64), (2, 64), (2, 32)
        query, key, value = (torch.randn(1, n, tokens, wide).to(dtype) for n, wide in forms)
        query[..., ::7] *= 3  # so that the largest score is now in this block, now in that
        row = Reading.of(1, 0, tokens, start, mask)
        made = own.over([row], [mask])(1, query, key, value, None)
        layer.keys[2, :, :start] = layer.keys[1, :, :start]
        layer.values[2, :, :start] = layer.values[1, :, :start]
        for node, path in enumerate(paths):
            at = start + len(path) - 1
            layer.keys[2, :, start:at] = key[0, :, path[:-1]]
            layer.values[2, :, start:at] = value[0, :, path[:-1]]
            states = [each[:, :, node : node + 1] for each in (query, key, value)]
            alone = own.over([Reading.of(2, 0, 1, at, None)])(1, *states, None)
            assert torch.equal(alone[:, 0], made[:, node])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tree", [True, False])
def test_a_row_behind_pads_is_as_the_row_alone(cache, dtype, tree):
    slots, pads, start, tokens = cache(dtype), 37, 60, 9
    for group in slots.groups:
        group.keys[:, 1, :, : start + tokens] = group.keys[:, 2, :, pads : pads + start + tokens]
        group.values[:, 1, :, : start + tokens] = group.values[
            :, 2, :, pads : pads + start + tokens
        ]
    states = [
        torch.randn(1, heads, tokens, n).to(dtype) for heads, n in ((2, 64), (2, 64), (2, 32))
    ]
    mask = None
    if tree:
        hidden = torch.rand(tokens, tokens).tril(-1) < 0.4
        mask = torch.zeros(tokens, tokens).masked_fill(hidden, torch.finfo(dtype).min)
        mask = mask.masked_fill(torch.ones(tokens, tokens).triu(1) > 0, torch.finfo(dtype).min)
        mask = mask.to(dtype)
    own, kept = InSlots(slots, 1, 64), [] if mask is None else [mask]
    alone = own.over([Reading.of(1, 0, tokens, start, mask)], kept)(1, *states, None)
    behind = own.over([Reading.of(2, 0, tokens, start + pads, mask, pads)], kept)(1, *states, None)
    assert torch.equal(alone, behind)
    layer = slots.rows_of[1]
    assert torch.equal(layer.keys[2, :, pads + start :][:, :tokens], states[1][0])
    assert torch.equal(layer.values[2, :, pads + start :][:, :tokens], states[2][0])


@pytest.mark.parametrize("which", range(3))
def test_states_may_lie_in_any_order(cache, which):
    """A product of a transposed weight leaves the numbers of a token apart."""
    slots = cache(torch.float32)
    own = InSlots(slots, 1, 8).over([Reading.of(0, 0, 3, 50, None)])
    states = [torch.randn(1, 2, 3, n) for n in (64, 64, 32)]
    right = own(0, *states, None)
    states[which] = states[which].transpose(2, 3).contiguous().transpose(2, 3)
    assert states[which].stride(3) != 1
    assert torch.equal(own(0, *states, None), right)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_a_token_reads_does_not_depend_on_its_neighbours(cache, dtype):
    """Bit for bit: a text must not change with the size of a draft."""
    slots = cache(dtype)
    slots.groups[0].keys[0, 0] *= 3  # larger scores come late
    query, key, value = (torch.randn(1, n, 40, w).to(dtype) for n, w in ((6, 64), (2, 64), (2, 32)))
    together = InSlots(slots, 3, 64).over([Reading.of(0, 0, 40, 50, None)])(0, query, key, value, 1)
    for t in (0, 1, 13, 14, 39):
        alone = InSlots(slots, 3, 64).over([Reading.of(0, 0, 1, 50 + t, None)])
        states = (one[:, :, t : t + 1] for one in (query, key, value))
        assert torch.equal(alone(0, *states, 1)[:, 0], together[:, t])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_key_that_is_no_number_is_not_hidden(cache, dtype):
    slots = cache(dtype)
    slots.groups[0].keys[0, 0, :, 20, 5] = float("nan")
    query, key, value = (torch.randn(1, 2, 1, n).to(dtype) for n in (64, 64, 32))
    for stop, spoilt in ((20, False), (40, True)):
        own = InSlots(slots, 1, 32).over([Reading.of(0, 0, 1, stop - 1, None)])
        assert bool(own(0, query, key, value, None).isnan().all()) is spoilt


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_no_number_is_none_behind_a_relu(dtype):
    x = torch.linspace(-1, 1, 32).to(dtype)
    x[5] = float("nan")
    made = torch.zeros_like(x)
    step = Step(KIND["relu"], 32, (Place(0, 0, 32),), Place(1, 0, 32))
    steps, entry = segments.in_a_row([segments.bound(step, {})]), segments.Between.entry
    buffers = (entry * 2)(entry(x.data_ptr(), 32), entry(made.data_ptr(), 32))
    between = native.operation("between", dtype)
    between(ctypes.addressof(steps), 1, ctypes.addressof(buffers), 1, 1)
    torch.testing.assert_close(made, torch.relu(x), rtol=0, atol=0, equal_nan=True)


def test_what_cannot_be_read_in_place_is_left_to_torch(cache):
    slots = cache(torch.float32)
    own = InSlots(slots, 1, 8)
    assert own.over([Reading.of(0, 0, 8, 100, None)]) is not None
    assert own.over([Reading.of(0, 0, 9, 100, None)]) is None  # too many tokens
    slots.lowered = True
    assert own.over([Reading.of(0, 0, 1, 100, None)]) is None  # windows
    assert InSlots(cache(torch.float32, 36, 36), 1, 8).over([Reading.of(0, 0, 1, 9, None)]) is None
    assert InSlots(SlotCache(3), 1, 8).over([Reading.of(0, 0, 1, 9, None)]) is None


def test_new_buffers_are_found(cache):
    slots = cache(torch.float32)
    own = InSlots(slots, 1, 8)
    query, key, value = (torch.randn(1, 2, 1, n) for n in (64, 64, 32))
    first = own.over([Reading.of(1, 0, 1, 60, None)])(2, query, key, value, None)
    slots.reserve(range(16), [2000] * 16)
    second = own.over([Reading.of(1, 0, 1, 60, None)])(2, query, key, value, None)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "rows"), [(64, 1), (64, 3), (64, 70), (48, 2)])
def test_a_norm_of_a_head_is_torchs(dtype, width, rows, monkeypatch):
    module = torch.nn.RMSNorm(width, eps=1e-5)
    module.weight = torch.nn.Parameter(torch.rand(width), requires_grad=False)
    module = module.to(dtype)
    x = torch.randn(2, rows, 2 * width).to(dtype)
    for states in (x[..., :width], x[0, :, width:], x[1:, :, :width]):
        wanted = torch.nn.RMSNorm.forward(module.double(), states.double())
        calls = counted(monkeypatch)
        near(few_tokens.Norm(module.to(dtype))(states), wanted.to(dtype))
        few = states.numel() // width <= few_tokens.FEW
        assert calls == ["norm"] * (few and width % 32 == 0)


def test_the_norms_of_a_head_are_made_in_c():
    head = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64, bias=False))
    take_native(head.requires_grad_(False))
    assert type(head[0].forward) is few_tokens.Norm
    x = torch.randn(3, 64)
    assert torch.allclose(head[0](x), torch.nn.functional.rms_norm(x, (64,)), atol=1e-5)


def test_the_faster_way_is_measured():
    found = slot_attention.reach(torch.float32, 2, 2, 64, 64, torch.get_num_threads())
    assert found in (0, *slot_attention.TRIED[:-1], slot_attention.ENDLESS)


@pytest.mark.parametrize(("lost", "taken"), [(0.5, slot_attention.IN_ONE_CALL), (2.0, 0)])
def test_few_tokens_may_lose_what_one_call_spares(monkeypatch, lost, taken):
    seconds = 1e-3 + lost * slot_attention.SPARED
    monkeypatch.setattr(slot_attention, "timed", lambda *_: (seconds, 1e-3))
    found = slot_attention.reach.__wrapped__(torch.float32, 2, 2, 64, 64, 1)
    assert found == max([n for n in slot_attention.TRIED if n <= taken], default=0)


def test_a_busy_moment_does_not_settle_how_attention_is_made(monkeypatch):
    looks = iter([(1e-4, 1e-3), (9e-3, 1e-3), (9e-3, 1e-3), (1e-4, 1e-3)])
    monkeypatch.setattr(slot_attention, "timed", lambda *_: next(looks, (1e-4, 1e-3)))
    assert (
        slot_attention.reach.__wrapped__(torch.float32, 2, 2, 64, 64, 1) == slot_attention.ENDLESS
    )
    monkeypatch.setattr(slot_attention, "timed", lambda _, n: (1e-4 if n < 8 else 9e-3, 1e-3))
    assert slot_attention.reach.__wrapped__(torch.float32, 2, 2, 64, 64, 1) == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_a_captured_model_gives_the_logits_of_its_modules(dtype, monkeypatch):
    """Lone rows, trees, batches of different lengths, and rows whose slots were moved."""
    monkeypatch.setattr(slot_attention, "reach", lambda *_: 32)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    used = []
    own = batch_forward.SlotAttention
    monkeypatch.setattr(batch_forward, "SlotAttention", lambda *a: used.append(a) or own(*a))
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 1))
    said = {}
    for way in ("auto", "off"):
        with open_lm(model, compile=way) as lm, torch.inference_mode():
            rows = [probe_row(some_tokens(n, 120, n)) for n in (40, 9, 70)]
            lm.prefill(rows)
            drafts = [Draft(tree, Draw.POINT)] * 3
            used.clear()
            three = lm.score(rows, drafts)
            lm.free(rows[:1])  # the last row takes its slot
            one = lm.score(rows[2:], drafts[2:])
            said[way] = [*three, *one]
            assert bool(used) is (way == "auto")
    for own, theirs in zip(said["auto"], said["off"], strict=True):
        spread = float(theirs.logits.float().std())
        error = 1e-4 if dtype is torch.float32 else 0.15
        assert float((own.logits - theirs.logits).abs().max()) < error * spread

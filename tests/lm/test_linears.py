"""Linear products: the same function by other kernels, and everything of it can be taken back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.kernels import choosing, linears, measuring
from foretoken.lm.kernels.choosing import NO_COPY
from foretoken.lm.kernels.linears import (
    BLOCKS,
    DENSE,
    LISTED,
    NATIVE,
    ONEDNN,
    PACKED,
    PADDED,
    TRANSPOSED,
    Product,
    can_pack,
)
from foretoken.lm.kernels.measuring import ROWS, choose, measure
from foretoken.lm.kernels.merged import Merged
from foretoken.lm.kernels.room import available_memory

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)
    ).eval()


def logits(model, rows=7):
    with torch.inference_mode():
        return model(torch.arange(rows)[None] % 100).logits.clone()


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request):
    return request.param()


@pytest.mark.parametrize("packed", [True, False])
def test_blocks_compute_the_same_product_in_few_sizes(packed, monkeypatch):
    """oneDNN keeps what it compiled for each count of rows: there are few of them."""
    torch.manual_seed(1)
    module = nn.Linear(48, 80)
    product = Product(module)
    if packed:
        product.pack()
    product.kernels, product.many = [PACKED if packed else ONEDNN] * (LISTED + 1), ONEDNN
    choosing.in_few_sizes([product])
    assert {*product.kernels, product.many} == {BLOCKS}
    sizes, run = set(), linears.onednn

    def noting(x, *rest):
        sizes.add(x.shape[0])
        return run(x, *rest)

    monkeypatch.setattr(linears, "onednn", noting)
    with torch.inference_mode():
        for rows in (1, 7, 16, 63, 64, 65, 100, 255, 256, 300, 575, 1030):
            x = torch.randn(1, rows, 48)
            torch.testing.assert_close(product(x), module(x))
    assert sizes == {32, 64, 256}


def test_blocks_of_merged_products_are_those_of_each():
    torch.manual_seed(1)
    parts = [nn.Linear(48, width) for width in (80, 32)]
    merged = Merged([Product(part) for part in parts])
    merged.many = ONEDNN
    choosing.in_few_sizes([merged])
    x = torch.randn(2, 150, 48)
    with torch.inference_mode():
        for told, part in zip(merged.multiply(x), parts, strict=True):
            torch.testing.assert_close(told, part(x))


@pytest.mark.parametrize("kernel", [DENSE, TRANSPOSED, ONEDNN, PACKED, PADDED])
@pytest.mark.parametrize("bias", [True, False])
def test_every_kernel_computes_the_same_product(kernel, bias):
    torch.manual_seed(1)
    module = nn.Linear(48, 80, bias=bias)
    product = Product(module)
    product.pack()
    few, many = [(48,), (1, 48), (1, 1, 48), (3, 1, 48)], [(3, 5, 48), (2, 40, 48)]
    for shape in few if kernel == PADDED else few + many:
        x = torch.randn(shape)
        with torch.inference_mode():
            y = product.run(kernel, x)
        exact = nn.functional.linear(x.double(), module.weight.double())
        exact = exact if module.bias is None else exact + module.bias.double()
        assert y.shape == exact.shape
        torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "packed", "lean"])
def test_the_model_computes_the_same_function_and_is_restored_to_the_bit(model, mode):
    before = {rows: logits(model, rows) for rows in (1, 2, 7, 40)}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    report = choosing.choose_kernels(model, mode, seconds=0.05)
    assert list(choosing.installed(model)) and report.mode == mode
    for rows, expected in before.items():
        torch.testing.assert_close(logits(model, rows), expected, atol=2e-5, rtol=1e-4)
    choosing.restore(model)
    assert not list(choosing.installed(model))
    for rows, expected in before.items():
        assert torch.equal(logits(model, rows), expected)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_the_choice_is_the_fastest_measured_kernel_and_prefers_the_first_on_a_tie():
    table = {1: {DENSE: 1.0, PACKED: 1.2}, 4: {DENSE: 2.0, PACKED: 1.1}, 64: {DENSE: 9, PACKED: 9}}
    kernels, many = choose(table, [DENSE, PACKED])
    assert kernels[1] == DENSE and kernels[2:5] == [PACKED] * 3 and len(kernels) == LISTED + 1
    assert kernels[5] == DENSE and many == DENSE
    assert choose(table, [DENSE]) == ([DENSE] * (LISTED + 1), DENSE)


def test_dispatch_follows_the_list(monkeypatch):
    product = Product(nn.Linear(48, 80))
    product.pack()
    product.kernels = [DENSE, TRANSPOSED, ONEDNN] + [DENSE] * (LISTED - 2)
    used = []
    run = Product.run
    monkeypatch.setattr(Product, "run", lambda self, k, x: used.append(k) or run(self, k, x))
    with torch.inference_mode():
        for rows in (1, 2, 3, 500):
            product(torch.randn(1, rows, 48))
    assert used == [TRANSPOSED, ONEDNN, DENSE, DENSE]


def test_measuring_covers_the_row_counts_and_stops_when_time_is_up():
    products = [Product(nn.Linear(64, 64)) for _ in range(2)]
    with torch.inference_mode():
        table = measure(products, seconds=5.0)
        hurried = measure(products, seconds=0.0)
    assert set(table) == set(ROWS) and list(table) == sorted(table)
    assert set(hurried) == {1}  # what is most wanted comes first
    assert all(value > 0 for row in table.values() for value in row.values())


def test_a_stalled_measurement_leaves_the_choice_to_a_rule(monkeypatch):
    """Beside a busy neighbour every call takes a scheduler's slice, whichever kernel it is."""

    class Member:
        width, dtype, places = 8, torch.float32, object()
        pack_once = staticmethod(lambda: None)
        nbytes = staticmethod(lambda: 1000)

    monkeypatch.setattr(
        measuring, "interleaved", lambda _, x, kernels: dict.fromkeys(kernels, 7e-3)
    )
    table = measuring.measure([Member()], 1.0)
    kernels, many = choose(table, (DENSE, NATIVE, PACKED, PADDED))
    assert set(kernels[: measuring.IN_ONE_CALL + 1]) == {NATIVE} and many == PACKED
    assert choose(table, NO_COPY)[1] == DENSE
    Member.places = None
    assert NATIVE not in measuring.measure([Member()], 0.0)[1], "no compiler, no rule"


def test_saving_two_copies_keeps_every_weight_and_one_copy_refuses(tmp_path):
    model = llama()
    expected = logits(model)
    choosing.choose_kernels(model, "packed")
    model.save_pretrained(tmp_path / "two")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "two").eval()), expected)
    choosing.choose_kernels(model, "lean", seconds=0.05)
    for product in choosing.installed(model):  # freed whatever the measurements of this machine say
        if product.module is not model.lm_head and not product.freed:
            product.pack_once()
            product.free()
    for attempt in (model.state_dict, lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(CapabilityError, match="restore"):
            attempt()
    with pytest.raises(CapabilityError):
        model.save_pretrained(tmp_path / "one")
    choosing.restore(model)
    model.save_pretrained(tmp_path / "one")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "one").eval()), expected)


def test_a_freed_weight_cannot_be_read_unnoticed_or_trained():
    module = nn.Linear(32, 32)
    product = Product(module)
    product.pack()
    product.free()
    assert module.weight.shape == (32, 32) and module.weight.isnan().all()
    assert module.weight.untyped_storage().nbytes() < 64
    with pytest.raises(CapabilityError, match="gradients"):
        product(torch.randn(2, 32, requires_grad=True))


def test_gradients_flow_as_without_products(model):
    choosing.choose_kernels(model, "packed")
    model(torch.arange(5)[None]).logits.sum().backward()
    product = next(iter(choosing.installed(model)))
    assert product.module.weight.grad is not None


def test_weights_written_in_place_are_noticed(model):
    choosing.choose_kernels(model, "packed")
    stale = logits(model)
    with torch.no_grad():
        for product in choosing.installed(model):
            product.module.weight.mul_(1.5)
    changed = logits(model)
    assert not torch.allclose(changed, stale, atol=1e-3)
    choosing.choose_kernels(model, "dense")
    torch.testing.assert_close(changed, logits(model), atol=2e-5, rtol=1e-4)


def test_copies_and_pickles_are_independent_and_dense(model):
    expected = logits(model)
    choosing.choose_kernels(model, "packed")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not list(choosing.installed(other))
        assert torch.equal(logits(other), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not logits(other).any()
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=1e-4)


def test_a_tied_head_keeps_its_dense_weight_when_lean():
    model = llama()
    choosing.choose_kernels(model, "lean", seconds=0.05)
    head = next(p for p in choosing.installed(model) if p.module is model.lm_head)
    assert not head.freed and model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.isnan().any()


def test_a_wrapped_forward_is_left_alone(model):
    target = next(m for m in model.modules() if type(m) in (nn.Linear,))
    calls = []
    target.forward = lambda x: calls.append(1) or type(target).forward(target, x)
    choosing.choose_kernels(model, "packed")
    logits(model)
    assert calls and all(product.module is not target for product in choosing.installed(model))


def test_too_little_memory_keeps_one_copy_and_says_so(model, monkeypatch):
    monkeypatch.setattr(choosing, "available_memory", lambda: 1)
    with pytest.warns(RuntimeWarning, match="packed copies need"):
        report = choosing.choose_kernels(model, "auto", seconds=0.05)
    assert report.extra_bytes == 0 and report.why
    assert all(product.packed is None for product in choosing.installed(model))


@pytest.mark.filterwarnings("ignore:linear kernels")
@pytest.mark.parametrize("mode", ["inplace", "auto"])
def test_copies_that_are_refused_are_not_made_to_be_measured(mode, monkeypatch):
    made = []

    def noting(pack):
        return lambda site: made.append(site) or pack(site)

    for kind in (Product, Merged):
        monkeypatch.setattr(kind, "pack", noting(kind.pack))
    monkeypatch.setattr(choosing, "_measured", {})
    monkeypatch.setattr(choosing, "available_memory", lambda: 1)
    layers = nn.Sequential(*(nn.Linear(48, width) for width in (80, 32, 64)))
    first, second, third = (Product(layer) for layer in layers)
    sites = [Merged([first, second]), third]
    report = choosing.choose_kernels(layers, mode, seconds=0.05, sites=sites)
    assert report.why and not made
    monkeypatch.setattr(choosing, "available_memory", lambda: None)
    choosing.choose_kernels(layers, "auto", seconds=0.05, sites=sites)
    assert made, "where they are allowed they are measured"


def test_a_merged_copy_that_is_dropped_takes_its_biases_along():
    merged = Merged([Product(nn.Linear(48, width)) for width in (80, 32)])
    merged.pack()
    choosing.install_measured([merged], {1: {DENSE: 1.0, PACKED: 2.0}}, (DENSE, PACKED))
    assert merged.packed is None and merged.bias is None


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "spare"),
    [
        ("0::/pod/app", "pod", "memory.max", "memory.current", "inactive_file"),
        ("0::/", ".", "memory.max", "memory.current", "inactive_file"),
        (
            "4:cpu,memory:/docker/outside",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_containers_limit_counts_as_its_memory(tmp_path, line, folder, limit, used, spare):
    """Also that of a group above; what a cache of files gives back is free."""
    proc, mounted = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (mounted / folder).mkdir(parents=True)
    assert available_memory(proc, mounted) is None
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {256 << 20} kB\n")
    (proc / "self" / "cgroup").write_text(f"7:pids:/other\n{line}\n")
    assert available_memory(proc, mounted) == 256 << 30
    (mounted / folder / used).write_text(f"{6 << 30}\n")
    (mounted / folder / limit).write_text("max\n")
    assert available_memory(proc, mounted) == 256 << 30
    (mounted / folder / limit).write_text(f"{8 << 30}\n")
    assert available_memory(proc, mounted) == 2 << 30
    (mounted / folder / "memory.stat").write_text(f"anon 5\n{spare} {1 << 30}\n")
    assert available_memory(proc, mounted) == 3 << 30


def test_an_unknown_mode_names_the_known_ones(model):
    with pytest.raises(ConfigError, match="auto, inplace, dense, packed, lean"):
        choosing.choose_kernels(model, "quick")


def test_a_lone_row_computed_as_several_has_the_bits_of_many():
    torch.manual_seed(2)
    product = Product(nn.Linear(2048, 96))
    product.pack()
    product.kernels = [PACKED, PADDED, *[PACKED] * (LISTED - 1)]
    x = torch.randn(1, 9, 2048)
    with torch.inference_mode():
        many = product(x)
        alone = torch.cat([product(x[:, i : i + 1]) for i in range(9)], 1)
    assert torch.equal(many, alone)


def test_weights_made_in_inference_mode_are_served_too():
    with torch.inference_mode():
        model = llama()
    expected = logits(model)
    report = choosing.choose_kernels(model, "packed")
    assert list(choosing.installed(model)) and not report.why
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=1e-4)

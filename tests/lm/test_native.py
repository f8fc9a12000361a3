"""Products in C: the same numbers, from the weights' own memory, or a told reason."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foretoken.lm.kernels import choosing, linears, measuring
from foretoken.lm.kernels.linears import DENSE, NATIVE, PACKED, PADDED, Product, can_pack
from foretoken.lm.kernels.measuring import choose, measure
from foretoken.lm.kernels.merged import Merged
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL
from foretoken.native import compiling
from foretoken.native import library as native

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or isinstance(native.library(), native.Unavailable),
    reason="no oneDNN, no C compiler or no OpenMP here",
)
TYPES = [torch.float32, torch.bfloat16]


def near(made, exact, dtype):
    wide = dtype is torch.bfloat16
    near_by = {"rtol": 1e-2, "atol": 1e-2} if wide else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(made.double(), exact.double(), **near_by)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_every_row_count_and_view_are_those_of_torch(dtype, threads, bias):
    torch.manual_seed(0)
    weights = [torch.randn(outs, 96).to(dtype) for outs in (100, 4, 36)]
    biases = [torch.randn(len(w)).to(dtype) if bias else None for w in weights]
    places = native.places(list(zip(weights, biases, strict=True)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 18), 33, 70):
            wide = torch.randn(1, rows, 2 * 96).to(dtype)
            views = (wide[..., 96:], wide[0, :, :96], wide[..., ::2], wide.view(2, rows, 96))
            for x in (*views, wide[:, 0, :96]):
                exact = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
                made = places.multiply(x)
                assert made.shape == (*x.shape[:-1], 140) and made.dtype is dtype
                near(made, torch.cat(exact, -1), dtype)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_many_rows_are_multiplied_in_blocks(dtype):
    torch.manual_seed(3)
    weight, bias = torch.randn(76, 4096).to(dtype), torch.randn(76).to(dtype)
    x = torch.randn(1, 197, 2 * 4096).to(dtype)[..., 4096:]
    places = native.places([(weight, bias), (weight, None)])
    exact = torch.cat([F.linear(x, weight, b) for b in (bias, None)], -1)
    made = places.multiply(x)
    scale = 64  # of sums of 4,096 numbers
    near(made / scale, exact / scale, dtype)
    assert torch.equal(places.multiply(x[:, :1]), made[:, :1])


def test_a_dimension_of_one_may_have_any_stride():
    weight, memory = torch.randn(8, 32), torch.randn(400)
    x = memory.as_strided((3, 1, 32), (32, 160, 1))
    assert x.is_contiguous()
    near(native.places([(weight, None)]).multiply(x), F.linear(x, weight), torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [160, 4224])  # the second is taken in parts that stay in a cache
def test_a_row_has_the_same_bits_however_many_are_multiplied_with_it(dtype, width):
    torch.manual_seed(1)
    weights = [torch.randn(outs, width).to(dtype) for outs in (40, 36)]
    bias = torch.randn(36).to(dtype)
    places = native.places([(weights[0], None), (weights[1], bias)])
    x = torch.randn(1, 40, width).to(dtype)
    whole = places.multiply(x)
    exact = torch.cat([F.linear(x, weights[0]), F.linear(x, weights[1], bias)], -1)
    near(whole / width**0.5, exact / width**0.5, dtype)
    for rows in range(1, 41):
        assert torch.equal(places.multiply(x[:, :rows]), whole[:, :rows])


def test_numbers_that_are_none_stay_so():
    weight = torch.ones(4, 32)
    for dtype in TYPES:
        places = native.places([(weight.to(dtype), None)])
        for odd in (float("nan"), float("inf"), -float("inf")):
            x = torch.ones(1, 2, 32, dtype=dtype)
            x[0, 1, 7] = odd
            made = places.multiply(x)
            assert torch.equal(made[0, 0], torch.full((4,), 32.0, dtype=dtype))
            assert torch.equal(made[0, 1].isnan(), torch.full((4,), odd != odd))
            assert odd != odd or bool((made[0, 1] == odd).all())


@pytest.mark.parametrize("make", [lambda: nn.Linear(33, 8), lambda: nn.Linear(32, 7)])
def test_sizes_that_do_not_fit_are_left_to_other_kernels(make):
    product = Product(make())
    assert product.places is None
    with torch.inference_mode():
        assert all(NATIVE not in row for row in measure([product], seconds=0.0).values())


def test_weights_written_to_or_replaced_are_read_in_their_new_state():
    torch.manual_seed(2)
    modules = [nn.Linear(64, 8), nn.Linear(64, 12)]
    both, alone = Merged([Product(m) for m in modules]), Product(modules[0])
    x = torch.randn(1, 2, 64)
    with torch.no_grad():
        modules[0].weight.mul_(2)
    with torch.inference_mode():
        near(alone.run(NATIVE, x), modules[0](x), torch.float32)
        near(torch.cat(both.run(NATIVE, x), -1), torch.cat([m(x) for m in modules], -1), x.dtype)
    modules[0].weight = nn.Parameter(torch.randn(8, 64))
    alone.renew(), both.renew()
    with torch.inference_mode():
        near(alone.run(NATIVE, x), modules[0](x), torch.float32)
        near(torch.cat(both.run(NATIVE, x), -1), torch.cat([m(x) for m in modules], -1), x.dtype)


@pytest.mark.parametrize("faster", [DENSE, NATIVE])
def test_they_are_chosen_where_they_are_the_faster_ones(faster):
    table = {rows: {DENSE: 2.0, NATIVE: 1.0} for rows in (1, 16)}
    table[256] = {DENSE: 2.0, NATIVE: 2.0, faster: 1.0}
    kernels, many = choose(table, [DENSE, NATIVE])
    assert set(kernels[:17]) == {NATIVE} and many == faster


@pytest.mark.parametrize(("told", "wanted"), [((), PACKED), ((PACKED,), NATIVE)])
def test_what_is_compiled_for_every_prompt_has_to_be_faster_by_more(told, wanted):
    table = {rows: {PACKED: 1.0, NATIVE: 1.3} for rows in (1, 64, 256)}
    kernels, many = choose(table, [NATIVE, PACKED], compiled=told)
    assert set(kernels[1:]) == {PACKED} and many == wanted
    table[256] = {PACKED: 1.0, NATIVE: 1.6}
    assert choose(table, [NATIVE, PACKED], compiled=told)[1] == PACKED


def test_vectors_multiply_where_the_system_grants_no_matrix_units():
    code = ctypes.CDLL(str(native.library().path))
    if not hasattr(code, "amx"):
        pytest.skip("a processor without matrix units")
    granted = ctypes.c_int.in_dll(code, "amx")
    torch.manual_seed(6)
    weight, x = torch.randn(76, 96).bfloat16(), torch.randn(1, 35, 96).bfloat16()
    places, before = native.places([(weight, None)]), granted.value
    granted.value = 0
    try:
        near(places.multiply(x), F.linear(x, weight), torch.bfloat16)
    finally:
        granted.value = before


@pytest.mark.parametrize("best", [PADDED, PACKED])
def test_kernels_are_kept_that_read_the_weight_where_it_lies_for_any_rows(monkeypatch, best):
    def one_alone(_, x, kernels):
        return {kernel: 1.0 if kernel == best else 9.0 for kernel in kernels}

    monkeypatch.setattr(measuring, "interleaved", one_alone)
    table = measure([Product(nn.Linear(64, 64))], seconds=5.0)
    assert all(set(row) & set(measuring.PLAIN) for row in table.values())


def test_a_type_that_onednn_cannot_multiply_has_products_in_c(monkeypatch):
    """As bfloat16 on processors without AVX-512, where torch's own use one thread."""
    for module in (choosing, linears, measuring):
        monkeypatch.setattr(module, "can_pack", lambda _: False)
    monkeypatch.setattr(choosing, "_measured", {})
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    sites = [Product(module) for module in linears.linears(model)]
    report = choosing.choose_kernels(model, sites=sites, seconds=0.1)
    assert not report.why and len(sites) == 2
    tried = {kernel for row in report.table["64x64"].values() for kernel in row}
    assert "native" in tried and tried <= {"dense", "transposed", "native"}
    choosing.in_few_sizes(sites)
    x = torch.randn(1, 300, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        for site in sites:
            near(site.multiply(x), site.module(x), x.dtype)
    report = choosing.choose_kernels(model, "packed")
    assert "no linear layer here" in report.why and not report.chosen


def test_where_products_in_c_were_chosen_all_of_a_forward_may_be_one_call(monkeypatch):
    """Row counts that were not measured for want of time are no reason against it."""
    head, *layers = sites = [Product(nn.Linear(64, outs)) for outs in (128, 64, 64)]
    for site in sites:
        site.kernels = [NATIVE] * len(site.kernels)
    measured = {key: {1: {DENSE: 2.0, NATIVE: 1.0}} for key in choosing.by_shape(sites)}
    monkeypatch.setattr(choosing, "_measured", measured)
    assert head.many == DENSE and choosing.reach_in_c(sites) == IN_ONE_CALL
    for layer in layers:
        layer.many = NATIVE
    assert choosing.reach_in_c(sites) == choosing.CHUNK, "a prompt has no logits"
    for layer in layers:
        layer.kernels[8:], layer.many = [DENSE] * len(layer.kernels[8:]), DENSE
    assert choosing.reach_in_c(sites) == 7


def fresh(code: str, tmp_path, **environment) -> str:
    """What a new process prints whose cache is `tmp_path`."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


ASK = "from foretoken.native import library as native; print(type(native.library()).__name__)"
TELL = "from foretoken.native import library as native; print(native.library())"
ALONE = "int omp_get_num_threads(void) {return 1;} int omp_get_thread_num(void) {return 0;}"


def test_a_library_is_compiled_once_and_made_anew_where_it_is_broken(tmp_path):
    assert fresh(ASK, tmp_path) == "Library"
    [made] = (tmp_path / "foretoken" / "kernels").iterdir()
    first, size = made.stat().st_mtime_ns, made.stat().st_size
    assert fresh(ASK, tmp_path, CC=compiling.find_compilers()[0][0]) == "Library"
    assert [p.stat().st_mtime_ns for p in made.parent.iterdir()] == [first]
    made.write_bytes(made.read_bytes()[:-5000])
    assert fresh(ASK, tmp_path) == "Library"
    [again] = made.parent.iterdir()
    assert again.stat().st_size == size


def test_without_a_compiler_the_reason_is_told_and_other_kernels_work(tmp_path):
    code = (
        "import torch\nfrom torch import nn\nfrom foretoken.lm.kernels import choosing\n"
        "report = choosing.choose_kernels(nn.Sequential(nn.Linear(64, 64)), seconds=0.01)\n"
        "print(report.chosen, report.not_native)"
    )
    told = fresh(code, tmp_path, CC="no-such-compiler")
    assert "native" not in told and "no C compiler (no-such-compiler) is on the path" in told
    assert "could not compile" in fresh(code, tmp_path, CC="false")
    assert not list((tmp_path / "foretoken" / "kernels").iterdir())  # nothing half-written


def test_of_what_a_compiler_says_the_error_is_told(tmp_path):
    """Before it stands which file includes which."""
    compiler = [*compiling.find_compilers()[0], "-DLINE="]
    told = fresh(TELL, tmp_path, CC=shlex.join(compiler))
    assert "could not compile" in told and "error:" in told and "In file included" not in told


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler behind the first one")
@pytest.mark.parametrize(
    "script", ["#!/bin/sh\nexit 1\n", pytest.param("no script", marks=pytest.mark.slow)]
)
def test_where_one_compiler_fails_the_next_one_is_tried(tmp_path, script):
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text(script)
    broken.chmod(0o755)
    path = os.pathsep.join([str(broken.parent), os.environ["PATH"]])
    assert fresh(TELL, tmp_path, CC="", PATH=path).startswith("Library(")


def test_threads_that_do_not_know_of_each_other_are_not_used(tmp_path):
    """As those of a compiler whose OpenMP is not the one that is asked how many they are."""
    alone = tmp_path / "alone.c"
    alone.write_text(ALONE)
    compiler = [*compiling.find_compilers()[0], str(alone), "-Wl,-Bsymbolic"]
    told = fresh(TELL, tmp_path, CC=shlex.join(compiler), OMP_DYNAMIC="false")
    assert told == "this compiler's OpenMP is not torch's"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler behind the first one")
@pytest.mark.slow
def test_behind_a_compiler_whose_threads_are_not_used_the_next_one_is_tried(tmp_path):
    alone, wrong = tmp_path / "alone.c", tmp_path / "bin" / "cc"
    alone.write_text(ALONE)
    wrong.parent.mkdir()
    wrong.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} {alone} -Wl,-Bsymbolic "$@"\n')
    wrong.chmod(0o755)
    path = os.pathsep.join([str(wrong.parent), os.environ["PATH"]])
    told = fresh(TELL, tmp_path, CC="", PATH=path, OMP_DYNAMIC="false")
    assert told.startswith("Library(")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_no_more_than_compiling_again(tmp_path):
    (tmp_path / "foretoken").write_text("a file in the way of the folder")
    assert fresh(ASK, tmp_path) == "Library"


def test_without_a_home_directory_files_are_kept_for_this_process(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    folder = compiling.writable()
    assert folder.is_dir() and folder.name.startswith("foretoken-")


def test_a_model_may_keep_one_copy_and_still_multiply_few_rows_fast(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    [product] = [Product(m) for m in model]
    table = {1: {DENSE: 9.0, NATIVE: 1.0}, 16: {DENSE: 9.0, NATIVE: 1.0}}
    choosing.install_one_copy([product], table, set())
    assert product.packed is None and product.kernels[1] == product.many == NATIVE


def test_max_is_an_error_where_auto_would_fall_back(tmp_path):
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from foretoken.errors import CapabilityError\n"
        "from foretoken.lm.opening import open_lm\n"
        "model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=96,"
        " num_hidden_layers=2, num_attention_heads=2, vocab_size=128)).eval()\n"
        "open_lm(model).close()\n"
        "try:\n    open_lm(model, compile='max').close()\n    print('taken')\n"
        "except CapabilityError as refused:\n    print(refused)"
    )
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))  # compiled already
    assert fresh(code, kept) == "taken"
    told = fresh(code, tmp_path, CC="no-such-compiler")
    assert "no C compiler" in told and "compile='auto'" in told


MAPS = """7f10-7f11 r--p 00000000 00:00 0
7f11-7f12 rw-p 00000000 00:00 0                          [heap]
7f12-7f13 r-xp 00001000 08:01 1234                       /old/libgomp.so.1 (deleted)
7f13-7f14 r-xp 00001000 08:01 1235                       /my files/libs/libgomp-a34b3233.so.1.0.0
7f14-7f15 r-xp 00001000 08:01 1236                       /usr/lib/libomp.so
"""


def test_the_openmp_of_torch_is_found_in_a_folder_with_a_space():
    assert compiling.openmp_among(MAPS) == "/my files/libs/libgomp-a34b3233.so.1.0.0"
    assert compiling.openmp_among("".join(MAPS.splitlines(keepends=True)[:3])) is None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="options of that family")
@pytest.mark.parametrize(
    "option",
    [
        "-mno-avx512f",
        *(
            pytest.param(option, marks=pytest.mark.slow)
            for option in ("-mno-avx", "-U__AMX_BF16__", "-D_FORTIFY_SOURCE=3")
        ),
    ],
)
def test_registers_of_any_width_do(tmp_path, option):
    """The tests of attention, norms, products, laws and columns once more, as on an
    older processor, or with a compiler that watches where memory is written."""
    compiler, *options = compiling.find_compilers()[0]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    env["CC"] = shlex.join([compiler, *options, option])
    here = Path(__file__)
    files = (here.with_name("test_few_tokens.py"), here, here.parents[1] / "native")
    products = "products_of_every or in_blocks or same_bits or are_none"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "-k",
        f"test_few_tokens or columns or test_laws or {products}",
        *map(str, files),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" not in done.stdout

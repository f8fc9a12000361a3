"""What makes a forward cheap on a CPU: linear kernels chosen from a table measured at load.

`choose_kernels(model)` puts the fastest product in place of every linear layer; `restore(model)`
takes all of it back. The function a model computes stays the same up to rounding. A model that
several may use at once is borrowed instead (`lm.borrowed`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from foretoken.errors import ConfigError
from foretoken.lm.kernels.few_tokens import Norm
from foretoken.lm.kernels.linears import (
    BLOCKS,
    DENSE,
    KERNELS,
    LISTED,
    NATIVE,
    ONEDNN,
    PACKED,
    PADDED,
    TRANSPOSED,
    Product,
    can_pack,
    is_conv1d,
    linears,
)
from foretoken.lm.kernels.measuring import choose, measure
from foretoken.lm.kernels.merged import Merged, Site
from foretoken.lm.kernels.room import available_memory
from foretoken.lm.runtime.cached import CHUNK
from foretoken.native.compiling import Unavailable
from foretoken.native.library import library

MODES = ("auto", "inplace", "dense", "packed", "lean")
BY_MKL = (DENSE, TRANSPOSED)  # in float32: other types go to oneDNN
NO_COPY = (DENSE, NATIVE, ONEDNN, TRANSPOSED)
# seconds that one call for many products spares per product: of calls, and per row of operations
# between products
SPARED, SPARED_PER_ROW = 2e-5, 3e-7
JUDGED = (1, 16)  # the row counts one copy is judged by: plain decoding and scoring a tree

# outputs of each layer and inputs, type, threads, stored transposed, whether copies may be made:
# one machine, so one answer per process
Shape = tuple[tuple[int, ...], torch.dtype, int, bool, bool]
_measured: dict[Shape, dict[int, dict[int, float]]] = {}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What was installed, and the measurements it was chosen from."""

    mode: str
    seconds: float = 0.0  # spent measuring and packing
    extra_bytes: int = 0  # memory taken by second copies
    # "1600x3840" -> rows -> kernel -> milliseconds
    table: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    chosen: dict[str, dict[int, str]] = field(default_factory=dict)  # same keys -> rows -> kernel
    why: str = ""  # why nothing, or less than asked, was done
    captured: bool = False  # whether the model runs as a captured forward
    uncaptured: str = ""  # why it does not
    not_native: str = ""  # why products in C cannot be had

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_kernels(
    model: nn.Module,
    mode: str = "auto",
    *,
    pad_lone: bool = False,
    seconds: float = 2.0,
    sites: Sequence[Site] | None = None,
) -> KernelReport:
    """Install the fastest product for every linear layer of `model`, in place.

    With `sites` of a captured model, kernels are chosen for these, and the model stays as it is.

    auto: measured; the dense weight stays and a packed copy is added where it pays (memory for
    speed). inplace: measured, among kernels that need no second copy. lean: measured; one copy,
    either the dense weight or the packed one alone, and of the output layer the dense one, whose
    rows are read apart. packed: packed copies at every row count, not measured; `pad_lone` computes
    a lone row as several, for equal bits. dense: the model as it was. `seconds` bounds the time
    spent measuring.
    """
    if mode not in MODES:
        raise ConfigError(
            f"kernels={mode!r} was asked for.",
            f"kernels is one of {', '.join(MODES)}.",
            "pass one of these; 'auto' is the default.",
        )
    began = perf_counter()
    stand_in = sites is None
    if sites is None:
        restore(model)
        sites = [Product(module) for module in linears(model)]
    able = [site for site in sites if mode != "packed" or can_pack(site.dtype)]
    groups = by_shape(able) if mode != "dense" else {}
    why = "" if groups or mode == "dense" else "no linear layer here that a kernel can multiply"
    if mode == "inplace" and groups:
        why = "second copies were not wanted"
    elif mode == "auto" and groups and (why := no_room(groups)):
        warnings.warn(f"linear kernels: {why}", RuntimeWarning, stacklevel=2)
    if groups and why:  # then copies are not made to be measured either
        groups = by_shape(able, copies=False)
    dense = tied_weights(model) | output_weight(model)
    for key, group in groups.items():
        if mode == "packed":
            install_packed(group, pad_lone)
            continue
        with torch.inference_mode():
            if key not in _measured:
                _measured[key] = measure(group, seconds / len(groups), not why)
        if mode == "lean":
            install_one_copy(group, _measured[key], dense)
        else:
            allowed = NO_COPY if why else (DENSE, NATIVE, PACKED, PADDED, *NO_COPY)
            install_measured(group, _measured[key], allowed)
    for site in sites if stand_in and groups else ():
        assert isinstance(site, Product)
        site.put_in()
    return report(mode, groups, perf_counter() - began, why)


def take_native(model: nn.Module) -> None:
    """Products and norms in C for few rows, in every layer that has one; nothing is measured.

    For small modules whose forward is their own: torch takes 50 to 90 microseconds for a product of
    a few rows with a small weight in bfloat16, C takes 6 to 10 (docs/LOG.md). Many rows are left to
    oneDNN where it multiplies this type.
    """
    for module in linears(model):
        product = Product(module)
        if product.places is not None:
            product.kernels = [NATIVE] * (LISTED + 1)
            product.many = product.many if can_pack(product.dtype) else NATIVE
            product.put_in()
    for norm in model.modules():
        if type(norm) is nn.RMSNorm and "forward" not in norm.__dict__:
            norm.__dict__["forward"] = Norm(norm)


def in_few_sizes(sites: Sequence[Site]) -> None:
    """Have oneDNN multiply blocks of a few sizes alone (`linears.in_blocks`)."""
    for site in sites:
        if not can_pack(site.dtype):
            continue
        own = (NATIVE, PADDED) if site.dtype is not torch.float32 else (NATIVE, PADDED, *BY_MKL)
        site.kernels = [kernel if kernel in own else BLOCKS for kernel in site.kernels]
        site.many = site.many if site.many in own else BLOCKS


def reach_in_c(sites: Sequence[Site], copies: bool = True) -> int:
    """Rows up to which products in C, in one call (`segments`), cost no more than those chosen.

    Where C was chosen both are the same, measured or not. More rows than a tree has are a prompt's,
    which wants no logits: a layer that has no other of its shape is the head. `copies`: whether any
    were allowed.
    """
    groups = [(_measured.get(key, {}), group) for key, group in by_shape(sites, copies).items()]
    groups = [(table, group) for table, group in groups if group[0].places is not None]
    reach = 0
    for rows in range(1, CHUNK + 1) if groups else ():
        ours, chosen = 0.0, (SPARED + SPARED_PER_ROW * rows) * len(sites)
        for table, group in groups:
            kernel = group[0].kernels[rows] if rows <= LISTED else group[0].many
            if kernel == NATIVE or (rows > LISTED and len(group) == 1):
                continue
            ours += len(group) * seconds_of(NATIVE, rows, table)
            chosen += len(group) * seconds_of(kernel, rows, table)
        reach = rows if ours <= chosen < float("inf") else reach
    return reach


def seconds_of(kernel: int, rows: int, table: Mapping[int, Mapping[int, float]]) -> float:
    """Between two measured row counts on the line; inf where the larger one did not try it."""
    larger = [measured for measured in table if measured >= rows]
    if not larger:
        return float("inf")
    high = min(larger)
    low = max((measured for measured in table if measured <= rows), default=high)
    after = table[high].get(kernel, float("inf"))
    before = table[low].get(kernel, after)
    return before if low == high else before + (rows - low) / (high - low) * (after - before)


def restore(model: nn.Module) -> None:
    """Take every installed product away: dense weights and forwards as they were."""
    for product in installed(model):
        product.take_out()


def installed(model: nn.Module) -> Iterator[Product]:
    """The products that stand in for linear layers of `model`."""
    for module in list(model.modules()):
        product = module.__dict__.get("forward")
        if isinstance(product, Product):
            yield product


def by_shape(sites: Sequence[Site], copies: bool = True) -> dict[Shape, list[Site]]:
    """Products grouped by what decides their speed, and what is measured of it."""
    groups: dict[Shape, list[Site]] = {}
    for site in sites:
        stored = is_conv1d(site.modules[0])
        key = (site.shape, site.dtype, torch.get_num_threads(), stored, copies)
        groups.setdefault(key, []).append(site)
    return groups


def tied_weights(model: nn.Module) -> set[int]:
    """Weights that another module reads too (a tied head): their dense form cannot be dropped."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for weight in module.__dict__.get("_parameters", {}).values():
            if weight is not None:
                (twice if weight.data_ptr() in seen else seen).add(weight.data_ptr())
    return twice


def output_weight(model: Any) -> set[int]:
    """That of the output layer, whose rows are read one by one (`few_rows`, early exits): a packed
    weight has no rows, and unpacking one to read a few would take the memory of a second copy."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(found, "weight", None)
    return {weight.data_ptr()} if isinstance(weight, torch.Tensor) else set()


def install_measured(
    group: Sequence[Site], table: dict[int, dict[int, float]], allowed: Sequence[int]
) -> None:
    """The measured best at each row count; the packed copy is kept only where it is used."""
    kernels, many = choose(table, allowed, compiled=compiled_by_length(group[0].dtype))
    for product in group:
        product.kernels, product.many = kernels, many
        if {many, *kernels} & {PACKED, PADDED}:
            product.pack_once()
            continue
        product.packed = None
        if isinstance(product, Merged):
            product.bias = None  # of the copy: the parts have their own


def compiled_by_length(dtype: torch.dtype) -> set[int]:
    """The kernels that oneDNN compiles for every row count."""
    return {ONEDNN, PACKED} if dtype is torch.float32 else {ONEDNN, PACKED, *BY_MKL}


def install_packed(group: Sequence[Site], pad_lone: bool) -> None:
    for product in group:
        product.kernels, product.many = [PACKED] * (LISTED + 1), PACKED
        if pad_lone:
            product.kernels[1] = PADDED
        product.pack_once()


def install_one_copy(
    group: Sequence[Site], table: dict[int, dict[int, float]], kept: set[int]
) -> None:
    """Either the dense weight under kernels that need no copy, or the packed weight alone.

    Weights at the addresses in `kept` stay dense.
    """
    judged = [rows for rows in JUDGED if rows in table] or [min(table)]
    without = sum(min(table[rows].get(k, float("inf")) for k in NO_COPY) for rows in judged)
    either = (PACKED, PADDED)
    packed = sum(min(table[rows].get(k, float("inf")) for k in either) for rows in judged)
    compiled = compiled_by_length(group[0].dtype)
    for product in group:
        assert isinstance(product, Product), "one copy is kept by a layer alone"
        free = product.module.weight.data_ptr() not in kept
        if packed < 0.97 * without and free:
            product.pack_once()
            product.free()
            product.kernels, product.many = choose(table, either, compiled=compiled)
        else:
            product.packed = None
            product.kernels, product.many = choose(table, NO_COPY, compiled=compiled)


def no_room(groups: dict[Shape, list[Site]]) -> str:
    """Why second copies cannot be afforded, or nothing when they can."""
    needed = sum(product.nbytes() for group in groups.values() for product in group)
    free = available_memory()
    if free is None or needed < 0.8 * free:
        return ""
    return (
        f"packed copies need {needed >> 20} MiB and {free >> 20} MiB are free, so only kernels "
        "that work on the dense weights are used (kernels='lean' keeps one packed copy)"
    )


def report(mode: str, groups: dict[Shape, list[Site]], seconds: float, why: str) -> KernelReport:
    table: dict[str, dict[int, dict[str, float]]] = {}
    chosen: dict[str, dict[int, str]] = {}
    extra = 0
    for key, group in groups.items():
        *outputs, inputs = key[0]
        name = f"{'+'.join(map(str, outputs))}x{inputs}" + (" conv1d" if key[3] else "")
        measured = _measured.get(key, {}) if mode != "packed" else {}
        table[name] = {
            rows: {KERNELS[kernel]: round(1e3 * value, 4) for kernel, value in row.items()}
            for rows, row in measured.items()
        }
        first = group[0]
        chosen[name] = {
            rows: KERNELS[first.kernels[rows] if rows <= LISTED else first.many]
            for rows in (measured or (1, LISTED + 1))
        }
        extra += sum(
            p.nbytes() for p in group if p.packed is not None and not getattr(p, "freed", False)
        )
    found = library() if groups else None
    absent = str(found) if isinstance(found, Unavailable) else ""
    return KernelReport(mode, seconds, extra, table, chosen, why, not_native=absent)

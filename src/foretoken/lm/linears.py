"""Matrix products of a model on a CPU, each by the kernel that is fastest for its row count.

A weight of a given shape can be multiplied in several ways, and which is fastest depends on the
number of rows (nodes scored together), the library and the machine; so it is measured, not known.
A `Product` replaces the forward of one module and picks a kernel by row count from a short list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from foretoken.errors import CapabilityError

DENSE, TRANSPOSED, ONEDNN, PACKED, PADDED = range(5)
KERNELS = ("dense", "transposed", "onednn", "packed", "padded")
PAD = 4  # rows that `padded` makes of fewer: the packed product reads its weight faster for four
# row counts that are measured, the telling ones first, since the time to measure is bounded
ROWS = (1, 16, 4, 64, 2, 8, 32, 3, 256, 6, 12, 24)
LISTED = 64  # row counts up to this are looked up, larger ones share the last measurement

# absent from builds without oneDNN, where `can_pack` is false and nothing is installed
onednn: Callable[..., Tensor] = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # type: ignore
Seconds = Mapping[int, Mapping[int, float]]  # rows -> kernel -> seconds of one call


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is built in and multiplies this type on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Unwatched:
    """Stands for a weight made in inference mode, which keeps no count of changes."""

    _version = 0


class Product:
    """The forward of one linear module: a list of kernels by row count. Copies fall back to dense.

    The packed copy follows in-place changes of the weight (`load_state_dict`, an optimizer step);
    a weight that is replaced by another tensor needs `choose_kernels` again.
    """

    __slots__ = (
        "bias",
        "dtype",
        "freed",
        "kernels",
        "many",
        "matrix",
        "module",
        "outside",
        "packed",
        "version",
        "watched",
        "width",
    )

    def __init__(self, module: Any) -> None:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        # Conv1D of GPT-2 stores [in, out]; a transposed view shares memory and version
        self.matrix: Tensor = weight.detach().t() if is_conv1d(module) else weight.detach()
        self.bias: Tensor | None = None if bias is None else bias.detach()
        self.module = module
        self.width, self.dtype = self.matrix.shape[1], self.matrix.dtype
        self.watched: Any = Unwatched if self.matrix.is_inference() else self.matrix
        self.version = self.watched._version
        self.packed: Tensor | None = None
        self.kernels: list[int] = [DENSE] * (LISTED + 1)
        self.many = DENSE
        self.freed = False  # the dense weight is gone: the packed copy is the only one

    def __call__(self, x: Tensor) -> Tensor:
        if (
            torch.is_grad_enabled()
            or x.dtype is not self.dtype
            or self.watched._version != self.version
            or torch.is_autocast_enabled("cpu")
        ):
            return self.careful(x)
        rows = x.numel() // self.width
        kernel = self.kernels[rows] if rows <= LISTED else self.many
        if kernel == PACKED:
            return onednn(x, self.packed, self.bias, "none", [], "")
        return self.run(kernel, x)

    def run(self, kernel: int, x: Tensor) -> Tensor:
        """`x @ matrix.T + bias` by one kernel."""
        if kernel == PACKED:
            return onednn(x, self.packed, self.bias, "none", [], "")
        if kernel == PADDED:
            few = x.reshape(-1, self.width)
            rows = few.shape[0]
            wide = torch.cat([few, few[-1:].expand(PAD - rows, -1)])
            y = onednn(wide, self.packed, self.bias, "none", [], "")
            return y[:rows].reshape(*x.shape[:-1], -1)
        if kernel == ONEDNN:
            return onednn(x, self.matrix, self.bias, "none", [], "")
        if kernel == TRANSPOSED:
            y = torch.mm(self.matrix, x.reshape(-1, self.width).t()).t()
            y = y if self.bias is None else y + self.bias
            return y.reshape(*x.shape[:-1], self.matrix.shape[0])
        return F.linear(x, self.matrix, self.bias)

    def careful(self, x: Tensor) -> Tensor:
        """The rare cases: training, other types, a weight that was written to."""
        if self.freed:
            return self.only_packed(x)
        if self.watched._version != self.version:
            self.version = self.watched._version
            if self.packed is not None:
                self.pack()
        plain: Tensor = type(self.module).forward(self.module, x)
        return plain

    def only_packed(self, x: Tensor) -> Tensor:
        """A module without its dense weight can multiply, and nothing else."""
        if x.dtype is not self.dtype or (torch.is_grad_enabled() and x.requires_grad):
            raise CapabilityError(
                "A model whose linear weights are kept packed only (kernels='lean') was asked to "
                f"compute gradients or to work on {x.dtype}.",
                f"Packed weights multiply {self.dtype} under torch.no_grad() or inference_mode().",
                "call foretoken.lm.fast.restore(model) first, or load with kernels='auto'.",
            )
        with torch.no_grad():
            return self.run(PACKED, x)

    def pack(self) -> None:
        """Make the packed copy, a normal tensor whatever the mode around."""
        with torch.inference_mode(self.matrix.is_inference()), torch.no_grad():
            # the second number is a hint; 2 to 64 give the same layout, 0 and 1 a slow one
            dense = self.matrix.contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(dense, 16)

    def pack_once(self) -> None:
        if self.packed is None:
            self.pack()

    def free(self) -> None:
        """Drop the dense weight. Its place is taken by NaNs of the same shape and no size."""
        self.freed, self.kernels, self.many = True, [PACKED] * (LISTED + 1), PACKED
        shape = self.module.weight.shape
        hollow = torch.full((1, 1), float("nan"), dtype=self.dtype).expand(shape)
        self.module.weight = nn.Parameter(hollow, requires_grad=False)
        self.matrix = self.module.weight.detach()
        self.matrix = self.matrix.t() if is_conv1d(self.module) else self.matrix
        self.watched, self.version = Unwatched, Unwatched._version
        self.outside = self.module.register_state_dict_pre_hook(refuse_saving)

    def unfree(self) -> None:
        """Put the dense weight back; unpacking returns the very bits that were packed."""
        assert self.packed is not None
        with torch.inference_mode(False), torch.no_grad():
            dense = self.packed.to_dense()
            dense = dense.t().contiguous() if is_conv1d(self.module) else dense
        self.module.weight = nn.Parameter(dense)
        self.outside.remove()
        self.freed = False

    def nbytes(self) -> int:
        return self.matrix.shape[0] * self.width * self.matrix.element_size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.must_be_whole()
        copied = memo[id(self.module)]
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> Any:
        self.must_be_whole()
        return original_forward, (self.module,)

    def must_be_whole(self) -> None:
        if self.freed:
            refuse_saving()


def original_forward(module: nn.Module) -> Any:
    """What an unpickled module gets in place of a `Product`: the forward of its class."""
    return type(module).forward.__get__(module)


def refuse_saving(*_: Any) -> None:
    """Packed weights are opaque to saving and copying, which would silently lose them."""
    raise CapabilityError(
        "A model whose linear weights are kept packed only (kernels='lean') was asked for its "
        "state dict, a copy or a save.",
        "The dense weights were freed to save memory.",
        "call foretoken.lm.fast.restore(model) first, or load with kernels='auto'.",
    )


def is_conv1d(module: nn.Module) -> bool:
    return type(module) is Conv1D


def linears(model: nn.Module) -> Iterator[nn.Module]:
    """Modules a `Product` can stand in for: exact classes only, without a forward of their own."""
    for module in model.modules():
        if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
            continue
        weight = module.weight
        if isinstance(weight, Tensor) and weight.device.type == "cpu" and can_pack(weight.dtype):
            yield module


def measure(products: Sequence[Product], seconds: float) -> dict[int, dict[int, float]]:
    """Seconds per call of each kernel by row count, over products of one shape.

    Several products are cycled through, since a weight that stays in the cache flatters everybody.
    A kernel that is far behind once is not tried again; `seconds` bounds the whole, and a row count
    that was not reached takes its neighbour's choice.
    """
    members = products[: max(1, 96_000_000 // products[0].nbytes())]
    for product in members:
        product.pack_once()
    alive = [DENSE, TRANSPOSED, ONEDNN, PACKED, PADDED]
    table: dict[int, dict[int, float]] = {}
    ends = perf_counter() + seconds
    for rows in ROWS:
        if table and perf_counter() > ends:
            break
        x = torch.linspace(-1, 1, rows * members[0].width, dtype=members[0].dtype)
        x = x.reshape(1, rows, members[0].width)
        used = members if rows < 64 else members[:1]  # many rows: arithmetic, not memory
        tried = [kernel for kernel in alive if kernel != PADDED or rows < PAD]
        table[rows] = interleaved(used, x, tried)
        best = min(table[rows].values())
        alive = [kernel for kernel in alive if table[rows].get(kernel, best) < 4 * best]
    return dict(sorted(table.items()))


def interleaved(members: Sequence[Product], x: Tensor, kernels: Sequence[int]) -> dict[int, float]:
    """Best of three passes per kernel, taken in turns so that a busy neighbour harms all alike.

    With one thread its own processor time is read, which does not count the neighbour at all.
    """
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    best = dict.fromkeys(kernels, float("inf"))
    for _ in range(3):
        for kernel in kernels:
            began = clock()
            for product in members:
                product.run(kernel, x)
            best[kernel] = min(best[kernel], (clock() - began) / len(members))
    return best


def choose(table: Seconds, allowed: Sequence[int], margin: float = 0.03) -> tuple[list[int], int]:
    """The kernel for each row count up to LISTED, and the one for more.

    A row count between two measured ones takes the next larger's choice; an earlier kernel in
    `allowed` is left only for one that is faster by more than `margin`.
    """
    best: dict[int, int] = {}
    for rows, seconds in table.items():
        chosen = next(kernel for kernel in allowed if kernel in seconds)
        for kernel in allowed:
            if kernel in seconds and seconds[kernel] < seconds[chosen] * (1 - margin):
                chosen = kernel
        best[rows] = chosen
    measured = sorted(best)
    listed = [
        best[next((rows for rows in measured if rows >= n), measured[-1])]
        for n in range(LISTED + 1)
    ]
    return listed, best[measured[-1]]

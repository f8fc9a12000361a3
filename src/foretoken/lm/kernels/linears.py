"""Matrix products of a model on a CPU, each by the kernel that is fastest for its row count.

A weight of a given shape can be multiplied in several ways, and which is fastest depends on the
number of rows (nodes scored together), the library and the machine; so it is measured, not known.
A `Product` replaces the forward of one module and picks a kernel by row count from a short list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from foretoken.errors import CapabilityError, ConfigError
from foretoken.native import library as native
from foretoken.native import scratch

DENSE, TRANSPOSED, ONEDNN, PACKED, PADDED, NATIVE, BLOCKS = range(7)
KERNELS = ("dense", "transposed", "onednn", "packed", "padded", "native", "blocks")
PAD = 4  # rows that `padded` makes of fewer: the packed product reads its weight faster for four
LISTED = 64  # row counts up to this are looked up, larger ones share the last measurement
# rows of products made in blocks: as many as are measured at load (`measuring.ROWS`), for then
# oneDNN has compiled these already
BLOCKS_OF = (256, 64, 32)
WIDE = 1 << 14  # outputs of a product from which on a block of 256 rows would take too much memory

# absent from builds without oneDNN, where `can_pack` is false
_pointwise: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
onednn: Callable[..., Tensor] = _pointwise and _pointwise.default._op


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is built in and multiplies this type on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for this type beside torch's own."""
    return can_pack(dtype) or native.operation("product", dtype) is not None


class Unwatched:
    """Stands for a weight made in inference mode, which keeps no count of changes."""

    _version = 0


class Product:
    """The forward of one linear module: a list of kernels by row count. Copies fall back to dense.

    Its copy of the weight is used in inference mode only, which is where scoring happens; a call
    in any other mode (the user's own training, or transformers' generate) multiplies the module's
    own weight. Ordinary in-place changes are noticed at once, by the version of the weight; all
    others need `renew`, which `lm.borrowed` calls after a look at the weights' fingerprints.
    """

    __slots__ = (
        "bias",
        "dtype",
        "freed",
        "idle",
        "kernels",
        "many",
        "matrix",
        "module",
        "outside",
        "packed",
        "places",
        "read",
        "version",
        "watched",
        "width",
    )

    def __init__(self, module: Any) -> None:
        self.module = module
        self.read_weight()
        self.width, self.dtype = self.matrix.shape[1], self.matrix.dtype
        self.packed: Tensor | None = None
        self.kernels: list[int] = [DENSE] * (LISTED + 1)
        self.many = DENSE
        self.freed = False  # the dense weight is gone: the packed copy is the only one
        self.idle = False  # taken out, and perhaps still called by a wrapper that kept it
        self.read: Any = None  # states of the fingerprints when the weight was read last

    def read_weight(self) -> None:
        """Views of the module's weight and bias as they are now."""
        weight, bias = self.module.weight, self.module.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        # Conv1D of GPT-2 stores [in, out]; a transposed view shares memory and version
        self.matrix: Tensor = weight.detach().t() if is_conv1d(self.module) else weight.detach()
        self.bias: Tensor | None = None if bias is None else bias.detach()
        self.places = native.places([(self.matrix, self.bias)])  # for products in C
        self.watched: Any = Unwatched if self.matrix.is_inference() else self.matrix
        self.version = self.watched._version

    def __call__(self, x: Tensor) -> Tensor:
        if (
            not torch.is_inference_mode_enabled()
            or self.idle
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

    def multiply(self, x: Tensor) -> Tensor:
        """The product for a caller that has looked at mode and weights itself."""
        rows = x.numel() // self.width
        return self.run(self.kernels[rows] if rows <= LISTED else self.many, x)

    def run(self, kernel: int, x: Tensor) -> Tensor:
        """`x @ matrix.T + bias` by one kernel."""
        if kernel == PACKED:
            return onednn(x, self.packed, self.bias, "none", [], "")
        if kernel == NATIVE and self.places is not None:
            return self.places.multiply(x)
        if kernel == PADDED:
            return multiply_padded(x, self.packed, self.bias, self.width)
        if kernel == ONEDNN:
            return onednn(x, self.matrix, self.bias, "none", [], "")
        if kernel == BLOCKS:
            return in_blocks(self, x)[0]
        if kernel == TRANSPOSED:
            y = torch.mm(self.matrix, x.reshape(-1, self.width).t()).t()
            y = y if self.bias is None else y + self.bias
            return y.reshape(*x.shape[:-1], self.matrix.shape[0])
        return F.linear(x, self.matrix, self.bias)

    def careful(self, x: Tensor) -> Tensor:
        """The rare cases: other modes and types, a weight that was written to, a product put away.

        Under gradients nothing is packed again: a training loop would pay for it in every step.
        """
        if self.freed:
            return self.only_packed(x)
        changed = self.watched._version != self.version
        if changed and not self.idle and torch.is_inference_mode_enabled():
            self.renew()
        plain: Tensor = type(self.module).forward(self.module, x)
        return plain

    def renew(self, read: Any = None) -> None:
        """Follow a weight or bias that was replaced or written to; the choice of kernels stays.

        `read` are states of fingerprints: when they were followed already, nothing is done.
        """
        if read is not None and read == self.read:
            return
        self.must_fit()
        given = not (self.freed and self.is_hollow())
        self.read_weight()
        self.read = read
        if given and self.packed is not None:
            self.pack()
        if given and self.freed:
            self.hollow()

    @property
    def modules(self) -> tuple[Any, ...]:
        """The linear layers whose weights this holds."""
        return (self.module,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return tuple(self.matrix.shape)

    def fits(self) -> bool:
        """Whether the module's weight has the type, size and place that all was chosen for."""
        weight = self.module.weight
        shape = tuple(reversed(weight.shape)) if is_conv1d(self.module) else tuple(weight.shape)
        there = tuple(self.matrix.shape), self.dtype, self.matrix.device
        return (shape, weight.dtype, weight.device) == there

    def must_fit(self) -> None:
        if not self.fits():
            weight = self.module.weight
            raise ConfigError(
                f"a linear weight became {tuple(weight.shape)}, {weight.dtype} on {weight.device} "
                "after its model was loaded.",
                "weights may get other numbers under a loaded model, no other size, type or place.",
                "close what was loaded, and load the changed model.",
            )

    def follows(self) -> bool:
        """Whether the packed copy holds the weight's numbers, every one of them compared."""
        if self.packed is None or self.freed:
            return True
        size = torch.int16 if self.dtype is torch.bfloat16 else torch.int32  # NaN equals NaN so
        with torch.no_grad():
            packed, own = self.packed.to_dense(), self.module.weight.detach()
            own = own.t() if is_conv1d(self.module) else own
            return torch.equal(packed.view(size), own.contiguous().view(size))

    def only_packed(self, x: Tensor) -> Tensor:
        """A module without its dense weight can multiply, and nothing else."""
        if x.dtype is not self.dtype or (torch.is_grad_enabled() and x.requires_grad):
            raise CapabilityError(
                "A model whose linear weights are kept packed only (kernels='lean') was asked to "
                f"compute gradients or to work on {x.dtype}.",
                f"Packed weights multiply {self.dtype} under torch.no_grad() or inference_mode().",
                "call foretoken.lm.kernels.choosing.restore(model), or load with kernels='auto'.",
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

    def put_in(self) -> None:
        """Stand in for the module's forward, unless somebody else does by now."""
        if self.module.__dict__.get("forward", self) is self:
            self.module.forward, self.idle = self, False

    def take_out(self) -> None:
        """Give the module its own forward and its dense weight back."""
        if self.freed:
            self.unfree()
        self.idle = True
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def free(self) -> None:
        """Drop the dense weight. Its place is taken by NaNs of the same shape and no size."""
        self.freed, self.kernels, self.many = True, [PACKED] * (LISTED + 1), PACKED
        self.outside = self.module.register_state_dict_pre_hook(refuse_saving)
        self.hollow()

    def hollow(self) -> None:
        weight = self.module.weight  # the parameter stays the same: an optimizer may hold it
        weight.data = torch.full((1, 1), float("nan"), dtype=self.dtype).expand(weight.shape)
        self.read_weight()
        self.watched, self.version = Unwatched, Unwatched._version

    def is_hollow(self) -> bool:
        """Whether nobody has given the freed module a weight since."""
        return bool(self.module.weight.data_ptr() == self.matrix.data_ptr())

    def unfree(self) -> None:
        """Put the dense weight back; unpacking returns the very bits that were packed."""
        assert self.packed is not None
        self.outside.remove()
        self.freed = False
        if self.is_hollow():  # else the module was given a weight, and that is the one
            with torch.inference_mode(False), torch.no_grad():
                dense = self.packed.to_dense()
                dense = dense.t().contiguous() if is_conv1d(self.module) else dense
            self.module.weight.data = dense
        self.read_weight()

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


def multiply_padded(x: Tensor, packed: Any, bias: Tensor | None, width: int) -> Tensor:
    """The packed product of few rows, made PAD rows for it."""
    few = x.reshape(-1, width)
    rows = few.shape[0]
    wide = torch.cat([few, few[-1:].expand(PAD - rows, -1)])
    return onednn(wide, packed, bias, "none", [], "")[:rows].reshape(*x.shape[:-1], -1)


def in_blocks(site: Any, x: Tensor) -> list[Tensor]:
    """The products of rows by oneDNN in a few sizes alone, whatever their number.

    oneDNN compiles a product anew for every count of rows, and never gives all of that back: half a
    MiB for each count that it ever saw.
    """
    flat, at, made = x.reshape(-1, site.width), 0, list[Tensor]()
    rows, least = flat.shape[0], LISTED
    wide = site.nbytes() > WIDE * site.width * x.element_size()
    # What oneDNN makes of a block lies beside whatever else a forward has: nobody can lend for it.
    most = LISTED if wide or scratch.lending() else max(BLOCKS_OF)
    while at < rows:
        left = rows - at
        count = next((size for size in BLOCKS_OF if least <= size <= min(left, most)), left)
        told = block(site, flat[at : at + count])
        made = made or [scratch.empty((rows, part.shape[-1]), part.dtype) for part in told]
        for to, part in zip(made, told, strict=True):
            to[at : at + count] = part[:count]
        at += count
    return [part.reshape(*x.shape[:-1], -1) for part in made]


def block(site: Any, rows: Tensor) -> list[Tensor]:
    """The products of one block; fewer rows than a whole one are as many as they are, or padded."""
    count = rows.shape[0]
    kernel = site.kernels[count] if count < LISTED else BLOCKS
    if kernel == BLOCKS:
        kernel = ONEDNN if site.packed is None else PACKED
        if missing := min(size for size in BLOCKS_OF if size >= count) - count:
            rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
    made = site.run(kernel, rows)
    return [made] if isinstance(made, Tensor) else list(made)


def original_forward(module: nn.Module) -> Any:
    """What an unpickled module gets in place of a `Product`: the forward of its class."""
    return type(module).forward.__get__(module)


def refuse_saving(*_: Any) -> None:
    """Packed weights are opaque to saving and copying, which would silently lose them."""
    raise CapabilityError(
        "A model whose linear weights are kept packed only (kernels='lean') was asked for its "
        "state dict, a copy or a save.",
        "The dense weights were freed to save memory.",
        "call foretoken.lm.kernels.choosing.restore(model), or load with kernels='auto'.",
    )


def is_conv1d(module: nn.Module) -> bool:
    return type(module) is Conv1D


def linears(model: nn.Module) -> Iterator[nn.Module]:
    """Modules a `Product` can stand in for: exact classes only, without a forward of their own."""
    for module in model.modules():
        if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
            continue
        weight = module.weight
        plain = type(weight) in (nn.Parameter, Tensor)  # no wrapper around quantised numbers
        if plain and weight.device.type == "cpu" and can_multiply(weight.dtype):
            yield module

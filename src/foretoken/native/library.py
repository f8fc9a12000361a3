"""Operations in C (`c/`), most of them for few tokens, compiled once where a compiler is.

Products read the weights where the model keeps them, attention the slot cache, so neither needs a
copy; a call costs a third of what a library's does. The compiled file is kept in the user's cache;
without a compiler torch's operations do the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.native import scratch
from foretoken.native.compiling import Maker, Unavailable, built, makers, own_folder, writable

_WORD, _COUNT, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_EXACT = ctypes.c_double
CALLS = {  # arguments of every operation; the names in C end in the type
    "product": (_WORD, _WORD, _COUNT, _COUNT, _COUNT, _WORD, _COUNT, _INT),
    "attend": (*[_WORD] * 8, _COUNT, _REAL, _INT),
    "norm": (_WORD, _WORD, _WORD, _COUNT, _COUNT, _COUNT, _REAL),
    "rotate": (*[_WORD] * 4, *[_COUNT] * 6),
    "first": (_WORD, _COUNT, _COUNT, _COUNT, _WORD, _INT),
    "largest": (_WORD, *[_COUNT] * 4, *[_WORD] * 2, _INT),
    "best": (_WORD, _COUNT, _COUNT, _COUNT, _REAL, _WORD, _COUNT, _WORD, _WORD),
    "law": (_WORD, _COUNT, _COUNT, _COUNT, _REAL, _WORD, _COUNT, _WORD, _INT),
    "drawn": (_WORD, _COUNT, _EXACT, _WORD),
    "owed": (_WORD, _WORD, _COUNT, _REAL, _WORD, _WORD),
    "without": (_WORD, _COUNT, _WORD, _COUNT, _WORD, _WORD),
    "columns": (_WORD, *[_COUNT] * 5, _WORD, *[_COUNT] * 2),
    "segment": (_WORD, _COUNT, _WORD, *[_COUNT] * 2, *[_WORD] * 5, _COUNT, _INT),
    "between": (_WORD, _COUNT, _WORD, _COUNT, _INT),
    "grow": (_WORD, _WORD, _COUNT),
}
RESULTS = {"segment": _COUNT, "paid": _COUNT}  # of the others: none
_TOKENS = (_WORD, _COUNT)
PLAIN = {  # of operations without a type
    "copied": (_WORD, *_TOKENS, *_TOKENS, _COUNT, _COUNT, _EXACT, _WORD, _COUNT, *_TOKENS),
    "guesses_tried": (_WORD, *_TOKENS, _WORD, _COUNT),
    "followed": (
        *[_WORD] * 3, *_TOKENS, _WORD, *[_COUNT] * 3, _EXACT, _WORD, _COUNT, *_TOKENS
    ),
    "recycled": (_WORD, _WORD, _COUNT, _WORD, _EXACT, _COUNT, _COUNT, _COUNT, *_TOKENS),
    "merged": (_WORD, _WORD, _COUNT, _WORD, _COUNT, _WORD, _WORD, _COUNT, _WORD),
    "merged_tried": (
        _WORD, _WORD, _COUNT, _WORD, _COUNT, _WORD, _WORD, _COUNT, _WORD, *_TOKENS
    ),
    "paid": (_WORD, _WORD, _COUNT, _WORD, _COUNT, _WORD),
}  # fmt: skip
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
NARROW = 256  # columns below which torch's operations do as well
Call = Callable[..., Any]


class _Part(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outs", ctypes.c_int64),
    )


class Places:
    """Where the weights of linear layers over one input lie, and the product with all of them.

    The numbers are read there in every product; weights that move need another of these.
    """

    __slots__ = ("address", "call", "count", "layers", "outs", "table", "width")

    def __init__(self, call: Call, layers: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        parts = [
            _Part(weight.data_ptr(), None if bias is None else bias.data_ptr(), len(weight))
            for weight, bias in layers
        ]
        self.layers = tuple(layers)  # keeps the memory
        self.table = (_Part * len(parts))(*parts)
        self.address, self.count = ctypes.addressof(self.table), len(parts)
        self.call, self.outs = call, sum(len(weight) for weight, _ in layers)
        self.width = layers[0][0].shape[1]

    def multiply(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., outputs of all layers]."""
        x, apart = evenly_apart(x)
        y = scratch.empty((*x.shape[:-1], self.outs), x.dtype)
        self.call(
            x.data_ptr(), y.data_ptr(), x.numel() // self.width, self.width, apart,
            self.address, self.count, torch.get_num_threads(),
        )  # fmt: skip
        return y


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled operations, by name and type."""

    path: Path  # of the file
    calls: dict[tuple[str, torch.dtype], Call]
    plain: dict[str, Call]  # without a type; these keep the interpreter
    team: Call  # whether the threads of a team, so many, know of each other
    outputs: int  # of a layer, and widths of heads and states, are multiples of these
    inputs: int
    together: int  # tokens that a thread takes through all steps between two products

    def places(self, layers: Sequence[tuple[Tensor, Tensor | None]]) -> Places | None:
        """For layers [outputs, inputs] with biases; None where one is stored or sized otherwise."""
        for weight, bias in layers:
            outputs, inputs = weight.shape
            fits = outputs % self.outputs == 0 and inputs % self.inputs == 0
            if not fits or not weight.is_contiguous() or weight.device.type != "cpu":
                return None
            if bias is not None and (bias.dtype is not weight.dtype or not bias.is_contiguous()):
                return None
        call = self.calls.get(("product", layers[0][0].dtype))
        return None if call is None else Places(call, layers)


def evenly_apart(states: Tensor) -> tuple[Tensor, int]:
    """The states, copied if they must be, and the elements between two tokens' [..., width]."""
    width = states.shape[-1]
    if states.dim() == 3 and len(states) == 1:
        return by_token(states, 1, width)
    return states.contiguous(), width


def by_token(states: Tensor, axis: int, count: int) -> tuple[Tensor, int]:
    """States whose tokens have `count` numbers side by side, and the elements between two tokens;
    copied where they lie otherwise. `axis` counts tokens, and is the first that is not one."""
    if states.is_contiguous():
        return states, count
    apart = states.stride(axis)
    if apart >= count and states.select(axis, 0).is_contiguous():
        return states, apart
    return states.contiguous(), count


def places(layers: Sequence[tuple[Tensor, Tensor | None]]) -> Places | None:
    """Of these layers, where products in C can be had and can read them."""
    found = library()
    return found.places(layers) if isinstance(found, Library) else None


@cache
def operation(name: str, dtype: torch.dtype) -> Call | None:
    """One of CALLS for a type, where it can be had."""
    found = library()
    return found.calls.get((name, dtype)) if isinstance(found, Library) else None


@cache
def plain(name: str) -> Call | None:
    """One of PLAIN, where it can be had."""
    found = library()
    return found.plain[name] if isinstance(found, Library) else None


def over_columns(name: str, numbers: Tensor, width: int, between: int) -> Call | None:
    """One of CALLS for rows of so many numbers, where it can be had and can read them; `between`:
    elements from one to the next.

    Asking a tensor costs microseconds behind a forward, so each thing is asked once, by the caller.
    """
    fits = width >= NARROW and between == 1 and numbers.is_cpu
    return operation(name, numbers.dtype) if fits else None


def together() -> int:
    """Tokens that a thread takes through all steps of a segment between products."""
    found = library()
    assert isinstance(found, Library)
    return found.together


@cache
def library() -> Library | Unavailable:
    """The operations of the first compiler whose work is right; or why there are none."""
    reasons = list[str]()
    try:
        folder = writable()  # which may find no folder at all
        for maker in makers(folder):
            try:
                return tried(maker, folder)
            except (Unavailable, OSError) as problem:  # another's may be right all the same
                reasons.append(reason(problem))
    except (Unavailable, OSError) as problem:
        reasons.append(reason(problem))
    return Unavailable("; ".join(reasons))


def tried(maker: Maker, folder: Path) -> Library:
    """Compiled or found in the folder, and compared with torch's own products."""
    try:
        loaded = load(built(maker, folder))
    except OSError:  # the folder is on a disk that no code may be run from
        loaded = load(built(maker, own_folder()))
    compare(loaded)
    return loaded


def reason(problem: Exception) -> str:
    known = isinstance(problem, Unavailable)
    return str(problem) if known else f"{type(problem).__name__}: {problem}"


def load(path: Path) -> Library:
    code = ctypes.CDLL(str(path))
    prepare: Any = code.prepare
    prepare.restype = None
    prepare()
    calls: dict[tuple[str, torch.dtype], Call] = {}
    for name, arguments in CALLS.items():
        for dtype, ending in TYPES.items():
            call: Any = getattr(code, f"{name}_{ending}")
            call.restype, call.argtypes = RESULTS.get(name), arguments
            calls[name, dtype] = call
    short = ctypes.PyDLL(str(path))
    plain: dict[str, Call] = {}
    for name, arguments in PLAIN.items():
        one: Any = getattr(short, name)
        one.restype, one.argtypes = RESULTS.get(name), arguments
        plain[name] = one
    team: Any = code.team
    team.restype, team.argtypes = _INT, (_INT,)
    sizes = []
    for name in ("whole_outputs", "whole_inputs", "together"):
        size: Any = getattr(code, name)
        size.restype = _COUNT
        sizes.append(int(size()))
    return Library(path, calls, plain, team, *sizes)


def compare(found: Library) -> None:
    """Unavailable where it does not compute what torch does."""
    if not found.team(2):  # threads that never meet: what they made may be right by chance
        raise Unavailable("this compiler's OpenMP is not torch's")
    outputs, inputs = 27 * found.outputs, 5 * found.inputs
    for dtype in TYPES:
        weight = torch.linspace(-1, 1, outputs * inputs).sin().reshape(outputs, inputs).to(dtype)
        bias = torch.linspace(-1, 1, outputs).to(dtype)
        x = torch.linspace(-2, 1, 39 * inputs).cos().reshape(1, 39, inputs).to(dtype)
        places = found.places([(weight, bias), (weight, None)])
        assert places is not None
        with torch.no_grad():
            own = torch.cat([F.linear(x, weight, bias), F.linear(x, weight)], -1).float()
            made = [places.multiply(x[:, :rows]).float() for rows in (1, 7, 39)]
        rtol = 2e-2 if dtype is torch.bfloat16 else 1e-4
        pairs = [(some, own[:, : some.shape[1]]) for some in made]
        if not all(torch.allclose(*pair, rtol=rtol, atol=1e-3) for pair in pairs):
            raise Unavailable(f"they differ from torch's own in {dtype} on this processor")

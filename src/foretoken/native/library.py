"""Operations in C (`c/`), most of them for few tokens, compiled once where a compiler is.

Products read the weights where the model keeps them, attention the slot cache, so neither needs a
copy; a call costs a third of what a library's does. The compiled file is kept in the user's cache;
without a compiler torch's operations do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.errors import ConfigError
from foretoken.native import scratch
from foretoken.shipped import user_cache

SOURCES = tuple(
    Path(__file__).with_name("c") / name
    for name in (
        "vectors.h",
        "operations.h",
        "tiles_wide.h",
        "tiles_narrow.h",
        "tiles_amx.h",
        "attention_amx.h",
        "product.c",
        "attention.c",
        "rows.c",
        "best.c",
        "columns.c",
        "laws.c",
        "segment.c",
        "growth.c",
        "look_ups.h",
        "copies.c",
        "guesses.c",
    )
)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
OPENMP = ("libgomp", "libiomp5", "libomp")
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
PATIENCE = 120  # seconds for a compiler that takes two
Call = Callable[..., Any]
_own: list[tempfile.TemporaryDirectory[str]] = []  # folders gone with the process


class Unavailable(Exception):
    """Why operations in C cannot be had on this machine."""


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
    """Compiled or found in the cache, and compared with torch's own products; or why not."""
    try:
        try:
            loaded = load(built())
        except OSError:  # the cache is full, or on a disk that no code may be run from
            loaded = load(built(own_folder()))
        compare(loaded)
    except Unavailable as why:
        return why
    except OSError as problem:
        return Unavailable(f"{type(problem).__name__}: {problem}")
    return loaded


def built(folder: Path | None = None) -> Path:
    """The shared library for this machine, compiled if it is not in the cache (or `folder`)."""
    compilers, openmp, folder = find_compilers(), find_openmp(), folder or writable()
    rest = [openmp, processor(), *FLAGS]
    recipes = [[*(file.read_text() for file in SOURCES), *one, *rest] for one in compilers]
    names = ["operations-" + digest("\0".join(recipe).encode()) for recipe in recipes]
    for name in names:
        for made in folder.glob(f"{name}-*.so"):
            if made.stem == f"{name}-{digest(made.read_bytes())}":
                return made
            made.unlink(missing_ok=True)  # cut short: mapping it would kill the process
    reasons = []
    for compiler, name in zip(compilers, names, strict=True):
        try:
            return compiled(compiler, openmp, folder, name)
        except Unavailable as why:
            reasons.append(str(why))
    raise Unavailable("; ".join(reasons))


def compiled(compiler: list[str], openmp: str, folder: Path, name: str) -> Path:
    """Made by one compiler, then kept in a folder: how full that is is not the compiler's fault."""
    with tempfile.TemporaryDirectory(prefix="foretoken-") as apart:
        draft = Path(apart) / "operations.so"
        files = [str(file) for file in SOURCES if file.suffix == ".c"]
        command = [*compiler, *FLAGS, *files, "-o", str(draft), openmp, "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except (OSError, subprocess.SubprocessError) as problem:
            raise Unavailable(f"{compiler[0]} could not compile them: {problem}") from problem
        if done.returncode:
            raise Unavailable(f"{compiler[0]} could not compile them: {complaint(done.stderr)}")
        handle, copy = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            shutil.copy(draft, copy)
            made = folder / f"{name}-{digest(draft.read_bytes())}.so"
            os.replace(copy, made)  # whole at once: another process may be looking
        finally:
            Path(copy).unlink(missing_ok=True)
    return made


def complaint(told: str) -> str:
    """The first error a compiler tells of; before it stands which file includes which."""
    lines = told.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line.lower()), lines[-1])


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def find_compilers() -> list[list[str]]:
    """Commands of C compilers: that of CC, with its options, or those of COMPILERS, each once."""
    asked = os.environ.get("CC", "")
    found: dict[Path, list[str]] = {}
    for name, *options in [shlex.split(asked)] if asked.strip() else [[n] for n in COMPILERS]:
        if path := shutil.which(name):
            found.setdefault(Path(path).resolve(), [path, *options])
    if not found:
        tried = asked or ", ".join(COMPILERS)
        raise Unavailable(f"no C compiler ({tried}) is on the path")
    return list(found.values())


def find_openmp() -> str:
    """The OpenMP library that torch has loaded: a second one would fight with it for the cores."""
    maps = Path("/proc/self/maps")
    found = openmp_among(maps.read_text()) if maps.exists() else None
    if found is None:
        raise Unavailable("torch's OpenMP library was not found")
    return found


def openmp_among(maps: str) -> str | None:
    """The file of the OpenMP library that is mapped, by the lines of /proc/self/maps: one that came
    with torch, for other packages bring their own; else the first."""
    home, found = Path(torch.__file__).resolve().parent, list[str]()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)  # address, rights, offset, device, inode; a path or none
        path = fields[5] if len(fields) > 5 else ""
        known = Path(path).name.startswith(OPENMP) and ".so" in path
        if known and not path.endswith(" (deleted)"):  # no file to link with any more
            found.append(path)
    own = (home / "lib", home.with_name("torch.libs"))
    return next(iter([*(path for path in found if Path(path).parent in own), *found]), None)


def processor() -> str:
    """What a compiler would make of the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    told = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(told))])


def writable() -> Path:
    """Where compiled files are kept: with the user's caches, or for this process alone where there
    is no folder for those, or none that can be written."""
    with suppress(OSError, ConfigError):
        folder = user_cache() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return own_folder()


def own_folder() -> Path:
    """For this process alone."""
    _own.append(tempfile.TemporaryDirectory(prefix="foretoken-"))
    return Path(_own[-1].name)


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
    return Library(calls, plain, team, *sizes)


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

"""How the operations in C are made: which compilers there are, with whose threads, and where what
they make is kept."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.errors import ConfigError
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
PATIENCE = 120  # seconds for a compiler that takes two
_own: list[tempfile.TemporaryDirectory[str]] = []  # folders gone with the process


class Unavailable(Exception):
    """Why operations in C cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A compiler, and what its library of these sources is called on this machine."""

    compiler: list[str]  # its command and options
    openmp: str
    name: str


def makers(folder: Path) -> list[Maker]:
    """What can be tried here: those whose library lies in the folder before those to be run."""
    compilers, openmp = find_compilers(), find_openmp()
    sources, rest = [file.read_text() for file in SOURCES], [openmp, processor(), *FLAGS]
    recipes = [[*sources, *compiler, *rest] for compiler in compilers]
    names = ["operations-" + digest("\0".join(recipe).encode()) for recipe in recipes]
    found = [Maker(one, openmp, name) for one, name in zip(compilers, names, strict=True)]
    return sorted(found, key=lambda maker: not any(folder.glob(f"{maker.name}-*.so")))


def built(maker: Maker, folder: Path) -> Path:
    """Its library, compiled if it is not in the folder."""
    for made in folder.glob(f"{maker.name}-*.so"):
        if made.stem == f"{maker.name}-{digest(made.read_bytes())}":
            return made
        made.unlink(missing_ok=True)  # cut short: mapping it would kill the process
    return compiled(maker, folder)


def compiled(maker: Maker, folder: Path) -> Path:
    """Made by one compiler, then kept in a folder: how full that is is not the compiler's fault,
    and what was made is as good in a folder of this process alone."""
    compiler = maker.compiler
    with tempfile.TemporaryDirectory(prefix="foretoken-") as apart:
        draft = Path(apart) / "operations.so"
        files = [str(file) for file in SOURCES if file.suffix == ".c"]
        command = [*compiler, *FLAGS, *files, "-o", str(draft), maker.openmp, "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except (OSError, subprocess.SubprocessError) as problem:
            raise Unavailable(f"{compiler[0]} could not compile them: {problem}") from problem
        if done.returncode:
            raise Unavailable(f"{compiler[0]} could not compile them: {complaint(done.stderr)}")
        try:
            return kept(draft, folder, maker.name)
        except OSError:
            return kept(draft, own_folder(), maker.name)


def kept(draft: Path, folder: Path, name: str) -> Path:
    """A copy in a folder, whole at once: another process may be looking."""
    handle, copy = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        shutil.copy(draft, copy)
        made = folder / f"{name}-{digest(draft.read_bytes())}.so"
        os.replace(copy, made)
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

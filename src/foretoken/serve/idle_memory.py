"""Memory that an idle server gives back to the system.

Forwards of many sizes leave holes in the heap, which glibc keeps: after a thousand requests some
hundred MiB. While requests come they are used again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

AFTER = 5.0  # seconds without work


@cache
def trim() -> Callable[[int], int] | None:
    """glibc's own call for it; None where the system's allocator has none."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def give_back() -> None:
    """Return free pages of the heap; takes some ten milliseconds."""
    call = trim()
    if call is not None:
        call(0)

"""What libraries keep of memory: glibc of what was freed, oneDNN of products that it compiled."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

# of glibc's mallopt: what is freed at the end of its memory and kept, what is a large block, and in
# how many places at once threads find theirs
GIVEN_BACK = {-1: 1 << 20, -3: 128 << 10, -8: 1}
USED_AGAIN = {-1: 64 << 20, -3: 32 << 20, -8: 1}
SHORT: WeakSet[Any] = WeakSet()  # whoever in this process has no room for what is freed
LOCK = threading.Lock()  # around SHORT and what follows from it

PRODUCTS = 256  # that oneDNN keeps in a server; by itself 1,024, half a MiB each


@cache
def c_library() -> Any:
    """glibc; None where there is another one."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "malloc_trim") else None


def use_large_blocks_again(owner: Any, room: bool) -> None:
    """Have the C library keep large blocks that were freed and use them again, pages and all, if
    the memory of `owner` leaves `room`; else ask the system for each and give it back, for as long
    as some owner lives that has none.

    From before a load on, or loading leaves holes that texts fill one by one. By itself the library
    learns from the sizes it sees to keep up to 64 MiB, which no plan could count. A step of 500
    nodes asks for 200 MB in blocks that live for a millisecond: new pages for all of them take half
    as long as the step itself.
    """
    library = c_library()
    with LOCK:
        before = bool(SHORT)
        (SHORT.discard if room else SHORT.add)(owner)
        if library is not None:
            for option in (GIVEN_BACK if SHORT else USED_AGAIN).items():
                library.mallopt(*option)
    if SHORT and not before:
        give_back()


def give_back() -> None:
    """Return free pages of the heap.

    Forwards of many sizes leave holes in it: after a chunk of a prompt 2 to 6 MiB, which take half
    a millisecond to give back; after a thousand requests some hundred MiB and ten milliseconds.
    While texts are written these are used again, so this is for what was measured once, for
    idleness, and for budgets of memory.
    """
    library = c_library()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def sparing(memory: bool) -> Iterator[None]:
    """Return free pages before and after what is done here: what was freed in small pieces, such as
    the logits of guesses one by one, else lies beside what is made in large ones.
    """
    if not memory:
        yield
        return
    give_back()
    try:
        yield
    finally:
        give_back()


def collect() -> None:
    """Free what nothing refers to any more, and give it back."""
    gc.collect()
    give_back()


def keep_few_products() -> None:
    """Have oneDNN keep fewer of its products, unless the environment says how many; before the
    first one is made.

    It compiles one for every number of tokens that a prompt may have: a server met new ones for an
    hour and grew by 500 MiB. What is compiled again takes some milliseconds, beside hundreds that
    such prompts take.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's and torch's
        os.environ.setdefault(name, str(PRODUCTS))

"""Several processes of one run, as `accelerate launch` or `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def several() -> bool:
    """Whether this process is one of several of a run."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Whether this is the process that measures, writes and tells."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def main_first() -> Iterator[bool]:
    """The main process goes through first, the others when it is done; whether this is it."""
    if not several():
        yield True
        return
    from accelerate import PartialState

    with PartialState().main_process_first():
        yield is_main()

"""Several processes of one run, as `accelerate launch` or `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def processes() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def several() -> bool:
    """Whether this process is one of several of a run."""
    return processes() > 1


def on_cpu() -> bool:
    """Whether several processes have to be told that they meet on a CPU: accelerate takes each of
    them for a run of its own otherwise, where `torchrun` has started them.
    """
    import torch

    return several() and not torch.cuda.is_available()


def learning_device() -> torch.device:
    """Where this process learns: accelerate's choice."""
    from accelerate import PartialState

    found: torch.device = PartialState(cpu=on_cpu()).device
    return found


def target_device(asked: str | None) -> str | None:
    """Where this process's target goes: of several, each has a GPU of its own where there are any
    and no device was asked for.
    """
    if asked is not None or not several() or on_cpu():
        return asked
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


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

    with PartialState(cpu=on_cpu()).main_process_first():
        yield is_main()

"""Peak memory of one piece of work, and of a row in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

try:
    import psutil
except ImportError:  # the bench goes on without these numbers, and says so
    psutil = None

MISSING = "memory was not measured: psutil is not installed (pip install 'foretoken[bench]')"
Answer = TypeVar("Answer")
_RESET = Path("/proc/self/clear_refs")  # Linux: writing 5 sets the peak back to the present
_STATUS = Path("/proc/self/status")


def measurable() -> bool:
    """Whether resident memory can be read here."""
    return psutil is not None


class Peak:
    """Peak resident memory of the process, and of the GPU, while the block ran.

    Where the system cannot set its peak back, the level after the block stands in for the peak.
    Without psutil the resident memory is None.
    """

    rss: int | None = None
    growth: int | None = None
    cuda: int | None = None

    def __enter__(self) -> Peak:
        self._resettable = measurable() and _reset()
        self._before = _resident()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *problem: Any) -> None:
        after = _resident()
        if self._before is not None and after is not None:
            self.rss = max(_high_water_mark() if self._resettable else after, after)
            self.growth = max(self.rss - self._before, 0)
        if torch.cuda.is_available():
            self.cuda = torch.cuda.max_memory_allocated()


def alone(work: Callable[..., Answer], *given: Any) -> tuple[int | None, Answer]:
    """Peak resident memory of a fresh process that did this work, and what it answered.

    Rows of one bench share a process, in which every model of the bench is loaded: their peaks tell
    little of a row. What is given and answered has to be picklable.
    """
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        answer = pool.submit(work, *given).result()
        peak = pool.submit(high_water).result()
    return peak, answer


def high_water() -> int | None:
    """The most that this process ever had resident, where the system tells."""
    return _high_water_mark() if _STATUS.exists() else _resident()


def _resident() -> int | None:
    return None if psutil is None else int(psutil.Process().memory_info().rss)


def _reset() -> bool:
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0

"""Where numbers were measured: enough to judge them, nothing that names a machine or a person."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import foretoken


def describe() -> dict[str, Any]:
    """Versions, processor, memory, threads, load and date."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "foretoken": foretoken.__version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": memory_gib(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(value, 2) for value in load()],
    }


def cpu() -> str:
    """The processor's model in words, as the system gives it."""
    if sys.platform == "linux":
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE):
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> tuple[float, ...]:
    """Load average over 1, 5 and 15 minutes; empty where the system keeps none."""
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


def busy(place: Mapping[str, Any]) -> str | None:
    """A warning where more work waits than the machine has cores; None where there is room."""
    load = place["load_average"]
    if not load or load[0] <= place["cores"]:
        return None
    return (
        f"the machine was busy at the start (load {load[0]:.1f} on {place['cores']} cores): "
        "rows wait for other work, and their times say little"
    )


def memory_gib() -> float | None:
    """Memory of the machine."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

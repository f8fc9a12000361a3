"""Amounts of memory as people write them."""

from __future__ import annotations

import math
import re
from typing import Any

from foretoken.errors import ConfigError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def amount(given: Any, name: str = "memory_budget") -> int:
    """Bytes of a number, or of a text such as 2GiB, 512MiB or 1.5GB."""
    found = 0.0
    if isinstance(given, int | float) and not isinstance(given, bool):
        found = float(given)
    elif isinstance(given, str) and (match := WRITTEN.fullmatch(given)):
        found = float(match[1]) * UNITS.get(match[2].lower(), 0)
    if not 1.0 <= found < 2.0**63:
        raise ConfigError(
            f"{name}={given!r} was asked for.",
            f"{name} is bytes, or a text with a unit: 2GiB, 512MiB, 1.5GB.",
            f"pass for example {name}='2GiB'.",
        )
    return int(found)


def told(count: float) -> str:
    """An amount for a message: in the unit that leaves one to four digits before the point."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}" if unit == "GiB" else f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def enough(count: int) -> str:
    """An amount as `amount` reads it, in whole KiB or MiB and no less than that."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= 10 * size:
            return f"{math.ceil(count / size)}{unit}"
    return str(count)

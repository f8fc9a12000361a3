"""What forwards cost on this machine, as they were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostTable:
    """What an engine's forwards cost on this machine for a batch: of a lone row, measured when it
    is quiet, or of several that share each forward.
    """

    target: Mapping[int, float]  # seconds of one target forward by nodes scored, of all rows
    draft: Mapping[int, float]  # seconds of a whole draft by depth (0 is absent), of all rows
    overhead: float = 0.0  # seconds of a step outside both
    asking: float = 0.0  # seconds of a proposal that finds nothing worth its price
    rows: int = 1  # rows of the batch
    cached: int = 0  # tokens of all of them that attention read

"""Which row a target checks itself on, between two steps.

A check is one forward over a whole text without a cache, and all other rows wait for it: beside
others a text much longer than all that were checked is left until it is alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from foretoken.types import DecodeState, Rows

LOG = logging.getLogger(__name__)
GROWTH = 4  # times the longest text that was checked, beside others
AHEAD = 1024  # tokens that count as checked for this: as many as are before there are texts


@dataclass(slots=True)
class LengthChecks:
    """What an engine knows of lengths that were not checked."""

    unverified: int = 0  # tokens of a text that the target had no memory to check itself at
    told: int = 0  # tokens of a text whose check was put off, and that was told

    def due(
        self, rows: Rows, longest: int, verified: float, inside: Sequence[Sized]
    ) -> list[DecodeState]:
        """The row that is checked now, if any is twice as long as all that were: the longest one
        that others may wait for, where there are any `inside`.
        """
        known = max(verified, self.unverified)
        if not rows or longest <= 2 * known:
            return []
        row = max(rows, key=length)
        if length(row) <= 2 * known:  # the longest one has just ended
            return []
        most = GROWTH * max(verified, AHEAD)
        if length(row) <= most or sum(map(len, inside)) == 1:
            return [row]
        if length(row) > 2 * self.told:
            self.told = length(row)
            LOG.warning("the check of a text of %d tokens is put off beside others", self.told)
        within = [one for one in rows if 2 * known < length(one) <= most]
        return [max(within, key=length)] if within else []


def length(row: DecodeState) -> int:
    """Committed tokens."""
    return len(row.tokens)

"""The naive rule for several candidates (MCNS in MCSD, arXiv 2401.06706): draw first, then look.

The target's own draw decides, whatever the candidates were; one of them is kept only if it happens
to be that token. Exact for candidates of every kind, and the yardstick of the rules that use q: it
accepts each candidate with the chance p(x) alone.
"""

from __future__ import annotations

from foretoken.types import Draw
from foretoken.verifiers.point import Point


class Naive(Point):
    """The walk of fixed candidates, on drawn ones."""

    exact_for = frozenset({Draw.POINT, Draw.IID, Draw.DISTINCT, Draw.MIXED})

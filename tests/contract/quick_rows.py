"""Which rows of METHODS the quick suite holds to what no rule or controller decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.methods import Method


def new_drafters(entries: Sequence[Method]) -> list[Any]:
    """The rows, those marked slow whose drafter an earlier row has."""
    found, known = [], set[str]()
    for entry in entries:
        marks = [pytest.mark.slow] * (entry.drafter in known)
        found.append(pytest.param(entry, id=entry.name, marks=marks))
        known.add(entry.drafter)
    return found

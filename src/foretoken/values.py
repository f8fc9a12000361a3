"""Whether a value has the type that an option declares, and how a user is told of that type."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal

UNIONS = (types.UnionType, typing.Union)
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    types.NoneType: "none",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type a field declares; a whole number is a number, too."""
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return any(fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:  # tuple[each, ...]
        each = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(fits(one, each) for one in value)
    if hint in (int, float):
        allowed = (int,) if hint is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, hint)


def told(hint: Any) -> str:
    """A type in a user's words."""
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return " or ".join(told(one) for one in typing.get_args(hint))
    if origin is Literal:
        return " or ".join(str(choice) for choice in typing.get_args(hint))
    if origin is tuple:
        return f"a list, each {told(typing.get_args(hint)[0])}"
    return WORDS.get(hint, str(hint))

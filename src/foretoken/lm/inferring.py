"""Inference mode for the doors of a model, entered only where nobody has entered it yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def inferring(function: Callable[P, R]) -> Callable[P, R]:
    """`function` under inference mode. The loop is in it already: entering again costs more than
    some of the calls themselves.
    """

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*given, **named)
        with torch.inference_mode():
            return function(*given, **named)

    return call

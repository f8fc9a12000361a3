"""Learning that gives way at once: between any two layers of a model, forwards or backwards."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any, TypeVar

from torch import Tensor, nn

R = TypeVar("R")
PATIENCE = 3  # times that a slice is given up: longer than all gaps, it would never be learned


class Disturbed(Exception):
    """Somebody waits: what was being computed is given up."""


def never() -> bool:
    return False


class GivingWay:
    """Raises `Disturbed` between two layers of the models that it watches once `disturbed` says so.

    A request that met a slice of learning waited half a slice on average, twenty milliseconds: most
    of what learning cost a busy server.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.disturbed: Callable[[], bool] = never
        self.given_up = 0  # slices, in all
        for model in models:
            for module in model.modules():
                if next(module.children(), None) is None:
                    module.register_forward_hook(self.passed)

    def passed(self, module: nn.Module, given: Any, made: Any) -> None:
        """A hook of a layer: look now, and when its gradient is there."""
        self.look()
        if isinstance(made, Tensor) and made.requires_grad:
            made.register_hook(self.look)  # type: ignore[no-untyped-call]

    def look(self, _: Tensor | None = None) -> None:
        if self.disturbed():
            raise Disturbed

    def tried(self, name: str, job: Callable[[], R]) -> Generator[str, None, R]:
        """Yield `name` before each try of `job`; the result of the first that is not disturbed."""
        for tries in count():
            yield name
            if tries == PATIENCE:
                self.disturbed = never
            try:
                return job()
            except Disturbed:
                self.given_up += 1
        raise AssertionError

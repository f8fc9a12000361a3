"""A user's model, changed for the length of one call only: evaluation mode and our kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Loan:
    """What has to be put in place before a call, and taken away after it.

    Attention functions need no loan: `CachedLM` switches them for the length of each forward.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.products: list[Any] = []  # kernels in place while the model is ours
        self.placement = placement(model)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The model as the engine wants it; afterwards as the user had it."""
        from foretoken.lm.fast import installed

        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        for product in self.products:
            product.module.forward = product
        try:
            yield
        finally:
            self.products = list(installed(self.model))
            for product in self.products:
                del product.module.__dict__["forward"]
            for module in training:
                module.training = True

    def current(self, model: Any) -> bool:
        """Whether the engine built under this loan still fits: same model, same weights."""
        return (
            model is self.model
            and placement(model) == self.placement
            and all(
                product.module.weight.data_ptr() == product.matrix.data_ptr()
                for product in self.products
            )
        )


def placement(model: Any) -> tuple[Any, Any]:
    """Where a model is and in which type."""
    return model.device, model.dtype

"""A caller's model inside `generate`: kernels and evaluation mode for the length of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.lm.runtime.cached import CachedLM


class BorrowedModel:
    """A cached language model whose model goes back to its caller after every call.

    Chosen kernels are kept between calls, put away. Attention functions need nothing of this:
    `CachedLM` switches them for the length of each forward.
    """

    def __init__(self, lm: CachedLM) -> None:
        self.lm = lm

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The model in evaluation mode, with our kernels over its weights as they are now."""
        self.lm.borrowing.take()
        try:
            self.lm.refresh()
            self.lm.check_usable()
            yield
        finally:
            self.lm.borrowing.give_back()

    def current(self, model: Any) -> bool:
        """Whether what was built over `lm` fits: the same model, layers, type, place and words."""
        lm = self.lm
        return model is lm.model and lm.borrowing.fits() and lm.structure.fits(model)

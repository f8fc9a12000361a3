"""Figures of a run as TensorBoard reads them, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

FOLDER = "tensorboard"  # in the folder of a run


def require_tensorboard() -> None:
    """ConfigError where it is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard=true was asked for.",
            "this installation lacks tensorboard; loss.png shows the same curves without it.",
            "install it: pip install 'foretoken[tensorboard]', or leave the option out.",
        )


class Scalars:
    """Writes figures of steps; those of steps that a resumed run takes again are replaced."""

    def __init__(self, folder: Path, step: int) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        made: Any = SummaryWriter
        self.writer = made(str(folder / FOLDER), purge_step=step + 1)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

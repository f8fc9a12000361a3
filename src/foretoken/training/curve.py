"""The loss curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_curve(
    path: Path,
    title: str,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
) -> None:
    """Training loss (thin, and smoothed) and held-out loss against optimizer steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9db4d6", linewidth=0.7, label="training loss, per step")
        axes.plot(
            steps, _smooth(losses), color="#1f4e9c", linewidth=1.6, label="training loss, smoothed"
        )
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), "o-", color="#d1495b", markersize=3, label="held-out loss"
        )
    axes.set(title=title, xlabel="optimizer steps", ylabel="loss (nats per weighted token)")
    if train or held_out:
        axes.legend()
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure)
    figure.savefig(str(path), format="png")


def _smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    smoothed: list[float] = []
    average = values[0]
    for value in values:
        average = keep * average + (1 - keep) * value
        smoothed.append(average)
    return smoothed

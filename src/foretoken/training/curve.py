"""The loss curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curve(
    path: Path,
    title: str,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    measured: Sequence[tuple[int, Mapping[str, float]]] = (),
) -> None:
    """Training loss (thin, and smoothed) and held-out loss against optimizer steps.

    What was `measured` besides has a panel for each figure, with its name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(measured[0][1]) if measured else []
    figure = Figure(figsize=(8, 4.5 + 1.8 * len(names)), layout="constrained")
    axes, *panels = figure.subplots(
        1 + len(names), sharex=True, height_ratios=[2.5] + [1] * len(names), squeeze=False
    )[:, 0]
    for name, panel in zip(names, panels, strict=True):
        panel.plot(
            [step for step, _ in measured], [told[name] for _, told in measured],
            "o-", color="#2a7f62", markersize=3,
        )  # fmt: skip
        panel.set(ylabel=name.replace("_", " "))
        panel.grid(alpha=0.3)
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
    axes.set(title=title, ylabel="loss (nats per weighted token)")
    [axes, *panels][-1].set(xlabel="optimizer steps")
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

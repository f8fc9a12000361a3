"""How a draft that learns fared beside the one it began as: figures, a page, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from foretoken.engine.results import Result
from foretoken.lm import draft_vocabulary


@dataclass(frozen=True, slots=True)
class Fared:
    """One request: guesses accepted, guesses judged, tokens, target forwards, seconds."""

    accepted: int
    judged: int
    tokens: int
    forwards: int
    seconds: float  # of the whole call, learning included

    @classmethod
    def of(cls, result: Result, seconds: float) -> Fared:
        steps = result.steps
        return cls(
            accepted=sum(step.accepted for step in steps),
            judged=sum(min(step.depth, step.accepted + 1) for step in steps),
            tokens=len(result.tokens),
            forwards=len(steps),
            seconds=seconds,
        )


def total(some: Sequence[Fared], name: str) -> float:
    found: float = sum(getattr(one, name) for one in some)
    return found


def acceptance(some: Sequence[Fared]) -> float:
    """Accepted share of the judged guesses."""
    return total(some, "accepted") / max(total(some, "judged"), 1)


def speed(some: Sequence[Fared]) -> float:
    """Tokens a second."""
    return total(some, "tokens") / max(total(some, "seconds"), 1e-9)


def figures(fared: Mapping[str, Sequence[Fared]], window: int) -> dict[str, Any]:
    """What a card says of both drafts, and how fast one was beside the other."""
    told: dict[str, Any] = {
        name: {
            "requests": len(some),
            "acceptance": acceptance(some),
            "first_acceptance": acceptance(some[:window]),
            "last_acceptance": acceptance(some[-window:]),
            "tokens_per_forward": total(some, "tokens") / max(total(some, "forwards"), 1),
            "tokens_per_second": speed(some),
        }
        for name, some in fared.items()
    }  # fmt: skip
    learning, frozen = fared["learning"], fared["frozen"]
    starts = range(0, max(len(learning) - window, 0) + 1, window)
    ratios = [speed(learning[at : at + window]) / speed(frozen[at : at + window]) for at in starts]
    told["speed_beside_frozen"] = {
        "all": speed(learning) / speed(frozen), "slowest": min(ratios), "window": window,
    }  # fmt: skip
    return told


def moving(some: Sequence[Fared], window: int) -> list[float]:
    """Acceptance over the last `window` requests, after each."""
    accepted = [0, *accumulate(one.accepted for one in some)]
    judged = [0, *accumulate(one.judged for one in some)]
    return [
        (accepted[at] - accepted[max(0, at - window)])
        / max(judged[at] - judged[max(0, at - window)], 1)
        for at in range(1, len(some) + 1)
    ]


def draw(path: Path, fared: Mapping[str, Sequence[Fared]], window: int) -> None:
    """Curves of acceptance over requests as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, some), colour in zip(fared.items(), ("#1f4e9c", "#d1495b"), strict=True):
        curve = moving(some, window)
        axes.plot(range(1, len(curve) + 1), curve, color=colour, label=f"{name} draft")
    axes.set(xlabel="requests", ylabel=f"acceptance, last {window} requests", ylim=(0, 1))
    axes.legend()
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure)
    figure.savefig(str(path), format="png")


def page(notes: Mapping[str, Any], window: int) -> str:
    """What a person wants to know of a draft that learned from traffic."""
    shape, words, speeds = notes["shape"], notes["vocabulary"], notes["speed_beside_frozen"]
    lines = [
        f"# A draft for {notes['target']}",
        "",
        f"Made by `foretoken train online` from {notes['draft']}: {shape['layers']} layers, "
        f"{shape['hidden']} wide, {shape['parameters']:,} parameters. It scores "
        f"{words['tokens']:,} of {words['of']:,} tokens.",
        "",
        f"It learned from {notes['learning']['requests']:,} requests while it served them: "
        f"{notes['steps']:,} optimizer steps in {notes['learning_seconds']:.1f} s. Its speed "
        f"beside the frozen draft: {speeds['all']:.3f} of its tokens/s over all, "
        f"{speeds['slowest']:.3f} in the slowest {window} requests.",
        "",
        f"| draft | acceptance, first {window} requests | last {window} | all | tokens/s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {notes[name]['first_acceptance']:.3f} | {notes[name]['last_acceptance']:.3f} "
        f"| {notes[name]['acceptance']:.3f} | {notes[name]['tokens_per_second']:.1f} |"
        for name in ("learning", "frozen")
    ]
    lines += [
        "",
        "Whatever this model guesses, the text keeps the target's law. An ordinary model: "
        f"`AutoModelForCausalLM.from_pretrained` reads it. `{draft_vocabulary.NAME}` says which "
        "tokens foretoken lets it guess.",
        "",
    ]
    return "\n".join(lines)

"""Training a decision model (arXiv 2409.10644): collect, train, keep the best, judge.

A guess is judged below the target's own text, as it is drafted below the target's own candidates.
Two departures from the paper: labels come from whole texts instead of from rounds of one drafted
token, which collects one per token at the same law; and the hard model's classes are balanced by
weight instead of by leaving out guesses.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.heads.decision import MODELS, DecisionHead, save
from foretoken.training.capture import Capture, Features, collect
from foretoken.training.features import Fit, fit
from foretoken.training.objectives.acceptance import quality
from foretoken.training.objectives.decision import LABELS, SEEN, Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionLesson:
    """All settings of a run."""

    capture: Capture = field(default_factory=lambda: Capture(mix=0.0))  # every guess counts
    model: str = "soft"  # or "hard"
    epochs: int = 10  # paper
    steps: int | None = None  # instead of epochs
    batch: int = 50  # tokens; paper
    rate: float = 1e-3  # paper

    def __post_init__(self) -> None:
        check_values(
            self,
            ("model", self.model in MODELS, " or ".join(MODELS)),
            ("steps", self.steps is None or self.steps >= 1, "1 or more"),
            ("rate", self.rate > 0.0, "above 0"),
        )


def run(
    session: Session,
    prompts: tuple[Sequence[str], Sequence[str]],
    lesson: DecisionLesson,
    out: Path,
    *,
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train a decision model for the session's pair on (training, held-out) prompts; its figures.

    Soft and hard models in one folder share what was collected; the head is the last one trained.
    """
    work = out / "training"
    if fresh and work.is_dir():
        shutil.rmtree(work)
    train, dev = (
        collect(session, some, lesson.capture, work / "capture", split, show=show)
        for split, some in zip(("train", "valid"), prompts, strict=True)
    )
    torch.manual_seed(lesson.capture.seed)
    head = DecisionHead(train["before"].shape[-1], session.draft.vocab_size, model=lesson.model)
    untrained = judge(head, dev)
    good = float(train[LABELS[lesson.model]].mean())
    balance = (1.0 - good) / good if lesson.model == "hard" and 0.0 < good < 1.0 else 1.0
    objective = Decision(model=lesson.model, weight=balance)
    how = Fit(lesson.epochs, lesson.steps, lesson.batch, lesson.rate, lesson.capture.seed)
    folder = work / lesson.model
    progress = fit(
        head, objective, (train, dev), how, folder, name=f"{lesson.model} decision model", show=show
    )
    notes = {
        "tokens": {"train": len(train["accept"]), "valid": len(dev["accept"])},
        "acceptance": float(dev["accept"].mean()),
        "untrained": untrained,
        "figures": {"trained": judge(head, dev)},
        "steps": progress.step,
        "ended": progress.ended,
        "held_out": progress.held_out,
        "settings": asdict(lesson),
    }
    save(out, head, notes)
    shutil.copyfile(folder / "loss.png", out / "loss.png")
    return notes


def judge(head: DecisionHead, dev: Features) -> dict[str, float]:
    """How far held-out outputs are from the labels, and how often their half is the labels' half.

    The hard model's outputs are chances under balanced classes, so only the last one judges it.
    """
    labels = dev[LABELS[head.model]]
    with torch.no_grad():
        predicted = head.likely(dev[SEEN[head.model]])
    right = (predicted > 0.5) == (labels > 0.5)
    return quality(predicted, labels) | {"right": float(right.double().mean())}

"""Training an acceptance head: collect, train, keep the best, calibrate, judge."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.heads import acceptance
from foretoken.training.calibrate import WAYS, Cape, cape, margins, scaled
from foretoken.training.capture import Capture, Features, collect
from foretoken.training.features import Fit, fit
from foretoken.training.objectives.acceptance import Acceptance, quality


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """All settings of a run."""

    capture: Capture = field(default_factory=Capture)
    objective: Acceptance = field(default_factory=Acceptance)
    blocks: int = 3  # paper's best
    shared: bool = False  # one block, repeated: the released code's
    epochs: int = 3  # paper
    steps: int | None = None  # instead of epochs
    batch: int = 256  # tokens
    rate: float = 1e-3
    calibration: str = "none"

    def __post_init__(self) -> None:
        check_values(
            self,
            ("blocks", self.blocks >= 0, "0 or more"),
            ("steps", self.steps is None or self.steps >= 1, "1 or more"),
            ("rate", self.rate > 0.0, "above 0"),
            ("calibration", self.calibration in WAYS, " or ".join(WAYS)),
        )
        check_values(
            self.objective,
            ("weight", self.objective.weight > 0.0, "above 0"),
            ("labels", self.objective.labels in ("accept", "outcome"), "accept or outcome"),
        )


def run(
    session: Session,
    prompts: tuple[Sequence[str], Sequence[str]],
    lesson: Lesson,
    out: Path,
    *,
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train a head for the session's pair on (training, held-out) prompts; its figures."""
    work = out / "training"
    if fresh and work.is_dir():
        shutil.rmtree(work)
    train, dev = (
        collect(session, some, lesson.capture, work / "capture", split, show=show)
        for split, some in zip(("train", "valid"), prompts, strict=True)
    )
    torch.manual_seed(lesson.capture.seed)
    hidden = train["hidden"].shape[-1]
    head = acceptance.AcceptanceHead(hidden, blocks=lesson.blocks, shared=lesson.shared)
    untrained = judge(head, dev)
    plan = Fit(lesson.epochs, lesson.steps, lesson.batch, lesson.rate, lesson.capture.seed)
    progress = fit(
        head, lesson.objective, (train, dev), plan, work, name="acceptance head", show=show
    )
    found = calibrated(head, train, dev, lesson)
    chosen = found.pop("head")
    notes = {
        "tokens": {"train": len(train["accept"]), "valid": len(dev["accept"])},
        "acceptance": float(dev["accept"].mean()),
        "untrained": untrained,
        **found,
        "steps": progress.step,
        "ended": progress.ended,
        "held_out": progress.held_out,
        "settings": asdict(lesson),
    }
    acceptance.save(out, chosen, session.draft.vocab_size, notes)
    shutil.copyfile(work / "loss.png", out / "loss.png")
    return notes


def judge(head: acceptance.AcceptanceHead, dev: Features) -> dict[str, float]:
    """Figures of a head on held-out tokens, with its mean on what is mostly taken or rejected."""
    with torch.no_grad():
        predicted = head.accepted(dev["hidden"])
    likely = dev["accept"] >= 0.5
    return quality(predicted, dev["accept"]) | {
        "mean_if_accepted": float(predicted[likely].mean()),
        "mean_if_rejected": float(predicted[~likely].mean()),
    }


def calibrated(
    head: acceptance.AcceptanceHead, train: Features, dev: Features, lesson: Lesson
) -> dict[str, Any]:
    """Every cheap way of calibration judged, and the head under the one that was asked for.

    Half of the held-out tokens fit it, the other half judge it.
    """
    half = len(dev["accept"]) // 2
    fit = {name: values[:half] for name, values in dev.items()}
    rest = {name: values[half:] for name, values in dev.items()}
    margin, labels = margins(head, fit), fit[lesson.objective.labels]
    found: dict[str, Any] = {}
    heads = {"none": (head, 1.0, 0.0)}
    for way in ("temperature", "shift"):
        heads[way] = (head, *scaled(margin, labels, shift=way == "shift"))
    if lesson.calibration.startswith("cape"):
        plan = Cape(kind=lesson.calibration.removeprefix("cape-"), seed=lesson.capture.seed)
        heads[lesson.calibration] = (cape(head, train, fit, plan), 1.0, 0.0)
    for way, (model, temperature, shift) in heads.items():
        model.temperature, model.shift = temperature, shift
        found[way] = judge(model, rest)
    model, temperature, shift = heads[lesson.calibration]
    model.temperature, model.shift = temperature, shift
    return {"figures": found, "calibration": lesson.calibration, "head": model}

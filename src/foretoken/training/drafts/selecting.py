"""`foretoken train adaspec`: distillation on the places a draft can learn (arXiv 2510.19779)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from foretoken.errors import check_values
from foretoken.training.drafts.distilling import DistillConfig, Student
from foretoken.training.drafts.learning import fit, part
from foretoken.training.objectives.selected import Selected
from foretoken.training.recipes import Order


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaspecConfig(DistillConfig):
    """How a draft is distilled on selected places."""

    on_policy: float = 0.0  # chance that a batch is answered by the draft itself, not the target
    keep: float = 0.4  # share of places that count: those with the most to gain
    reference_epochs: float = 2.0  # passes over the texts of the reference, at most

    def __post_init__(self) -> None:
        DistillConfig.__post_init__(self)
        check_values(
            self,
            ("keep", 0 < self.keep <= 1, "above 0, at most 1"),
            ("reference_epochs", self.reference_epochs > 0, "above 0"),
        )


def run(order: Order) -> dict[str, Any]:
    """Distil a reference and then, with its help, `order.draft`; the notes of the draft's card."""
    student, config = Student.of(order), order.config
    share = config.reference_epochs / (config.reference_epochs + config.epochs)  # of the minutes
    reference = replace(part(config, share), epochs=config.reference_epochs)
    twin = copy.deepcopy(student.model)
    fit(
        twin, student.objective, reference, student.data, student.work / "reference",
        student.measure, packed=False, judge=student.objective.on_texts, show=order.show,
    )  # fmt: skip
    twin.eval().requires_grad_(False)
    chosen = Selected(student.objective, twin, config.keep)
    return student.taught(chosen, "adaspec", 1.0 - share)

"""`foretoken train distill`: a draft that exists learns its target's laws (arXiv 2310.08461)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import ConfigError, check_values
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.load import load_model
from foretoken.lm.opening import open_draft, open_lm
from foretoken.training.capture import models_of
from foretoken.training.drafts.learning import Learning, fit, held_out, part, run_folder, told
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.shape import Timed, ratio
from foretoken.training.drafts.words import covered, mass
from foretoken.training.drafts.writing import shape_of, write_draft
from foretoken.training.identity import identity
from foretoken.training.objectives.distilled import Distilled
from foretoken.training.objectives.divergence import DIVERGENCES
from foretoken.training.plain_logits import check_linear
from foretoken.training.recipes import Order
from foretoken.training.trainer import Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(Learning):
    """How a draft is distilled."""

    divergence: str = "fkl"  # fkl, rkl, jsd or tvd, between the target's law and the draft's
    on_policy: float = 0.5  # chance that a batch is answered by the draft itself, not the target
    new_tokens: int = 96  # of such an answer, at most
    epochs: float = 2.0  # passes over the texts at most
    tokens: int = 4096  # in a step, about
    matrix_rate: float = 0.0  # peak rate of Muon, for the blocks; 0: AdamW for all
    vector_rate: float = 3e-4  # peak rate of AdamW
    embedding_rate: float = 3e-4  # the same for the embedding

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        check_values(
            self,
            ("divergence", self.divergence in DIVERGENCES, "one of " + ", ".join(DIVERGENCES)),
            ("on_policy", 0 <= self.on_policy <= 1, "from 0 (fixed texts) to 1"),
            ("new_tokens", self.new_tokens >= 1, "1 or more"),
        )


def run(order: Order) -> dict[str, Any]:
    """Distil `order.draft`; the notes of its card."""
    student = Student.of(order)
    return student.taught(student.objective, "distill")


@dataclass(frozen=True, slots=True)
class Student:
    """A draft that is to be taught, and all that its teaching needs."""

    order: Order
    data: Path
    model: Any
    tokens: Tensor  # that it scores
    work: Path
    cost: float  # of a forward, as a share of the target's
    measure: EngineAcceptance
    objective: Distilled

    @classmethod
    def of(cls, order: Order) -> Student:
        config, session, data = order.config, order.session, order.data
        assert data is not None, "its row says that it needs texts"
        model, tokens = read_draft(order)
        begun_as = identity(*models_of(session), model)
        work = run_folder(order.out, config, data, order.source, begun_as, fresh=order.fresh)
        cost = cost_of(session, order.draft)
        measure = EngineAcceptance(session, held_out(data, config.held_out), tokens, cost)
        objective = Distilled(
            session.target, tokens, DIVERGENCES[config.divergence], config.on_policy,
            config.new_tokens, tuple(sorted(session.eos)),
        )  # fmt: skip
        return cls(order, data, model, tokens, work, cost, measure, objective)

    def taught(self, objective: Objective, recipe: str, share: float = 1.0) -> dict[str, Any]:
        """Teach the draft in a share of the minutes and write it down; the notes of its card."""
        order, model, session = self.order, self.model, self.order.session
        before = self.measure(model)
        run = self.work / "run"
        progress = fit(
            model, objective, part(order.config, share), self.data, run, self.measure,
            packed=False, judge=self.objective.on_texts, show=order.show,
        )  # fmt: skip
        counts = mass(self.data, session.target.vocab_size)
        notes = {
            "recipe": recipe,
            "target": order.source,
            "draft": str(order.draft),
            "shape": shape_of(model),
            "cost": self.cost,
            "vocabulary": {
                "tokens": len(self.tokens),
                "of": len(counts),
                "mass": covered(counts, self.tokens),
            },
            "before": before,
            **told(progress),
            "settings": asdict(order.config),
        }
        write_draft(order.out, model, session, self.tokens, notes, run / "loss.png")
        return notes


def cost_of(session: Any, draft: Any) -> float:
    """A forward of the draft as a share of the target's, measured in turns."""
    target = session.target.model
    small = load_model(draft, device=target.device, dtype=target.dtype)
    rows = chosen_rows(None, draft, session.target.vocab_size)
    with (
        closing(Timed.of(open_lm(target))) as asked,
        closing(Timed.of(open_draft(small, rows))) as one,
    ):
        return ratio(one, asked)


def read_draft(order: Order) -> tuple[PreTrainedModel, Tensor]:
    """The draft to be taught, in float32, and the tokens it scores."""
    if order.draft is None:
        raise ConfigError(
            "distilling was asked for without a draft.",
            "it teaches a draft that exists; `foretoken train draft` makes one from nothing.",
            "pass --draft DIR.",
        )
    model, width = student(order.session, order.draft), order.session.target.vocab_size
    rows = chosen_rows(None, order.draft, width)
    return model, torch.arange(width) if rows is None else rows.tokens


def student(session: Any, draft: Any, doing: str = "distilling") -> PreTrainedModel:
    """A draft that exists, in float32; one of another vocabulary, or whose logits are more than its
    output layer says, is refused.
    """
    place, width = session.target.model.device, session.target.vocab_size
    model: PreTrainedModel = load_model(draft, device=place, dtype=torch.float32)
    if model.config.vocab_size != width:
        raise ConfigError(
            f"{doing} the draft {draft} was asked for.",
            f"it has {model.config.vocab_size} tokens and the target {width}: laws over different "
            "tokens cannot be compared.",
            "pass a draft with the target's vocabulary.",
        )
    check_linear(model, doing)
    model.train()
    return model

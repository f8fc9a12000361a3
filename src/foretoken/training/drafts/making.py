"""`foretoken train draft`: a small model from the target's own text alone (arXiv 2411.11055)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.session import Session
from foretoken.errors import check_values
from foretoken.training.drafts.learning import Learning, fit, held_out, run_folder, told
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.shape import Shape, build, costs, fitting_shape
from foretoken.training.drafts.words import covered, frequent, mass
from foretoken.training.drafts.writing import write_draft
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.recipes import Order


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig(Learning):
    """How large a draft is, and how it learns."""

    cost: float = 0.055  # of a forward, as a share of the target's; decides the shape
    shape: tuple[int, int] | None = None  # width, a multiple of 64, and layers, in place of it
    vocabulary: int = 16384  # tokens it scores: the most frequent of the target's text
    hard: float = 0.1  # share of the loss on the written token; the rest on the target's law

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        check_values(
            self,
            ("vocabulary", self.vocabulary >= 1, "1 or more"),
            ("cost", self.cost > 0, "above 0"),
            ("hard", 0 <= self.hard <= 1, "from 0 to 1"),
            ("shape", fits_heads(self.shape), "a multiple of 64 and a number of layers: 192x4"),
        )


def fits_heads(shape: tuple[int, int] | None) -> bool:
    return shape is None or (shape[0] >= 64 and shape[0] % 64 == 0 and shape[1] >= 1)


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train draft` does."""
    assert order.data is not None, "its row says that it needs texts"
    return make_draft(
        order.session, order.config, order.data, order.out, source=order.source, show=order.show
    )


def make_draft(
    session: Session,
    config: DraftConfig,
    data: Path,
    out: Path,
    *,
    source: str = "",
    show: bool = True,
) -> dict[str, Any]:
    """Train a draft for the session's target on the texts in `data`; the notes of its card.

    A killed run goes on where it was. `out` becomes a model directory that any transformers reads,
    with the file that says which tokens it scores.
    """
    work = run_folder(out, config)
    target = session.target.model
    counts = mass(data, session.target.vocab_size)
    tokens = frequent(counts, config.vocabulary, session.eos)
    shape, cost = decided(config, work, target, len(tokens))
    model = build(shape, target, counts, config.seed)
    objective = SparseLaws.over(tokens, len(counts), config.hard)
    measure = EngineAcceptance(session, held_out(data, config.held_out), tokens, cost)
    progress = fit(model, objective, config, data, work / "run", measure, show=show)
    notes = {
        "recipe": "draft",
        "target": source,
        "shape": asdict(shape) | {"parameters": model.num_parameters()},
        "cost": cost,
        "vocabulary": {"tokens": len(tokens), "of": len(counts), "mass": covered(counts, tokens)},
        **told(progress),
        "settings": asdict(config),
    }
    write_draft(out, model, session, tokens, notes, work / "run" / "loss.png")
    return notes


def decided(config: DraftConfig, work: Path, target: Any, rows: int) -> tuple[Shape, float]:
    """The draft's shape and its measured cost; measured once, so that a run resumes with it."""
    path = work / "shape.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        return Shape(found["hidden"], found["layers"]), found["cost"]
    if config.shape is None:
        shape, cost = fitting_shape(target, rows, config.cost)
    else:
        [(shape, cost)] = costs(target, rows, [Shape(*config.shape)])
    path.write_text(json.dumps(asdict(shape) | {"cost": cost}) + "\n", encoding="utf-8")
    return shape, cost

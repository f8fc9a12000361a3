"""`foretoken train draft`: a small model from the target's own text alone (arXiv 2411.11055).

Where ordinary text lies beside the chats it is learned first; a draft that exists may be continued.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.engine.session import Session
from foretoken.errors import ConfigError, check_values
from foretoken.training.capture import models_of
from foretoken.training.dataset.card import written_by_draft
from foretoken.training.dataset.records import Folders, every_chat, laws_kept, replace_text
from foretoken.training.dataset.stream import check_learnable, none_there
from foretoken.training.drafts.distilling import cost_of, student
from foretoken.training.drafts.learning import Learning, fit, held_out, run_folder, told
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.shape import Shape, build, costs, fitting_shape
from foretoken.training.drafts.words import covered, frequent, mass
from foretoken.training.drafts.writing import shape_of, write_draft
from foretoken.training.identity import identity
from foretoken.training.objectives.asked_laws import AskedLaws
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.processes import main_first
from foretoken.training.recipes import Order

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig(Learning):
    """How large a draft is, and how it learns."""

    cost: float = 0.055  # of a forward, as a share of the target's; decides the shape
    shape: tuple[int, int] | None = None  # width, a multiple of 64, and layers, in place of it
    vocabulary: int = 16384  # tokens it scores: the most frequent of the target's text
    hard: float = 0.1  # share of the loss on the written token; the rest on the target's law
    text_share: float = 0.3  # of minutes and epochs, first: on ordinary text, where there is some

    def __post_init__(self) -> None:
        Learning.__post_init__(self)
        check_values(
            self,
            ("vocabulary", self.vocabulary >= 1, "1 or more"),
            ("cost", self.cost > 0, "above 0"),
            ("hard", 0 <= self.hard <= 1, "from 0 to 1"),
            ("text_share", 0 <= self.text_share <= 1, "from 0 (none) to 1 (nothing else)"),
            ("shape", fits_heads(self.shape), "a multiple of 64 and a number of layers: 192x4"),
        )


def fits_heads(shape: tuple[int, int] | None) -> bool:
    if shape is None:
        return True
    return len(shape) == 2 and shape[0] >= 64 and shape[0] % 64 == 0 and shape[1] >= 1


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train draft` does."""
    assert order.data is not None, "its row says that it needs texts"
    return make_draft(
        order.session, order.config, order.data, order.out, start=order.draft, source=order.source,
        fresh=order.fresh, show=order.show,
    )  # fmt: skip


def make_draft(
    session: Session,
    config: DraftConfig,
    data: Path,
    out: Path,
    *,
    start: Any = None,
    source: str = "",
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train a draft for the session's target on the texts in `data`; the notes of its card.

    `start` is a draft whose weights it begins with. A killed run goes on where it was, unless
    `fresh`. `out` becomes a model directory that any transformers reads, with the file that says
    which tokens it scores.
    """
    check_splits(data)
    parts = planned(data, config)  # before anything is learned, or an earlier run forgotten
    config = by_laws_alone(config, data)
    with main_first():
        given = [] if start is None else [continued(session, config, start)]
    counts = mass(data, session.target.vocab_size)
    tokens = frequent(counts, config.vocabulary, session.eos)
    begun_as = identity(*models_of(session), *given)
    work = run_folder(out, config, data, source, begun_as, fresh=fresh)
    with main_first():
        if given:
            model, cost = given[0], cost_of_existing(session, work, given[0], start)
        else:
            model, cost = begun(session, config, work, counts, len(tokens))
    objective, packed = taught(session, SparseLaws.over(tokens, len(counts), config.hard), data)
    measure = EngineAcceptance(session, held_out(data, config.held_out), tokens, cost)
    runs = {
        folder: fit(
            model, objective, config, data, work / folder, measure, packed=packed, text=text,
            share=share, show=show,
        )
        for folder, text, share in parts
    }  # fmt: skip
    notes = {
        "recipe": "draft",
        "target": source,
        "start": None if start is None else str(start),
        "shape": shape_of(model),
        "cost": cost,
        "vocabulary": {"tokens": len(tokens), "of": len(counts), "mass": covered(counts, tokens)},
        **told(runs["run"]),
        **({"on_text": told(runs["text"])} if "text" in runs else {}),
        "settings": asdict(config),
    }
    write_draft(out, model, session, tokens, notes, work / "run" / "loss.png")
    return notes


def check_splits(data: Path) -> None:
    """ConfigError for a folder with nothing to learn from, or nothing to judge by."""
    for split in ("train", "valid"):
        if not any(every_chat(data, split, text=None)):
            raise none_there(data, split)


def planned(data: Folders, config: DraftConfig) -> list[tuple[str, bool, float]]:
    """The stages of a run; ConfigError where one of them has nothing to learn or to judge by."""
    found = stages(data, config.text_share)
    for _, text, _ in found:
        for split in ("train", "valid"):
            check_learnable(data, split, config.row_tokens, text)
    return found


def stages(data: Folders, text_share: float) -> list[tuple[str, bool, float]]:
    """Folders of the runs one after the other, whether each reads ordinary text, their shares."""
    text, chats = (any(every_chat(data, "train", text=of)) for of in (True, False))
    if chats and not any(every_chat(data, "valid", text=True)):
        text = False  # of a single window: none was left to judge by
    if not text or (chats and text_share == 0):
        return [("run", False, 1.0)]
    if not chats or text_share == 1:
        return [("run", True, 1.0)]
    return [("text", True, text_share), ("run", False, 1.0 - text_share)]


def by_laws_alone(config: Any, *folders: Path) -> Any:
    """The options, without a loss on the written tokens where a draft has written some of them:
    they are not what the target would have said, but its laws along them are.
    """
    drafted = [str(folder) for folder in folders if written_by_draft(folder)]
    if not drafted or not config.hard:
        return config
    LOG.warning("a draft wrote the answers in %s: hard=0, the target's laws alone are learned",
                ", ".join(drafted))  # fmt: skip
    return replace(config, hard=0.0)


def taught(session: Session, laws: SparseLaws, data: Path) -> tuple[Any, bool]:
    """What a draft learns by, and whether it may read several chats in a row.

    Where no laws are kept beside the texts the target is asked, which reads one chat at a time.
    """
    return (laws, True) if laws_kept(data) else (AskedLaws(laws, session.target), False)


def begun(
    session: Session, config: DraftConfig, work: Path, counts: Any, rows: int
) -> tuple[Any, float]:
    """A draft that has learned nothing yet, and its measured cost."""
    target = session.target.model
    shape, cost = decided(work, lambda: chosen(config, target, rows))
    return build(shape, target, counts, config.seed), cost


def continued(session: Session, config: DraftConfig, start: Any) -> Any:
    """The draft to be continued; one of another shape than was asked for is refused."""
    model = student(session, start, "continuing")
    found = shape_in(model)
    if config.shape is not None and Shape(*config.shape) != found:
        raise ConfigError(
            f"continuing the draft {start} in the shape {config.shape[0]}x{config.shape[1]} was "
            "asked for.",
            f"it is {found.hidden} wide and has {found.layers} layers.",
            "leave the option `shape` out, or leave the draft out: a new one has any shape.",
        )
    return model


def cost_of_existing(session: Session, work: Path, model: Any, start: Any) -> float:
    """The measured cost of the draft to be continued."""
    return decided(work, lambda: (shape_in(model), cost_of(session, start)))[1]


def shape_in(model: Any) -> Shape:
    return Shape(model.config.hidden_size, model.config.num_hidden_layers)


def chosen(config: DraftConfig, target: Any, rows: int) -> tuple[Shape, float]:
    """The shape of a new draft and its cost."""
    if config.shape is None:
        return fitting_shape(target, rows, config.cost)
    [found] = costs(target, rows, [Shape(*config.shape)])
    return found


def decided(work: Path, decide: Callable[[], tuple[Shape, float]]) -> tuple[Shape, float]:
    """A shape and its measured cost; measured once, so that a run resumes with it."""
    path = work / "shape.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        return Shape(found["hidden"], found["layers"]), found["cost"]
    shape, cost = decide()
    replace_text(path, json.dumps(asdict(shape) | {"cost": cost}) + "\n")
    return shape, cost

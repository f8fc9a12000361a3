"""One path that trains every head of HEADS: capture, split, resume, keep the best, judge, save."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.heads import made_for, store
from foretoken.heads.table import HEADS, Head, head_row, resolve
from foretoken.lm import draft_vocabulary
from foretoken.training import checkpoint
from foretoken.training.asked import AskedTexts
from foretoken.training.capture import check_prompts, collect, models_of
from foretoken.training.config import TrainingConfig
from foretoken.training.dataset.card import written_by_draft
from foretoken.training.features import Features, Shuffled
from foretoken.training.folders import check_idle, working_alone
from foretoken.training.identity import identity
from foretoken.training.optimizers import check_muon
from foretoken.training.processes import learning_device
from foretoken.training.trainer import Progress, Trainer, TrainingPlan

HELD_OUT = 10  # one prompt is kept for judging beside this many
JUDGED_MOST = 256  # texts that judge a head while it learns, where they are read anew each time

Figures = dict[str, dict[str, float]]  # named rows of named numbers, all with the same names
Prompts = Callable[[str, int], Sequence[Any]]  # a split, "train" or "valid", and how many


class HeadObjective:
    """What is a head's own in training: its shape, its loss, and how good it has become."""

    scored: Tensor | None = None  # [k] outputs of the target that read the head; None: all
    anywhere = False  # whether it begins and judges heads on any device, not on a CPU alone
    start: nn.Module | None = None  # what a head begins as; None: random weights

    @classmethod
    def completed(cls, config: Any, session: Session) -> Any:
        """The options, with those that others decide; asked before anything is captured."""
        return config

    def __init__(self, config: Any, train: Features) -> None:
        self.config = config

    def shape(self, session: Session) -> dict[str, Any]:
        """What the module's Config takes beside the sizes of the model it reads."""
        return {}

    def begin(self, head: Any, session: Session) -> None:
        """Give a fresh head what it starts from, and keep what the loss needs of the models."""

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and metrics with its "loss"."""
        raise NotImplementedError

    def judge(self, head: Any, held_out: Features) -> dict[str, float]:
        """How good a head is on held-out tokens."""
        return {}

    def finish(self, head: Any, train: Features, held_out: Features) -> tuple[Any, Figures]:
        """The trained head, calibrated if need be, and its figures."""
        return head, {"trained": self.judge(head, held_out)}


def run_training(
    session: Session,
    name: str,
    prompts: Prompts,
    config: TrainingConfig,
    out: Path,
    *,
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train the head `name` for the session's models into `out`; the notes of its card.

    A killed run goes on where it was; what was captured serves runs with other training options.
    """
    row, work = trainable(name), out / "training"
    kind: type[HeadObjective] = resolve(row.objective)
    config = kind.completed(config, session)
    check_muon(config.matrix_rate)
    texts, capture = texts_of(prompts, config), resolve(row.captures).of(config)
    read: list[Any] = []
    if asks(config):
        read = [AskedTexts(session, some, capture, name) for some in texts.values()]
    for split, some in texts.items():
        check_prompts(session, some, split)
    if fresh and work.is_dir():  # behind whatever could be wrong with what was asked for
        check_idle(work)
        shutil.rmtree(work)
    with working_alone(work):
        train, held_out = read or (
            collect(session, some, capture, work / "capture", split, show=show)
            for split, some in texts.items()
        )
        objective = kind(config, train)
        torch.manual_seed(config.seed)
        module, lm = resolve(row.module), getattr(session, row.reads)
        sizes = {"hidden_size": lm.hidden_size, "vocab_size": lm.vocab_size}
        place = learning_device() if objective.anywhere else torch.device("cpu")
        head = module(module.Config(**sizes, **objective.shape(session))).to(place)
        objective.begin(head, session)
        untrained = objective.judge(head, held_out)
        settings = asdict(config)
        run = work / run_name(settings, session, objective, (train, held_out))
        progress = fit(head, objective, (train, held_out), config, run, name=name, show=show)
        head = head.to(place)
        head, figures = objective.finish(head, train, held_out)
        notes = {
            "tokens": {"train": len(train), "valid": len(held_out)},
            "untrained": untrained,
            "figures": figures,
            "steps": progress.step,
            "seconds": round(progress.seconds, 1),
            "ended": progress.ended,
            "held_out": progress.held_out,
            "settings": settings,
            **made_for.notes_of(lm),
        }
        if config.precision == "bf16":
            head = head.to(torch.bfloat16)
        scored = None if objective.scored is None else objective.scored.tolist()
        draft_vocabulary.put(out, scored, lm.vocab_size)
        store.save(out, name, head, notes)
        shutil.copyfile(run / "loss.png", out / "loss.png")
        return notes


def run_name(
    settings: dict[str, Any], session: Session, objective: HeadObjective, parts: tuple[Any, Any]
) -> str:
    """The folder of a run: another one for whatever makes another head of the same options.

    Texts whose states are asked bring the target with them; kept ones lie in a folder that refuses
    another target.
    """
    others = [one.digest for one in parts if one.digest]
    if others:
        others.append(identity(*models_of(session)))
    if objective.start is not None:
        others.append(identity(objective.start))
    told = json.dumps([settings, *others] if others else settings)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def texts_of(prompts: Prompts, config: Any) -> dict[str, Sequence[Any]]:
    """What a head learns from and what judges it, by split; raises for what cannot be read."""
    few = max(1, config.prompts // HELD_OUT)
    if asks(config):
        few = min(few, JUDGED_MOST)
    return {"train": prompts("train", config.prompts), "valid": prompts("valid", few)}


def asks(config: Any) -> bool:
    """Whether hidden states are asked of the target anew, and not kept."""
    return getattr(config, "states", "kept") == "asked"


def fit(
    head: nn.Module,
    objective: HeadObjective,
    parts: tuple[Any, Any],
    config: TrainingConfig,
    folder: Path,
    *,
    name: str,
    show: bool,
) -> Progress:
    """Train on the first part, keep what is best on the second; goes on where `folder` stands."""
    train, held_out = parts
    stream = train.stream(config.batch, config.seed)
    judged = Shuffled(held_out, len(held_out) // -(-len(held_out) // held_out.judged_together), 0)
    steps = config.steps or config.epochs * stream.per_epoch
    every = max(1, steps // 20)
    plan = TrainingPlan(
        steps=steps,
        matrix_rate=config.matrix_rate,
        vector_rate=config.rate,
        embedding_rate=getattr(config, "embedding_rate", config.rate),
        precision=config.precision,
        seconds=60.0 * config.minutes if config.minutes else None,
        warmup=max(1, round(0.03 * steps)),
        save_every=every,
        evaluate_every=every,
        held_out_batches=judged.per_epoch,
        patience=6,
        seed=config.seed,
    )
    trainer = Trainer(head, objective, stream, plan, folder, held_out=judged, name=f"{name} head")
    progress = trainer.run(show=show)
    if (folder / checkpoint.BEST).is_file():
        head.load_state_dict(checkpoint.load(folder / checkpoint.BEST)["model"])
    head.eval().requires_grad_(False)
    return progress


def trainable(name: str) -> Head:
    """The row of a head that has an objective; others are refused with those that have one."""
    row = head_row(name)
    if not row.trainable:
        known = ", ".join(head.name for head in HEADS.values() if head.trainable)
        raise ConfigError(
            f"training the head {name!r} was asked for.",
            f"{name!r} cannot be trained yet, as its row has no objective; these can: {known}.",
            f"use {row.serves} with random weights, or add an objective to the row in HEADS.",
        )
    return row


def check_writer(name: str, data: Path) -> None:
    """ConfigError for texts that a draft wrote, and a head that learns the written tokens."""
    if head_row(name).learns == "tokens" and written_by_draft(data):
        others = ", ".join(head.name for head in HEADS.values() if head.learns == "laws")
        raise ConfigError(
            f"training the head {name!r} on the texts in {data} was asked for.",
            "a draft wrote their answers (writer=draft); this head learns the written tokens, and "
            "would guess the draft's, not the target's.",
            "make texts of the target's own: `foretoken train data --target T --out DIR`; or train "
            f"a head that learns its laws: {others}.",
        )

"""Training the predictors of SpecEE: what every layer of a target would have said of its own text.

The target writes after each prompt, by the engine. Read again in one forward with all hidden
layers, and with the draft model's candidates at every place, each layer gives features; the label
is whether its most likely token is the last layer's.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.heads import exits
from foretoken.lm.leaving import Readout
from foretoken.training import checkpoint
from foretoken.training.objectives.exits import ExitLoss, accuracy
from foretoken.training.trainer import Trainer, TrainingPlan
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw

Features = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitLesson:
    """All settings of a run."""

    new_tokens: int = 64  # written after each prompt
    candidates: int = 4  # paper
    hidden: int = 512  # units of a predictor; paper
    steps: int = 600
    batch: int = 256  # tokens
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "candidates", "hidden", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} was asked for.",
                    f"{name} is 1 or more.",
                    f"pass a {name} of 1 or more.",
                )


class Drawn:
    """A stream of batches drawn from collected places."""

    def __init__(self, features: Features, batch: int, seed: int) -> None:
        self.features, self.seed = features, seed
        self.n = len(features["input_ids"])
        self.size = min(batch, self.n)

    def batch(self, index: int) -> Features:
        seed = random.Random(f"{self.seed}/{index}").getrandbits(62)
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(seed))
        return {name: values[order[: self.size]] for name, values in self.features.items()}


def run(
    session: Session,
    prompts: tuple[Sequence[str], Sequence[str]],
    lesson: ExitLesson,
    out: Path,
    *,
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train predictors for the session's pair on (training, held-out) prompts; their figures."""
    work = out / "training"
    if fresh and work.is_dir():
        shutil.rmtree(work)
    train, held_out = (collect(session, some, lesson, show=show) for some in prompts)
    layers = tuple(range(session.target.layers - 1))
    torch.manual_seed(lesson.seed)
    head = exits.ExitPredictors(layers, candidates=lesson.candidates, hidden=lesson.hidden)
    plan = TrainingPlan(
        steps=lesson.steps,
        matrix_rate=0.0,
        vector_rate=lesson.rate,
        warmup=max(1, round(0.03 * lesson.steps)),
        save_every=max(1, lesson.steps // 20),
        evaluate_every=max(1, lesson.steps // 20),
        held_out_batches=1,
        patience=6,
        seed=lesson.seed,
    )
    trainer = Trainer(
        head,
        ExitLoss(layers=layers),
        Drawn(train, lesson.batch, lesson.seed),
        plan,
        work,
        held_out=Drawn(held_out, len(held_out["input_ids"]), 0),
        name="exit predictors",
    )
    progress = trainer.run(show=show)
    if (work / checkpoint.BEST).is_file():
        head.load_state_dict(checkpoint.load(work / checkpoint.BEST)["model"])
    head.eval().requires_grad_(False)
    head.often = frequent(head, train)
    notes = {
        "tokens": {"train": len(train["input_ids"]), "valid": len(held_out["input_ids"])},
        **accuracy(chances(head, held_out), held_out["labels"]),
        "often": list(head.often),
        "steps": progress.step,
        "settings": asdict(lesson),
    }
    exits.save(out, head, session.target.family.hidden, session.target.vocab_size, notes)
    shutil.copyfile(work / "loss.png", out / "loss.png")
    return notes


@torch.inference_mode()
def collect(
    session: Session, prompts: Sequence[str], lesson: ExitLesson, *, show: bool = True
) -> Features:
    """Features [n, L - 1, 3K] and labels [n, L - 1] of every token written after the prompts."""
    from rich.progress import track

    rows = session.rows(list(prompts), lesson.new_tokens, temperature=0.0)
    before = [list(row.tokens) for row in rows]
    with closing(session.engine.run(rows, session.max_rows)) as records:
        for _ in records:
            pass
    readout = Readout(session.target)
    parts = []
    told = zip(rows, before, strict=True)
    for row, ids in track(list(told), description="collecting", disable=not show):
        asked = DecodeState(ids, len(ids), row.params, row.coins, row.warp)
        parts.append(read(session, readout, asked, row.new_tokens, lesson.candidates))
    return {name: torch.cat([part[name] for part in parts]).clone() for name in parts[0]}


def read(
    session: Session, readout: Readout, row: DecodeState, text: Sequence[int], count: int
) -> Features:
    """What every layer but the last sees of the candidates along a text."""
    target, draft = session.target, session.draft
    tree = chain(row.tokens[-1], text[:-1])
    taps = tuple(range(target.layers))
    target.prefill(row)
    [score] = target.score([row], [Draft(tree, Draw.POINT)], taps)
    target.free([row])
    draft.prefill(row)
    [guesses] = draft.grow([row], [tree.tokens], [tree.parents])
    draft.free([row])
    candidates = guesses.topk(count).indices  # [n, K]
    final = score.logits.argmax(-1)
    laws: list[Tensor] = []
    features, labels = [], []
    for layer in range(target.layers - 1):
        normed = readout.norm(score.hidden[:, layer])  # type: ignore[index]
        scores = readout.some(normed, candidates)
        law = scores.softmax(-1)
        change = law - laws[-1] if laws else law
        laws.append(law)
        features.append(torch.cat([scores, law, change], -1))
        labels.append(torch.tensor(readout.best(normed), device=final.device) == final)
    return {
        "input_ids": final.cpu(),
        "features": torch.stack(features, 1).float().cpu(),
        "labels": torch.stack(labels, 1).float().cpu(),
    }


def chances(head: exits.ExitPredictors, found: Features) -> Tensor:
    """Predicted chances [n, L - 1]."""
    with torch.no_grad():
        return torch.stack(
            [head(layer, found["features"][:, i]) for i, layer in enumerate(head.layers)], 1
        ).sigmoid()


def frequent(head: exits.ExitPredictors, found: Features) -> tuple[int, ...]:
    """The half of the layers at which most texts would leave, were every layer asked."""
    fires = (chances(head, found) > 0.5) & (found["labels"] > 0.5)
    first = fires.float().argmax(1)[fires.any(1)]
    counts = torch.bincount(first, minlength=len(head.layers))
    best = counts.argsort(descending=True, stable=True)[: max(1, len(head.layers) // 2)]
    return tuple(sorted(head.layers[i] for i in best.tolist()))

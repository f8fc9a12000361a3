"""`foretoken train draft`: a small model from the target's own text alone (arXiv 2411.11055)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, check_values
from foretoken.lm import draft_vocabulary
from foretoken.lm.load import quiet
from foretoken.training import checkpoint
from foretoken.training.attention import hurry
from foretoken.training.config import check_types
from foretoken.training.dataset.records import every_chat
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts.card import write_card
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.shape import Shape, build, costs, fitting_shape
from foretoken.training.drafts.words import covered, frequent, mass
from foretoken.training.objectives.sparse_laws import SparseLaws
from foretoken.training.recipes import Order
from foretoken.training.trainer import Progress, Trainer, TrainingPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """How large a draft is, and how long it learns."""

    cost: float = 0.055  # of a forward, as a share of the target's; decides the shape
    shape: tuple[int, int] | None = None  # width, a multiple of 64, and layers, in place of it
    vocabulary: int = 16384  # tokens it scores: the most frequent of the target's text
    hard: float = 0.1  # share of the loss on the written token; the rest on the target's law
    minutes: float | None = 60.0  # of training; none: as many as the epochs take
    epochs: float = 12.0  # passes over the texts at most
    tokens: int = 8192  # in a step
    row_tokens: int = 384  # of a row; twice that for longer chats
    matrix_rate: float = 0.02  # peak rate of Muon, for the blocks
    vector_rate: float = 3e-3  # peak rate of AdamW, for norms
    embedding_rate: float = 3e-3  # the same for the embedding, which is the output layer as well
    evaluations: int = 20  # of acceptance by the engine, in the whole of the epochs
    patience: int = 8  # evaluations without a better acceptance before stopping
    held_out: int = 24  # prompts that acceptance is measured on
    precision: str = "auto"  # bf16 where the processor multiplies it; or no, or bf16
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("vocabulary", "tokens", "row_tokens", "evaluations", "patience", "held_out")
        rates = ("cost", "epochs", "embedding_rate", "vector_rate")
        check_values(
            self,
            *((name, getattr(self, name) >= 1, "1 or more") for name in counts),
            *((name, getattr(self, name) > 0, "above 0") for name in rates),
            ("matrix_rate", self.matrix_rate >= 0, "0 (AdamW for all) or more"),
            ("hard", 0 <= self.hard <= 1, "from 0 to 1"),
            ("minutes", self.minutes is None or self.minutes > 0, "above 0"),
            ("shape", fits_heads(self.shape), "a multiple of 64 and a number of layers: 192x4"),
            ("precision", self.precision in ("auto", "no", "bf16"), "auto, no or bf16"),
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
    if precision(config.precision) == "bf16":
        hurry(model)
    objective = SparseLaws.over(tokens, len(counts), config.hard)
    measure = EngineAcceptance(session, held_out(data, config.held_out), tokens, cost)
    progress = fit(model, objective, config, data, work / "run", measure, show=show)
    notes = {
        "target": source,
        "shape": asdict(shape) | {"parameters": model.num_parameters()},
        "cost": cost,
        "vocabulary": {"tokens": len(tokens), "of": len(counts), "mass": covered(counts, tokens)},
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "ended": progress.ended,
        "measured": progress.measured,
        "held_out": progress.held_out,
        "first_loss": progress.train[0][1] if progress.train else None,
        "settings": asdict(config),
    }
    write_draft(out, model, session, tokens, notes)
    shutil.copyfile(work / "run" / "loss.png", out / "loss.png")
    return notes


def fits_heads(shape: tuple[int, int] | None) -> bool:
    return shape is None or (shape[0] >= 64 and shape[0] % 64 == 0 and shape[1] >= 1)


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train draft` does."""
    assert order.data is not None, "its row says that it needs texts"
    return make_draft(
        order.session, order.config, order.data, order.out, source=order.source, show=order.show
    )


def fit(
    model: nn.Module,
    objective: Any,
    config: DraftConfig,
    data: Path,
    folder: Path,
    measure: EngineAcceptance,
    *,
    show: bool,
) -> Progress:
    """Train, and take the weights with the best measured acceptance."""
    pad = int(measure.session.tokenizer.pad_token_id or 0)
    rows = {"row_tokens": config.row_tokens, "pad": pad}
    train = ChatStream(data, "train", tokens=config.tokens, seed=config.seed, **rows)
    valid = ChatStream(data, "valid", tokens=config.tokens, seed=0, **rows)
    steps = max(1, round(config.epochs * train.per_epoch))
    every = max(1, steps // config.evaluations)
    plan = TrainingPlan(
        steps=steps,
        matrix_rate=config.matrix_rate,
        vector_rate=config.vector_rate,
        embedding_rate=config.embedding_rate,
        warmup=max(1, min(50, steps // 20)),
        precision=precision(config.precision),
        save_every=max(1, every // 2),
        evaluate_every=every,
        held_out_batches=min(valid.per_epoch, 4),
        patience=config.patience,
        seconds=60.0 * config.minutes if config.minutes else None,
        seed=config.seed,
    )
    trainer = Trainer(
        model, objective, train, plan, folder, held_out=valid, measure=measure, name="draft"
    )
    progress = trainer.run(show=show)
    if (folder / checkpoint.BEST).is_file():
        model.load_state_dict(checkpoint.load(folder / checkpoint.BEST)["model"])
    return progress


def precision(asked: str) -> str:
    """bf16 where products of it are in the processor, as accelerate names it."""
    if asked != "auto":
        return asked
    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if fast else "no"


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


def held_out(data: Path, count: int) -> list[list[int]]:
    """Prompts of the held-out chats, kinds in turns."""
    by_kind: dict[str, list[list[int]]] = {}
    for chat in every_chat(data, "valid"):
        by_kind.setdefault(chat.kind, []).append(chat.prompt)
    longest = max(map(len, by_kind.values()), default=0)
    turns = [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)]
    return turns[:count]


def run_folder(out: Path, config: Any) -> Path:
    """Where a run with these options works; another length of training is another run."""
    name = hashlib.sha256(json.dumps(asdict(config)).encode()).hexdigest()[:12]
    work = out / "training" / name
    work.mkdir(parents=True, exist_ok=True)
    return work


def write_draft(
    out: Path, model: Any, session: Session, tokens: Tensor, notes: dict[str, Any]
) -> None:
    """A model directory: weights in bfloat16, tokenizer, the tokens it scores, its card."""
    model.set_attn_implementation("sdpa")
    partial = out / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with quiet():
            model.eval().to(torch.bfloat16).save_pretrained(partial)
        session.tokenizer.save_pretrained(partial)
        draft_vocabulary.write(
            partial / draft_vocabulary.NAME, tokens.tolist(), model.config.vocab_size
        )
        write_card(partial, notes)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, out / path.name)  # config.json last: without it there is no model
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"writing a draft into {out} was asked for.",
            f"the folder cannot be written ({error}); its training is kept in {out}/training.",
            "free disk space or fix the permissions, then run the same command: nothing is lost.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

"""What every recipe for drafts shares: its options, the loop, the prompts that judge it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import check_values
from foretoken.heads.files import digest
from foretoken.lm.kernels.linears import can_pack
from foretoken.training import checkpoint
from foretoken.training.attention import hurried, hurry
from foretoken.training.config import check_types
from foretoken.training.dataset.records import DOCUMENT, Chat, Folders, every_chat, shards
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.folders import check_idle
from foretoken.training.optimizers import check_muon
from foretoken.training.processes import main_first, processes, several
from foretoken.training.recipes import clear
from foretoken.training.scalars import require_tensorboard
from foretoken.training.trainer import Objective, Progress, Trainer, TrainingPlan

BEGINNING = 48  # tokens of a held-out text that acceptance is measured behind


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """How long and how fast a draft learns, and how it is judged on the way."""

    minutes: float | None = 60.0  # of training; none: as many as the epochs take
    epochs: float = 12.0  # passes over the texts at most
    tokens: int = 8192  # in a step, of each process
    row_tokens: int = 384  # of a row; twice that for longer chats, which are cut there
    matrix_rate: float = 0.02  # peak rate of Muon, for the blocks; 0: AdamW for all
    vector_rate: float = 3e-3  # peak rate of AdamW, for the rest
    embedding_rate: float = 3e-3  # the same for the embedding, which is the output layer as well
    evaluations: int = 20  # of acceptance by the engine, in the whole of the epochs or minutes
    patience: int = 8  # evaluations without a better acceptance before stopping
    held_out: int = 24  # prompts that acceptance is measured on
    precision: str = "auto"  # bf16 where the processor multiplies it; or no, or bf16
    tensorboard: bool = False  # also write loss, acceptance and speed-up for TensorBoard
    seed: int = 0  # of weights and order

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("tokens", "row_tokens", "evaluations", "patience", "held_out")
        rates = ("epochs", "embedding_rate", "vector_rate")
        check_values(
            self,
            *((name, getattr(self, name) >= 1, "1 or more") for name in counts),
            *((name, getattr(self, name) > 0, "above 0") for name in rates),
            ("matrix_rate", self.matrix_rate >= 0, "0 (AdamW for all) or more"),
            ("minutes", self.minutes is None or self.minutes > 0, "above 0"),
            ("precision", self.precision in ("auto", "no", "bf16"), "auto, no or bf16"),
        )
        if self.tensorboard:
            require_tensorboard()

    @property
    def in_bf16(self) -> bool:
        """Whether products are taken in bfloat16: where the processor has them, unless asked."""
        if self.precision != "auto":
            return self.precision == "bf16"
        return torch.cuda.is_available() or can_pack(torch.bfloat16)


def fit(
    model: Any,
    objective: Objective,
    config: Learning,
    data: Folders,
    folder: Path,
    measure: EngineAcceptance,
    *,
    packed: bool = True,
    text: bool = False,
    share: float = 1.0,
    judge: Objective | None = None,
    show: bool = True,
) -> Progress:
    """Train on the texts in `data`, and take the weights with the best measured acceptance.

    Goes on where `folder` stands. `packed` puts several chats into a row; `text` reads the ordinary
    text there instead of the chats; `share` is that of the minutes and epochs. `judge` gives the
    held-out loss where the objective itself would say another one each time.
    """
    if config.in_bf16 and packed and hurried(model):  # other lengths would be compiled again
        hurry(model)
    pad = int(measure.session.tokenizer.pad_token_id or 0)
    rows: dict[str, Any] = {
        "row_tokens": config.row_tokens, "pad": pad, "packed": packed, "text": text,
    }  # fmt: skip
    train = ChatStream(data, "train", tokens=config.tokens, seed=config.seed, **rows)
    valid = ChatStream(data, "valid", tokens=config.tokens, seed=0, **rows)
    steps = max(1, round(share * config.epochs * train.per_epoch / processes()))
    every = max(1, steps // config.evaluations)
    plan = TrainingPlan(
        steps=steps,
        matrix_rate=config.matrix_rate,
        vector_rate=config.vector_rate,
        embedding_rate=config.embedding_rate,
        warmup=max(1, min(50, steps // 20)),
        precision="bf16" if config.in_bf16 else "no",
        save_every=max(1, every // 2),
        evaluate_every=every,
        held_out_batches=min(valid.per_epoch, 4),
        patience=config.patience,
        seconds=60.0 * share * config.minutes if config.minutes else None,
        tensorboard=config.tensorboard,
        seed=config.seed,
    )
    trainer = Trainer(
        model, objective, train, plan, folder, held_out=valid, held_out_objective=judge,
        measure=measure, name="draft",
    )  # fmt: skip
    progress = trainer.run(show=show)
    if (folder / checkpoint.BEST).is_file():
        model.load_state_dict(checkpoint.load(folder / checkpoint.BEST)["model"])
    return progress


def part(config: Learning, share: float) -> Any:
    """The same options with a share of the minutes."""
    return replace(config, minutes=share * config.minutes) if config.minutes else config


def told(progress: Progress) -> dict[str, Any]:
    """What a card says of a run."""
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "ended": progress.ended,
        "first_loss": progress.train[0][1] if progress.train else None,
        "held_out": progress.held_out,
        "measured": progress.measured,
    }


def held_out(data: Folders, count: int) -> list[list[int]]:
    """Prompts of the held-out chats, kinds in turns; beginnings of text where there are none."""
    by_kind: dict[str, list[list[int]]] = {}
    for chat in every_chat(data, "valid"):
        began = beginning(chat) if chat.kind == DOCUMENT else chat.prompt
        by_kind.setdefault(chat.kind, []).append(began)
    if not by_kind:
        by_kind["text"] = [beginning(window) for window in every_chat(data, "valid", text=True)]
    longest = max(map(len, by_kind.values()), default=0)
    turns = [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)]
    return turns[:count]


def beginning(chat: Chat) -> list[int]:
    """What a text begins with: documents have no prompt, and would all be the same one."""
    ids = chat.prompt + chat.answer
    return ids[: min(BEGINNING, len(ids) // 2)]


def run_folder(
    out: Path, config: Any, data: Folders | None, *others: object, fresh: bool = False
) -> Path:
    """Where a run with these options learns from these texts; any other run works elsewhere.

    `others` name what else decides what comes of it: the target, the weights it begins with. Steps
    and batches are those of a number of processes, so that another one goes on with nothing.
    `fresh` deletes what runs in `out` have left.
    """
    check_muon(getattr(config, "matrix_rate", 0.0))  # before an earlier run is forgotten
    texts = [] if data is None else [digest(path) for path in shards(data, "train")]
    said: list[Any] = [asdict(config), texts, *map(str, others)]
    if several():
        said.append({"processes": processes()})
    if fresh:
        with main_first() as first:
            if first:
                check_idle(out / "training")
                clear(out)
    work = out / "training" / hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]
    work.mkdir(parents=True, exist_ok=True)
    return work

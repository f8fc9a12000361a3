"""The training loop that every trainable part of foretoken shares.

It knows models, objectives and streams only by their calls: an objective maps (model, batch, rng)
to a loss and some metrics; a stream maps an index to a batch. Everything random is derived from
(seed, step), so a run that was killed continues to the very same weights. Several processes: start
it with ``accelerate launch``. Where an objective is a mean over places and says by `count(batch)`
how many there are, a step is the mean over all places of its batches, in whatever process they are.
One that changes along a run is told by `reach(done)`, before each step, which part of it is over.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from foretoken.engine.interrupts import Uninterrupted
from foretoken.errors import CheckpointError

from . import checkpoint
from .bar import bar
from .curve import draw_curve
from .folders import working_alone
from .optimizers import split_optimizers
from .processes import on_cpu
from .scalars import Scalars
from .schedule import cosine
from .stream import Stream, tokens_in

LOG = logging.getLogger(__name__)
_SECONDS_BETWEEN_CURVES = 60.0
_SECONDS_BETWEEN_SAVES = 60.0  # at most, however far apart the plan's own are

Objective = Callable[
    [nn.Module, dict[str, Tensor], random.Random], tuple[Tensor, dict[str, Tensor]]
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """How long, how fast, how often; everything that is a number."""

    steps: int  # optimizer steps
    matrix_rate: float = 0.02  # peak rate of Muon; 0 gives every weight to AdamW
    vector_rate: float = 3e-3  # peak rate of AdamW
    embedding_rate: float = 0.015  # the same for embedding tables
    weight_decay: float = 0.05  # of the matrices
    warmup: int = 50  # steps
    floor: float = 0.02  # last rate as a part of the peak
    accumulate: int = 1  # batches per optimizer step and process
    clip: float = 1.0  # largest norm of the gradient
    precision: str = "no"  # no, bf16 or fp16, as accelerate names them
    save_every: int = 200  # steps
    evaluate_every: int = 200  # steps, or the same share of `seconds` where that is over sooner
    held_out_batches: int = 4
    patience: int | None = None  # evaluations without a better held-out loss before stopping
    seconds: float | None = (
        None  # the schedule is over after this time whatever step it is; not exactly repeatable
    )
    tensorboard: bool = False  # write figures for TensorBoard, too
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """What a run has seen so far; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0  # without padding
    seconds: float = 0.0
    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    measured: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    best: float = math.inf  # held-out loss, or measured acceptance below zero
    stale: int = 0  # evaluations since the best one
    ended: str = ""  # why: "steps", "patience" or "time"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class _Loss(nn.Module):
    """Model and objective as one module, so that accelerate's wrappers see a single forward."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(
        self, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.objective(self.model, batch, rng)


class Trainer:
    """One run: `model` is trained in place, `folder` receives checkpoints and the loss curve."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        stream: Stream,
        plan: TrainingPlan,
        folder: Path,
        *,
        held_out: Stream | None = None,
        held_out_objective: Objective | None = None,
        measure: Callable[[nn.Module], dict[str, float]] | None = None,
        name: str = "training",
    ) -> None:
        self.plan, self.stream, self.held_out, self.folder, self.name = (
            plan,
            stream,
            held_out,
            folder,
            name,
        )
        self.judge, self.measure = held_out_objective or objective, measure
        self.count: Callable[[dict[str, Tensor]], float] | None = getattr(objective, "count", None)
        self.reach: Callable[[float], None] | None = getattr(objective, "reach", None)
        self.scalars: Scalars | None = None
        # Layer dropout leaves weights without a gradient in some steps; DDP must expect that.
        uneven = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(
            cpu=on_cpu(),
            mixed_precision=plan.precision,
            gradient_accumulation_steps=plan.accumulate,
            kwargs_handlers=[uneven],
        )
        optimizers = split_optimizers(
            model,
            matrix_rate=plan.matrix_rate,
            vector_rate=plan.vector_rate,
            embedding_rate=plan.embedding_rate,
            weight_decay=plan.weight_decay,
        )
        self.peaks = [group["lr"] for o in optimizers for group in o.param_groups]
        self.model = model
        self.loss, *self.optimizers = self.accelerator.prepare(_Loss(model, objective), *optimizers)
        self.progress = Progress()
        self.drawn = self.saved = time.monotonic()

    def run(self, *, resume: bool = True, show: bool = True) -> Progress:
        """Train to the end of the plan, from the newest checkpoint if there is one.

        Ctrl-C waits for the end of a step and leaves a checkpoint of it; a second one does not.
        Of two runs in one folder the second is refused.
        """
        main = self.accelerator.is_main_process
        alone: AbstractContextManager[None] = nullcontext()
        if main:
            alone = working_alone(self.folder)
        with alone:
            return self._run(resume, show and main)

    def _run(self, resume: bool, shown: bool) -> Progress:
        """The same, in a folder where nobody else is at work."""
        if resume and (path := checkpoint.latest(self.folder)):
            self._restore(checkpoint.load(path), path)
        if self.plan.tensorboard and self.accelerator.is_main_process:
            self.scalars = Scalars(self.folder, self.progress.step)
        self.loss.train()
        self.saved, stop = time.monotonic(), False
        with (
            bar(self.name, self.plan.steps, shown) as advance,
            Uninterrupted() as interrupted,  # between steps alone there is something to save
        ):
            while not (stop or self._over()):
                started, place = time.monotonic(), self._place()
                loss = self._step()
                spent, asked = self._summed(time.monotonic() - started, float(interrupted()))
                self.progress.seconds += spent / self.accelerator.num_processes
                advance(self.progress.step, loss, self.progress.tokens_per_second)
                self._look_and_save(place)
                stop = asked > 0  # of any process: all of them end behind the same step
            if self.progress.step:
                self._save(best=False)
            if stop:
                self._stop()
        self.accelerator.wait_for_everyone()  # whoever reads what was saved finds it
        return self.progress

    def _stop(self) -> None:
        """End as Ctrl-C asked, once what was done is kept."""
        if self.accelerator.is_main_process:
            told = "%s: stopped; the same command, without --fresh, goes on from step %d."
            LOG.warning(told, self.name, self.progress.step)
        raise KeyboardInterrupt

    def _step(self) -> float:
        """One optimizer step over `accumulate` batches of this process."""
        plan, progress, accelerator = self.plan, self.progress, self.accelerator
        self._set_rates()
        turns = [progress.step * plan.accumulate + part for part in range(plan.accumulate)]
        batches = [self._batch(turn) for turn in turns]
        counts = [self.count(batch) if self.count else 1 for batch in batches]
        read = sum(tokens_in(batch) for batch in batches)
        places, tokens = self._summed(sum(counts), read)
        mean = places / (plan.accumulate * accelerator.num_processes)
        total = 0.0
        for turn, batch, count in zip(turns, batches, counts, strict=True):
            share = count / mean if mean else 1.0
            self._seed(turn)
            with accelerator.accumulate(self.loss):
                loss, metrics = self.loss(batch, random.Random(f"{plan.seed}/{turn}"))
                # A loss that is no number is none in every process, so that all of them stop.
                [value] = self._summed(share * float(metrics["loss"]) + 0.0 * float(loss.detach()))
                if not math.isfinite(value):
                    self._refuse_nan(value)
                accelerator.backward(share * loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.loss.parameters(), plan.clip)
                    # A scaler of float16 sees to its own, by leaving the step out.
                    if accelerator.scaler is None and not math.isfinite(float(norm)):
                        self._refuse_nan(float(norm), "norm of the gradients")
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            total += value / (plan.accumulate * accelerator.num_processes)
        progress.tokens += int(tokens)
        progress.step += 1
        progress.train.append((progress.step, total))
        self._tell(loss=total)
        return total

    def _batch(self, turn: int) -> dict[str, Tensor]:
        """The batch of this process in a turn."""
        index = turn * self.accelerator.num_processes + self.accelerator.process_index
        device = self.accelerator.device
        return {key: value.to(device) for key, value in self.stream.batch(index).items()}

    def _summed(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.accelerator.num_processes == 1:
            return list(values)
        device = self.accelerator.device
        kind = torch.float32 if device.type == "mps" else torch.float64
        summed = self.accelerator.reduce(torch.tensor(values, dtype=kind, device=device), "sum")
        return [float(value) for value in summed]

    def _tell(self, **figures: float) -> None:
        """Figures of the step for TensorBoard, where it was asked for."""
        if self.scalars is not None:
            self.scalars.add(self.progress.step, figures)

    def _seed(self, turn: int) -> None:
        """Give dropout inside the model a seed of its own per batch and process."""
        place = f"{self.plan.seed}/{turn}/{self.accelerator.process_index}"
        torch.manual_seed(random.Random(place).getrandbits(62))

    def _set_rates(self) -> None:
        plan, step = self.plan, self._place()
        if self.reach is not None:
            self.reach(min(1.0, step / plan.steps))
        factor = cosine(int(step), plan.steps, plan.warmup, plan.floor)
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, peak in zip(groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def _place(self) -> float:
        """The steps that are over, or those that the time stands for where that is further."""
        plan, step = self.plan, float(self.progress.step)
        timed = plan.steps * self.progress.seconds / plan.seconds if plan.seconds else 0.0
        return max(step, timed)

    def _over(self) -> bool:
        plan, progress = self.plan, self.progress
        if progress.step >= plan.steps:
            progress.ended = "steps"
        elif plan.patience is not None and progress.stale >= plan.patience:
            progress.ended = "patience"
        elif self._out_of_time():
            progress.ended = "time"
        return bool(progress.ended)

    def _out_of_time(self) -> bool:
        return self.plan.seconds is not None and self.progress.seconds >= self.plan.seconds

    def _look_and_save(self, place: float) -> None:
        """Evaluate and save when due, behind a step that began at `place`; what is better is saved
        at once.
        """
        plan, progress = self.plan, self.progress
        better = False
        due = self._place() // plan.evaluate_every > place // plan.evaluate_every
        due = due or self._out_of_time()
        if self.held_out is not None and due:
            loss = self.evaluate()
            if not math.isfinite(loss):
                self._refuse_nan(loss)
            progress.held_out.append((progress.step, loss))
            self._tell(held_out_loss=loss)
            cost = self._measured(loss)
            better = cost < progress.best
            progress.best = min(cost, progress.best)
            progress.stale = 0 if better else progress.stale + 1
        late = time.monotonic() - self.saved > _SECONDS_BETWEEN_SAVES
        if better or late or progress.step % plan.save_every == 0:
            self._save(best=better)

    def _measured(self, loss: float) -> float:
        """What is to become small: the held-out loss, or the measured acceptance below zero."""
        if self.measure is None:
            return loss
        told: list[dict[str, float]] = [{}]
        if self.accelerator.is_main_process:
            told = [self.measure(self.model)]
        broadcast_object_list(told)
        self.progress.measured.append((self.progress.step, told[0]))
        self._tell(**told[0])
        return -told[0]["acceptance"]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first batches of the held-out stream."""
        if self.held_out is None:
            return math.nan
        self.loss.eval()
        total = 0.0
        for index in range(self.plan.held_out_batches):
            batch = {
                k: v.to(self.accelerator.device) for k, v in self.held_out.batch(index).items()
            }
            with self.accelerator.autocast():
                total += float(self.judge(self.model, batch, random.Random(index))[1]["loss"])
        self.loss.train()
        return total / self.plan.held_out_batches

    def _save(self, *, best: bool) -> None:
        if not self.accelerator.is_main_process:
            return
        progress = self.progress
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "progress": {key: getattr(progress, key) for key in Progress.__slots__} | {"ended": ""},
        }
        checkpoint.save(self.folder, progress.step, state, best=best)
        self.saved = time.monotonic()
        if progress.ended or time.monotonic() - self.drawn > _SECONDS_BETWEEN_CURVES:
            title = f"{self.name}: loss"
            draw_curve(
                self.folder / "loss.png", title, progress.train, progress.held_out,
                progress.measured,
            )  # fmt: skip
            self.drawn = time.monotonic()

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        try:
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                asked=f"resuming from {path}",
                possible=f"the checkpoint belongs to another model or plan ({error})",
                do="use another output folder, or pass --fresh to begin anew",
            ) from error
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])

    def _refuse_nan(self, value: float, what: str = "loss") -> None:
        kept = checkpoint.latest(self.folder)
        raise CheckpointError(
            asked=f"step {self.progress.step + 1} of {self.name}",
            possible=f"the {what} became {value}; last good checkpoint: {kept or 'none'}",
            do="start again with lower learning rates; a run with other rates begins anew",
        )

"""Thousands of texts in lockstep, a token of each per forward: for GPUs.

An engine that serves each row by itself spends its time in Python where a forward of thousands of
rows costs little more than one of a few. Here all rows of a batch stand in the same column and are
written until the last one ends; nothing is drafted, and every text is drawn from the target's law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.lm.footprint import footprint
from foretoken.lm.kernels.graphs import captured
from foretoken.lm.runtime.whole_texts import LockstepAttention, captured_of
from foretoken.lm.views.view import innermost

TOKENS = 1 << 16  # of prompts that are read in one call
SHARE = 0.5  # of a GPU's free memory that keys, values and laws may take
LAWS = 24  # bytes of a token's score: several copies in float32 while one is drawn
LOOK = 16  # steps between looks at how many rows go on: each waits for the device
ALIGNED = 16  # columns are a multiple of it, as fused attention kernels want masks


class Written(NamedTuple):
    """What was written after a prompt."""

    tokens: list[int]  # its end token among them
    stopped: bool  # by an end token


@torch.inference_mode()
def write(
    session: Session,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    new_tokens: int,
    together: int,
    seed: int,
    min_p: float = 0.0,
) -> list[Written]:
    """At most `new_tokens` after each prompt; `together` of similar length at a time, or as many as
    a GPU has room for.

    `temperatures` are those of the prompts, 0 for greedy; `min_p` as in `SamplingParams`.
    """
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    room, found = Room.of(session), dict[int, Written]()
    while waiting:
        some = waiting[:together]
        some = some[: room.rows(len(prompts[some[-1]]) + new_tokens)]
        batch = Batch(session, [prompts[i] for i in some], new_tokens)
        draw = Draw([temperatures[i] for i in some], min_p, seed + len(found), batch.device)
        found.update(zip(some, batch.written(draw), strict=True))
        waiting = waiting[len(some) :]
    return [found[i] for i in range(len(prompts))]


class Room(NamedTuple):
    """The memory of a GPU that rows may take."""

    free: float  # bytes; without end on a CPU, where whoever asks knows best
    column: int  # bytes of a token's keys and values in all layers
    law: int  # and of what a row's law takes while a token is drawn

    @classmethod
    def of(cls, session: Session) -> Room:
        """What is free now."""
        lm: Any = innermost(session.target)
        if lm.device.type != "cuda":
            return cls(float("inf"), 1, 1)
        sizes = footprint(lm.model.config, lm.model.dtype, lm.device)
        torch.cuda.empty_cache()
        return cls(SHARE * torch.cuda.mem_get_info(lm.device)[0], sizes.column, LAWS * sizes.vocab)

    def rows(self, columns: int) -> int | None:
        """How many rows of so many columns there may be; None: any number."""
        if self.free == float("inf"):
            return None
        return max(1, int(self.free / (columns * self.column + self.law)))


class Draw:
    """Draws a token of every row from its law."""

    def __init__(
        self, temperatures: Sequence[float], min_p: float, seed: int, device: torch.device
    ) -> None:
        self.temperatures = torch.tensor(temperatures, device=device)[:, None]
        self.least = torch.tensor(min_p, device=device).log()
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Float[Tensor, "n V"]) -> Int[Tensor, "n"]:
        scores = logits.float()
        best = scores.argmax(-1)
        scores = scores / self.temperatures.clamp(min=1e-4)
        scores -= scores.amax(-1, keepdim=True)
        scores.masked_fill_(scores < self.least, -torch.inf)
        noise = torch.empty_like(scores).exponential_(generator=self.generator)
        drawn = (scores - noise.log_()).argmax(-1)  # Gumbel's maximum
        return torch.where(self.temperatures[:, 0] > 0, drawn, best)


class Batch:
    """Rows that are written together, their prompts padded in front."""

    def __init__(self, session: Session, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        lm: Any = innermost(session.target)
        self.lean, self.device = captured_of(lm, "writing in lockstep"), lm.device
        self.new_tokens, self.longest = new_tokens, max(map(len, prompts))
        rows = [[0] * (self.longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.ids = torch.tensor(rows, device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.begins = self.longest - lengths
        columns = -(-(self.longest + new_tokens) // ALIGNED) * ALIGNED
        self.attention = LockstepAttention(lm.family.windows, self.begins, columns, lm.model.dtype)
        self.ends = torch.tensor(sorted(session.eos), dtype=torch.long, device=self.device)

    def written(self, draw: Draw) -> list[Written]:
        """What is written after the prompts, in their order."""
        tokens = draw(self.read())
        kept, over = [tokens], torch.isin(tokens, self.ends)
        step = self.stepping()
        for count in range(1, self.new_tokens):
            if count % LOOK == 0 and bool(over.all()):
                break
            tokens = draw(step(tokens, self.longest + count - 1))
            kept.append(tokens)
            over |= torch.isin(tokens, self.ends)
        ends = set(self.ends.tolist())
        return [up_to_end(row, ends) for row in torch.stack(kept, 1).tolist()]

    def read(self) -> Float[Tensor, "B V"]:
        """Logits behind the prompts."""
        some = max(1, TOKENS // self.longest)
        place = torch.arange(self.longest, device=self.device)
        logits = []
        for start in range(0, len(self.ids), some):
            rows = self.attention.reading = slice(start, start + some)
            positions = (place - self.begins[rows, None]).clamp(min=0)
            logits += self.lean.run(self.ids[rows], positions, place[-1:], self.attention)
        self.attention.reading = None
        return torch.cat(logits)

    def stepping(self) -> Callable[[Tensor, int], Tensor]:
        """A forward of one token of every row into a column; a captured graph on a GPU."""
        ids, positions = self.ids[:, -1:].clone(), self.ids[:, -1:].clone()
        places = torch.zeros_like(ids[0])

        def run() -> Tensor:
            logits: Tensor = self.lean.run(ids, positions, places, self.attention)[-1]
            return logits

        def aim(tokens: Tensor, column: int) -> None:
            ids.copy_(tokens[:, None])
            positions.copy_((column - self.begins)[:, None])
            self.attention.go_to(column)

        aim(self.ids[:, -1], self.longest)
        again = captured(run) if self.device.type == "cuda" else run

        def step(tokens: Tensor, column: int) -> Tensor:
            aim(tokens, column)
            return again()

        return step


def up_to_end(tokens: list[int], ends: set[int]) -> Written:
    """A row's tokens up to and with its first end token."""
    for at, token in enumerate(tokens):
        if token in ends:
            return Written(tokens[: at + 1], True)
    return Written(tokens, False)

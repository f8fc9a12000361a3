"""Thousands of texts in lockstep, a token of each per forward: for GPUs.

An engine that serves each row by itself spends its time in Python where a forward of thousands of
rows costs little more than one of a few. Here all rows of a batch stand in the same column and are
written until the last one ends; nothing is drafted, and every text is drawn from the target's law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.lm.footprint import footprint
from foretoken.lm.kernels.graphs import captured
from foretoken.lm.runtime.whole_texts import LockstepAttention, captured_of
from foretoken.lm.views.view import innermost
from foretoken.types import DecodeState, SamplingParams

TOKENS = 1 << 14  # of prompts that are read in one call
SHARE = 0.5  # of a GPU's free memory that keys, values and laws may take
LAWS = 24  # bytes of a token's score: several copies in float32 while one is drawn
LOOK = 16  # steps between looks at how many rows go on: each waits for the device
ALIGNED = 16  # columns are a multiple of it, as fused attention kernels want masks


def decode(session: Session, rows: list[DecodeState], together: int) -> None:
    """Write fresh rows of a session to their ends: `together` of similar length at a time, or as
    many as a GPU has room for; by the session itself where `together` is 0.

    On a GPU the batches follow from the memory that is free, and what is drawn in them does, too.
    ConfigError for rows with other options than temperature, top_k, top_p and min_p.
    """
    if not together:
        session.decode(rows)
        return
    for row in rows:
        check_plain(row.params)
    waiting, room = sorted(rows, key=lambda row: row.prompt_len), Room.of(session)
    with torch.inference_mode():
        while waiting:
            some = waiting[:together]
            if room is not None:
                some = some[: room.rows(some[-1].prompt_len + max(row.limit[0] for row in some))]
            Batch(session, some).write()
            waiting = waiting[len(some) :]


def check_plain(params: SamplingParams) -> None:
    """ConfigError for options that lockstep does not know."""
    known = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "eos", "seed")
    plain = SamplingParams(**{name: getattr(params, name) for name in known})
    other = [one.name for one in fields(params)
             if getattr(params, one.name) != getattr(plain, one.name)]  # fmt: skip
    if other:
        raise ConfigError(
            f"texts in lockstep with {', '.join(other)} were asked for.",
            "rows are drawn together by temperature, top_k, top_p and min_p alone; a model's "
            "generation config may ask for more.",
            "leave lockstep out: the engine then writes them.",
        )


class Room(NamedTuple):
    """The memory of a GPU that rows may take."""

    free: float  # bytes
    column: int  # bytes of a token's keys and values in all layers
    law: int  # and of what a row's law takes while a token is drawn

    @classmethod
    def of(cls, session: Session) -> Room | None:
        """What is free now; None on a CPU, where whoever asks for rows knows best."""
        lm: Any = innermost(session.target)
        if lm.device.type != "cuda":
            return None
        sizes = footprint(lm.model.config, lm.model.dtype, lm.device, lm.model)
        torch.cuda.empty_cache()
        return cls(SHARE * torch.cuda.mem_get_info(lm.device)[0], sizes.column, LAWS * sizes.vocab)

    def rows(self, columns: int) -> int:
        """How many rows of so many columns there may be."""
        return max(1, int(self.free / (columns * self.column + self.law)))


class Draw:
    """Draws a token of every row from its law."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.temperatures = torch.tensor([[one.temperature] for one in params], device=device)
        self.least = torch.tensor([[one.min_p] for one in params], device=device).log()
        self.count = torch.tensor([[one.top_k] for one in params], device=device)
        self.most = int(self.count.max())
        self.share = torch.tensor([[one.top_p] for one in params], device=device)
        self.cut = bool((self.share < 1.0).any())
        self.generator = torch.Generator(device)
        if params[0].seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params[0].seed)

    def __call__(self, logits: Float[Tensor, "n V"]) -> Int[Tensor, "n"]:
        best, scores = logits.argmax(-1), self.scores(logits)
        noise = torch.empty_like(scores).exponential_(generator=self.generator)
        drawn = (scores - noise.log_()).argmax(-1)  # Gumbel's maximum
        return torch.where(self.temperatures[:, 0] > 0, drawn, best)

    def scores(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Logits of the laws that are drawn from, the largest zero; -inf where nothing is."""
        scores = logits.float() / self.temperatures.clamp(min=1e-4)
        scores -= scores.amax(-1, keepdim=True)
        if self.most:
            best = scores.topk(min(self.most, scores.shape[-1]), -1).values
            last = best.gather(-1, (self.count - 1).clamp(0, best.shape[-1] - 1))
            scores.masked_fill_((scores < last) & (self.count > 0), -torch.inf)
        if self.cut:
            ordered, places = scores.sort(-1, descending=True)
            law = ordered.softmax(-1)
            beyond = (law.cumsum(-1) - law >= self.share) & (self.share < 1.0)
            scores.scatter_(-1, places, ordered.masked_fill_(beyond, -torch.inf))
        return scores.masked_fill_(scores < self.least, -torch.inf)


class Batch:
    """Rows that are written together, their prompts padded in front."""

    def __init__(self, session: Session, rows: Sequence[DecodeState]) -> None:
        lm: Any = innermost(session.target)
        self.rows, self.device = rows, lm.device
        self.lean = captured_of(lm, "writing in lockstep")
        self.longest = max(row.prompt_len for row in rows)
        padded = [[0] * (self.longest - row.prompt_len) + row.tokens for row in rows]
        self.ids = torch.tensor(padded, device=self.device)
        lengths = torch.tensor([row.prompt_len for row in rows], device=self.device)
        self.begins = self.longest - lengths
        self.limits = torch.tensor([row.limit[0] for row in rows], device=self.device)
        self.steps = int(self.limits.max())
        columns = -(-(self.longest + self.steps) // ALIGNED) * ALIGNED
        self.last = (lm.max_length or columns) - 1  # position; rows that are over go no further
        self.attention = LockstepAttention(lm.family.windows, self.begins, columns, lm.model.dtype)
        ends = sorted(rows[0].params.eos)
        self.ends = torch.tensor(ends, dtype=torch.long, device=self.device)
        self.draw = Draw([row.params for row in rows], self.device)

    def write(self) -> None:
        """Write the rows until the last of them is over."""
        tokens = self.draw(self.read())
        kept, over = [tokens], torch.isin(tokens, self.ends)
        step = self.stepping()
        for count in range(1, self.steps):
            over |= self.limits <= count
            if count % LOOK == 0 and bool(over.all()):
                break
            tokens = self.draw(step(tokens, self.longest + count - 1))
            kept.append(tokens)
            over |= torch.isin(tokens, self.ends)
        for row, written in zip(self.rows, torch.stack(kept, 1).tolist(), strict=True):
            row.extend(written)

    def read(self) -> Float[Tensor, "n V"]:
        """Logits behind the prompts."""
        some = max(1, TOKENS // self.longest)
        place = torch.arange(self.longest, device=self.device)
        logits = []
        for start in range(0, len(self.ids), some):
            part = slice(start, start + some)
            self.attention.read(part)
            positions = (place - self.begins[part, None]).clamp(min=0)
            logits += self.lean.run(self.ids[part], positions, place[-1:], self.attention)
        self.attention.read(None)
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
            positions.copy_((column - self.begins).clamp(max=self.last)[:, None])
            self.attention.go_to(column)

        aim(self.ids[:, -1], self.longest)
        again = captured(run, self.device) if self.device.type == "cuda" else run

        def step(tokens: Tensor, column: int) -> Tensor:
            aim(tokens, column)
            return again()

        return step

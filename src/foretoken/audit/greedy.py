"""Greedy equality: a method writes the tokens plain decoding writes, or the logits were a tie.

A forward over six rows is not bit for bit a forward over one, so two tokens whose logits differ by
less than rounding may change places. That is no error of a method, but it must be told apart from
one: at each first divergence the margin between the two tokens is recomputed from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretoken.audit.rows import Build, Guesses, seeded_rows, write
from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.row import make_row
from foretoken.trees.build import undrafted
from foretoken.types import Ragged, SamplingParams

# Rounding of logits as a share of the largest one: what a reordered sum of a deep model may change.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text first left plain decoding's, and by how much the target preferred the other."""

    prompt: int
    at: int  # new tokens both had written
    plain: int
    other: int
    margin: float  # of the best token over the lesser of the two
    bound: float  # below this the margin is rounding

    @property
    def near_tie(self) -> bool:
        return self.margin <= self.bound


@dataclass(frozen=True, slots=True)
class GreedyComparison:
    """All texts of a method against plain decoding's."""

    tokens: int
    divergences: tuple[Divergence, ...]
    guesses: Guesses = field(default_factory=Guesses)

    @property
    def errors(self) -> list[Divergence]:
        return [d for d in self.divergences if not d.near_tie]


@torch.inference_mode()
def compare_greedy(
    plain: Build, method: Build, prompts: Ragged, tokens: int, max_rows: int = 16
) -> GreedyComparison:
    """Write after all `prompts` with both engines, the method's in a ragged batch."""
    params = SamplingParams(max_new_tokens=tokens)
    expected: list[list[int]] = []
    target = plain().target
    for prompt in prompts:
        expected += write(plain(), seeded_rows([prompt], params, target.vocab_size))
    rows = seeded_rows(prompts, params, target.vocab_size)
    engine, guesses = method(), Guesses()
    engine.listeners.append(guesses)
    written = write(engine, rows, max_rows)
    found = []
    for i, (ours, theirs) in enumerate(zip(expected, written, strict=True)):
        at = first_difference(ours, theirs)
        if at is not None:
            context = [*prompts[i], *ours[:at]]
            found.append(diverged(target, context, i, at, ours, theirs))
    return GreedyComparison(sum(map(len, written)), tuple(found), guesses)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two texts differ, their ends included."""
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def diverged(
    target: LanguageModel,
    context: Sequence[int],
    prompt: int,
    at: int,
    plain: Sequence[int],
    other: Sequence[int],
) -> Divergence:
    """The divergence with its margin, from logits recomputed after `context`."""
    if at >= min(len(plain), len(other)):  # one text ended early: no tie can do that
        return Divergence(prompt, at, -1, -1, float("inf"), 0.0)
    logits = fresh_logits(target, context)
    values = logits.double()
    lesser = min(float(values[plain[at]]), float(values[other[at]]))
    bound = ROUNDING[logits.dtype] * float(values.abs().max())
    return Divergence(prompt, at, plain[at], other[at], float(values.max()) - lesser, bound)


def fresh_logits(lm: LanguageModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after `tokens`, from a row of their own that is forgotten again."""
    row = make_row(tokens, SamplingParams(), SeededCoins(0), lm.vocab_size)
    lm.prefill([row])
    try:
        return lm.score([row], [undrafted(row)])[0].logits[0].clone()
    finally:
        lm.free([row])

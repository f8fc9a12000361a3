"""The exact law of a method by enumeration: every coin of the real engine, both ways.

The engine runs on tables whose law is known. Each outcome of all draws and flips, in drafter and
verifier alike, is visited once with its probability; what the texts add up to must be what the
target alone would say, to the last digits of float64. No sampling, so no error is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from foretoken.audit.rows import Build
from foretoken.coins import Coins, enumerate_outcomes
from foretoken.contract import Controller
from foretoken.engine.engine import Engine, decode
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Finish,
    Memory,
    Rows,
    SamplingParams,
    Step,
)
from foretoken.warp import Warp

Text = tuple[int, ...]
MakeRow = Callable[[Coins], DecodeState]

BOUND = 1e-9  # total variation of an exact method; float64 rounding stays far below
PROMPT = (0, 1, 2, 0, 1)  # repeats itself, so that look-up has something to find
TOKENS = 3

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 1, seeded": {"temperature": 1.0, "seed": 0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-k 2": {"temperature": 1.0, "top_k": 2},
    "temperature 0.7, top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "penalties, min-p": {
        "temperature": 1.0,
        "min_p": 0.1,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
    },
    "end token, minimum length, bias": {
        "temperature": 1.0,
        "eos": frozenset({2}),
        "min_new_tokens": 1,
        "logit_bias": {1: 0.5},
    },
    "temperature 0": {"temperature": 0.0},
}

# A machine on which drafting pays a little, so that a controller has something to decide.
COSTS = CostTable(
    target={n: 1.0 + 0.02 * n for n in (1, 2, 3, 4, 6, 8, 16, 32)},
    draft={d: 0.1 * d for d in range(1, 9)},
    overhead=0.01,
)


@dataclass(slots=True)
class Law:
    """The joint law of a row's text, and what the enumeration went through."""

    joint: dict[Text, float] = field(default_factory=dict)
    outcomes: int = 0
    drafted: float = 0.0  # expected over the whole text
    accepted: float = 0.0


class Steady:
    """A controller whose clock stands still: measured times would differ between outcomes."""

    def __init__(self, inner: Controller, costs: CostTable = COSTS) -> None:
        self.inner, self.costs = inner, costs
        self.needs_costs, self.stop = inner.needs_costs, inner.stop
        inner.learn(costs)

    def bind(self, drafter: Any) -> None:
        self.inner.bind(drafter)

    def learn(self, costs: CostTable) -> None:
        self.inner.learn(costs)

    def lacks(self, rows: int) -> bool:
        return False  # batches are priced by the one table

    def budgets(self, rows: Rows) -> list[Budget]:
        return self.inner.budgets(rows)

    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        return self.inner.admit(rows, drafts)

    def observe(self, step: Step) -> None:
        times = step.times
        size = min(self.costs.target, key=lambda n: abs(n - times.nodes))
        steady = replace(
            times,
            draft=0.1 * (times.nodes - times.rows),
            target=self.costs.target[size],
            other=self.costs.overhead,
        )
        self.inner.observe(replace(step, times=steady))


def engine_law(build: Build, make: MakeRow) -> Law:
    """The joint law of what a fresh row writes under a fresh engine, over all coins."""
    if build().drafter.traits.memory is Memory.NOTHING:
        return merged_law(build, make)
    law = Law()

    def run(coins: Coins) -> tuple[Text, int, int]:
        row, engine = make(coins), build()
        drafted = accepted = 0
        for step in decode([row], engine):
            drafted += len(step.drafts[0].tree) - 1
            accepted += len(step.verdicts[0].path)
        return tuple(row.new_tokens), drafted, accepted

    for (text, drafted, accepted), probability in enumerate_outcomes(run):
        law.joint[text] = law.joint.get(text, 0.0) + probability
        law.outcomes += 1
        law.drafted += probability * drafted
        law.accepted += probability * accepted
    return law


@dataclass(slots=True)
class Reached:
    """A state between two steps: its chance, and one way to come to it."""

    chance: float = 1.0
    coins: list[int] = field(default_factory=list)
    coins_chance: float = 1.0


def merged_law(build: Build, make: MakeRow) -> Law:
    """The same for a drafter that remembers nothing: equal states are gone on from only once.

    What happens next follows from the text and from what a controller has seen, the shapes of the
    drafts and the accepted paths. All ways that lead to the same of these are merged, step by
    step; one of them is replayed to go on from there, so the engine still runs every step.
    """
    law = Law()
    states: dict[Any, Reached] = {(): Reached()}
    while states:
        after: dict[Any, Reached] = {}
        for history, state in states.items():

            def run(coins: Any, steps: int = len(history) + 1) -> Any:
                return first_steps(make(coins), build(), steps), coins.taken

            for (found, taken), chance in enumerate_outcomes(run, state.coins):
                text, ended, seen, drafted = found
                share = state.chance * chance / state.coins_chance
                law.outcomes += 1
                law.drafted += share * drafted
                law.accepted += share * len(seen[-1][1])
                if ended:
                    law.joint[text] = law.joint.get(text, 0.0) + share
                    continue
                merged = after.setdefault(seen, Reached(0.0, taken, chance))
                merged.chance += share
        states = after
    return law


def first_steps(row: DecodeState, engine: Engine, steps: int) -> tuple[Text, bool, Any, int]:
    """The text after `steps` steps, whether it ended, what happened, and the last draft's size."""
    seen, drafted = [], 0
    with closing(decode([row], engine)) as taken:
        for step in islice(taken, steps):
            tree, path = step.drafts[0].tree, step.verdicts[0].path
            seen.append((tree.parents, path, tuple(row.new_tokens)))
            drafted = len(tree) - 1
        ended = row.finish is not None  # closing cancels
    return tuple(row.new_tokens), ended, tuple(seen), drafted


def own_law(
    target: TableLM,
    prompt: Sequence[int],
    params: SamplingParams,
    ends: Callable[[list[int]], bool] = lambda text: False,
) -> dict[Text, float]:
    """What the target says alone, one token after the other; `ends` is asked for each new text."""
    warp = Warp(params, len(prompt), target.vocab_size)
    joint: dict[Text, float] = {}

    def go_on(text: list[int], probability: float) -> None:
        law: Tensor = warp.law([*prompt, *text], target.after([*prompt, *text]))
        for token, p in enumerate(law.tolist()):
            if p <= 0.0:
                continue
            longer = [*text, token]
            if token in params.eos or len(longer) == params.max_new_tokens or ends(longer):
                joint[tuple(longer)] = probability * p
            else:
                go_on(longer, probability * p)

    go_on([], 1.0)
    return joint


def total_variation(a: Mapping[Text, float], b: Mapping[Text, float]) -> float:
    """Half the sum of all differences: the largest error in the chance of any event."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b})


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a method's law is from the target's own."""

    variation: float
    law: Law


@torch.inference_mode()
def law_gap(
    build: Build,
    target: TableLM,
    setting: Mapping[str, Any],
    *,
    prompt: Sequence[int] = PROMPT,
    tokens: int = TOKENS,
    ends: Callable[[list[int]], bool] | None = None,
    row_class: type[DecodeState] = DecodeState,
    warp_class: type[Warp] = Warp,
) -> Gap:
    """Total variation between the engine's text and the target's own, all of it enumerated."""
    params = SamplingParams(max_new_tokens=tokens, **setting)

    def ended(row: DecodeState) -> Finish | None:
        return Finish("stop") if ends is not None and ends(row.new_tokens) else None

    def make(coins: Coins) -> DecodeState:
        return make_row(
            prompt,
            params,
            coins,
            target.vocab_size,
            ended=ended,
            row_class=row_class,
            warp_class=warp_class,
        )

    law = engine_law(build, make)
    truth = own_law(target, prompt, params, ends or (lambda text: False))
    return Gap(total_variation(law.joint, truth), law)

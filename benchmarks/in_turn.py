"""Rows on one clock: every row writes every prompt in turn, so that drift falls on all alike.

All rows draw with the same coins, without being asked to repeat them: what the clock chooses is as
free as in ordinary use, and rows of fixed candidates still write the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretoken.bench.intervals import interval
from foretoken.bench.own import finish_device
from foretoken.bench.prompts import encode
from foretoken.bench.tasks import Task
from foretoken.coins import SeededCoins
from foretoken.engine.engine import Engine, decode
from foretoken.row import make_row
from foretoken.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Written:
    """One text: what it cost behind its prompt, and how many forwards it took."""

    tokens: int
    seconds: float
    forwards: int


Texts = Mapping[str, Sequence[Sequence[Written]]]  # by row, prompt by prompt, every repetition


def prompts_of(tasks: Sequence[Task], tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Family and ids of every task's first turn."""
    return [(task.family, encode(task, 0, (), tokenizer)) for task in tasks]


def write(engine: Engine, ids: Sequence[int], params: SamplingParams, coins: int) -> Written:
    """A text of one row."""
    row = make_row(list(ids), params, SeededCoins(coins), engine.target.vocab_size)
    began = perf_counter()
    forwards = sum(1 for _ in decode([row], engine))
    finish_device()
    return Written(len(row.new_tokens), perf_counter() - began - row.prefill, forwards)


def in_turn(
    engines: Mapping[str, Engine],
    prompts: Sequence[tuple[str, list[int]]],
    params: SamplingParams,
    repetitions: int,
    told: Callable[[str], None] = lambda text: None,
) -> dict[str, list[list[Written]]]:
    """Every prompt by every row, whose order rotates; repetitions follow each other."""
    labels = list(engines)
    found: dict[str, list[list[Written]]] = {label: [[] for _ in prompts] for label in labels}
    for turn in range(repetitions):
        for at, (family, ids) in enumerate(prompts):
            first = (turn + at) % len(labels)
            for label in labels[first:] + labels[:first]:
                told(f"{family} {at + 1}/{len(prompts)}: {label}")
                written = write(engines[label], ids, params, 1000 * turn + at)
                found[label][at].append(written)
    return found


def rate(prompts: Iterable[Iterable[Written]]) -> float:
    """All tokens over all seconds."""
    texts = [one for texts in prompts for one in texts]
    return sum(one.tokens for one in texts) / sum(one.seconds for one in texts)


def over(
    texts: Texts, above: str, below: str, places: Sequence[int] | None = None
) -> tuple[float, tuple[float, float] | None]:
    """How many times faster one row is than another, with the interval over prompts; of fewer than
    three there is none.
    """
    places = range(len(texts[above])) if places is None else places

    def ratio(at: Sequence[int]) -> float:
        chosen = [places[i] for i in at]
        return rate(texts[above][i] for i in chosen) / rate(texts[below][i] for i in chosen)

    return ratio(range(len(places))), interval(ratio, len(places))


def by_family(prompts: Sequence[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """The numbers of every family's prompts."""
    found: dict[str, list[int]] = {}
    for at, (family, _) in enumerate(prompts):
        found.setdefault(family, []).append(at)
    return found

"""Goodput control against every fixed length, at five loads and over a day.

    python benchmarks/smartspec.py --tasks spec-bench.jsonl   # the real model
    python benchmarks/smartspec.py --target ./model --draft ./draft --tasks spec-bench.jsonl
    python benchmarks/smartspec.py --quick                                   # the shipped minis

Closed loop: so many requests at once, the next one begins when one is over. `plain`, chains of 1 to
6 tokens, `cost_model` and `smartspec` serve the same requests in turns, piece by piece, so that
drift falls on all alike. In a day the number of requests changes, and every row goes through it
with what it has learned. Seconds are those of steps; what the target reads of prompts, which no
length shortens, is told apart; what a draft reads of them counts. The best fixed length of a piece
is the one that was fastest in all others: the fastest of seven noisy rows in these very pieces was
lucky in them as well. Three quarters of an hour on two cores. Writes
benchmarks/results/smartspec.json and .md (smartspec-METHOD for another method).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import gates
import torch
from in_turn import prompts_of
from pair import console, main, pair, parser, prompts
from real import MODEL, tasks

from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.bench.models import Models
from foretoken.bench.own import OwnRow
from foretoken.bench.rows import parse_methods
from foretoken.coins import SeededCoins
from foretoken.controllers.smartspec import SmartSpec
from foretoken.engine.engine import Engine
from foretoken.minis.fetch import get
from foretoken.row import make_row
from foretoken.types import Rows, SamplingParams, Step

LOADS = (1, 2, 4, 8, 16)
DAY = (1, 2, 4, 8, 16, 16, 8, 4, 2, 1)  # requests at once, hour by hour
LENGTHS = range(1, 7)
NEAR, OVER, OVERLOAD = 0.95, 1.0, 0.97  # of the best fixed length at a load, over a day, of plain


@dataclass(slots=True)
class Served:
    """Some requests: what they cost, and what was drafted for them."""

    tokens: int = 0
    seconds: float = 0.0  # of steps
    prompts: float = 0.0  # seconds in which the target read prompts
    rows: int = 0  # of all steps
    drafted: int = 0
    levels: int = 0  # of the deepest draft of every step
    steps: int = 0

    def add(self, step: Step, spent: float, prompts: float) -> None:
        """A step that took `spent` seconds, in `prompts` of which the target read prompts."""
        self.tokens += sum(map(len, step.emitted))
        self.seconds += spent - prompts
        self.prompts += prompts
        self.rows += len(step.rows)
        self.drafted += sum(len(draft.tree) - 1 for draft in step.drafts)
        self.levels += max(max(draft.tree.depths()) for draft in step.drafts)
        self.steps += 1


@dataclass(slots=True)
class Watch:
    """How far a controller's prediction of a step was from what it took."""

    misses: list[float] = field(default_factory=list)

    def follow(self, controller: SmartSpec) -> None:
        """Look at every prediction before the controller learns what became of it."""
        observe = controller.observe

        def watched(step: Step) -> None:
            policy, times = controller.shared, step.times
            drafted = times.nodes - times.rows
            said = policy.latency.scoring(times.rows, policy.turn.cached, drafted)[drafted]
            self.misses.append(abs(said / (times.target + times.other) - 1.0))
            observe(step)

        controller.observe = watched  # type: ignore[method-assign]


class Client:
    """Asks an engine for texts: so many at once, the prompts over and over."""

    def __init__(self, engine: Engine, ids: Sequence[Sequence[int]], params: SamplingParams):
        self.engine, self.params = engine, params
        engine.max_rows = max(LOADS)
        self.requests = enumerate(itertools.cycle(ids))
        self.reading = 0.0  # seconds in which the target read prompts
        self.prefill = engine.prefill
        engine.prefill = self.read  # type: ignore[method-assign]

    def read(self, rows: Rows, limit: int) -> None:
        """Prompts, by the clock."""
        began = perf_counter()
        self.prefill(rows, limit)
        self.reading += perf_counter() - began

    def serve(self, together: int, count: int, whole: bool = False) -> Served:
        """Write `count` texts, `together` at once. Counted are steps of so many rows: when no text
        is left to begin, the last ones run out, which is another load; `whole` counts all.
        """
        found, running = Served(), []
        left = count
        while left or running:
            while left and len(running) < together:
                at, prompt = next(self.requests)
                vocab = self.engine.target.vocab_size
                row = make_row(list(prompt), self.params, SeededCoins(at), vocab)
                running.append(row)
                self.engine.submit(row)
                left -= 1
            began, read = perf_counter(), self.reading
            step = self.engine.step()
            spent, read = perf_counter() - began, self.reading - read
            assert step is not None, "rows are running"
            if whole or len(step.rows) == together:
                found.add(step, spent, read)
            for row in running:
                if row.error is not None:
                    raise row.error
            running = [row for row in running if row.finish is None]
        return found


def added(pieces: Sequence[Served]) -> Served:
    """All of them as one."""
    whole = Served()
    for piece in pieces:
        for name in Served.__slots__:
            setattr(whole, name, getattr(whole, name) + getattr(piece, name))
    return whole


Log = dict[str, list[Served]]  # by row, piece by piece


def at_load(clients: Mapping[str, Client], together: int, asked: argparse.Namespace) -> Log:
    """Every row serves every piece in turn; the row that begins changes.

    Where one text is written at a time, the turn passes on after each: a machine that changes its
    speed within a piece does so for all rows. More at once run out at the end of every turn.
    """
    labels, found = list(clients), {label: [] for label in clients}
    for client in clients.values():  # costs of this batch, and shapes nobody ran yet
        client.serve(together, together)
    count = max(asked.least, asked.waves * together)
    turns, each = (count, 1) if together == 1 else (1, count)
    for piece in range(asked.rounds):
        served: Log = {label: [] for label in labels}
        for turn in range(turns):
            first = (piece + turn) % len(labels)
            for label in labels[first:] + labels[:first]:
                with console.status(f"{together} at once, {piece + 1}/{asked.rounds}: {label}"):
                    served[label].append(clients[label].serve(together, each))
        for label in labels:
            found[label].append(added(served[label]))
    return found


def through_a_day(clients: Mapping[str, Client], asked: argparse.Namespace) -> Log:
    """The same hour of every row, then the next; days follow each other."""
    labels, found = list(clients), {label: [] for label in clients}
    for day in range(asked.days):
        pieces: Log = {label: [] for label in labels}
        for hour, together in enumerate(asked.day):
            first = (day + hour) % len(labels)
            for label in labels[first:] + labels[:first]:
                with console.status(f"day {day + 1}, hour {hour + 1}: {label}"):
                    count = max(asked.least, together)
                    pieces[label].append(clients[label].serve(together, count, whole=True))
        for label in labels:
            found[label] += pieces[label]
    return found


def rate(pieces: Sequence[Served], prompts: bool = False) -> float:
    """Tokens per second of steps, or of the prompts as well."""
    whole = added(pieces)
    return whole.tokens / (whole.seconds + prompts * whole.prompts)


def over(above: Sequence[Served], below: Sequence[Served]) -> tuple[float, str]:
    """How many times as fast one row is as another, with the interval over pieces."""

    def ratio(at: Sequence[int]) -> float:
        return rate([above[i] for i in at]) / rate([below[i] for i in at])

    count = len(above)
    value = ratio(range(count))
    span = interval(ratio, count)
    return value, f"{span[0]:.3f} to {span[1]:.3f}" if span else "too few pieces to tell"


def best_fixed(log: Log, piece: int | None = None) -> str:
    """The row of a fixed length, none included, that is fastest in all pieces but one."""

    def speed(label: str) -> float:
        return rate([one for at, one in enumerate(log[label]) if at != piece])

    return max((label for label in log if "controller=" not in label), key=speed)


def of_best_fixed(log: Log) -> list[Served]:
    """Every piece as the row served it that is fastest in all others."""
    count = len(next(iter(log.values())))
    return [log[best_fixed(log, at if count > 1 else None)][at] for at in range(count)]


def verdicts(logs: Mapping[str, Log], smart: str, misses: Sequence[float]) -> list[gates.Gate]:
    """The controller against the best fixed length."""
    found = []
    for name, log in logs.items():
        value, span = over(log[smart], of_best_fixed(log))
        bound = OVER if name == "day" else NEAR
        claim = f"{name}: smartspec over the best fixed length, {best_fixed(log)} ({span})"
        found.append(gates.Gate(claim, value, bound, unit="x"))
    most = [name for name in logs if name != "day"][-1]
    value, span = over(logs[most][smart], logs[most]["plain"])
    claim = f"{most}: smartspec over plain ({span})"
    found.append(gates.Gate(claim, value, OVERLOAD, unit="x"))
    wrong = 100.0 * median(misses) if misses else None
    found.append(gates.Gate("median miss of a predicted step", wrong, 10.0, False, " %"))
    return found


def page(logs: Mapping[str, Log]) -> str:
    """Tables by load: speed, what it is of the best fixed length, and what was drafted."""
    lines: list[str] = []
    for name, log in logs.items():
        best = of_best_fixed(log)
        lines += [
            "", f"## {name.capitalize()}", "",
            "| row | tokens/s | with prompts | of the best fixed | interval | drafted per row "
            "and step | deepest draft of a step | tokens per row and step | ms per step "
            "| seconds of prompts |",
            "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
        ]  # fmt: skip
        for label, pieces in log.items():
            value, span = over(pieces, best)
            whole = added(pieces)
            lines.append(
                f"| {label} | {rate(pieces):.1f} | {rate(pieces, True):.1f} | {value:.3f} "
                f"| {span} | {whole.drafted / whole.rows:.2f} | {whole.levels / whole.steps:.2f} "
                f"| {whole.tokens / whole.rows:.2f} | {1000 * whole.seconds / whole.steps:.2f} "
                f"| {whole.prompts:.2f} |"
            )
    return "\n".join(lines) + "\n"


def told(logs: Mapping[str, Log]) -> dict[str, Any]:
    """The same for programs."""
    return {
        name: {
            label: {
                "tokens_per_second": rate(pieces),
                "with_prompts": rate(pieces, True),
                "pieces": [
                    {key: getattr(piece, key) for key in Served.__slots__} for piece in pieces
                ],
            }
            for label, pieces in log.items()
        }
        for name, log in logs.items()
    }


def labels_of(method: str, quick: bool) -> tuple[list[str], str]:
    """The rows, and which of them is the controller's."""
    controlled = [f"{method}[controller={name}]" for name in ("cost_model", "smartspec")]
    lengths = (1, 3) if quick else LENGTHS
    return ["plain", *(f"{method}[depth={k}]" for k in lengths), *controlled], controlled[1]


def engines(models: Models, labels: Sequence[str]) -> Iterator[tuple[str, Engine]]:
    """An engine for every row, its costs measured."""
    for label in labels:
        [spec] = parse_methods(label)
        row = models.row(spec)
        assert isinstance(row, OwnRow), "rows of one text each"
        yield label, row.engine


def options_of(description: str | None) -> argparse.Namespace:
    options = parser(description)
    options.add_argument("--dtype", help="number type (default: bfloat16 of the real model)")
    options.add_argument("--tasks", type=Path, help="questions of Spec-Bench; none: the minis'")
    options.add_argument("--per-category", type=int, default=4, help="tasks of each category")
    options.add_argument("--method", default="chain", help="what drafts")
    options.add_argument("--loads", type=int, nargs="+", default=LOADS, help="requests at once")
    options.add_argument("--day", type=int, nargs="*", default=DAY, help="the same, by hours")
    options.add_argument("--days", type=int, default=2)
    options.add_argument("--rounds", type=int, default=9, help="pieces that a load is measured in")
    options.add_argument("--least", type=int, default=8, help="requests of a piece, at least")
    options.add_argument(
        "--waves", type=int, default=2, help="times all rows begin anew in a piece"
    )
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--temperature", type=float, default=0.0)
    asked = options.parse_args()
    if asked.quick:
        asked.loads, asked.day, asked.days = (1, 4), (1, 4, 1), 1
        asked.rounds, asked.max_new_tokens, asked.per_category = 2, 24, 1
    if asked.target is None and asked.tasks is not None:
        asked.target, asked.draft = str(get(MODEL)), f"{MODEL}-draft"
        asked.dtype = asked.dtype or "bfloat16"
    return asked


def run(description: str | None) -> int:
    asked = options_of(description)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    chosen = tasks(asked.tasks, asked.per_category, 1) if asked.tasks else prompts(2)
    labels, smart = labels_of(asked.method, asked.quick)
    watch, logs = Watch(), dict[str, Log]()
    with pair(asked.target, asked.draft) as where:
        models = Models(where.target, where.draft, dtype=asked.dtype, allow_pickle=False)
        ids = [ids for _, ids in prompts_of(chosen, models.tokenizer)]
        # The target looks at itself where a text is longer than all before: while it warms up.
        longest = max(range(len(ids)), key=lambda at: len(ids[at]))
        ids = ids[longest:] + ids[:longest]
        params = SamplingParams(
            max_new_tokens=asked.max_new_tokens, temperature=asked.temperature, eos=models.eos
        )
        clients = {label: Client(e, ids, params) for label, e in engines(models, labels)}
        controller = clients[smart].engine.controller
        assert isinstance(controller, SmartSpec)
        watch.follow(controller)
        for together in asked.loads:
            logs[f"{together} at once"] = at_load(clients, together, asked)
        if asked.day and asked.days:
            logs["day"] = through_a_day(clients, asked)
    found = verdicts(logs, smart, watch.misses)
    document = {
        "environment": environment.describe(),
        "target": Path(asked.target or "text-target").name,
        "gates": [gate.to_dict() for gate in found],
        "loads": told(logs),
    }
    name = "smartspec" if asked.method == "chain" else f"smartspec-{asked.method}"
    title = f"# Goodput control, {asked.method}\n\n{gates.markdown(found)}"
    for file in gates.publish(asked.out, name, document, title + page(logs)):
        console.print(f"wrote {file}", markup=False)
    gates.show(found, "goodput control")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""What several texts at once write over one at a time, by default and without speculation.

    python benchmarks/batching.py --tasks spec-bench.jsonl
    python benchmarks/batching.py --dtype float32 --quick

The same prompts are written one after another, and so many at once; the order of sizes and rows
rotates from round to round. No setting has read what another one wrote: a row that remembers
answers is made anew for each, and warmed up on the prompts of another round. Speeds are given with
prompts, which no batch makes cheaper, and without. The model is the one of `foretoken minis get
smollm2-135m`, fetched if it is not there, with the shipped draft. Writes
benchmarks/results/batching-DTYPE.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import gates
import torch
from clocked import spanned
from in_turn import prompts_of
from pair import console, main, parser
from ragged import DRAFT, Ids, Run, write
from real import MODEL, SPEC_BENCH, tasks

from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.bench.models import Models
from foretoken.bench.rows import parse_methods
from foretoken.minis.fetch import get
from foretoken.types import SamplingParams

ROWS = {"plain": "plain", "default": "auto-draft"}
BATCHES = (1, 4, 8, 16)
JUDGED, BAR = 8, 3.0  # eight at once, by default, over one
Setting = tuple[str, int]  # row and texts at once


def measure(
    models: Models, prompts: Sequence[Ids], asked: argparse.Namespace
) -> dict[Setting, list[Run]]:
    """Every setting writes the prompts of every round, and before that some of the next one's."""
    specs = parse_methods(list(ROWS.values()))
    rows = {name: models.row(spec) for name, spec in zip(ROWS, specs, strict=True)}
    params = SamplingParams(max_new_tokens=asked.max_new_tokens, eos=models.eos)
    settings = list(product(rows, asked.batches))
    runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
    for turn in range(asked.rounds):
        given, others = (part_of(prompts, turn + i, asked.prompts) for i in range(2))
        at = turn % len(settings)
        for name, batch in settings[at:] + settings[:at]:
            console.print(f"round {turn + 1} of {asked.rounds}: {name}, {batch} at once")
            models.renew(rows[name])  # or it would copy what another setting wrote
            engine = rows[name].engine
            for _ in range(2 if turn == 0 else 1):  # shapes that nobody ran yet, and costs
                write(engine, others[:batch], params, batch)
            runs[name, batch].append(write(engine, given, params, batch)[0])
    return runs


def part_of(prompts: Sequence[Ids], turn: int, count: int) -> list[Ids]:
    """The prompts of a round; behind the last one the first one follows."""
    return [prompts[(turn * count + i) % len(prompts)] for i in range(count)]


def over(
    runs: Mapping[Setting, Sequence[Run]], above: Setting, below: Setting, clock: str
) -> dict[str, Any]:
    """How many times the tokens per second of another setting one has, with its interval."""

    def rate(setting: Setting, at: Sequence[int]) -> float:
        mine = [runs[setting][i] for i in at]
        return sum(run.tokens for run in mine) / sum(getattr(run, clock) for run in mine)

    def ratio(at: Sequence[int]) -> float:
        return rate(above, at) / rate(below, at)

    whole = range(len(runs[above]))
    return {
        "tokens_per_second": rate(above, whole),
        "value": ratio(whole),
        "interval": interval(ratio, len(whole)),
    }


def summed(runs: Mapping[Setting, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """Of every setting: over one text at a time, and over plain, with prompts and without."""
    least = min(batch for _, batch in runs)
    return {
        f"{name}, {batch} at once": {
            "row": name,
            "batch": batch,
            **{
                clock: {
                    "over_one": over(runs, (name, batch), (name, least), clock),
                    "over_plain": over(runs, (name, batch), ("plain", batch), clock),
                }
                for clock in ("seconds", "rounds")
            },
            "runs": [asdict(run) for run in runs[name, batch]],
        }
        for name, batch in runs
    }


def page(document: Mapping[str, Any], bounds: Sequence[gates.Gate]) -> str:
    """The table of all settings."""
    lines = [
        f"# Texts at once: {document['models']['target']} in {document['dtype']}\n",
        f"{document['prompts']} prompts of Spec-Bench in each of {document['rounds']} rounds, of "
        f"at most {document['longest']} tokens, up to {document['tokens']} greedy tokens each.\n",
        gates.markdown(bounds),
        "| setting | tokens/s | over one at a time | over plain | without prompts, tokens/s "
        "| over one at a time | over plain |",
        "|---" + "|---:" * 6 + "|",
    ]
    for name, found in document["settings"].items():
        cells = [name]
        for clock in ("seconds", "rounds"):
            one, plain = found[clock]["over_one"], found[clock]["over_plain"]
            cells += [f"{one['tokens_per_second']:.1f}", spanned(one), spanned(plain)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options.add_argument("--tasks", type=Path, default=SPEC_BENCH, help="questions of Spec-Bench")
    options.add_argument("--per-category", type=int, default=8, help="tasks of each category")
    options.add_argument("--longest", type=int, default=900, help="tokens of a prompt at most")
    options.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    options.add_argument("--prompts", type=int, default=16, help="of each round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--max-new-tokens", type=int, default=128)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.quick:
        asked.batches, asked.rounds, asked.prompts = [1, 2], 1, 2
        asked.max_new_tokens, asked.per_category = 12, 1
    if asked.target is None:
        get(MODEL, lambda what, done, of: None)
    started = environment.describe()
    models = Models(asked.target or MODEL, asked.draft or DRAFT, dtype=asked.dtype)
    given = prompts_of(tasks(asked.tasks, asked.per_category, 1), models.tokenizer)
    prompts = [ids for _, ids in given if len(ids) <= asked.longest]
    settings = summed(measure(models, prompts, asked))
    judged = settings.get(f"default, {JUDGED} at once")
    bounds = [
        gates.Gate(
            f"default, {JUDGED} texts at once over one at a time{told}",
            judged and judged[clock]["over_one"]["value"], BAR, unit="x",
        )
        for clock, told in (("seconds", ""), ("rounds", ", without prompts"))
    ]  # fmt: skip
    document = {
        "environment": started, "load_after": environment.load(), "models": models.names(),
        "dtype": asked.dtype, "prompts": asked.prompts, "longest": asked.longest,
        "tokens": asked.max_new_tokens, "rounds": asked.rounds, "settings": settings,
        "gates": [gate.to_dict() for gate in bounds],
    }  # fmt: skip
    gates.publish(asked.out, f"batching-{asked.dtype}", document, page(document, bounds))
    gates.show(bounds, f"texts at once, {asked.dtype}")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

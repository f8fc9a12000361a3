"""Ragged slots against a batch that is realigned, and one grouped by length (EQSPEC, EXSPEC).

    python benchmarks/ragged.py --tasks spec-bench.jsonl
    python benchmarks/ragged.py --dtype float32 --batches 8 --quick

Three rows draft chains of one depth with the same draft and the same forwards: `chain` keeps rows
in slots of their own, `eqspec` pads and realigns them, `exspec` takes rows of equal length from a
window of three batches. `plain` is beside them. In every round each row gets the same prompts,
three batches of them at once, and the order of rows rotates; prompts are fed in the same way for
all, so speeds are given with them and without. Texts are held against what each prompt writes alone
and plain; where one parts, the target's margin between the two tokens says whether that is
rounding.

The model is the one of `foretoken minis get smollm2-135m`, fetched if it is not there, with the
shipped draft. Writes benchmarks/results/ragged-DTYPE.json and .md.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import gates
import torch
from clocked import spanned
from in_turn import prompts_of
from pair import console, main, parser
from real import MODEL, PRECISIONS, SPEC_BENCH, precisions, tasks

from foretoken.audit.greedy import diverged, first_difference
from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.bench.models import Models
from foretoken.bench.own import finish_device
from foretoken.bench.rows import parse_methods
from foretoken.coins import SeededCoins
from foretoken.engine.engine import Engine, decode
from foretoken.minis.fetch import get
from foretoken.row import make_row
from foretoken.types import SamplingParams

DRAFT = "smollm2-135m-draft"
BATCHES = (4, 8, 16)
POOLS = 3  # batches of prompts in a round, and the window of exspec
BAR = 1.2  # ragged slots over eqspec
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """The prompts of one round by one row."""

    tokens: int
    seconds: float
    rounds: float  # of these seconds, those of steps: without prompts
    steps: int
    realigning: float  # seconds in the caches of target and draft
    together: int  # forwards of the target over several rows
    realigned: int  # of them, those whose rows had to be moved first


def alignments(engine: Engine) -> list[Any]:
    """What target and draft tell of realigning; nothing where rows lie in slots of their own."""
    model: Any = getattr(engine.drafter, "model", None)
    lms = [getattr(model, "view", None), getattr(model, "lm", None)]
    return [found for lm in lms if (found := getattr(lm, "alignment", None)) is not None]


def write(
    engine: Engine, prompts: Sequence[Ids], params: SamplingParams, batch: int
) -> tuple[Run, list[Ids]]:
    """All prompts at once, `batch` of them decoded at a time; what it took, and new tokens."""
    rows = [make_row(ids, params, SeededCoins(0), engine.target.vocab_size) for ids in prompts]
    told = alignments(engine)
    before = [(one.seconds, one.rounds, one.realigned) for one in told]
    began, stepping, steps = perf_counter(), 0.0, 0
    for step in decode(rows, engine, batch):
        stepping, steps = stepping + step.times.whole, steps + 1
    finish_device()
    seconds = perf_counter() - began
    spent = [
        (one.seconds - s, one.rounds - n, one.realigned - m)
        for one, (s, n, m) in zip(told, before, strict=True)
    ]
    texts = [row.new_tokens for row in rows]
    return (
        Run(
            sum(map(len, texts)), seconds, stepping, steps,
            sum(one[0] for one in spent), *(spent[0][1:] if spent else (0, 0)),
        ),
        texts,
    )  # fmt: skip


class Alone:
    """What each prompt writes alone and plain, written once."""

    def __init__(self, plain: Engine, params: SamplingParams) -> None:
        self.plain, self.params = plain, params
        self.known: dict[tuple[int, ...], Ids] = {}

    def text(self, ids: Ids) -> Ids:
        key = tuple(ids)
        if key not in self.known:
            _, [self.known[key]] = write(self.plain, [ids], self.params, 1)
        return self.known[key]

    def judge(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> dict[str, int]:
        """Texts that are equal, that part at a tie of the target, and that part elsewhere."""
        found = {"equal": 0, "ties": 0, "wrong": 0}
        for ids, text in zip(prompts, texts, strict=True):
            right = self.text(ids)
            at = first_difference(right, text)
            if at is None:
                found["equal"] += 1
                continue
            with torch.inference_mode():
                one = diverged(self.plain.target, [*ids, *right[:at]], 0, at, right, text)
            found["ties" if one.near_tie else "wrong"] += 1
        return found


def labels(depth: int, batch: int) -> dict[str, str]:
    """Rows by their short names."""
    return {
        "plain": "plain",
        "chain": f"chain[depth={depth}]",
        "eqspec": f"eqspec[depth={depth}]",
        "exspec": f"exspec[depth={depth},window={POOLS * batch}]",
    }


def measure(
    models: Models, prompts: Sequence[Ids], batch: int, asked: argparse.Namespace, alone: Alone
) -> dict[str, Any]:
    """Every row on every round's prompts; the first prompts once more before, to warm up."""
    specs = parse_methods(list(labels(asked.depth, batch).values()))
    engines: dict[str, Any] = {
        name: models.row(spec).engine
        for name, spec in zip(labels(asked.depth, batch), specs, strict=True)
    }
    names, size = list(engines), POOLS * batch
    params = alone.params
    runs: dict[str, list[Run]] = {name: [] for name in names}
    equality = {name: {"equal": 0, "ties": 0, "wrong": 0} for name in names}
    for engine in engines.values():
        write(engine, prompts[:batch], params, batch)
    for turn in range(asked.rounds):
        first = turn * size % len(prompts)
        given = [prompts[(first + i) % len(prompts)] for i in range(size)]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            console.print(f"batch {batch}, round {turn + 1} of {asked.rounds}: {name}")
            run, texts = write(engines[name], given, params, batch)
            runs[name].append(run)
            for kind, count in alone.judge(given, texts).items():
                equality[name][kind] += count
    del engines
    gc.collect()  # caches of this batch, before those of the next are made
    return {"batch": batch, "rows": summed(runs, equality)}


def summed(
    runs: Mapping[str, Sequence[Run]], equality: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Speeds of rows by all tokens over all seconds, over chain and plain, with intervals."""

    def rate(name: str, at: Sequence[int], clock: str) -> float:
        mine = [runs[name][i] for i in at]
        return sum(run.tokens for run in mine) / sum(getattr(run, clock) for run in mine)

    def over(above: str, below: str, clock: str) -> dict[str, Any]:
        def ratio(at: Sequence[int]) -> float:
            return rate(above, at, clock) / rate(below, at, clock)

        return {"value": ratio(whole), "interval": interval(ratio, len(whole))}

    found: dict[str, Any] = {}
    whole = range(len(runs["plain"]))
    for name, mine in runs.items():
        together = sum(run.together for run in mine)
        found[name] = {
            "tokens_per_second": rate(name, whole, "seconds"),
            "interval": interval(lambda at, name=name: rate(name, at, "seconds"), len(whole)),
            "tokens_per_second_of_rounds": rate(name, whole, "rounds"),
            "over_plain": over(name, "plain", "seconds"),
            "chain_over": over("chain", name, "seconds"),
            "chain_over_in_rounds": over("chain", name, "rounds"),
            "realigning": sum(run.realigning for run in mine) / sum(run.rounds for run in mine),
            "grouping_rate": (
                1 - sum(run.realigned for run in mine) / together if together else None
            ),
            "texts": dict(equality[name]),
            "runs": [asdict(run) for run in mine],
        }
    return found


def verdicts(batches: Sequence[Mapping[str, Any]]) -> list[gates.Gate]:
    """Ragged slots over eqspec at every batch, and no text that is another one."""
    found = [
        gates.Gate(
            f"ragged slots over eqspec, batch {one['batch']}",
            one["rows"]["eqspec"]["chain_over"]["value"], BAR, unit="x",
        )
        for one in batches
    ]  # fmt: skip
    wrong = sum(row["texts"]["wrong"] for one in batches for row in one["rows"].values())
    found.append(gates.Gate("texts that part beyond rounding", float(wrong), 0.0, at_least=False))
    return found


def page(document: Mapping[str, Any], bounds: Sequence[gates.Gate]) -> str:
    """All batches as tables."""
    lines = [
        f"# Ragged slots, realigned batches, grouped batches: {document['models']['target']} in "
        f"{document['dtype']}\n",
        f"Prompts of Spec-Bench of at most {document['longest']} tokens "
        f"({document['left_out']} longer ones left out), up to {document['tokens']} greedy tokens "
        f"each; chains of {document['depth']}. Intervals are over {document['rounds']} rounds, in "
        "each of which three batches of prompts were handed in at once. Realigning is a share of "
        "the seconds without prompts.\n",
        gates.markdown(bounds),
    ]
    for one in document["batches"]:
        lines += [
            f"## Batch {one['batch']}\n",
            "| row | tokens/s | without prompts | over plain | ragged slots over it "
            "| without prompts | realigning | grouping rate | equal texts | ties | wrong |",
            "|---" + "|---:" * 10 + "|",
        ]
        for name, row in one["rows"].items():
            speed = {"value": row["tokens_per_second"], "interval": row["interval"]}
            kept, texts = row["grouping_rate"], row["texts"]
            cells = [
                name, spanned(speed), f"{row['tokens_per_second_of_rounds']:.2f}",
                spanned(row["over_plain"]), spanned(row["chain_over"]),
                spanned(row["chain_over_in_rounds"]), f"{row['realigning']:.1%}",
                "-" if kept is None else f"{kept:.0%}", *map(str, texts.values()),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def one_precision(asked: argparse.Namespace, dtype: str) -> None:
    """All batches in one precision, and the two files."""
    started = environment.describe()
    target, draft = asked.target or MODEL, asked.draft or DRAFT
    models = Models(target, draft, dtype=dtype)
    params = SamplingParams(max_new_tokens=asked.max_new_tokens, eos=models.eos)
    chosen = tasks(asked.tasks, asked.per_category, 1)
    given = [ids for _, ids in prompts_of(chosen, models.tokenizer)]
    prompts = [ids for ids in given if len(ids) <= asked.longest]
    [spec] = parse_methods("plain")
    alone = Alone(models.row(spec).engine, params)  # type: ignore[union-attr,arg-type]
    batches = [measure(models, prompts, batch, asked, alone) for batch in asked.batches]
    bounds = verdicts(batches)
    document = {
        "environment": started,
        "load_after": environment.load(),
        "models": models.names(),
        "dtype": dtype,
        "depth": asked.depth,
        "prompts": len(prompts),
        "left_out": len(given) - len(prompts),
        "longest": asked.longest,
        "tokens": asked.max_new_tokens,
        "rounds": asked.rounds,
        "batches": batches,
        "gates": [gate.to_dict() for gate in bounds],
    }
    name = f"ragged-{dtype}"
    files = gates.publish(asked.out, name, document, page(document, bounds))
    gates.show(bounds, f"ragged slots, {dtype}")
    console.print(f"wrote {', '.join(str(file) for file in files)}", markup=False)


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--dtype", choices=(*PRECISIONS, "both"), default="both")
    options.add_argument("--tasks", type=Path, default=SPEC_BENCH, help="questions of Spec-Bench")
    options.add_argument("--per-category", type=int, default=8, help="tasks of each category")
    options.add_argument("--longest", type=int, default=900, help="tokens of a prompt at most")
    options.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    options.add_argument("--depth", type=int, default=5, help="length of the chains")
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--max-new-tokens", type=int, default=64)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.quick:
        asked.batches, asked.rounds = asked.batches[:1], 1
        asked.max_new_tokens, asked.per_category = 12, 1
    if asked.target is None:
        get(MODEL, lambda what, done, of: None)
    for dtype in precisions(asked.dtype):
        one_precision(asked, dtype)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

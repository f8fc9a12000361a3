"""Leaving the target's layers early, against the same speculation without it.

    python benchmarks/specee.py                     # trains predictors first
    python benchmarks/specee.py --exits DIR --resume
    python benchmarks/specee.py --quick

Answers are counted on the shipped mini over at least 300 tasks that a function can check, in
batches; times are taken one request at a time on its widened form, which says the same, rows
interleaved. The fair baselines of a drafted row are `chain` and `tree` with the same draft. Writes
benchmarks/results/specee.json and .md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gates
from clocked import Clock
from pair import WORK, main, pair, parser, prompts
from paired import difference
from rich.markup import escape

import foretoken
from foretoken.bench import environment
from foretoken.bench.progress import Bar, shown
from foretoken.bench.rows import RowSpec, parse_methods
from foretoken.bench.run import BenchConfig, run_bench

FIXED = "controller=fixed,depth=5,nodes=12"
CHAIN = "controller=fixed,depth=3"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one task under one row."""

    family: str
    right: bool
    text: str
    tokens: int
    steps: int


def trained(asked: Any, models: Any) -> Path:
    """The predictors asked for, or some trained now."""
    if asked.exits is not None:
        return Path(asked.exits)
    from foretoken.cli.train import prompts as some
    from foretoken.training.heads import run_training
    from foretoken.training.objectives.exits import ExitTraining

    count, tokens, steps = (12, 16, 20) if asked.quick else (300, 64, 1200)
    out = WORK / ("specee-quick" if asked.quick else "specee") / "exits"
    config = ExitTraining(prompts=count, new_tokens=tokens, steps=steps)
    with foretoken.load(models.target, "chain", models.draft) as session:
        run_training(session, "exits", partial(some, None), config, out)
    return out


def rows(exits: Path) -> dict[str, str]:
    """Rows that count answers, and the row that each is fairly held against."""
    start = f"specee[predictors={exits}"
    return {
        "plain": "",
        f"{start},shape=nothing,sure_above=0.5,controller=fixed]": "plain",
        f"{start},shape=nothing,controller=fixed]": "plain",
        f"{start},shape=chain,{CHAIN}]": f"chain[{CHAIN}]",
        f"{start},sure_above=0.5,{FIXED}]": f"tree[{FIXED}]",
        f"{start},{FIXED}]": f"tree[{FIXED}]",
    }


def timed(exits: Path) -> list[str]:
    """The same, their fair baselines, and both sides with sizes that measured costs choose."""
    counted = rows(exits)
    fair = dict.fromkeys([*counted, *filter(None, counted.values())])
    return [*fair, "tree[controller=cost_model]", f"specee[predictors={exits}]"]


def answers(session: Any, spec: RowSpec, tasks: Sequence[Any], asked: Any, bar: Bar) -> list[Any]:
    """One answer per task, batch after batch."""
    own = session.using(spec.method, **spec.method_options)
    found: list[Answer] = []
    for start in range(0, len(tasks), asked.max_rows):
        batch = tasks[start : start + asked.max_rows]
        results = own.generate([task.turns[0] for task in batch], max_new_tokens=96)
        for task, one in zip(batch, results, strict=True):
            right, stats = task.check(one.text), one.stats
            found.append(Answer(task.family, right, one.text, stats.tokens, stats.target_steps))
            bar.advance()
    return found


def count(asked: Any, models: Any, exits: Path) -> dict[str, list[Answer]]:
    """Answers of every row; with `--resume` those of an earlier run are read."""
    tasks = prompts(2 if asked.quick else asked.answers // 6)
    work = WORK / ("specee-quick" if asked.quick else "specee") / f"answers-{len(tasks)}"
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Answer]] = {}
    with (
        shown(False) as bar,
        foretoken.load(models.target, "chain", models.draft, max_rows=asked.max_rows) as session,
    ):
        for spec in parse_methods(list(rows(exits))):
            file = work / (re.sub(r"[^\w.-]+", "_", spec.label) + ".json")
            if not (asked.resume and file.exists()):
                bar.begin(escape(spec.label), len(tasks))
                took = answers(session, spec, tasks, asked, bar)
                file.write_text(json.dumps([asdict(one) for one in took]))
            found[spec.label] = [Answer(**one) for one in json.loads(file.read_text())]
    return found


def judged(found: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """Right answers, texts as plain's and tokens per forward, with intervals over tasks."""
    plain = found["plain"]
    told = []
    for label, own in found.items():

        def gap(at: Sequence[int], own: Sequence[Answer] = own) -> float:
            return sum(own[i].right - plain[i].right for i in at) / len(at)

        told.append({
            "row": label,
            "tasks": len(own),
            "right": sum(one.right for one in own) / len(own),
            "over_plain": difference(gap, range(len(own))),
            "as_plain": sum(a.text == b.text for a, b in zip(own, plain, strict=True)) / len(own),
            "tokens_per_forward": sum(o.tokens for o in own) / sum(o.steps for o in own),
        })  # fmt: skip
    return told


def timed_on(bench: dict[str, Any]) -> str:
    """What was timed, in one line."""
    setting = bench["setting"]
    size = f"{setting['models']['target']}, {setting['prompts']} prompts"
    return f"{size}, at most {setting['max_new_tokens']} new tokens, rows in turns."


def table(
    told: Sequence[dict[str, Any]],
    clock: Clock | None,
    fair: dict[str, str],
    bench: dict[str, Any],
) -> str:
    """Answers, and speed over plain and over the row without early exits."""
    lines = [
        f"## Answers ({told[0]['tasks']} tasks, greedy)", "",
        "| row | right | above plain, with its interval | texts as plain's | tokens per step |",
        "|---|---:|---|---:|---:|",
    ]  # fmt: skip
    for one in told:
        gap, (low, high) = one["over_plain"]["difference"], one["over_plain"]["interval"]
        lines.append(
            f"| {one['row']} | {one['right']:.1%} | {gap:+.1%} ({low:+.1%} to {high:+.1%}) "
            f"| {one['as_plain']:.0%} | {one['tokens_per_forward']:.2f} |"
        )
    lines.append("")
    if clock is not None:
        lines += ["## Speed, over plain and over the fair baseline", "", timed_on(bench)]
        lines += ["", clock.table(fair)]
    return "\n".join(lines) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--exits", type=Path, help="trained predictors (default: train some)")
    options.add_argument("--params", default="350M", help="size to widen to for the times")
    options.add_argument("--answers", type=int, default=300, help="tasks whose answers count")
    options.add_argument("--per-family", type=int, default=2, help="timed prompts of each family")
    options.add_argument("--max-rows", type=int, default=16)
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    options.add_argument("--untimed", action="store_true", help="count answers only")
    asked = options.parse_args()
    with pair(asked.target, asked.draft) as models:
        exits = trained(asked, models)
        told = judged(count(asked, models, exits))
    results: dict[str, Any] = {}
    clock = None
    if not asked.untimed:
        params = None if asked.quick else asked.params
        with pair(asked.target, asked.draft, params) as models:
            config = BenchConfig(
                target=models.target, draft=models.draft, dtype="float32", methods=timed(exits),
                out=WORK / ("specee-quick" if asked.quick else "specee") / "bench",
                repetitions=1, max_new_tokens=16 if asked.quick else 64, threads=asked.threads,
                resume=asked.resume, title="specee",
            )  # fmt: skip
            results = run_bench(config, prompts(1 if asked.quick else asked.per_family))
            clock = Clock.of(config.out)
    fair = {spec.label: base for spec, base in zip(
        parse_methods(list(rows(exits))), rows(exits).values(), strict=True)}  # fmt: skip
    fair[f"specee[predictors={exits.name}]"] = "tree[controller=cost_model]"
    document = {"environment": environment.describe(), "answers": told, "bench": results}
    text = "# Leaving layers early, and what it costs in answers\n\n" + table(
        told, clock, fair, results
    )
    gates.publish(asked.out, "specee", document, text)
    print(text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Methods that look guesses up, at equal budgets of nodes, and what their speed is.

    python benchmarks/look_ups.py                       # counts and times
    python benchmarks/look_ups.py --counts-only         # needs no quiet machine

Accepted tokens per step of prompt look-up (as a chain and as a tree), suffixes, recycled tokens and
a datastore, each with 8, 16, 32 and 64 nodes: what one finds with more nodes than another is no
merit of its source. Then `rest` with its paper's 64 nodes and `retrieval-dense` by the clock, each
also with the nodes that measured costs choose. Datastore and keys hold texts of the training split.
Writes benchmarks/results/look_ups.json and .md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clocked import Clock
from pair import WORK, main, pair, parser, prompts
from paired import difference, publish, table
from rich.markup import escape

import foretoken
from foretoken.bench import environment
from foretoken.bench.progress import Bar, shown
from foretoken.bench.rows import RowSpec, parse_methods
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.cli.datastore import build
from foretoken.minis.corpus import code_modules

BUDGETS = (8, 16, 32, 64)
SOURCES = {  # by name: how a budget of nodes is asked for
    "look-up, chain": "prompt-lookup[controller=fixed,depth={n},nodes={n}]",
    "look-up, tree": "prompt-lookup[controller=fixed,matches=16,depth=10,nodes={n}]",
    "suffix": "suffix[controller=fixed,depth=16,nodes={n},max_spec=64,factor=8]",
    "recycling": "token-recycling[controller=fixed,depth=6,nodes={n}]",
    "datastore": "rest[datastore={store},controller=fixed,depth=10,nodes={n}]",
}


@dataclass(frozen=True, slots=True)
class Count:
    """What became of one prompt under one row."""

    family: str
    tokens: int
    steps: int
    drafted: int


def stores(asked: Any, models: Any, work: Path) -> tuple[Path, Path]:
    """A datastore and keys of generated traffic and source files, made once."""
    traffic, examples = (200, 60) if asked.quick else (asked.traffic, asked.examples)
    store, keys = work / f"store-{traffic}", work / f"keys-{examples}"
    sources = list(code_modules("train"))[: 20 if asked.quick else None]
    for folder, texts, size, options in (
        (store, sources, traffic, {}),
        (keys, [], examples, {"dense": True}),
    ):
        if not (asked.resume and folder.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            build(folder, texts, traffic=size, target=str(models.target), **options)
    return store, keys


def counted(session: Any, spec: RowSpec, tasks: Sequence[Any], asked: Any, bar: Bar) -> list[Count]:
    """One count per prompt, batch after batch."""
    own = session.using(spec.method, **spec.method_options)
    found = []
    for start in range(0, len(tasks), asked.max_rows):
        batch = tasks[start : start + asked.max_rows]
        results = own.generate([task.turns[0] for task in batch], asked.max_new_tokens)
        for task, one in zip(batch, results, strict=True):
            stats = one.stats
            found.append(Count(task.family, stats.tokens, stats.target_steps, stats.drafted))
            bar.advance()
    return found


def count(asked: Any, models: Any, store: Path, work: Path) -> dict[str, dict[int, list[Count]]]:
    """Counts by source and nodes; with `--resume` those of an earlier run are read."""
    tasks = prompts(1 if asked.quick else asked.per_family)
    work = work / f"counts-{len(tasks)}-{asked.max_new_tokens}"
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, list[Count]]] = {}
    with shown(False) as bar, foretoken.load(models.target, "plain", max_rows=16) as session:
        for source, form in SOURCES.items():
            for nodes in BUDGETS[:1] if asked.quick else BUDGETS:
                [spec] = parse_methods(form.format(n=nodes, store=store))
                file = work / (re.sub(r"[^\w.-]+", "_", spec.label) + ".json")
                if not (asked.resume and file.exists()):
                    bar.begin(escape(spec.label), len(tasks))
                    own = counted(session, spec, tasks, asked, bar)
                    file.write_text(json.dumps([asdict(one) for one in own]))
                own = [Count(**one) for one in json.loads(file.read_text())]
                found.setdefault(source, {})[nodes] = own
    return found


def length(counts: Sequence[Count], at: Sequence[int]) -> float:
    """Tokens per target forward over some prompts."""
    return sum(counts[i].tokens for i in at) / sum(counts[i].steps for i in at)


def orderings(found: dict[str, dict[int, list[Count]]]) -> list[dict[str, Any]]:
    """Recycled tokens over look-up, and a datastore over both, at equal nodes."""
    told = []
    for above, below in (
        ("recycling", "look-up, tree"), ("recycling", "look-up, chain"),
        ("suffix", "look-up, tree"), ("datastore", "look-up, tree"),
    ):  # fmt: skip
        for nodes, high in found[above].items():
            low = found[below][nodes]

            def gap(at: Sequence[int], high: Any = high, low: Any = low) -> float:
                return length(high, at) - length(low, at)

            families = [one.family for one in high]
            by_family = {
                family: difference(gap, [i for i, own in enumerate(families) if own == family])
                for family in dict.fromkeys(families)
            }
            told.append({
                "claim": f"{nodes} nodes: {above} over {below}",
                **difference(gap, range(len(high))),
                "by_family": by_family,
                "fails_in": [name for name, one in by_family.items() if not one["holds"]],
            })  # fmt: skip
    return told


def lengths(found: dict[str, dict[int, list[Count]]]) -> list[str]:
    """Tokens per step by source and budget, and the nodes that were really drafted."""
    budgets = list(next(iter(found.values())))
    lines = ["| source | " + " | ".join(f"{n} nodes" for n in budgets) + " |"]
    lines += ["|---|" + "---:|" * len(budgets)]
    for source, rows in found.items():
        cells = [
            f"{length(own, range(len(own))):.2f} "
            f"({sum(o.drafted for o in own) / sum(o.steps for o in own):.1f} drafted)"
            for own in rows.values()
        ]
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return lines


def timed(store: Path, keys: Path) -> dict[str, str | None]:
    """Rows by the clock, and what each is held against."""
    return {
        "plain": None,
        "prompt-lookup[controller=fixed,depth=10]": None,
        f"rest[datastore={store},controller=fixed,depth=10,nodes=64]": "plain",
        f"rest[datastore={store},controller=cost_model]": "plain",
        f"retrieval-dense[keys={keys},controller=fixed,depth=10,nodes=64]": "plain",
        f"retrieval-dense[keys={keys},controller=cost_model]": "plain",
    }


def clock(asked: Any, store: Path, keys: Path, work: Path) -> tuple[Clock, dict[str, Any]]:
    """Speeds on the target that read the keys: its widened form has other states."""
    with pair(asked.target, asked.draft) as models:
        config = BenchConfig(
            target=models.target, dtype="float32", methods=list(timed(store, keys)),
            out=work / "bench", repetitions=1, max_new_tokens=16 if asked.quick else 64,
            threads=asked.threads, resume=asked.resume, title="Looked-up guesses by the clock",
        )  # fmt: skip
        results = run_bench(config, prompts(1 if asked.quick else asked.timed))
    return Clock.of(config.out), results


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument(
        "--per-family", type=int, default=16, help="counted prompts of each family"
    )
    options.add_argument("--timed", type=int, default=4, help="timed prompts of each family")
    options.add_argument(
        "--examples", type=int, default=400, help="texts that the keys are made of"
    )
    options.add_argument("--traffic", type=int, default=20_000, help="texts of the datastore")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--max-rows", type=int, default=16)
    options.add_argument("--counts-only", action="store_true", help="no times")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    work = WORK / ("look_ups-quick" if asked.quick else "look_ups")
    with pair(asked.target, asked.draft) as models:
        store, keys = stores(asked, models, work)
        found = count(asked, models, store, work)
    told = orderings(found)
    text = ["# Looked-up guesses at equal nodes", "", *lengths(found), "", *table(told), ""]
    results: dict[str, Any] = {}
    if not asked.counts_only:
        times, results = clock(asked, store, keys, work)
        against = {spec.label: None for form in timed(store, keys) for spec in parse_methods(form)}
        model = results["setting"]["models"]["target"]
        text += ["## By the clock", "", f"{model}, {results['setting']['prompts']} prompts.", ""]
        text += [times.table(against)]
    document = {
        "environment": environment.describe(), "orderings": told, "bench": results,
        "counts": {source: {n: [asdict(one) for one in own] for n, own in rows.items()}
                   for source, rows in found.items()},
    }  # fmt: skip
    publish(asked.out, "look_ups", document, "\n".join(text))
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""A real instruction model on the prompts of Spec-Bench, every category, beside other engines.

    python benchmarks/real.py --tasks spec-bench.jsonl    # both precisions
    python benchmarks/real.py --dtype float32 --quick

The model is the one of `foretoken minis get smollm2-135m`, fetched if it is not there. Rows take
turns on every prompt; rows that cannot run here are left out with a line. `auto` is there twice:
by as much as its two rows differ in a category, any two may. FORETOKEN_LLAMA_PYTHON
and FORETOKEN_VLLM_PYTHON name the interpreters of the other engines. A row is held against another
by all its tokens over all its seconds. Writes benchmarks/results/real-DTYPE.json and .md, and
real-DTYPE-tT at temperature T.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gates
from pair import WORK, console, main, parser
from stage_c import auto_share, by_clock

from foretoken import shipped
from foretoken.bench import report
from foretoken.bench.journal import Cell, read_journal
from foretoken.bench.metrics import rates
from foretoken.bench.models import check_rows
from foretoken.bench.rows import parse_methods
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task, load_file, spread
from foretoken.errors import ConfigError
from foretoken.lm.kernels.linears import can_pack
from foretoken.minis.fetch import get

MODEL = "smollm2-135m"
SPEC_BENCH = Path("spec-bench.jsonl")  # question.jsonl of github.com/hemingkx/Spec-Bench
TWIN = "auto[controller=cost_model]"  # `auto` as it is by itself, once more
ROWS = (
    "plain", "hf:plain", "hf:compiled", "prompt-lookup", "suffix", "token-recycling", "auto", TWIN,
    "llama:plain", "llama:lookup", "llama:draft", "vllm:plain", "vllm:ngram", "vllm:draft",
)  # fmt: skip
PRECISIONS = ("float32", "bfloat16")
BARS = {  # what is wanted in each precision
    "float32": {"plain": 1.05, "sixteen": 1.9, "limit": 1.3, "best": 1.5, "rival": 1.15},
    "bfloat16": {"plain": 1.5, "sixteen": 1.3, "limit": None, "best": 2.3, "rival": 2.0},
}
RIVALS = {"float32": "llama:", "bfloat16": "vllm:"}  # whose best row ours is held against


def tasks(path: Path, per_category: int, turns: int) -> list[Task]:
    """So many tasks of every category, categories alternating, each cut to its first turns."""
    if not path.is_file():
        raise ConfigError(
            f"the questions of Spec-Bench in {path}.",
            "the file is not there; it is no part of this repository.",
            "pass --tasks FILE: data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench.",
        )
    by_category: dict[str, list[Task]] = defaultdict(list)
    for task in load_file(path):
        by_category[task.family].append(
            dataclasses.replace(task, turns=task.turns[:turns], check=None)
        )
    chosen = [spread(found, per_category) for found in by_category.values()]
    longest = max(len(found) for found in chosen)
    return [found[n] for n in range(longest) for found in chosen if n < len(found)]


def possible(names: Iterable[str], draft: str | None) -> Iterator[str]:
    """The rows that this installation knows and these models can run."""
    for name in names:
        try:
            check_rows(parse_methods(name), draft)
        except ConfigError as problem:
            console.print(f"{name} is left out: {problem.possible}", markup=False, soft_wrap=True)
        else:
            yield name


def precisions(asked: str) -> list[str]:
    """Those asked for; of `both`, what this processor multiplies."""
    import torch

    if asked != "both":
        return [asked]
    if can_pack(torch.bfloat16):
        return list(PRECISIONS)
    console.print("bfloat16 is left out: this processor does not multiply it")
    return ["float32"]


def untrained(results: dict[str, Any]) -> str | None:
    """The fastest of our rows that need no training and no second model."""
    rows = by_clock(results)
    names = {name for found in rows.values() for name in found} - {"plain", TWIN}
    return gates.best(results, lambda label: label in names, whole=True)


def verdicts(results: dict[str, Any], dtype: str) -> list[gates.Gate]:
    """The bars whose rows are here."""
    bars, rows = BARS[dtype], results["rows"]
    best = untrained(results)
    rival = gates.best(results, lambda label: label.startswith(RIVALS[dtype]), whole=True)

    def over(above: str | None, below: str | None, kind: str, bar: float) -> list[gates.Gate]:
        """Nothing where no row of the kind was asked for; rows that failed make a bar fail."""
        if not any(name.startswith(kind) for name in rows):
            return []
        measured = gates.ratio(results, above, below, whole=True)
        return [gates.Gate(f"{above} over {below or kind + '*'}", measured, bar, unit="x")]

    scoring = results["scoring"]
    sixteen = dict(zip(scoring["nodes"], scoring["ratio"], strict=True)).get(16)
    near = (rows.get("plain", {}).get("over_limit") or {}).get("forward")
    found = over("plain", "hf:compiled", "hf:compiled", bars["plain"])
    claim = "scoring 16 nodes, in plain steps"
    found.append(gates.Gate(claim, sixteen, bars["sixteen"], at_least=False, unit=" steps"))
    if bars["limit"] is not None:
        claim = "a plain step over the memory limit"
        found.append(gates.Gate(claim, near, bars["limit"], at_least=False, unit="x"))
    found += over(best, "hf:compiled", "hf:compiled", bars["best"])
    found += over(best, rival, RIVALS[dtype], bars["rival"])
    if "auto" in rows:
        own = by_clock(results)
        twins = [speeds.pop(TWIN) / speeds["auto"] for speeds in own.values() if TWIN in speeds]
        share, where = auto_share(own)
        found.append(gates.Gate(f"auto over the best row ({where})", share, 0.97))
        if twins:
            claim = "the same for two rows of auto itself: chance alone"
            found.append(gates.Gate(claim, min(min(one, 1.0 / one) for one in twins), 0.97))
        calm = [speeds["auto"] for speeds in own.values() if "auto" in speeds]
        worst = min(calm, default=None)
        found.append(gates.Gate("auto over plain, worst category", worst, 0.97, unit="x"))
    return found


def categories(results: dict[str, Any]) -> str:
    """Speeds over plain by category: all tokens over all seconds."""
    rows = {n: row for n, row in results["rows"].items() if "tokens_per_second" in row}
    own = by_clock(results)
    lines = [
        "| category | " + " | ".join(rows) + " | auto over the best |",
        "|---" + "|---:" * (len(rows) + 1) + "|",
    ]
    for family in results["families"]:
        found = [(row["families"].get(family) or {}).get("speedup") for row in rows.values()]
        speeds = {name: speed for name, speed in own.get(family, {}).items() if name != TWIN}
        share = speeds["auto"] / max(speeds.values()) if "auto" in speeds else None
        cells = [*(one["total"] if one else None for one in found), share]
        text = " | ".join("-" if value is None else f"{value:.2f}" for value in cells)
        lines.append(f"| {family} | {text} |")
    return "\n".join(lines) + "\n"


def spreads(results: dict[str, Any], cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Tokens per second of each row over prompts, and how far its repetitions lie apart."""
    found = {}
    for label, row in results["rows"].items():
        mine = [cell for cell in cells if cell.row == label]
        if "tokens_per_second" not in row:
            continue
        speeds = list(rates(mine).values())
        low, middle, high = quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        apart = []
        for prompt in dict.fromkeys(cell.prompt for cell in mine):
            several = [len(c.tokens) / c.seconds for c in mine if c.prompt == prompt]
            apart.append((max(several) - min(several)) / median(several))
        found[label] = {
            "lowest": min(speeds), "quarter": low, "median": middle, "three_quarters": high,
            "highest": max(speeds), "repetitions_apart": median(apart),
        }  # fmt: skip
    return found


def spread_table(found: dict[str, dict[str, float]]) -> str:
    """The spread as a table."""
    lines = [
        "| tokens/s | lowest | quarter | median | three quarters | highest | repetitions apart |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for label, row in found.items():
        *speeds, apart = row.values()
        text = " | ".join(f"{value:.1f}" for value in speeds)
        lines.append(f"| {label} | {text} | {100 * apart:.0f} % |")
    return "\n".join(lines) + "\n"


def origin(target: str) -> str:
    """Where the weights come from, as the record of a fetched model tells it."""
    if target != MODEL:
        return f"The weights of {Path(target).name}."
    import json

    record = shipped.path(MODEL) / shipped.RECORD
    return str(json.loads(record.read_text(encoding="utf-8"))["origin"])


def measure(asked: argparse.Namespace, dtype: str) -> list[gates.Gate]:
    """One precision: the bench, its verdicts, its two files."""
    name = f"real-{dtype}" + (f"-t{asked.temperature:g}" if asked.temperature else "")
    quick = asked.quick
    target = asked.target or MODEL
    config = BenchConfig(
        target=target,
        draft=asked.draft,
        dtype=dtype,
        methods=list(possible(dict.fromkeys(["plain", *(asked.methods or ROWS)]), asked.draft)),
        out=WORK / (f"{name}-quick" if quick else name),
        repetitions=1 if quick else asked.repetitions,
        max_new_tokens=16 if quick else asked.max_new_tokens,
        temperature=asked.temperature,
        tuning_tokens=16 if quick else 64,
        threads=asked.threads,
        resume=asked.resume,
        title=f"{Path(target).name} in {dtype} on Spec-Bench",
    )
    chosen = tasks(asked.tasks, 1 if quick else asked.per_category, asked.turns)
    results = run_bench(config, chosen)
    found = verdicts(results, dtype)
    apart = spreads(results, read_journal(config.out / "journal.jsonl")[1].cells)
    results |= {
        "gates": [gate.to_dict() for gate in found],
        "spread": apart,
        "origin": origin(target),
    }
    text = report.markdown(results, {}).rstrip() + f"\n- weights: {results['origin']}\n"
    text += "\n## Categories, over plain\n\n" + categories(results)
    text += "\n## Spread over prompts\n\n" + spread_table(apart)
    text += "\n## Bounds\n\n" + gates.markdown(found)
    files = gates.publish(asked.out, name, results, text)
    gates.show(found, results["title"])
    console.print(f"wrote {', '.join(str(file) for file in files)}", markup=False)
    return found


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--dtype", choices=(*PRECISIONS, "both"), default="both")
    options.add_argument("--tasks", type=Path, default=SPEC_BENCH, help="questions of Spec-Bench")
    options.add_argument("--per-category", type=int, default=2, help="tasks of each category")
    options.add_argument("--turns", type=int, default=1, help="turns of a task at most")
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--methods", nargs="*", help="other rows")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    if asked.target is None:
        get(MODEL, lambda what, done, of: None)
    for dtype in precisions(asked.dtype):
        measure(asked, dtype)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

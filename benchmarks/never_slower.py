"""Does anything ever lose? Every default that needs no training against plain, on text that repeats
itself and on text that does not; the cost model with a useless draft, and with a good one.

    python benchmarks/never_slower.py [--quick] [--params 350M]
    python benchmarks/never_slower.py --target ./model --tasks spec-bench.jsonl --parts defaults

Writes benchmarks/results/never_slower.json and .md (never_slower-NAME with --target).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gates
import torch
from in_turn import Texts, Written, by_family, in_turn, over, prompts_of, rate
from pair import WORK, console, main, pair, parser, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.bench import environment
from foretoken.bench.models import Models
from foretoken.bench.own import OwnRow
from foretoken.bench.rows import parse_methods
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task, load_file
from foretoken.engine.engine import Engine
from foretoken.errors import CapabilityError
from foretoken.types import SamplingParams

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # a sweep ends where speed has fallen twice
NODES = (4, 8, 16, 32, 64)
FALLEN = 2
PARTS = ("drafts", "defaults")
KINDS = {"greedy": 0.0, "temperature 1": 1.0}  # the second does not repeat itself, so cannot loop


def random_draft(like: Path | str) -> Any:
    """A model of the draft's shape that knows nothing."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like), dtype=torch.float32)


def swept(labels: Sequence[str], speed: Callable[[str], float | None]) -> list[str]:
    """Rows of growing size up to the best one and the `FALLEN` behind it."""
    found: list[str] = []
    best, fallen = 0.0, 0
    for label in labels:
        value = speed(label) or 0.0
        found.append(label)
        best, fallen = (value, 0) if value > best else (best, fallen + 1)
        if fallen == FALLEN:
            break
    return found


def fastest(results: dict[str, Any], method: str) -> str | None:
    """The fastest row of a method with a fixed size."""
    return gates.best(results, lambda label: label.startswith(f"{method}["), whole=True)


def verdicts(useless: dict[str, Any], good: dict[str, Any]) -> list[gates.Gate]:
    """Never below 0.97 of what it could have done instead, by all tokens over all seconds: medians
    of two rows can be of different prompts. Nor on the family of prompts where it does worst, where
    there are enough of them for an interval: a few prompts differ by more than that by chance."""
    rows = ("chain", "tree", "prompt-lookup")
    found = [
        gates.Gate(
            f"useless draft: {label} over plain",
            gates.ratio(useless, label, "plain", whole=True),
            0.97,
            unit="x",
        )
        for label in rows
    ]
    found += worst_family(useless, rows)
    for method in ("chain", "tree"):
        fixed = fastest(good, method)
        claim = f"good draft: {method} over the best fixed one, {fixed}"
        measured = gates.ratio(good, method, fixed, whole=True)
        found.append(gates.Gate(claim, measured, 0.97, unit="x"))
    return found


def worst_family(results: dict[str, Any], labels: Sequence[str]) -> list[gates.Gate]:
    """The family of prompts whose speed over plain is surely the lowest: the upper end of its
    interval. None where nothing is sure."""
    ends: dict[str, float] = {}
    for label in labels:
        row = results["rows"].get(label, {"failed": "not asked for"})
        for family, record in {} if row["failed"] else row.get("families", {}).items():
            if record["speedup"] is not None and record["speedup"]["interval"]:
                ends[f"{label} on {family}"] = record["speedup"]["interval"][1]
    worst = min(ends, key=lambda name: ends[name], default=None)
    if worst is None:
        return []
    claim = f"worst family with a useless draft, over plain, at most: {worst}"
    return [gates.Gate(claim, ends[worst], 0.97, unit="x")]


def drafts(asked: argparse.Namespace) -> tuple[list[gates.Gate], dict[str, Any], str]:
    """With a useless draft against plain, with a good one against the best fixed length.

    Rows of a sweep run one after the other, and the fastest of many is also the luckiest: what is
    judged is written once more, in turn.
    """
    quick = asked.quick
    tasks = prompts(1, limit=3) if quick else prompts(asked.per_family)
    work = WORK / ("never_slower-quick" if quick else "never_slower")
    with pair(asked.target, asked.draft, asked.params) as models:

        def bench(draft: Any, methods: list[str], name: str, resume: bool) -> dict[str, Any]:
            return run_bench(
                BenchConfig(
                    target=models.target,
                    draft=draft,
                    dtype="float32",
                    methods=methods,
                    out=work / name,
                    repetitions=1 if quick else asked.repetitions,
                    max_new_tokens=24 if quick else 128,
                    threads=asked.threads,
                    resume=resume,
                    title=f"The cost model: {name}",
                ),
                tasks,
            )

        rows = ["plain", "chain", "tree", "prompt-lookup", "chain[depth=5]"]
        useless = bench(random_draft(models.draft), rows, "useless", asked.resume)
        rows = ["plain", "chain", "tree"]
        good = bench(models.draft, rows, "good", asked.resume)

        def speed(label: str) -> float | None:
            nonlocal good
            good = bench(models.draft, [*good["rows"], label], "good", True)
            return gates.speed(good, label, whole=True)

        swept([f"chain[depth={n}]" for n in LENGTHS[: 2 if quick else None]], speed)
        swept([f"tree[depth=6,nodes={n}]" for n in NODES[: 1 if quick else None]], speed)
        fixed = [fastest(good, method) for method in ("chain", "tree")]
        rows = ["plain", "chain", "tree", *[label for label in fixed if label is not None]]
        held = bench(models.draft, rows, "held", asked.resume)
    text = "".join(
        f"\n## With a {name} draft\n\n" + gates.speeds(results)
        for name, results in (("useless", useless), ("good", held))
    )
    text += "\n## The sweep that found the fixed ones\n\n" + gates.speeds(good)
    return verdicts(useless, held), {"useless": useless, "good": held, "sweep": good}, text


def defaults(asked: argparse.Namespace) -> tuple[list[gates.Gate], dict[str, Any], str]:
    """Every default that needs neither training nor data against plain, and `auto` against all."""
    found: list[gates.Gate] = []
    document: dict[str, Any] = {}
    text = ""
    if asked.threads:
        torch.set_num_threads(asked.threads)
    tasks = real_tasks(asked)
    with pair(asked.target, asked.draft, asked.params) as where:
        models = Models(where.target, dtype=asked.dtype, allow_pickle=False)
        given = prompts_of(tasks, models.tokenizer)
        repetitions = 1 if asked.quick else asked.repetitions
        families = by_family(given)
        for kind, temperature in KINDS.items():
            params = SamplingParams(
                max_new_tokens=24 if asked.quick else asked.tokens,
                temperature=temperature,
                eos=models.eos,
            )
            # Anew for each kind: who remembers texts knows an answer to each of these prompts.
            engines = engines_of(models, asked.methods)
            with console.status(kind) as status:
                texts = in_turn(engines, given, params, repetitions, status.update)
            found += kept(kind, texts, families)
            document[kind] = told(texts, families)
            text += f"\n## {kind.capitalize()}\n\n" + page(texts, families)
    return found, document, text


def engines_of(models: Models, methods: str) -> dict[str, Engine]:
    """Plain decoding and the rows asked for, but those that this target cannot run."""
    specs = [spec for spec in parse_methods(methods) if spec.method != "plain"]
    engines: dict[str, Engine] = {}
    for spec in (*parse_methods("plain"), *specs):
        try:
            row = models.row(spec)
        except CapabilityError as problem:
            console.print(f"{spec.label} is left out: {problem}", markup=False)
            continue
        if isinstance(row, OwnRow):
            engines[spec.label] = row.engine
    return engines


def real_tasks(asked: argparse.Namespace) -> list[Task]:
    """Prompts of every family of a file, or the held-out ones of the minis."""
    if asked.tasks is None:
        return prompts(1, limit=3) if asked.quick else prompts(asked.per_family)
    tasks: dict[str, list[Task]] = {}
    for task in load_file(asked.tasks):
        tasks.setdefault(task.family, []).append(task)
    count = asked.per_family
    return [one for own in tasks.values() for one in own[:: max(len(own) // count, 1)][:count]]


def kept(kind: str, texts: Texts, families: dict[str, list[int]]) -> list[gates.Gate]:
    """No default below 0.97 of plain; on greedy text `auto` within 0.97 of the best everywhere."""
    found = [
        gate(f"{kind}: {label} over plain", over(texts, label, "plain"))
        for label in texts
        if label != "plain"
    ]
    if kind != "greedy" or "auto" not in texts:
        return found
    for family, places in families.items():
        best = max(texts, key=lambda label, at=places: rate(texts[label][i] for i in at))
        claim = f"{kind}, {family}: auto over the best row, {best}"
        found.append(gate(claim, over(texts, "auto", best, places)))
    return found


def gate(claim: str, found: tuple[float, tuple[float, float] | None]) -> gates.Gate:
    """A claim with its ratio and the interval of that over prompts."""
    value, span = found
    return gates.Gate(f"{claim} ({spanned(span)})", value, 0.97, unit="x")


def spanned(span: tuple[float, float] | None) -> str:
    return "too few prompts for an interval" if span is None else f"{span[0]:.3f} to {span[1]:.3f}"


def told(texts: Texts, families: dict[str, list[int]]) -> dict[str, Any]:
    """Speeds, ratios with intervals, and ratios by family."""
    return {
        label: {
            "tokens_per_second": rate(own),
            "tokens_per_forward": per_forward(own),
            "over_plain": over(texts, label, "plain"),
            "by_family": {
                family: over(texts, label, "plain", at)[0] for family, at in families.items()
            },
        }
        for label, own in texts.items()
    }


def per_forward(prompts: Sequence[Sequence[Written]]) -> float:
    texts = [one for texts in prompts for one in texts]
    return sum(one.tokens for one in texts) / sum(one.forwards for one in texts)


def page(texts: Texts, families: dict[str, list[int]]) -> str:
    """The same as tables."""
    lines = [
        "| row | tokens/s | over plain | interval | tokens per forward |",
        "|---|---:|---:|---|---:|",
    ]
    rows = told(texts, families)
    for label, row in rows.items():
        value, span = row["over_plain"]
        lines.append(
            f"| {label} | {row['tokens_per_second']:.1f} | {value:.3f} | {spanned(span)} "
            f"| {row['tokens_per_forward']:.2f} |"
        )
    lines += ["", f"| over plain | {' | '.join(families)} |", "|---|" + "---:|" * len(families)]
    for label, row in rows.items():
        cells = " | ".join(f"{value:.2f}" for value in row["by_family"].values())
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", help="widen the shipped target to this size first")
    options.add_argument("--parts", default=",".join(PARTS), help="drafts, defaults or both")
    options.add_argument("--tasks", help="a file of prompts, such as Spec-Bench's question.jsonl")
    options.add_argument("--methods", default="training-free", help="rows of the part defaults")
    options.add_argument("--dtype", default="float32", help="of the part defaults")
    options.add_argument("--tokens", type=int, default=128, help="per text, of the part defaults")
    options.add_argument("--per-family", type=int, default=2, help="prompts of each family")
    # Once: a text that is written again is a copy for methods that remember texts.
    options.add_argument("--repetitions", type=int, default=1)
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    found: list[gates.Gate] = []
    document: dict[str, Any] = {"environment": environment.describe()}
    text = ""
    for part in asked.parts.split(","):
        judged, results, tables = {"drafts": drafts, "defaults": defaults}[part](asked)
        found += judged
        document[part] = results
        text += tables
    document["gates"] = [gate.to_dict() for gate in found]
    name = "never_slower" + (f"-{Path(asked.target).name}" if asked.tasks and asked.target else "")
    gates.publish(asked.out, name, document, f"# Never slower\n\n{gates.markdown(found)}\n{text}")
    gates.show(found, "never slower")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

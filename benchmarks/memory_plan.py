"""The memory plan against measured peaks, and what a small budget keeps of the speed.

    python benchmarks/memory_plan.py [--real] [--quick]

Every configuration runs in a process of its own. It is planned from configuration files alone; then
the models are loaded with that plan as their budget, costs are measured if the controller asks for
them, and texts are written. What was measured is the bytes of the loaded weights, counted, and the
growth of the process from then to its peak; free memory of the load is given back before. Plan and
peak are compared with the weights, which a budget is for, and without them, as weights are the
larger part and known. A frontier runs one configuration without a budget, as `load` would have it,
and with budgets of shares of the generation memory that it took: one text, and a stream of four
texts for each place in the batch, with trees of the size that pays and with trees as large as
papers have them.
What was measured is kept at once, and a run that was cut off goes on from there; `--again` forgets.
Writes benchmarks/results/memory_plan.json and .md (memory_plan-real with --real).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import gates
from pair import WORK, console, main, parser, prompts

from foretoken.bench import environment
from foretoken.bench.files import replace
from foretoken.bench.memory import alone
from foretoken.engine.memory.amounts import told

SHARES = (0.7, 0.5, 0.35, 0.25)
SHARE = 0.35  # that is judged
WITHIN, OVER, KEPT = 5.0, 2.0, 0.9  # per cent, per cent, share of the speed at 35 %


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration."""

    target: str
    method: str
    dtype: str = "float32"
    draft: str = ""
    rows: int = 1
    prompt: int = 512
    new: int = 64
    nodes: int = 8
    kernels: str = "inplace"
    stream: int = 1  # texts for each row; more than one: rows are taken as others end
    temperature: float = 0.0

    @property
    def name(self) -> str:
        guessed = "" if self.method == "plain" else f", {self.nodes or 'measured'} nodes"
        texts = f"{self.stream * self.rows} texts, " if self.stream > 1 else ""
        drawn = f", temperature {self.temperature:g}" if self.temperature else ""
        return (
            f"{self.target.rpartition('/')[2]} {self.dtype} {self.method}, {texts}{self.rows} x "
            f"({self.prompt} + {self.new}){guessed}{drawn}, {self.kernels}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Of the method."""
        if self.method == "plain" or not self.nodes:
            return {}
        return {"depth": min(self.nodes, 8), "nodes": self.nodes}


def settings(target: str, draft: str, real: bool) -> list[Setting]:
    """Eleven that differ in model, type, method, batch, length, tree, kernels and temperature."""
    if not real:
        return [
            Setting(target, "plain"),
            Setting(target, "plain", rows=8, prompt=128, new=128),
            Setting(target, "plain", prompt=2048, new=32),
            Setting(target, "prompt-lookup", nodes=16),
            Setting(target, "token-recycling", nodes=48, rows=4),
            Setting(target, "chain", draft=draft, nodes=4),
            Setting(target, "tree", draft=draft, nodes=32, rows=8, prompt=128),
            Setting(target, "chain", draft=draft, nodes=4, kernels="dense", rows=2),
            Setting(target, "plain", "bfloat16", rows=4),
            Setting(target, "tree", "bfloat16", draft=draft, nodes=24, prompt=1024),
            Setting(target, "chain", draft=draft, nodes=8, rows=8, prompt=64, temperature=1.0),
        ]
    return [
        Setting(target, "plain", "bfloat16"),
        Setting(target, "plain", "bfloat16", rows=8, prompt=256, new=128),
        Setting(target, "plain", "bfloat16", prompt=2048, new=32),
        Setting(target, "chain", "bfloat16", draft=draft, nodes=4),
        Setting(target, "tree", "bfloat16", draft=draft, nodes=32, rows=4),
        Setting(target, "token-recycling", "bfloat16", nodes=60, rows=2),
        Setting(target, "plain", "float32", rows=4),
        Setting(target, "tree", "float32", draft=draft, nodes=64, rows=2),
        Setting(target, "prompt-lookup", "float32", nodes=16, prompt=2048, new=64),
        Setting(target, "plain", "bfloat16", kernels="dense", rows=4, prompt=1024),
        Setting(
            target, "chain", "bfloat16", draft=draft, nodes=8, rows=8, prompt=64, temperature=1.0
        ),
    ]


def frontiers(target: str, draft: str, real: bool, quick: bool) -> list[Setting]:
    """One text, and a batch that others wait for: trees of the size that the method has by itself;
    a batch of turns of a chat with trees of 64 nodes.
    """
    sizes: dict[str, Any] = {"prompt": 384, "new": 128, "nodes": 0}
    if quick:
        sizes = {"prompt": 64, "new": 16, "nodes": 0}
    dtype = "bfloat16" if real else "float32"
    made = [Setting(target, "tree", dtype, draft, **sizes)]
    made.append(Setting(target, "tree", dtype, draft, rows=8, stream=4, **sizes))
    chats = {"prompt": 96, "new": 96, "nodes": 64}
    made.append(Setting(target, "tree", dtype, draft, rows=8, stream=4, **chats))
    return made[:1] if quick else made


class Kept:
    """Results in files, each written when it is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured before under this name, else what is measured now."""
        file = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        if not file.exists():
            console.print(name)
            replace(file, json.dumps(measure()))
        return json.loads(file.read_text())


def planned(setting: Setting) -> dict[str, Any]:
    """The plan, from configuration files."""
    from foretoken.engine.memory.layout import largest_draft, layout_of
    from foretoken.engine.memory.plan import Need

    draft = setting.draft or None
    layout = layout_of(
        setting.target, setting.method, draft, dtype=setting.dtype, kernels=setting.kernels,
        config=setting.options,
    )  # fmt: skip
    depth, nodes = largest_draft(setting.method, setting.options)
    context = setting.prompt + setting.new
    sampled = setting.temperature > 0.0
    return layout.plan(Need(setting.rows, context, nodes, depth, sampled)).to_dict()


def written(
    setting: Setting, budget: int | None, repeats: int, threads: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Load, write, and tell bytes and seconds, in this process."""
    import torch

    from foretoken.bench.memory import Peak
    from foretoken.engine.loading import load
    from foretoken.engine.memory.keeping import all_held, models_of
    from foretoken.lm.runtime.heap import collect

    torch.set_num_threads(threads)
    session = load(
        setting.target, setting.method, setting.draft or None, dtype=setting.dtype,
        kernels=setting.kernels, max_rows=setting.rows, memory_budget=budget,
        generation_config=False, **options,
    )  # fmt: skip
    held = all_held(dict(models_of(session.engine, session.draft)), session.draft)
    count = setting.rows * setting.stream
    # other ones each time: what is kept of texts that are over would feed them else
    texts = [[worded(count * turn + i, setting.prompt, session.tokenizer) for i in range(count)]
             for turn in range(repeats)]  # fmt: skip
    collect()
    with Peak() as peak:
        session.prepare()
        seconds = []
        for some in texts:
            began = perf_counter()
            results = session.generate(
                some, max_new_tokens=setting.new, ignore_eos=True,
                temperature=setting.temperature, seed=0,
            )  # fmt: skip
            seconds.append(perf_counter() - began)
    tokens = sum(len(result.tokens) for result in results)
    return {
        "held": held, "growth": peak.growth, "measured": held + (peak.growth or 0),
        "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / median(seconds),
    }  # fmt: skip


def worded(seed: int, count: int, tokenizer: Any) -> list[int]:
    """A prompt of so many tokens: texts of all families, other ones for each seed."""
    text = "\n\n".join(task.turns[0] for task in prompts(4, seed=seed))
    ids = list(tokenizer(text)["input_ids"])
    return (ids * (1 + count // len(ids)))[:count]


def compared(setting: Setting, quick: bool, threads: int) -> dict[str, Any]:
    """Plan and peak of one configuration."""
    _, plan = alone(planned, setting)
    given = setting, plan["total"], 1 if quick else 2, threads, setting.options
    peak, found = alone(written, *given)
    growth = found["growth"]
    off = None if growth is None else 100.0 * (plan["total"] / found["measured"] - 1.0)
    return {"setting": asdict(setting), "plan": plan, "process": peak, "off": off, **found}


def line(name: str, row: dict[str, Any]) -> str:
    """Of the table."""
    plan, off = row["plan"], row["off"]
    grown = "-" if row["growth"] is None else told(row["growth"])
    alone = generation_off(row)
    return (
        f"| {name} | {told(plan['weights'])} | {told(row['held'])} | {told(plan['generation'])} | "
        f"{grown} | {'-' if alone is None else f'{alone:+.1f} %'} | {told(plan['total'])} | "
        f"{told(row['measured'])} | {'-' if off is None else f'{off:+.1f} %'} | "
        f"{told(row['process'] or 0)} |"
    )


def generation_off(row: dict[str, Any]) -> float | None:
    """By how many per cent a plan is above what texts took beside the weights."""
    grown = row["growth"]
    return 100.0 * (row["plan"]["generation"] / grown - 1.0) if grown else None


def frontier(setting: Setting, quick: bool, threads: int) -> list[dict[str, Any]]:
    """Speed and memory without a budget, and with shares of what it took beside the weights."""
    repeats, options = 1 if quick else 3, setting.options
    _, free = alone(written, setting, None, repeats, threads, options)
    rows = [{"share": None, "budget": None, **free}]
    for share in SHARES if free["growth"] else ():
        budget = free["held"] + round(share * free["growth"])
        _, found = alone(attempted, setting, budget, repeats, threads, options)
        if "refused" not in found:
            found["kept"] = found["tokens_per_second"] / free["tokens_per_second"]
        rows.append({"share": share, "budget": budget, **found})
    return rows


def attempted(*given: Any) -> dict[str, Any]:
    """As `written`; a budget that can hold no such text says so."""
    from foretoken.errors import CapabilityError

    try:
        return written(*given)
    except CapabilityError as why:
        return {"refused": str(why)}


def verdicts(
    rows: dict[str, dict[str, Any]], points: dict[str, list[dict[str, Any]]]
) -> list[gates.Gate]:
    """What the issue asks for."""
    off = [abs(row["off"]) for row in rows.values() if row["off"] is not None]
    alone = [abs(one) for row in rows.values() if (one := generation_off(row)) is not None]
    held = [(row["plan"]["total"], row) for row in rows.values()]
    held += [(point["budget"], point) for found in points.values() for point in found
             if point["budget"] is not None and "refused" not in point]  # fmt: skip
    held = [(budget, row) for budget, row in held if row["growth"] is not None]
    over = [100.0 * (row["measured"] / budget - 1.0) for budget, row in held]
    grown = [100.0 * (row["growth"] / max(budget - row["held"], 1) - 1.0) for budget, row in held]
    kept = [point.get("kept", 0.0) for found in points.values() for point in found
            if point["share"] == SHARE]  # fmt: skip
    bare = "without the weights"
    return [
        gates.Gate("largest difference of plan and peak", top(off), WITHIN, False, " %"),
        gates.Gate(f"largest difference of plan and peak, {bare}", top(alone), WITHIN, False, " %"),
        gates.Gate("largest excess of a budget", top(over), OVER, False, " %"),
        gates.Gate(f"largest excess of a budget, {bare}", top(grown), OVER, False, " %"),
        gates.Gate("speed kept at 35 %, best of these", top(kept), KEPT),
        gates.Gate("speed kept at 35 %, worst of these", min(kept, default=None), KEPT),
    ]


def top(found: list[float]) -> float | None:
    """The largest; None where nothing was measured."""
    return max(found, default=None)


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--real", action="store_true", help="smollm2-135m, fetched before")
    options.add_argument("--again", action="store_true", help="not go on from a run cut off")
    asked = options.parse_args()
    names = ("smollm2-135m", "smollm2-135m-draft") if asked.real else ("text-target", "text-draft")
    target, draft = asked.target or names[0], asked.draft or names[1]
    threads = asked.threads or 1
    every = settings(target, draft, asked.real)
    every = every[1:8:3] if asked.quick else every
    name = "memory_plan" + ("-real" if asked.real else "")
    kept = Kept(WORK / (f"{name}-quick" if asked.quick else name) / f"{threads}")
    if asked.again or asked.quick:
        shutil.rmtree(kept.folder, ignore_errors=True)
    kept.folder.mkdir(parents=True, exist_ok=True)
    how = asked.quick, threads
    rows = {one.name: kept.of(one.name, partial(compared, one, *how)) for one in every}
    points = {one.name: kept.of(f"shares of {one.name}", partial(frontier, one, *how))
              for one in frontiers(target, draft, asked.real, asked.quick)}  # fmt: skip
    judged = verdicts(rows, points)
    text = report(rows, points) + "\n" + gates.markdown(judged)
    document = {
        "environment": environment.describe(), "rows": rows, "frontiers": points,
        "gates": [gate.to_dict() for gate in judged],
    }  # fmt: skip
    gates.publish(asked.out, name, document, text)
    shutil.rmtree(kept.folder)
    print(text)
    return 0


def report(rows: dict[str, dict[str, Any]], points: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown of all tables."""
    lines = [
        "# The memory plan against measured peaks", "",
        "Each in a process of its own; the last column is all of that process, with the",
        "interpreter, its libraries and the captured graphs, which no plan counts.", "",
        "| configuration | weights planned | held | generation planned | grown | off | total "
        "planned | measured | off | process |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [line(name, row) for name, row in rows.items()]
    for name, found in points.items():
        lines += ["", f"## With a part of the generation memory: {name}", "",
                  "| share | generation memory | of its budget | tokens/s | kept |",
                  "|---|---:|---:|---:|---:|"]  # fmt: skip
        lines += [point_line(point) for point in found]
    return "\n".join(lines) + "\n"


def point_line(point: dict[str, Any]) -> str:
    """Of a frontier's table."""
    share = "no budget" if point["share"] is None else f"{100 * point['share']:.0f} %"
    if "refused" in point:
        return f"| {share} | refused | - | - | - |"
    kept = f"{point['kept']:.2f}" if "kept" in point else "1.00"
    grown = "-" if point["growth"] is None else told(point["growth"])
    filled = f"{100 * point['measured'] / point['budget']:.1f} %" if point["budget"] else "-"
    return f"| {share} | {grown} | {filled} | {point['tokens_per_second']:.1f} | {kept} |"


if __name__ == "__main__":
    main(run, __doc__)

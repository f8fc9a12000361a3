"""A first layer of the target's own: how much more is accepted, and what it costs in quality.

    python benchmarks/target_first.py [--quick] [--per-family 50] [--noise 0.5] [--resume]

Counted in batches at temperature 0.7 (`sampled_trees.py` takes the times): accepted tokens per
drafted layer (a layer is one draft forward; the target's own first layer is neither), and the share
of answers that pass the check of their task, beside plain sampling. Trains the decision models
first. Writes benchmarks/results/target_first.json and .md.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gates
import torch
from pair import (
    WORK,
    console,
    draft_noise,
    main,
    names,
    pair,
    parser,
    prompts,
    weak_name,
    weaker,
)
from rich.markup import escape

import foretoken
from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.bench.progress import Bar, shown
from foretoken.types import Draw, Step

BASE = "mcsd[k=4x2x2x1]"
INIT = "mcsd-target-init[k=2x4x4x1x1]"  # the paper's shapes, both of four drafted layers
DYNAMIC = "mcsd-dynamic[k=4,depth=5,soft]"
# Method and options; all draft four layers, the dynamic ones at most.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    BASE: ("mcsd", {"k": (4, 2, 2, 1)}),
    INIT: ("mcsd-target-init", {"k": (2, 4, 4, 1, 1)}),
    DYNAMIC: ("mcsd-dynamic", {"k": 4, "depth": 5, "head": "soft"}),
    "mcsd-dynamic[k=4,depth=5,hard]": ("mcsd-dynamic", {"k": 4, "depth": 5, "head": "hard"}),
    "mcsd-dynamic[k=1,depth=5,soft]": ("mcsd-dynamic", {"k": 1, "depth": 5, "head": "soft"}),
    "mcsd-dynamic[k=8,depth=5,soft]": ("mcsd-dynamic", {"k": 8, "depth": 5, "head": "soft"}),
    "mcsd-target-init[k=4x1x1x1x1]": ("mcsd-target-init", {"k": (4, 1, 1, 1, 1)}),
}
EXACT = ("plain", BASE, "mcsd-dynamic[k=1,depth=5,soft]")


@dataclass(slots=True)
class Count:
    """What became of one prompt under one row."""

    family: str
    right: bool = False  # the answer passed its check
    tokens: int = 0
    steps: int = 0  # target forwards
    nodes: int = 0
    layers: int = 0  # drafted by the draft model, where a step's first layer was known
    accepted: int = 0  # of these


def heads(asked: Any, session: Any, work: Path) -> dict[str, str]:
    """Folders of a soft and a hard decision model, trained on what one collection saw."""
    from foretoken.cli.train import prompts as some
    from foretoken.training.heads import run_training
    from foretoken.training.objectives.decision import DecisionTraining

    count, tokens, steps = (16, 16, 20) if asked.quick else (asked.train, 48, None)
    found = {}
    gathered = work / f"training-{count}-{tokens}-{asked.temperature}"
    for model in ("soft", "hard"):
        config = DecisionTraining(
            prompts=count, new_tokens=tokens, temperature=asked.temperature, model=model,
            steps=steps, epochs=5,
        )  # fmt: skip
        run_training(session, "decision", partial(some, None), config, gathered)
        found[model] = str(work / model)
        shutil.rmtree(work / model, ignore_errors=True)
        shutil.copytree(gathered, work / model, ignore=shutil.ignore_patterns("training"))
    return found


def counted(own: Any, tasks: Sequence[Any], asked: Any, bar: Bar) -> list[Count]:
    """One count per prompt, batch after batch."""
    found: list[Count] = []
    for start in range(0, len(tasks), asked.max_rows):
        batch = tasks[start : start + asked.max_rows]
        counts: dict[int, Count] = {}
        own.engine.listeners[:] = [partial(note, counts)]
        results = own.generate(
            [task.turns[0] for task in batch],
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            seed=asked.seed + start,
        )
        # Rows are numbered in the order of their prompts.
        for task, result, uid in zip(batch, results, sorted(counts), strict=True):
            count = counts[uid]
            count.family, count.right = task.family, task.check(result.text)
            found.append(count)
            bar.advance()
    return found


def note(counts: dict[int, Count], step: Step) -> None:
    """Add one step. A first layer of the target's own was not drafted.

    With such a layer the token a step ends with is an accepted one, so that the path is as long as
    what was accepted below it; the ordinary chains of these methods (a text's first steps) count
    as forwards only.
    """
    several = zip(step.rows, step.drafts, step.verdicts, step.emitted, strict=True)
    for row, draft, verdict, emitted in several:
        count = counts.setdefault(row.uid, Count(""))
        count.tokens += len(emitted)
        count.steps += 1
        count.nodes += len(draft.tree) - 1
        if draft.draw in (Draw.DISTINCT, Draw.TARGET) and len(draft.tree) > 1:
            count.layers += max(draft.tree.depths()) - (draft.draw is Draw.TARGET)
            count.accepted += len(verdict.path)


def collect(asked: Any) -> dict[str, list[Count]]:
    """Counts of every row; with `--resume` those that an earlier run has finished are read."""
    tasks = prompts(1 if asked.quick else asked.per_family, seed=asked.seed)
    setting = f"{len(tasks)}-{asked.max_new_tokens}-{asked.temperature}-{asked.seed}"
    work = WORK / ("target_first-quick" if asked.quick else "target_first")
    work = work / f"noise-{asked.noise:g}" if asked.noise else work
    (work / setting).mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Count]] = {}
    with (
        pair(asked.target, asked.draft) as models,
        weaker(models, asked.noise) as models,
        shown(False) as bar,
        foretoken.load(models.target, "chain", models.draft, max_rows=asked.max_rows) as session,
    ):
        trained = heads(asked, session, work)
        for label, (method, options) in ROWS.items():
            file = work / setting / (re.sub(r"[^\w-]+", "_", label) + ".json")
            if not (asked.resume and file.exists()):
                bar.begin(escape(label), len(tasks))
                if "head" in options:
                    options = {**options, "head": trained[options["head"]]}
                counts = counted(session.using(method, **options), tasks, asked, bar)
                file.write_text(json.dumps([asdict(count) for count in counts]))
            found[label] = [Count(**count) for count in json.loads(file.read_text())]
    return found


def acceptance(counts: Sequence[Count]) -> float:
    """Accepted tokens per drafted layer."""
    layers = sum(c.layers for c in counts)
    return sum(c.accepted for c in counts) / layers if layers else 0.0


def accuracy(counts: Sequence[Count]) -> float:
    """Share of answers that pass."""
    return sum(c.right for c in counts) / len(counts)


def over(
    statistic: Callable[..., float], above: Sequence[Count], below: Sequence[Count], ratio: bool
) -> dict[str, Any]:
    """A statistic of one row against another's on the same prompts, with its interval."""

    def at(chosen: Sequence[int]) -> float:
        high, low = (statistic([row[i] for i in chosen]) for row in (above, below))
        return (high / low if low else 0.0) if ratio else high - low

    return {"value": at(range(len(above))), "interval": interval(at, len(above))}


def summary(found: dict[str, list[Count]]) -> dict[str, Any]:
    """Every row's numbers."""
    rows = {}
    for label, counts in found.items():
        steps = sum(c.steps for c in counts)
        families = dict.fromkeys(c.family for c in counts)
        rows[label] = {
            "exact": label in EXACT,
            "prompts": len(counts),
            "acceptance": acceptance(counts),
            "over_mcsd": over(acceptance, counts, found[BASE], ratio=True),
            "tokens_per_forward": sum(c.tokens for c in counts) / steps,
            "layers_per_forward": sum(c.layers for c in counts) / steps,
            "nodes_per_forward": sum(c.nodes for c in counts) / steps,
            "accuracy": accuracy(counts),
            "over_plain": over(accuracy, counts, found["plain"], ratio=False),
            "by_family": {f: accuracy([c for c in counts if c.family == f]) for f in families},
        }
    return rows


def report(rows: dict[str, Any], checked: Sequence[gates.Gate], setting: str) -> str:
    """The result as Markdown."""
    families = list(rows["plain"]["by_family"])
    base = rows[BASE]["acceptance"]
    lines = [
        "# A first layer of the target's own", "", setting, "",
        "Counts, not times. Acceptance is accepted tokens per drafted layer, over mcsd's with its "
        "95 % interval over prompts; accuracy the share of answers that pass their check. Lossy "
        "rows follow another law than the target's: what that costs is their accuracy against "
        "plain sampling (difference and interval), here for small models and short answers.", "",
        gates.markdown(checked), "",
        f"mcsd itself keeps {base:.2f} of at most one token per layer, so {1 / base:.2f} times "
        "that is the most there could be on this pair.", "",
        "| row | law | acceptance | over mcsd | tokens/forward | layers | nodes | accuracy "
        "| against plain | " + " | ".join(families) + " |",
        "|---|---|---:|---|---:|---:|---:|---:|---|" + "---:|" * len(families),
    ]  # fmt: skip
    for label, row in rows.items():
        cells = [f"`{label}`", "exact" if row["exact"] else "lossy"]
        drafted = label != "plain"
        cells += [f"{row['acceptance']:.3f}", spanned(row["over_mcsd"])] if drafted else ["-", "-"]
        cells += [f"{row['tokens_per_forward']:.2f}", f"{row['layers_per_forward']:.2f}"]
        cells += [f"{row['nodes_per_forward']:.1f}", f"{row['accuracy']:.2f}"]
        cells += [spanned(row["over_plain"], "+") if drafted else "-"]
        cells += [f"{row['by_family'][family]:.2f}" for family in families]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spanned(one: dict[str, Any], sign: str = "") -> str:
    """A value and its interval."""
    low, high = one["interval"] or (one["value"], one["value"])
    return f"{one['value']:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--per-family", type=int, default=50, help="prompts of each family")
    options.add_argument("--train", type=int, default=96, help="prompts for the decision models")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--max-rows", type=int, default=16, help="prompts decoded together")
    options.add_argument("--temperature", type=float, default=0.7)
    options.add_argument("--seed", type=int, default=0)
    draft_noise(options)
    options.add_argument("--resume", action="store_true", help="keep rows that were counted before")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    rows = summary(collect(asked))
    checked = [
        gates.Gate(f"acceptance of `{label}` over `{BASE}`", rows[label]["over_mcsd"]["value"], 1.2)
        for label in (INIT, DYNAMIC)
    ]
    where = environment.describe()
    setting = (
        f"{names(asked)}; {rows['plain']['prompts']} held-out prompts, "
        f"temperature {asked.temperature:g}, at most {asked.max_new_tokens} new tokens, decision "
        f"models trained on {asked.train} other prompts. {where['date']}, foretoken "
        f"{where['foretoken']}, torch {where['torch']}, {where['cpu']}."
    )
    document = {
        "environment": where, "setting": setting, "rows": rows,
        "gates": [gate.to_dict() for gate in checked],
    }  # fmt: skip
    text = report(rows, checked, setting)
    files = gates.publish(Path(asked.out), weak_name("target_first", asked.noise), document, text)
    gates.show(checked, "Acceptance per drafted layer")
    for label in (INIT, DYNAMIC):
        console.print(f"accuracy against plain: {label} {spanned(rows[label]['over_plain'], '+')}",
                      markup=False)  # fmt: skip
    console.print(f"wrote {', '.join(str(file) for file in files)}", markup=False)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

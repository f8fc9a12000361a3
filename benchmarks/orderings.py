"""Which way of drawing candidates, and which rule, keeps more of them: counted, not timed.

    python benchmarks/orderings.py [--quick] [--per-family 50] [--resume]
    python benchmarks/orderings.py --resume --methods "mcsd,mcsd[verifier=traversal]"
    python benchmarks/orderings.py --noise 0.5          # the same with a draft that knows less

Every row writes after the same held-out prompts of the six families at temperature 1. Counted are
tokens per target forward and the share of steps in which a candidate was kept; intervals come from
resampling the prompts, and two rows are compared prompt by prompt. Rows are named as for
`foretoken bench`. Writes benchmarks/results/orderings.json and .md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import paired
import torch
from pair import (
    WORK,
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
from foretoken.bench.identity import model_contents, shortened
from foretoken.bench.intervals import interval
from foretoken.bench.progress import Bar, shown
from foretoken.bench.rows import RowSpec, parse_methods

ONE, WITH, WITHOUT = (
    "chain[depth=1]", "mcsd[k=3,depth=1,replacement=true]", "mcsd[k=3,depth=1]"
)  # fmt: skip
# Three tokens deep: chains of 3 nodes, trees of 14, the beam and SpecTr's chains of 12.
CHAIN, REPEATING, MCSD = (
    "chain[depth=3,verifier=recursive]", "mcsd[k=2x2x2,replacement=true]", "mcsd[k=2x2x2]"
)  # fmt: skip
RSD_C, RSD_S = "rsd-c[k=2x2x2]", "rsd-s[width=4,depth=3]"
SELECTED, REJECTED = "spectr[k=4,depth=3]", "spectr[k=4,depth=3,verifier=recursive]"
GREEDY, GREEDY_LEAVES = (
    "mcsd[k=2x2x2,greedy_draft=true,verifier=mixed]",
    "mcsd[k=2x2x2,greedy_draft=true,verifier=traversal]",
)
# The same trees under traversal verification, leaves first, and under the rule from the top.
LEAVES_FIRST = {
    "mcsd[k=2x2x2,verifier=traversal]": MCSD,
    "mcsd[k=2x2x2,replacement=true,verifier=traversal]": REPEATING,
    "spectr[k=4,depth=3,verifier=traversal]": REJECTED,
    "rsd-s[width=4,depth=3,verifier=traversal]": RSD_S,
    GREEDY_LEAVES: GREEDY,
}
# Twelve nodes for the target to score, however deep.
CHAIN_12, SPECTR_12, RSD_C_12, RSD_S_12 = (
    "chain[depth=12,verifier=recursive]", "spectr[k=3,depth=4]", "rsd-c[k=3x1x1x1]",
    "rsd-s[width=3,depth=4]",
)  # fmt: skip
ROWS = (
    ONE, WITH, WITHOUT, CHAIN, REPEATING, MCSD, RSD_C, RSD_S, SELECTED, REJECTED,
    CHAIN_12, SPECTR_12, RSD_C_12, RSD_S_12,
    "chain[depth=3]", "mcsd[k=2x2x2,verifier=naive]", GREEDY, *LEAVES_FIRST,
)  # fmt: skip
ORDERINGS = (
    ("three siblings with replacement, over one candidate", WITH, ONE),
    ("three siblings without replacement, over with", WITHOUT, WITH),
    ("equal length: rsd-s over rsd-c", RSD_S, RSD_C),
    ("equal length: rsd-c over mcsd (one law, two names)", RSD_C, MCSD),
    ("equal length: mcsd without replacement over with", MCSD, REPEATING),
    ("equal length: mcsd over chain", MCSD, CHAIN),
    ("equal length: mcsd with replacement over chain", REPEATING, CHAIN),
    ("spectr over recursive rejection of its drafts", SELECTED, REJECTED),
    ("equal length: spectr over chain", SELECTED, CHAIN),
    ("12 nodes: rsd-s over rsd-c", RSD_S_12, RSD_C_12),
    ("12 nodes: rsd-c over spectr", RSD_C_12, SPECTR_12),
    ("12 nodes: rsd-s over chain", RSD_S_12, CHAIN_12),
    ("equal length: recursive over naive", MCSD, "mcsd[k=2x2x2,verifier=naive]"),
    *((f"leaves first: {above} over {below}", above, below)
      for above, below in LEAVES_FIRST.items()),
    ("equal shape: greedy draft over drawn, from the top", GREEDY, MCSD),
    *((f"equal shape: greedy draft, leaves first, over {below}", GREEDY_LEAVES, below)
      for below in (MCSD, REPEATING, RSD_C, *list(LEAVES_FIRST)[:2])),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Count:
    """What became of one prompt under one row."""

    family: str
    tokens: int
    steps: int  # target forwards
    drafted: int
    hits: int  # steps in which a candidate was kept


def mean_length(counts: Sequence[Count]) -> float:
    """Tokens per target forward."""
    return sum(c.tokens for c in counts) / sum(c.steps for c in counts)


def hit_rate(counts: Sequence[Count]) -> float:
    """Share of target forwards that kept a candidate."""
    return sum(c.hits for c in counts) / sum(c.steps for c in counts)


def counted(session: Any, spec: RowSpec, tasks: Sequence[Any], asked: Any, bar: Bar) -> list[Count]:
    """One count per prompt, batch after batch."""
    own = session.using(spec.method, **spec.method_options)
    found: list[Count] = []
    for start in range(0, len(tasks), asked.max_rows):
        batch = tasks[start : start + asked.max_rows]
        results = own.generate(
            [task.turns[0] for task in batch],
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            seed=asked.seed + start,
        )
        for task, result in zip(batch, results, strict=True):
            hits = sum(step.accepted > 0 for step in result.steps)
            stats = result.stats
            found.append(Count(task.family, stats.tokens, stats.target_steps, stats.drafted, hits))
            bar.advance()
    return found


def collect(asked: Any, specs: Sequence[RowSpec]) -> dict[str, list[Count]]:
    """Counts of every row; with `--resume` those that an earlier run has finished are read."""
    tasks = prompts(1 if asked.quick else asked.per_family, seed=asked.seed)
    pairing = [model_contents(one) or one for one in (asked.target, asked.draft)]
    setting = f"{shortened(*map(str, pairing))}-{len(tasks)}-{asked.max_new_tokens}"
    setting += f"-{asked.temperature}-{asked.seed}"
    setting += f"-{asked.noise:g}" if asked.noise else ""
    work = WORK / ("orderings-quick" if asked.quick else "orderings") / setting
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Count]] = {}
    with (
        pair(asked.target, asked.draft) as models,
        weaker(models, asked.noise) as models,
        shown(False) as bar,
    ):
        session = foretoken.load(models.target, draft=models.draft, max_rows=asked.max_rows)
        with session:
            for spec in specs:
                file = work / (re.sub(r"[^\w-]+", "_", spec.label) + ".json")
                if not (asked.resume and file.exists()):
                    bar.begin(escape(spec.label), len(tasks))
                    counts = counted(session, spec, tasks, asked, bar)
                    file.write_text(json.dumps([asdict(count) for count in counts]))
                found[spec.label] = [Count(**count) for count in json.loads(file.read_text())]
    return found


def summary(counts: Sequence[Count]) -> dict[str, Any]:
    """A row's numbers, over all prompts and by family."""
    families = list(dict.fromkeys(count.family for count in counts))
    return {
        "prompts": len(counts),
        "tokens": sum(count.tokens for count in counts),
        "emitted_per_forward": mean_length(counts),
        "interval": interval(lambda at: mean_length([counts[i] for i in at]), len(counts)),
        "kept_a_candidate": hit_rate(counts),
        "nodes_per_forward": sum(c.drafted for c in counts) / sum(c.steps for c in counts),
        "by_family": {
            family: mean_length([count for count in counts if count.family == family])
            for family in families
        },
    }


def gap(above: Sequence[Count], below: Sequence[Count]) -> paired.Gap:
    """How much longer one row's accepted length is, on the same prompts."""

    def over(at: Sequence[int]) -> float:
        return mean_length([above[i] for i in at]) - mean_length([below[i] for i in at])

    return over


def report(rows: dict[str, Any], compared: Sequence[dict[str, Any]], setting: str) -> str:
    """The result as Markdown."""
    families = list(next(iter(rows.values()))["by_family"])
    lines = [
        "# What is kept of drawn candidates", "", setting, "",
        "Counts, not times. Accepted length is tokens per target forward, with its 95 % interval "
        "over prompts; the share is that of target forwards which kept a candidate.", "",
        "| row | accepted length | interval | kept one | nodes | " + " | ".join(families) + " |",
        "|---|---:|---|---:|---:|" + "---:|" * len(families),
    ]  # fmt: skip
    for label, row in rows.items():
        span = "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
        lines.append(
            f"| `{label}` | {row['emitted_per_forward']:.3f} | {span} "
            f"| {row['kept_a_candidate']:.3f} | {row['nodes_per_forward']:.1f} | "
            + " | ".join(f"{row['by_family'][family]:.2f}" for family in families)
            + " |"
        )
    return "\n".join([*lines, "", *paired.table(compared)]) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--methods", help="other rows, as `foretoken bench` names them")
    options.add_argument("--per-family", type=int, default=50, help="prompts of each family")
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--max-rows", type=int, default=16, help="prompts decoded together")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--seed", type=int, default=0)
    draft_noise(options)
    options.add_argument("--resume", action="store_true", help="keep rows that were counted before")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    specs = parse_methods(asked.methods or ROWS)
    labels = {spec.label for spec in specs}
    found = collect(asked, specs)
    rows = {label: summary(counts) for label, counts in found.items()}
    compared = [
        paired.ordering(
            claim, gap(found[above], found[below]), [count.family for count in found[above]]
        )
        for claim, above, below in ORDERINGS
        if {above, below} <= labels
    ]
    where = environment.describe()
    setting = (
        f"{names(asked)}; "
        f"{len(next(iter(found.values())))} held-out prompts, temperature {asked.temperature:g}, "
        f"at most {asked.max_new_tokens} new tokens. {where['date']}, foretoken "
        f"{where['foretoken']}, torch {where['torch']}, {where['cpu']}."
    )
    document = {"environment": where, "setting": setting, "rows": rows, "orderings": compared}
    text = report(rows, compared, setting)
    paired.publish(asked.out, weak_name("orderings", asked.noise), document, text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Several candidates per place against one, by the clock: what a wider draft is worth in time.

    python benchmarks/sampled_trees.py [--temperature 0.7] [--per-family 50] [--noise 0.45]

Rows of the multi-candidate papers in their own shapes, one request at a time, on the widened mini:
`spectr` with eight chains of eight, `mcsd`, `rsd-c`, `rsd-s`, and the target's own first layer
(`mcsd-target-init`, `mcsd-dynamic`; lossy). Each is held against a chain of its length and, the
lossy ones, against `mcsd`. Trains the decision model first. Writes
benchmarks/results/sampled_trees[-weak].json and .md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gates
from clocked import Clock
from pair import WORK, draft_noise, main, names, pair, parser, prompts, weak_name, weaker

import foretoken
from foretoken.bench import environment
from foretoken.bench.run import BenchConfig, run_bench

FIXED = "controller=fixed"
FOUR, EIGHT = f"chain[{FIXED},depth=4]", f"chain[{FIXED},depth=8]"
SPECTR, MCSD = f"spectr[{FIXED},k=8,depth=8]", f"mcsd[{FIXED},k=4x2x2x1]"
RSD_C, RSD_S = f"rsd-c[{FIXED},k=4x2x2x1]", f"rsd-s[{FIXED},width=4,depth=4]"
INIT = f"mcsd-target-init[{FIXED},k=2x4x4x1x1]"
COSTED = "chain[controller=cost_model]"


def decision_model(asked: Any, models: Any) -> Path:
    """A soft decision model for `mcsd-dynamic`: the one asked for, or one trained now."""
    if asked.head is not None:
        return Path(asked.head)
    from foretoken.cli.train import prompts as some
    from foretoken.training.heads import run_training
    from foretoken.training.objectives.decision import DecisionTraining

    count, tokens, steps = (16, 16, 20) if asked.quick else (96, 48, None)
    out = WORK / ("sampled_trees-quick" if asked.quick else "sampled_trees") / "decision"
    config = DecisionTraining(
        prompts=count, new_tokens=tokens, temperature=asked.temperature, steps=steps, epochs=5
    )
    with foretoken.load(models.target, "chain", models.draft) as session:
        run_training(session, "decision", partial(some, None), config, out)
    return out


def held_against(dynamic: str) -> dict[str, str | None]:
    """Every row, and what it is fairly held against."""
    return {
        "plain": None, FOUR: None, EIGHT: None, COSTED: None, SPECTR: EIGHT, MCSD: FOUR,
        RSD_C: MCSD, RSD_S: MCSD, INIT: MCSD, dynamic: MCSD,
    }  # fmt: skip


def chosen(held: dict[str, str | None], methods: list[str] | None) -> dict[str, str | None]:
    """The rows of these methods, and those that they are held against; all, if none are named."""
    if not methods:
        return held
    known = {row.split("[")[0] for row in held}
    if unknown := {*methods} - known:
        raise SystemExit(f"no row of {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    rows = {row for row in held if row.split("[")[0] in methods}
    rows |= {other for row in rows if (other := held[row]) is not None}
    return {row: other if other in rows else None for row, other in held.items() if row in rows}


def verdicts(clock: Clock, dynamic: str) -> list[gates.Gate]:
    """The papers' ratios of the rows there are, in tokens per step and by the clock."""

    def gate(above: str, below: str, bound: float, by: str = "seconds") -> gates.Gate:
        unit = "time" if by == "seconds" else "tokens per step"
        found = clock.over(above, below, by)["value"]
        return gates.Gate(f"{above} over {below}, {unit}", found, bound, unit="x")

    bounds = [
        (SPECTR, EIGHT, 1.2, "steps"), (SPECTR, EIGHT, 1.0), (MCSD, FOUR, 1.0, "steps"),
        (MCSD, FOUR, 1.0), (RSD_S, MCSD, 1.0, "steps"), (RSD_S, MCSD, 1.0),
        (INIT, MCSD, 1.0, "steps"), (INIT, MCSD, 1.0), (dynamic, MCSD, 1.0, "steps"),
        (dynamic, MCSD, 1.0),
    ]  # fmt: skip
    return [gate(*bound) for bound in bounds if {*bound[:2]} <= {*clock.work}]


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--head", type=Path, help="folder of a trained decision model")
    options.add_argument("--params", default="350M", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=50, help="prompts of each family")
    options.add_argument("--methods", nargs="*", help="these, and what they are held against")
    options.add_argument("--name", default="", help="of such a run, in the result's name")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.7)
    draft_noise(options)
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    name = weak_name("sampled_trees" + (f"-{asked.name}" if asked.name else ""), asked.noise)
    with pair(asked.target, asked.draft) as small, weaker(small, asked.noise) as small:
        chosen(held_against("mcsd-dynamic[]"), asked.methods)  # refuses before anything is trained
        head = decision_model(asked, small)
        dynamic = f"mcsd-dynamic[head={head},k=4,depth=5]"
        with pair(asked.target, str(small.draft), None if asked.quick else asked.params) as models:
            config = BenchConfig(
                target=models.target, draft=models.draft, dtype="float32",
                methods=list(chosen(held_against(dynamic), asked.methods)), repetitions=1,
                out=WORK / (name + ("-quick" if asked.quick else "")),
                max_new_tokens=16 if asked.quick else asked.max_new_tokens,
                temperature=asked.temperature, threads=asked.threads, resume=asked.resume,
                title="Several candidates per place, by the clock",
            )  # fmt: skip
            results = run_bench(config, prompts(1 if asked.quick else asked.per_family))
    clock, dynamic = Clock.of(config.out), f"mcsd-dynamic[head={head.name},k=4,depth=5]"
    found = verdicts(clock, dynamic)
    setting = results["setting"]
    size = "" if asked.target else f", the target widened to {asked.params}"
    told = (
        f"{names(asked)}{size}; {setting['prompts']} prompts, "
        f"temperature {asked.temperature:g}, at most {setting['max_new_tokens']} new tokens. "
        "The target-first rows are lossy."
    )
    document = {
        "environment": environment.describe(), "setting": told, "results": results,
        "gates": [gate.to_dict() for gate in found],
    }  # fmt: skip
    text = f"# {results['title']}\n\n{told}\n\n{gates.markdown(found)}\n"
    held = chosen(held_against(dynamic), asked.methods)
    table = clock.table(held, base=next(iter(held)))
    gates.publish(asked.out, name, document, text + table)
    gates.show(found, results["title"])
    return 0


if __name__ == "__main__":
    main(run, __doc__)

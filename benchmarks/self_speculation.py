"""A target that guesses for itself: exits that follow the text against every fixed one, and layers
that are skipped.

    python benchmarks/self_speculation.py                    # the 350M mini
    python benchmarks/self_speculation.py --target DIR --tasks FILE --name real

`del` is held against a sweep of `layerskip` over exits and lengths, ours and as published: by the
clock, rows interleaved. `swift` stands beside them, ours and as published, and a line tells what
its search found. Writes benchmarks/results/self_speculation[-NAME].json and .md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gates
from clocked import Clock
from pair import WORK, main, pair, parser, prompts

from foretoken.bench import environment
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task, load_file, spread

PAPER_DEL = "del[every_exit=true,look_every=1,look_back=32,controller=fixed]"
SWIFT = "swift"
PAPER_SWIFT = "swift[controller=fixed,search_share=1000000,bayes_interval=25]"


def sweep(exits: Sequence[int], lengths: Sequence[int]) -> list[str]:
    """Fixed exits and lengths, each as the paper's LayerSkip drafts."""
    return [
        f"layerskip[exit_layer={exit},controller=fixed,depth={depth}]"
        for exit in exits
        for depth in lengths
    ]


def tasks_of(asked: Any) -> list[Task]:
    """Prompts of the mini's families, or of a file, which a chat template may wrap."""
    if asked.tasks is None:
        return prompts(1 if asked.quick else asked.per_family)
    return spread(load_file(asked.tasks), asked.limit)


def fastest(results: dict[str, Any], start: str) -> str | None:
    return gates.best(results, lambda label: label.startswith(start), whole=True)


def by_family(results: dict[str, Any], label: str | None, others: Sequence[str]) -> dict[str, Any]:
    """How fast a row is in each family over the best of others there, and which that is."""
    found = {}
    for family in results["families"]:

        def speed(row: str, family: str = family) -> float:
            own = results["rows"][row]["families"].get(family)
            return own["speedup"]["total"] if own else 0.0

        best = max(others, key=speed)
        if label is not None and speed(best):
            found[family] = {"best": best, "share": speed(label) / speed(best)}
    return found


def verdicts(results: dict[str, Any]) -> list[gates.Gate]:
    """What the issue asks of these rows; a bound that is missed is told as missed."""
    best = fastest(results, "layerskip")

    def over(label: str, other: str | None) -> float | None:
        return gates.ratio(results, label, other, whole=True)

    return [
        gates.Gate(f"del over the best of the sweep ({best})", over("del", best), 1.0),
        gates.Gate("del over del as published", over("del", PAPER_DEL), 1.0),
        gates.Gate(f"del as published over the best of the sweep ({best})",
                   over(PAPER_DEL, best), 1.0),
        gates.Gate("swift over plain", over(SWIFT, "plain"), 0.97),
        gates.Gate("swift over swift as published", over(SWIFT, PAPER_SWIFT), 1.0),
    ]  # fmt: skip


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", default="350M", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=2, help="prompts of each family")
    options.add_argument("--tasks", type=Path, help="JSON lines of prompts, for another target")
    options.add_argument("--limit", type=int, default=26, help="prompts taken of --tasks")
    options.add_argument("--exits", type=int, nargs="*", default=(1, 2, 3, 4), help="of the sweep")
    options.add_argument("--lengths", type=int, nargs="*", default=(2, 4, 6, 8))
    options.add_argument("--dtype", default="float32")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--name", default="", help="of another target, in the result's name")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    exits, lengths = asked.exits, asked.lengths
    name = "self_speculation" + (f"-{asked.name}" if asked.name else "")
    with pair(asked.target, asked.draft, None if asked.quick else asked.params) as models:
        config = BenchConfig(
            target=models.target, dtype=asked.dtype,
            methods=["plain", *sweep(exits, lengths), "del", PAPER_DEL, SWIFT, PAPER_SWIFT],
            out=WORK / (name + ("-quick" if asked.quick else "")), repetitions=1,
            max_new_tokens=16 if asked.quick else asked.max_new_tokens,
            temperature=asked.temperature, threads=asked.threads, resume=asked.resume,
            title="Self-speculation: exits that follow the text, and skipped layers",
        )  # fmt: skip
        results = run_bench(config, tasks_of(asked))
    found = verdicts(results)
    fixed = [label for label in results["rows"] if label.startswith("layerskip")]
    families = by_family(results, "del", fixed)
    document = {
        "environment": environment.describe(),
        "gates": [gate.to_dict() for gate in found],
        "del_by_family": families,
        "results": results,
    }
    notes = [f"- {label}: {note}" for label, note in results["notes"].items() if note]
    lines = ["| family | best fixed exit and length | del over it |", "|---|---|---:|"]
    lines += [f"| {f} | {one['best']} | {one['share']:.2f} |" for f, one in families.items()]
    setting = results["setting"]
    text = "\n".join([
        f"# {results['title']}", "",
        f"{setting['models']['target']} in {asked.dtype}, {setting['prompts']} prompts, "
        f"temperature {asked.temperature:g}, at most {setting['max_new_tokens']} new tokens.", "",
        gates.markdown(found), Clock.of(config.out).table({"del": fastest(results, "layerskip")}),
        *notes, "", *lines, "",
    ])  # fmt: skip
    gates.publish(asked.out, name, document, text)
    gates.show(found, results["title"])
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Methods without a second model, on a target of about 350M parameters, family by family.

    python benchmarks/stage_c.py            # about half an hour on two cores
    python benchmarks/stage_c.py --quick
    python benchmarks/stage_c.py --exits DIR    # with specee, from `foretoken train exits`

Every prompt is new to every row, and each row keeps what it learned from the prompts before, as a
server would: so there is one repetition, and the intervals are over prompts. The datastore of
`rest` and one `rasd` holds generated traffic and source files, both of the training split. Rows are
held against each other by all their tokens over all their seconds. Text that does not repeat
itself is for `never_slower.py`. Writes benchmarks/results/stage_c.json, .md, .svg and .html.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gates
from pair import ROOT, WORK, console, main, pair, parser, prompts
from stage_a import publish

from foretoken.bench.journal import Cell, read_journal
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task, single, spread
from foretoken.cli.datastore import build
from foretoken.controllers.step_costs import CostCurve
from foretoken.minis.corpus import code_modules, code_piece

Speeds = dict[str, dict[str, float]]  # by family and row

EQUAL = 16  # nodes at which look-up and recycled tokens are held against each other
REPETITIVE = ("dialogue", "retrieval", "summarisation")
MORE = ("chain", "tree", "rest", "rasd")  # given what `auto` is not: a draft model, a datastore


def code(count: int) -> list[Task]:
    """First halves of held-out standard-library source."""
    rng = random.Random("stage c")
    pieces = [code_piece("test", rng) for _ in range(count)]
    return [
        single(piece[: len(piece) // 2], id=f"code/{n}", family="code")
        for n, piece in enumerate(pieces)
    ]


def store(target: Path | str, traffic: int) -> Path:
    """A new datastore of generated traffic, and of source files, both of the training split."""
    out = WORK / "store"
    shutil.rmtree(out, ignore_errors=True)
    build(out, list(code_modules("train")), traffic=traffic, target=str(target))
    return Path(os.path.relpath(out))


def rows(datastore: Path, exits: Path | None) -> list[str]:
    """The paper's own template or fixed setting, and beside it what the cost model picks."""
    found = ["plain", "lookahead"]
    for name in ("prompt-lookup", "token-recycling", "suffix"):
        found += [f"{name}[preset=paper]", name]
    found += [f"rest[datastore={datastore}]", "tree", f"rasd[datastore={datastore}]", "rasd"]
    found += [f"prompt-lookup[controller=fixed,matches=16,depth=10,nodes={EQUAL}]"]
    found += [f"token-recycling[controller=fixed,depth=6,nodes={EQUAL}]"]
    found += [f"layerskip[exit_layer={layer},depth={n}]" for layer, n in ((2, 4), (2, 6), (3, 4))]
    found += ["del", "del[preset=paper]", "swift", "fused", "auto"]
    if exits is not None:
        found += [f"specee[predictors={exits}]"]
        found += [f"specee[predictors={exits},shape=nothing,controller=fixed]"]
    return found


def named(results: dict[str, Any], start: str) -> str | None:
    """The fastest row whose label begins so."""
    return gates.best(results, lambda label: label.startswith(start), whole=True)


def length(
    results: dict[str, Any], label: str | None, families: Sequence[str] = ()
) -> float | None:
    """Mean accepted length of a row, over all families or the mean over some."""
    row = results["rows"].get(label or "", {})
    if row.get("failed") or not row:
        return None
    if not families:
        return row["accepted_length"]["emitted_per_forward"]
    found = [row["families"][f]["accepted_length"] for f in families if f in row["families"]]
    return sum(found) / len(found) if found else None


def over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def rivals(results: dict[str, Any]) -> set[str]:
    """The rows that `auto` is held against: exact, with nothing that it is not given."""
    rows = results["rows"].items()
    return {n for n, r in rows if not r["failed"] and r["lossless"] and r["method"] not in MORE}


def by_clock(results: dict[str, Any]) -> Speeds:
    """All tokens over all seconds, as multiples of plain's."""
    return {
        family: {
            name: results["rows"][name]["families"][family]["speedup"]["total"]
            for name in rivals(results)
            if (results["rows"][name]["families"].get(family) or {}).get("speedup")
        }
        for family in results["families"]
    }


def by_price(results: dict[str, Any], cells: Sequence[Cell]) -> Speeds:
    """Tokens per second if every target forward took what its nodes cost when that was measured.

    The same forward takes 10 to 20 % longer in one second than in another on a small machine, and
    a cell has two or three. Drafts count as timed.
    """
    scoring, names = results["scoring"], rivals(results)
    price = CostCurve(dict(zip(scoring["nodes"], scoring["ms"], strict=True)))
    spent: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        if cell.row in names:
            seconds = cell.draft + sum(price.at(1 + nodes) for nodes, *_ in cell.steps) / 1000.0
            found = spent.setdefault(cell.family, {}).setdefault(cell.row, [0.0, 0.0])
            found[0] += len(cell.tokens)
            found[1] += seconds
    return {
        family: {name: tokens / seconds for name, (tokens, seconds) in rows.items()}
        for family, rows in spent.items()
    }


def auto_share(speeds: Speeds) -> tuple[float | None, str]:
    """The speed of `auto` over that of the best row of a family, where it does worst."""
    worst, where = None, "no family"
    for family, found in speeds.items():
        if "auto" not in found:
            continue
        best = max(found, key=lambda name: found[name])
        share = found["auto"] / found[best]
        if worst is None or share < worst:
            worst, where = share, f"{family}, where {best} is best"
    return worst, where


def verdicts(results: dict[str, Any], cells: Sequence[Cell]) -> list[gates.Gate]:
    """The bars of this stage."""
    found = results["rows"]

    def faster(start: str, bar: float) -> gates.Gate:
        label = named(results, start)
        measured = gates.ratio(results, label, "plain", whole=True)
        return gates.Gate(f"{label or start} over plain", measured, bar, unit="x")

    def above(label: str | None, other: str | None) -> float | None:
        return gates.ratio(results, label, other, whole=True)

    recycled = length(results, "token-recycling[preset=paper]")
    equal = [
        length(results, f"{name}[controller=fixed,{size},nodes={EQUAL}]")
        for name, size in (("token-recycling", "depth=6"), ("prompt-lookup", "matches=16,depth=10"))
    ]
    suffix, lookup = (
        length(results, f"{name}[preset=paper]", REPETITIVE) for name in ("suffix", "prompt-lookup")
    )
    rasd, rest = named(results, "rasd[datastore"), named(results, "rest")
    fused = named(results, "fused")
    single_best = gates.best(
        results,
        lambda n: n.split("[")[0] in ("prompt-lookup", "suffix", "token-recycling"),
        whole=True,
    )
    share, where = auto_share(by_clock(results))
    priced, there = auto_share(by_price(results, cells))
    answers = [found.get(n, {}).get("accuracy") for n in (named(results, "specee"), "plain")]
    lost = answers[1]["value"] - answers[0]["value"] if all(answers) else None
    return [
        gates.Gate("token-recycling, accepted length with 80 nodes", recycled, 2.5),
        faster("token-recycling", 1.3),
        gates.Gate(f"token-recycling over a tree of look-ups, {EQUAL} nodes", over(*equal), 1.0),
        gates.Gate("suffix over prompt-lookup, repetitive families", over(suffix, lookup), 1.0),
        gates.Gate("rasd over its tree", above(rasd, "tree"), 1.0),
        gates.Gate("rasd from the text over its tree", above("rasd", "tree"), 1.0),
        gates.Gate("rasd over rest", above(rasd, rest), 1.0),
        faster("layerskip", 1.2),
        gates.Gate(
            "del over the best layerskip",
            above(named(results, "del"), named(results, "layerskip")), 1.0,
        ),
        faster("swift", 1.05),
        faster("specee", 1.1),
        gates.Gate("specee over the tree of the same draft",
                   above(named(results, "specee"), "tree"), 1.0),
        gates.Gate("specee, accuracy lost", lost, 0.01, at_least=False),
        gates.Gate(f"fused over {single_best}", above(fused, single_best), 1.0),
        gates.Gate(f"auto over the best row ({where})", share, 0.95),
        gates.Gate(f"the same, target forwards at one price ({there})", priced, 0.95),
    ]  # fmt: skip


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", default="350M", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=3, help="prompts of each family")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--methods", nargs="*", help="other rows")
    options.add_argument("--datastore", type=Path, help="for rest and rasd (default: a new one)")
    options.add_argument("--exits", type=Path, help="trained predictors for specee")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    quick = asked.quick
    count = 1 if quick else asked.per_family
    with pair(asked.target, asked.draft, asked.params) as models:
        methods = asked.methods
        if not methods:
            datastore = asked.datastore or store(models.target, 200 if quick else 20_000)
            methods = rows(datastore, asked.exits)
        tasks = spread([*prompts(count), *code(count)], 3 if quick else None)
        config = BenchConfig(
            target=models.target,
            draft=models.draft,
            dtype="float32",
            methods=methods,
            out=WORK / ("stage_c-quick" if quick else "stage_c"),
            repetitions=1,
            max_new_tokens=16 if quick else asked.max_new_tokens,
            threads=asked.threads,
            resume=asked.resume,
            title="Nothing to train, no second model",
        )
        results = run_bench(config, tasks)
    found = verdicts(results, read_journal(config.out / "journal.jsonl")[1].cells)
    if asked.methods:  # bounds of rows that nobody asked for are not missed
        found = [gate for gate in found if gate.measured is not None]
    results["gates"] = [gate.to_dict() for gate in found]
    publish(results, found, config.out, asked.out, "stage_c")
    gates.show(found, results["title"])
    console.print(
        f"results in {asked.out.relative_to(ROOT) if asked.out.is_relative_to(ROOT) else asked.out}"
    )
    return 0


if __name__ == "__main__":
    main(run, __doc__)

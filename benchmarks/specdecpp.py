"""Lengths by a trained head against the best fixed length and the draft's own confidence.

    python benchmarks/specdecpp.py --head DIR          # from `foretoken train acceptance`
    python benchmarks/specdecpp.py --quick             # trains a tiny head first

Writes benchmarks/results/specdecpp.json and .md: interleaved tokens per second at temperature 1 on
the widened mini with their intervals over at least 100 prompts, and how much of the way to perfect
lengths the head goes, by one cost model. Where the fastest fixed length is the longest that was
tried, the result says so: the sweep then ends where speed still rises. A run that was interrupted
after some prompts may go on with its best rows only (`--resume --only ROW ...`); the others keep
the prompts they have, and the table says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gates
from clocked import Clock, spanned
from pair import WORK, main, pair, parser, prompts

import foretoken
from foretoken.bench import environment
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.controllers.step_costs import CostCurve
from foretoken.engine.measure import measure_costs
from foretoken.engine.session import Session

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20)
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
CONFIDENCE = (0.2, 0.4, 0.6)
LONGEST = 20
Round = tuple[int, int]  # drafted, accepted


@contextmanager
def head_at(given: Path | None, models: Any, quick: bool) -> Any:
    """The head asked for, or one trained now."""
    if given is not None:
        yield given
        return
    from foretoken.cli.train import prompts as some
    from foretoken.training.heads import run_training
    from foretoken.training.objectives.acceptance import AcceptanceTraining

    count, tokens, steps = (16, 16, 20) if quick else (600, 64, 600)
    config = AcceptanceTraining(prompts=count, new_tokens=tokens, steps=steps)
    with TemporaryDirectory(prefix="foretoken-") as folder:
        out = Path(folder)
        with foretoken.load(models.target, "chain", models.draft) as session:
            run_training(session, "acceptance", partial(some, None), config, out)
        yield out


def rounds(session: Session, tasks: Sequence[Any], tokens: int) -> list[Round]:
    """What was drafted and accepted in every round at temperature 1."""
    texts = [task.turns[0] for task in tasks]
    found = session.generate_rows(texts, tokens, temperature=1.0, seed=0)
    return [(step.drafted, step.accepted) for one in found for step in one.steps if step.drafted]


def rate(found: Sequence[Round], target: CostCurve, draft: CostCurve, overhead: float) -> float:
    """Tokens per second of rounds under the cost table."""
    seconds = sum(target.at(n + 1) + (draft.at(n) if n else 0.0) + overhead for n, _ in found)
    return sum(accepted + 1 for _, accepted in found) / seconds


def oracle_gap(models: Any, head: Path, tasks: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Modelled rates of fixed lengths, of the head, and of lengths that are never wrong.

    A draft of LONGEST tokens shows how far each round would have gone; cut to k tokens it accepts
    the smaller of the two. The oracle drafts exactly what will be accepted.
    """
    with foretoken.load(
        models.target, "chain", models.draft, depth=LONGEST, verifier="recursive"
    ) as session:
        costs = measure_costs(session.engine)
        target, draft = CostCurve(costs.target), CostCurve(costs.draft)
        runs = [accepted for _, accepted in rounds(session, tasks, tokens)]
        using = session.using("specdec++", head=str(head), verifier="recursive")
        chosen = rounds(using, tasks, tokens)
    fixed = {
        k: rate([(k, min(k, run)) for run in runs], target, draft, costs.overhead) for k in LENGTHS
    }
    found = {
        "plain": rate([(0, 0)], target, draft, costs.overhead),
        "fixed": fixed,
        "head": rate(chosen, target, draft, costs.overhead),
        "oracle": rate([(run, run) for run in runs], target, draft, costs.overhead),
    }
    best = max(fixed.values())
    found["share_of_the_gap"] = (found["head"] - best) / (found["oracle"] - best)
    found["mean_length"] = sum(n for n, _ in chosen) / len(chosen)
    found["discarded"] = sum(n - a for n, a in chosen) / sum(a + 1 for _, a in chosen)
    return found


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--head", type=Path, help="folder of a trained acceptance head")
    options.add_argument("--params", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=17, help="prompts of each family")
    options.add_argument("--repetitions", type=int, default=1)
    options.add_argument("--lengths", type=int, nargs="*", help="fixed lengths of the sweep")
    options.add_argument("--thresholds", type=float, nargs="*", help="of the head")
    options.add_argument("--only", nargs="*", help="rows that an interrupted run goes on with")
    options.add_argument("--no-oracle", action="store_true", help="speeds only")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    quick = asked.quick
    params = asked.params or (None if quick else "350M")
    tasks = prompts(1, limit=2) if quick else prompts(asked.per_family)
    tokens = 16 if quick else asked.max_new_tokens
    with (
        pair(asked.target, asked.draft, params) as models,
        head_at(asked.head, models, quick) as head,
    ):
        lengths, bounds, doubts = (
            ((2, 5), (0.7,), (0.4,))
            if quick
            else (asked.lengths or LENGTHS, asked.thresholds or THRESHOLDS, CONFIDENCE)
        )
        methods = [
            "plain",
            *(f"chain[controller=fixed,depth={k}]" for k in lengths),
            *(f"chain[controller=confidence,threshold={c}]" for c in doubts),
            "chain[controller=cost_model]",
            *(f"specdec++[head={head},threshold={h}]" for h in bounds),
        ]
        config = BenchConfig(
            target=models.target,
            draft=models.draft,
            dtype="float32",
            methods=asked.only or methods,
            out=WORK / ("specdecpp-quick" if quick else "specdecpp"),
            repetitions=1 if quick else asked.repetitions,
            max_new_tokens=tokens,
            temperature=1.0,
            threads=asked.threads,
            resume=asked.resume,
            title="Lengths by an acceptance head",
        )
        results = run_bench(config, tasks)
        gap = None if asked.no_oracle else oracle_gap(models, head, tasks, tokens)
    publish(results, gap, Clock.of(config.out), asked.out)
    return 0


def way_left(gap: dict[str, Any]) -> str:
    """How far the head goes towards perfect lengths, in words."""
    steps = ", ".join(f"{k}: {value:.1f}" for k, value in gap["fixed"].items())
    return (
        "\n## How far from perfect lengths\n\nBy one cost table measured on this machine, tokens/s "
        f"of fixed lengths are {steps}; of the head {gap['head']:.1f}; of lengths that are never "
        f"wrong {gap['oracle']:.1f}. The head goes {gap['share_of_the_gap']:.0%} of the way from "
        f"the best fixed length to the oracle; its drafts have {gap['mean_length']:.1f} tokens on "
        f"average, and {gap['discarded']:.2f} are thrown away per token written.\n"
    )


def publish(results: dict[str, Any], gap: dict[str, Any] | None, clock: Clock, out: Path) -> None:
    """Gates, speeds with their intervals, and the oracle's gap where it was asked for."""
    fixed = clock.best("chain[controller=fixed")
    learned, unsure = clock.best("specdec++"), clock.best("chain[controller=confidence")
    over = {"the best fixed length": fixed, "the draft's own confidence": unsure,
            "the cost model": "chain[controller=cost_model]"}  # fmt: skip
    found = [
        gates.Gate(f"specdec++ over {name}", clock.over(learned, label)["value"], bound, unit="x")
        for (name, label), bound in zip(over.items(), (1.03, 1.0, 1.0), strict=True)
    ]
    swept = [label for label in clock.work if label.startswith("chain[controller=fixed")]
    rising = fixed == max(swept, key=lambda label: int(label.split("depth=")[1].rstrip("]")))
    document = {
        "environment": environment.describe(),
        "gates": [gate.to_dict() for gate in found],
        "best": {"fixed": fixed, "specdec++": learned, "confidence": unsure},
        "still_rising": rising,
        "over": {name: clock.over(learned, label) for name, label in over.items()},
        "oracle": gap,
        "results": results,
    }
    told = results["setting"]
    text = f"# Lengths by an acceptance head\n\n{gates.markdown(found)}\n"
    text += f"{told['prompts']} prompts, at most {told['max_new_tokens']} new tokens each.\n\n"
    text += f"`{learned}` over, with 95 % intervals over prompts: " + "; ".join(
        f"{name} (`{label}`) {spanned(clock.over(learned, label))}" for name, label in over.items()
    )
    text += ".\n\n"
    if rising:
        text += "The fastest fixed length is the longest tried: speed may rise beyond it.\n\n"
    text += clock.table({learned: fixed} if learned else {})
    if gap is not None:
        text += way_left(gap)
    gates.publish(out, "specdecpp", document, text)
    gates.show(found, "specdec++")


if __name__ == "__main__":
    main(run, __doc__)

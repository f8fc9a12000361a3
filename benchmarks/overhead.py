"""What a step costs beside its model forwards, at two context lengths, one row.

    python benchmarks/overhead.py [--quick] [--contexts 200,2000]

Each model's forwards are timed, as they were captured; the rest of a step is overhead: trees,
masks, cache bookkeeping, laws, verdicts, commits, Python. Writes benchmarks/results/overhead.json
and .md.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import gates
import torch
from pair import console, main, pair, parser, prompts

from foretoken.bench import environment
from foretoken.bench.models import Models
from foretoken.bench.rows import parse_methods
from foretoken.coins import SeededCoins
from foretoken.engine.engine import decode
from foretoken.row import make_row
from foretoken.types import SamplingParams

MOST = {  # milliseconds of a step outside forwards, at the shorter context
    "plain": 0.25,
    "chain[depth=5]": 0.7,
    "tree[depth=5]": 1.0,
    "prompt-lookup[depth=5]": 1.0,
    "chain": 1.0,
    "auto": 1.25,
}
METHODS = ",".join(MOST)


@dataclass(slots=True)
class ForwardClock:
    """Seconds inside the models' own forwards."""

    seconds: float = 0.0

    def watch(self, lm: Any) -> None:
        """Time the forwards of a language model, captured or not."""
        if lm.lean is not None:
            lm.lean.run = self.timed(lm.lean.run)
        else:
            lm.model.forward = self.timed(lm.model.forward)
        if (trees := getattr(lm, "trees_at_once", None)) is not None:
            trees.grow = self.of_trees(trees, trees.grow)

    def of_trees(self, trees: Any, grow: Any) -> Any:
        """Forwards of trees that grow in one call, which times them itself."""

        def call(*given: Any) -> Any:
            trees.seconds = 0.0
            grown = grow(*given)
            self.seconds += trees.seconds
            return grown

        return call

    def timed(self, run: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return run(*given, **named)
            finally:
                self.seconds += perf_counter() - began

        return call


def steps(row: Any, prompt: list[int], tokens: int, clock: ForwardClock) -> list[tuple[float, ...]]:
    """Milliseconds of every step but the first: outside forwards, the loop's own, whole."""
    engine = row.engine
    params = SamplingParams(max_new_tokens=tokens)
    state = make_row(prompt, params, SeededCoins(0), engine.target.vocab_size)
    found: list[tuple[float, ...]] = []
    mark = None
    for record in decode([state], engine):
        now = perf_counter()
        if mark is not None:  # the first step comes with the prompt
            passed = now - mark
            found.append(
                tuple(1000 * s for s in (passed - clock.seconds, record.times.other, passed))
            )
        clock.seconds, mark = 0.0, perf_counter()
    return found


def context(models: Models, length: int, seed: int) -> list[int]:
    """`length` tokens of held-out prompts."""
    ids: list[int] = []
    for task in prompts(12, seed=seed):
        ids += models.tokenizer(task.turns[0])["input_ids"]
        if len(ids) >= length:
            return ids[:length]
    return (ids * (length // len(ids) + 1))[:length]


def measure(models: Models, lengths: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds per step by method and context, rounds interleaved."""
    rows = {spec.label: models.row(spec) for spec in parse_methods(METHODS)}
    clock = ForwardClock()
    for role in ("target", "draft"):
        clock.watch(models.own(role))
    texts = {n: [context(models, n, seed) for seed in range(rounds + 1)] for n in lengths}
    found: dict[str, dict[int, list[tuple[float, ...]]]] = {
        label: {n: [] for n in lengths} for label in rows
    }
    for turn in range(rounds + 1):
        for label, row in rows.items():
            for n in lengths:
                seen = steps(row, texts[n][turn], tokens, clock)
                if turn:  # the first round warms
                    found[label][n] += seen
    names = ("outside_forwards", "loop", "whole")
    return {
        label: {
            str(n): {
                name: median(step[i] for step in seen) if seen else None
                for i, name in enumerate(names)
            }
            for n, seen in by_length.items()
        }
        for label, by_length in found.items()
    }


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--contexts", default="200,2000", help="prompt lengths to compare")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    lengths = [int(n) for n in asked.contexts.split(",")]
    tokens, rounds = (12, 1) if asked.quick else (asked.max_new_tokens, asked.rounds)
    with pair(asked.target, asked.draft) as where:
        models = Models(where.target, where.draft, dtype="float32")
        most = models.own("target").max_length
        if most is not None and max(lengths) + tokens > most:
            console.print(f"contexts are cut to the model's {most} positions", style="yellow")
            lengths = sorted({min(n, most - tokens) for n in lengths})
        found = measure(models, lengths, tokens, rounds)
    short, long = str(lengths[0]), str(lengths[-1])
    verdicts = []
    for label, by_length in found.items():
        here, there = (by_length[n]["outside_forwards"] for n in (short, long))
        verdicts.append(
            gates.Gate(f"{label}: overhead at context {short}", here, MOST[label], False, " ms")
        )
        growth = there / here if here and there else None
        verdicts.append(gates.Gate(f"{label}: growth to context {long}", growth, 1.2, False, "x"))
    document = {
        "environment": environment.describe(),
        "model": models.names(),
        "ms_per_step": found,
        "gates": [gate.to_dict() for gate in verdicts],
    }
    text = f"# Overhead of a step\n\nMedian milliseconds.\n\n{table(found)}\n"
    gates.publish(asked.out, "overhead", document, text + gates.markdown(verdicts))
    gates.show(verdicts, "overhead per step")
    return 0


def table(found: dict[str, Any]) -> str:
    """Every method at every context."""
    lines = [
        "| row | context | outside forwards | of it the loop | whole step |",
        "|---|---:|---:|---:|---:|",
    ]
    for label, by_length in found.items():
        for n, ms in by_length.items():
            values = " | ".join("-" if v is None else f"{v:.3f}" for v in ms.values())
            lines.append(f"| {label} | {n} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(run, __doc__)

"""Does drafting while the target verifies pay? Modelled at several speed ratios, and measured.

    python benchmarks/pearl.py [--quick] [--params 350M] [--counts-only]

Modelled: what a step costs follows from its counted forwards, t_target + n t_draft for a chain and
max(t_target, n t_draft) for pearl, at ratios t_target / (g t_draft) for every draft length g. That
needs no clock. Measured: wall time on this machine, where both models share its cores (and memory),
all rows interleaved, beside the time two devices would have taken as the emulation models it.
Writes benchmarks/results/pearl.json and .md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import gates
import torch
from pair import console, main, pair, parser, prompts

from foretoken.bench import environment
from foretoken.bench.intervals import ratio_interval
from foretoken.bench.models import Models
from foretoken.bench.rows import parse_methods
from foretoken.coins import SeededCoins
from foretoken.contract import Guided
from foretoken.engine.engine import decode
from foretoken.engine.record import Recorder
from foretoken.row import make_row
from foretoken.types import SamplingParams

LENGTHS = (2, 4, 6, 8)
RATIOS = (0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # t_target / (g t_draft)


class Counted:
    """A draft model that counts its forwards."""

    def __init__(self, lm: Any) -> None:
        self._lm, self.forwards = lm, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def grow(self, *given: Any) -> Any:
        self.forwards += 1
        return self._lm.grow(*given)

    def grow_trees(self, rows: Any, rules: Any, names: Any = None) -> list[None]:
        """Level by level, so that every forward is counted."""
        return [None] * len(rows)


@dataclass(slots=True)
class Cell:
    """One text."""

    prompt: int
    tokens: int
    seconds: float
    modelled: float  # seconds with a device for each model
    target: float  # seconds of target forwards, the prompt's included
    drafts: list[int] = field(default_factory=list)  # draft forwards of each step


def write(engine: Any, prompt: int, ids: list[int], asked: Any, turn: int) -> Cell:
    tokens, temperature, seed = asked.max_new_tokens, asked.temperature, 1000 * turn + prompt
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    row = make_row(ids, params, SeededCoins(seed), engine.target.vocab_size)
    lm = engine.drafter.model.lm if isinstance(engine.drafter, Guided) else None
    before, drafts = lm.forwards if lm else 0, []
    recorder = Recorder([row])
    for step in decode([row], engine):
        recorder(step)
        drafts.append((lm.forwards if lm else 0) - before)
        before += drafts[-1]
    stats = recorder.stats[row.uid]
    times = stats.seconds, stats.modelled_seconds, stats.target_seconds
    return Cell(prompt, stats.tokens, *times, drafts)


def cost(cells: Sequence[Cell], draft: float, at_once: bool) -> float:
    """Time per token where a target forward takes 1 and a draft forward takes `draft`."""
    spent = (
        max(1.0, n * draft) if at_once else 1.0 + n * draft for cell in cells for n in cell.drafts
    )
    return sum(spent) / sum(cell.tokens for cell in cells)


def modelled(found: dict[str, list[Cell]], lengths: Sequence[int]) -> list[dict[str, float]]:
    """Chain and pearl at every length and ratio, in target forwards per token."""
    table = []
    for g in lengths:
        for ratio in RATIOS:
            draft = 1.0 / (ratio * g)
            chains = {n: cost(found[f"chain[depth={n}]"], draft, False) for n in lengths}
            chain, best = chains[g], min(chains.values())
            pearl = cost(found[emulated(g)], draft, True)
            table.append(
                {
                    "g": g, "ratio": ratio, "chain": chain, "best_chain": best, "pearl": pearl,
                    "gain": chain / pearl, "gain_over_best": best / pearl,
                }
            )  # fmt: skip
    return table


def emulated(g: int) -> str:
    return f"pearl[depth={g},overlap=emulated]"


def rates(cells: Sequence[Cell], name: str) -> list[float]:
    """Tokens per second of each prompt, over all rounds."""
    by_prompt: dict[int, list[Cell]] = {}
    for cell in cells:
        by_prompt.setdefault(cell.prompt, []).append(cell)
    return [
        sum(c.tokens for c in by_prompt[i]) / sum(getattr(c, name) for c in by_prompt[i])
        for i in sorted(by_prompt)
    ]


def measured(found: dict[str, list[Cell]], lengths: Sequence[int]) -> dict[str, Any]:
    """Tokens per second of every row, and against the chain of the same length."""
    rows: dict[str, Any] = {}
    for label, cells in found.items():
        name = "modelled" if "emulated" in label else "seconds"
        rows[label] = {
            "tokens_per_second": fmean(rates(cells, name)),
            "clock": "modelled" if name == "modelled" else "wall",
            "target_ms": 1e3 * sum(c.target for c in cells) / sum(len(c.drafts) for c in cells),
        }
    for g in lengths:
        chain = rates(found[f"chain[depth={g}]"], "seconds")
        for label, name in ((f"pearl[depth={g}]", "seconds"), (emulated(g), "modelled")):
            if label in found:
                value, span = ratio_interval(rates(found[label], name), chain)
                rows[label] |= {"over_chain": value, "interval": span}
    return rows


def collect(
    models: Models, labels: Sequence[str], texts: list[list[int]], asked: Any, rounds: int
) -> dict[str, list[Cell]]:
    """Every row writes after every prompt, in an order that rotates; the first round warms."""
    engines = {}
    for spec in parse_methods(list(labels)):
        engines[spec.label] = models.row(spec).engine
        drafter = engines[spec.label].drafter
        if isinstance(drafter, Guided):
            drafter.model.lm = Counted(drafter.model.lm)
    found: dict[str, list[Cell]] = {label: [] for label in engines}
    order = list(engines)
    for turn in range(rounds + 1):
        for i, ids in enumerate(texts if turn else texts[:1]):
            for label in order:
                cell = write(engines[label], i, ids, asked, turn)
                if turn:
                    found[label].append(cell)
            order = order[1:] + order[:1]
    return found


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", help="widen the shipped target to this size first")
    options.add_argument("--per-family", type=int, default=4, help="prompts of each family")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--counts-only", action="store_true", help="measure no wall time")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    lengths = LENGTHS[:2] if asked.quick else LENGTHS
    rounds = 1 if asked.quick else asked.rounds
    if asked.quick:
        asked.max_new_tokens = 16
    labels = [f"chain[depth={g}]" for g in lengths] + [emulated(g) for g in lengths]
    if not asked.counts_only:
        labels += ["plain", *(f"pearl[depth={g}]" for g in lengths)]
    started = environment.describe()
    with pair(asked.target, asked.draft, asked.params) as where:
        models = Models(where.target, where.draft, dtype="float32")
        tasks = prompts(1, limit=2) if asked.quick else prompts(asked.per_family)
        texts = [models.tokenizer(task.turns[0])["input_ids"] for task in tasks]
        found = collect(models, labels, texts, asked, rounds)
    table = modelled(found, lengths)
    bounds = [
        gates.Gate(
            f"modelled: chain's time per token over pearl's, g={row['g']} at t_target = g t_draft",
            row["gain"], 1.0, unit="x",
        )
        for row in table
        if row["ratio"] == 1.0
    ]  # fmt: skip
    rows = {} if asked.counts_only else measured(found, lengths)
    document = {
        "environment": started,
        "load_after": environment.load(),
        "models": models.names(),
        "temperature": asked.temperature,
        "prompts": len(texts),
        "tokens": asked.max_new_tokens,
        "rounds": rounds,
        "modelled": table,
        "measured": rows,
        "gates": [gate.to_dict() for gate in bounds],
    }
    gates.publish(asked.out, "pearl", document, page(table, rows, bounds))
    gates.show(bounds, "drafting while verifying")
    if not asked.counts_only and torch.get_num_threads() < 2:
        console.print("torch has one thread: both models shared one core", style="yellow")
    return 0


def page(table: list[dict[str, float]], rows: dict[str, Any], bounds: list[gates.Gate]) -> str:
    """Both tables in words."""
    lines = [
        "# Drafting while the target verifies\n",
        gates.markdown(bounds),
        "## Modelled, in target forwards per token\n",
        "| g | t_target / (g t_draft) | chain, same g | chain, best g | pearl | gain | over best |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        values = ("chain", "best_chain", "pearl", "gain", "gain_over_best")
        numbers = " | ".join(f"{row[name]:.3f}" for name in values)
        lines.append(f"| {row['g']} | {row['ratio']:g} | {numbers} |")
    if rows:
        lines += [
            "\n## Measured\n",
            "| row | tokens/s | clock | over chain of its length | ms per target forward |",
            "|---|---:|---|---:|---:|",
        ]
    for label, row in rows.items():
        over = "-"
        if "over_chain" in row:
            over = f"{row['over_chain']:.2f}"
            if row["interval"]:
                over += " ({:.2f} to {:.2f})".format(*row["interval"])
        lines.append(
            f"| {label} | {row['tokens_per_second']:.1f} | {row['clock']} | {over} | "
            f"{row['target_ms']:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(run, __doc__)

"""Ways to teach a draft its target's laws, at equal steps: fixed texts, its own, AdaSPEC.

    python benchmarks/distillation.py --target smollm2-135m --draft ./draft --data ./texts

`--draft` is where every way begins; `--data` what `foretoken train data` made. Each run is the
documented command, in a process of its own, and goes on where an earlier call left it. Judged on
held-out chats, by the tokens of the target's answers: the share of its law that the draft covers,
which is the chance that a guess there is accepted at temperature 1 (among tokens that the draft
scores), and how often both have the same likeliest one; and by the engine on the same prompts: a
chain of four, 48 tokens, half greedy and half at temperature 1. AdaSPEC takes as many steps again
for its reference. "All places alike" is AdaSPEC that selects everything: distillation counts
texts alike, AdaSPEC places. Counts only, so no quiet machine is needed. Writes
benchmarks/results/distillation.json and .md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import gates
import torch
from pair import RESULTS, WORK, console, main
from rich.progress import track

import foretoken
from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.training.dataset.records import Chat, every_chat
from foretoken.training.drafts.distilling import student
from foretoken.training.drafts.learning import held_out
from foretoken.training.objectives.distilled import Distilled, Places, divergence
from foretoken.training.objectives.divergence import DIVERGENCES

OF = DIVERGENCES["fkl"]
POINT = 1.0  # wanted: AdaSPEC above distillation at equal steps
BEGUN, FIXED, MIXED = "as it began", "the target's texts", "half its own texts"
SELECTED, ALIKE = "selected places, 40 %", "all places alike"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to teach: a recipe with its options."""

    name: str
    recipe: str
    options: Mapping[str, float]


WAYS = (
    Way(FIXED, "distill", {"on_policy": 0.0}),
    Way(MIXED, "distill", {"on_policy": 0.5}),
    Way("its own texts", "distill", {"on_policy": 1.0}),
    Way(SELECTED, "adaspec", {"keep": 0.4}),
    Way(ALIKE, "adaspec", {"keep": 1.0}),
    Way("selected places, 20 %", "adaspec", {"keep": 0.2}),
    Way("selected places, 70 %", "adaspec", {"keep": 0.7}),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A way with a seed, in its folder."""

    way: Way
    seed: int
    folder: Path

    def teach(self, asked: argparse.Namespace) -> None:
        """The documented command, unless the draft lies there already."""
        if (self.folder / "config.json").is_file():  # what is written last
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "minutes": "none", "evaluations": 1, "held_out": asked.chats, "tokens": asked.tokens,
            "epochs": asked.epochs, "vector_rate": asked.rate, "embedding_rate": asked.rate,
            "matrix_rate": asked.matrix_rate, "seed": self.seed, **self.way.options,
        }  # fmt: skip
        if self.way.recipe == "adaspec":
            needed = self.way.options["keep"] < 1.0
            settings["reference_epochs"] = asked.epochs if needed else 1e-3
        command = [
            sys.executable, "-m", "foretoken", "train", self.way.recipe, "--target", asked.target,
            "--dtype", "bfloat16", "--draft", asked.draft, "--data", str(asked.data),
            "--out", str(self.folder),
        ]  # fmt: skip
        command += [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
        threads = {"OMP_NUM_THREADS": "1"} if asked.workers > 1 else {}
        with (self.folder / "log.txt").open("w") as log:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **threads}
            )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{(self.folder / 'log.txt').read_text()}")
        console.print(f"{self.way.name}, seed {self.seed}: taught")


@dataclass(frozen=True, slots=True)
class Judge:
    """Held-out answers with the target's laws, among the tokens that every draft here scores."""

    session: Any
    tokens: torch.Tensor
    answers: Sequence[Places]

    @classmethod
    def of(cls, session: Any, draft: str, chats: Sequence[Chat]) -> Judge:
        rows = chosen_rows(None, draft, session.target.vocab_size)
        tokens = torch.arange(session.target.vocab_size) if rows is None else rows.tokens
        fixed = Distilled(session.target, tokens, OF, on_policy=0.0, new_tokens=1, eos=())
        answers = []
        for chat in track(chats, "the target's laws", console=console):
            ids = torch.tensor([[*chat.prompt, *chat.answer]])
            weights = torch.zeros(ids.shape)
            weights[0, len(chat.prompt) :] = 1.0
            batch = {"input_ids": ids, "weights": weights}
            answers.append(fixed.places(None, batch, random.Random(0)))
        return cls(session, tokens, answers)

    @torch.no_grad()
    def judged(self, draft: str) -> dict[str, list[float]]:
        """Share of the law covered, and of agreement, in the mean of each held-out answer."""
        model = student(self.session, draft).eval()
        found: dict[str, list[float]] = {"overlap": [], "agreement": []}
        for places in self.answers:
            states = places.states(model)
            alike = torch.full((len(states),), 1.0 / len(states))
            _, told = divergence(model, states, self.tokens, places.laws, alike, OF)
            for name, values in found.items():
                values.append(float(told[name]))
        return found


Rows = Sequence[Mapping[str, Any]]


def compared(rows: Rows, than: Rows) -> tuple[float, list[float], list[float]]:
    """How much more of the law is covered than by other drafts, in points: in the mean of the
    seeds that both have, its interval by chats, and of each seed."""
    theirs = {row.get("seed"): row["overlap"] for row in than}
    pairs = [(row["overlap"], theirs.get(row.get("seed"), than[0]["overlap"])) for row in rows]

    def gain(at: Sequence[int]) -> float:
        return 100.0 * mean(mine[i] - other[i] for mine, other in pairs for i in at)

    every = range(len(pairs[0][0]))
    each = [100.0 * mean(mine[i] - other[i] for i in every) for mine, other in pairs]
    return gain(every), list(interval(gain, len(every)) or (gain(every),) * 2), each


def table(found: Mapping[str, Rows]) -> list[str]:
    """A line for every way."""
    lines = [
        "| taught on | seeds | steps | law covered | points more than on the target's texts "
        "| each seed | same likeliest token | acceptance by the engine |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for name, rows in found.items():
        covered = ", ".join(f"{mean(row['overlap']):.4f}" for row in rows)
        gain, span, each = compared(rows, found[FIXED])
        beside = "" if name == FIXED else f"{gain:+.2f} ({span[0]:+.2f} to {span[1]:+.2f})"
        apart = "" if name == FIXED else ", ".join(f"{one:+.2f}" for one in each)
        agreed = mean(mean(row["agreement"]) for row in rows)
        engine = ", ".join(f"{row['acceptance']:.3f}" for row in rows)
        lines.append(
            f"| {name} | {len(rows)} | {rows[0]['steps']} | {covered} | {beside} | {apart} "
            f"| {agreed:.4f} | {engine} |"
        )
    return lines


def bounds(found: Mapping[str, Rows]) -> list[gates.Gate]:
    """What the recipes are wanted to show, in points of the law."""
    wanted = (
        (FIXED, BEGUN, 0.0), (MIXED, FIXED, 0.0), (SELECTED, FIXED, POINT),
        (SELECTED, ALIKE, POINT),
    )  # fmt: skip
    return [
        gates.Gate(f"{one}, over {other}", compared(found[one], found[other])[0], bound,
                   unit=" points")
        for one, other, bound in wanted if one in found and other in found
    ]  # fmt: skip


def options(description: str | None) -> argparse.Namespace:
    asked = argparse.ArgumentParser(description=description)
    asked.add_argument("--target", required=True)
    asked.add_argument("--draft", required=True, help="where every way begins")
    asked.add_argument("--data", type=Path, required=True)
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked.add_argument("--sweep-seeds", type=int, default=1, help="seeds of ways beside the main")
    asked.add_argument("--epochs", type=float, default=0.5)
    asked.add_argument("--tokens", type=int, default=2048, help="in a step, about")
    asked.add_argument("--rate", type=float, default=1e-3)
    asked.add_argument("--matrix-rate", type=float, default=0.005)
    asked.add_argument("--chats", type=int, default=62, help="held-out ones")
    asked.add_argument("--workers", type=int, default=2, help="processes at once, of one thread")
    asked.add_argument("--work", type=Path, default=WORK / "distillation")
    asked.add_argument("--out", type=Path, default=RESULTS)
    return asked.parse_args()


def settled(asked: argparse.Namespace) -> str:
    """A name for whatever else decides what a run comes to."""
    others = ("target", "draft", "data", "epochs", "tokens", "rate", "matrix_rate", "chats")
    said = json.dumps({name: str(getattr(asked, name)) for name in others})
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def run(description: str | None) -> int:
    asked = options(description)
    started = environment.describe()
    runs = [
        Run(way, seed, asked.work / settled(asked) / f"{way.recipe}-{option}-{seed}")
        for at, seed in enumerate(asked.seeds)
        for way in WAYS
        for option in [*map(str, way.options.values())]
        if way.name in (FIXED, MIXED, SELECTED) or at < asked.sweep_seeds
    ]
    with ThreadPoolExecutor(asked.workers) as pool:
        list(pool.map(lambda one: one.teach(asked), runs))
    chosen = {tuple(prompt) for prompt in held_out(asked.data, asked.chats)}
    chats = [chat for chat in every_chat(asked.data, "valid") if tuple(chat.prompt) in chosen]
    found: dict[str, list[dict[str, Any]]] = {BEGUN: []}
    with foretoken.load(asked.target, "plain", dtype="bfloat16") as session:
        judge = Judge.of(session, asked.draft, chats)
        for one in track(runs, "judging", console=console):
            card = json.loads((one.folder / "card.json").read_text())
            if not found[BEGUN]:
                before = {**judge.judged(asked.draft), **card["before"], "steps": 0}
                found[BEGUN].append(before)
            end = card["measured"][-1][1]
            found.setdefault(one.way.name, []).append(
                {"seed": one.seed, "steps": card["steps"], "seconds": card["seconds"], **end,
                 **judge.judged(str(one.folder))}
            )  # fmt: skip
    wanted = bounds(found)
    lines = [
        "# Ways to teach a draft its target's laws\n",
        f"`{Path(asked.draft).name}` on {Path(asked.target).name}, {asked.tokens} tokens a step, "
        f"{len(chats)} held-out chats. \"Law covered\": the sum over the tokens that the draft "
        "scores of the smaller of both chances. AdaSPEC's reference took as many steps again.\n",
        gates.markdown(wanted), *table(found),
    ]  # fmt: skip
    document = {
        "environment": started, "found": found, "ways": [asdict(way) for way in WAYS],
        "asked": {name: value.name if isinstance(value, Path) else value
                  for name, value in vars(asked).items() if name not in ("out", "work")}
        | {"draft": Path(asked.draft).name, "target": Path(asked.target).name},
        "gates": [gate.to_dict() for gate in wanted],
    }  # fmt: skip
    gates.publish(asked.out, "distillation", document, "\n".join(lines) + "\n")
    gates.show(wanted, "teaching a draft its target's laws")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""What `make demo` runs: text by guessing, then the same text with and without, timed.

    python examples/demo.py [--tokens 96] [--params 350M] [--no-real]

First the shipped pair, then a real instruction model, fetched once where it can be had. Everything
is measured here and now, methods taking turns on the same prompts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from transformers.utils import logging

import foretoken
from foretoken import minis
from foretoken.cli.colour import legend, paint
from foretoken.cli.minis import arrival, size
from foretoken.engine.session import Result, Session
from foretoken.errors import ForetokenError
from foretoken.lm.kernels.linears import can_pack
from foretoken.minis.fetch import get
from foretoken.minis.tasks import FAMILIES, examples
from foretoken.minis.widen import widen_directory

Rows = dict[str, tuple[str, dict[str, Any]]]  # what is shown: a method and its options
SMALL: Rows = {
    "plain": ("plain", {}),
    "chain of 5": ("chain", {"depth": 5, "controller": "fixed"}),
    "chain, cost model": ("chain", {"controller": "cost_model"}),
    "tree": ("tree", {}),
    "prompt-lookup": ("prompt-lookup", {}),
}
WIDE = {name: SMALL[name] for name in ("plain", "chain of 5", "chain, cost model", "tree")}
REAL = "smollm2-135m"
UNTRAINED: Rows = {name: (name, {}) for name in ("plain", "prompt-lookup", "suffix", "auto")}
TRAINED: Rows = {
    "plain": ("plain", {}),
    "a draft, look-ups": ("hybrid", {}),
    "an EAGLE-3 head, look-ups": ("eagle3-hybrid", {"draft_head": f"{REAL}-eagle3"}),
}
QUESTIONS = (
    "Rewrite this in the past tense: The old lighthouse keeper climbs the stairs every evening, "
    "lights the lamp, writes a line in his book and watches the ships until the morning comes.",
    "Write a Python class for a bank account that can deposit, withdraw and show its balance.",
    "Why is the sky blue? Explain it to a child.",
)
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=96, help="tokens per prompt")
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--params", default="350M", help="size of the widened target")
    options.add_argument("--no-real", action="store_true", help="the shipped pair only")
    chosen = options.parse_args()
    logging.disable_progress_bar()

    target, draft = minis.path("text-target"), minis.path("text-draft")
    prompts = [examples(family, "test", 1, seed=2)[0].prompt for family in FAMILIES]
    session = foretoken.load(target, method="chain", draft=draft)

    console.print(Rule("The shipped pair writes"))
    show(session, prompts[:2])

    console.print(Rule("The shipped pair, timed"))
    compare(session, SMALL, prompts, chosen.tokens, chosen.repetitions)

    console.print(Rule(f"The same target widened to {chosen.params}, the same draft"))
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide"
        tell("widening: more arithmetic, the same function")
        with console.status("widening: more arithmetic, the same function"):
            widen_directory(target, wide, size(chosen.params), verify=False)
            session = foretoken.load(wide, method="chain", draft=draft)
        compare(session, WIDE, prompts, min(chosen.tokens, 48), min(chosen.repetitions, 2))
    if not chosen.no_real:
        real(min(chosen.tokens, 96), min(chosen.repetitions, 2))


def real(tokens: int, repetitions: int) -> None:
    """The same with a real instruction model: what needs no training, then what ships for it."""
    kind = "bfloat16" if can_pack(torch.bfloat16) else "float32"
    console.print(Rule(f"A real model: {REAL} in {kind}, nothing beside it"))
    try:
        with arrival(hush=False) as told:
            folder = get(REAL, told)
    except ForetokenError as problem:
        console.print(f"skipped: {problem.possible}", markup=False)
        return
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    session = foretoken.load(folder, dtype=kind)
    show(session, prompts[:1])
    compare(session, UNTRAINED, prompts, tokens, repetitions)
    console.print(Rule("The same model, with the draft and the head that ship for it"))
    session = foretoken.load(folder, dtype=kind, method="hybrid", draft=f"{REAL}-draft")
    compare(session, TRAINED, prompts, tokens, repetitions)


def tell(what: str) -> None:
    """A sign of life where there is no terminal for a spinner."""
    if not console.is_terminal:
        console.print(f"{what} ...", style="dim", markup=False)


def show(session: Session, prompts: list[Any]) -> None:
    """Text as it is written, coloured by where each token came from."""
    console.print(legend(session.method, console))
    for prompt in prompts:
        asked = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"
        console.print(asked, style="dim", end="", markup=False)
        result = paint(session, prompt, {"max_new_tokens": 80}, console, True)
        console.print(
            f"{result.stats.tokens} tokens in {result.stats.target_steps} target steps\n",
            style="dim",
        )


def compare(
    first: Session,
    methods: Rows,
    prompts: list[Any],
    tokens: int,
    repetitions: int,
) -> None:
    """Plain decoding against every method, taking turns; medians over repetitions."""
    sessions = {name: first.using(method, **parts) for name, (method, parts) in methods.items()}
    names = list(sessions)
    written: dict[tuple[str, int], list[Result]] = {}
    tell(f"measuring {', '.join(names)}: {repetitions} times {len(prompts)} prompts")
    with console.status("measuring") as status:
        for session in sessions.values():
            session.generate(prompts[0], max_new_tokens=16)  # warm up
        for repetition in range(repetitions):
            for n, prompt in enumerate(prompts):
                turn = (n + repetition) % len(names)
                for name in names[turn:] + names[:turn]:
                    status.update(f"repetition {repetition + 1}, prompt {n + 1}: {name}")
                    result = sessions[name].generate(prompt, max_new_tokens=tokens)
                    written.setdefault((name, n), []).append(result)
    speeds = {}
    for name in names:
        results = [written[name, n] for n in range(len(prompts))]
        seconds = sum(median(r.stats.seconds for r in repeated) for repeated in results)
        speeds[name] = sum(len(repeated[0].tokens) for repeated in results) / seconds
    exact = first.engine.target.model.dtype is torch.float32
    other = "[bold red]TEXT DIFFERS FROM PLAIN[/]" if exact else "text differs by 16-bit rounding"
    report(speeds, written, len(prompts), other)


def report(
    speeds: dict[str, float],
    written: dict[tuple[str, int], list[Result]],
    prompts: int,
    other: str,
) -> None:
    """One line per method, and the verdict; `other` is said of a text that is not plain's."""
    for name, speed in speeds.items():
        results = [written[name, n][0] for n in range(prompts)]
        same = all(results[n].tokens == written["plain", n][0].tokens for n in range(prompts))
        steps = sum(result.stats.target_steps for result in results)
        length = sum(result.stats.tokens for result in results) / steps
        console.print(
            f"  {name:18}{speed:8.1f} tokens/s   {speed / speeds['plain']:5.2f}x   "
            f"{length:.2f} tokens per target step   "
            + ("text identical to plain" if same else other)
        )
    best = max(speeds, key=lambda name: speeds[name])
    console.print(
        f"plain {speeds['plain']:.1f} tokens/s, best method ({best}) {speeds[best]:.1f} tokens/s: "
        f"speed-up {speeds[best] / speeds['plain']:.2f}x\n",
        style="bold",
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None

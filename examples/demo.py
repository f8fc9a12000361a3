"""What `make demo` runs: text by guessing, then the same text with and without, timed.

    python examples/demo.py [--tokens 96] [--params 350M]

Everything is measured here and now, methods taking turns on the same prompts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.rule import Rule
from transformers.utils import logging

import foretoken
from foretoken import minis
from foretoken.cli.colour import legend, paint
from foretoken.cli.minis import size
from foretoken.engine.session import Result, Session
from foretoken.minis.tasks import FAMILIES, examples
from foretoken.minis.widen import widen_directory

SMALL = {  # what is shown: a method and its options
    "plain": ("plain", {}),
    "chain": ("chain", {}),
    "chain, cost model": ("chain", {"controller": "cost_model"}),
    "tree": ("tree", {}),
    "prompt-lookup": ("prompt-lookup", {}),
}
WIDE = {name: SMALL[name] for name in ("plain", "chain", "chain, cost model", "tree")}
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=96, help="tokens per prompt")
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--params", default="350M", help="size of the widened target")
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
        with console.status("widening: more arithmetic, the same function"):
            widen_directory(target, wide, size(chosen.params), verify=False)
            session = foretoken.load(wide, method="chain", draft=draft)
        compare(session, WIDE, prompts, min(chosen.tokens, 48), min(chosen.repetitions, 2))


def show(session: Session, prompts: list[str]) -> None:
    """Text as it is written, coloured by where each token came from."""
    console.print(legend(session.method, console))
    for prompt in prompts:
        console.print(prompt, style="dim", end="", markup=False)
        result = paint(session, prompt, {"max_new_tokens": 80}, console, True)
        console.print(
            f"{result.stats.tokens} tokens in {result.stats.target_steps} target steps\n",
            style="dim",
        )


def compare(
    first: Session,
    methods: dict[str, tuple[str, dict[str, str]]],
    prompts: list[str],
    tokens: int,
    repetitions: int,
) -> None:
    """Plain decoding against every method, taking turns; medians over repetitions."""
    sessions = {name: first.using(method, **parts) for name, (method, parts) in methods.items()}
    names = list(sessions)
    written: dict[tuple[str, int], list[Result]] = {}
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
    report(speeds, written, len(prompts))


def report(
    speeds: dict[str, float], written: dict[tuple[str, int], list[Result]], prompts: int
) -> None:
    """One line per method, and the verdict."""
    for name, speed in speeds.items():
        results = [written[name, n][0] for n in range(prompts)]
        same = all(results[n].tokens == written["plain", n][0].tokens for n in range(prompts))
        steps = sum(result.stats.target_steps for result in results)
        length = sum(result.stats.tokens for result in results) / steps
        console.print(
            f"  {name:18}{speed:8.1f} tokens/s   {speed / speeds['plain']:5.2f}x   "
            f"{length:.2f} tokens per target step   "
            + ("text identical to plain" if same else "[bold red]TEXT DIFFERS FROM PLAIN[/]")
        )
    best = max(speeds, key=lambda name: speeds[name])
    console.print(
        f"plain {speeds['plain']:.1f} tokens/s, best method ({best}) {speeds[best]:.1f} tokens/s: "
        f"speed-up {speeds[best] / speeds['plain']:.2f}x\n",
        style="bold",
    )


if __name__ == "__main__":
    main()

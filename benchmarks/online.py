"""Two real servers, one of whose drafts learns in idle moments, under requests of a changing topic.

    python benchmarks/online.py
    python benchmarks/online.py --topic recipes --draft DIR --gap 2

Both get every request, in turns which of them is first, and each gap between requests passes for
both; while one is asked the other is stopped, so that they never take each other's processor. The
first requests are mixed, the others of one topic. Acceptance is that of the first guess of a step,
which no length of drafts changes. One process of two may be some percent slower than the other for
its whole life, so all of it is done several times (`--starts`), each time with new servers and the
prompts of the topic in another order; a figure of some requests is of those of every start, and the
slowest requests of one start are told beside.
Writes benchmarks/results/online-TOPIC.json, .md and .png.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import gates
import httpx
from pair import WORK, console, main
from prometheus_client.parser import text_string_to_metric_families
from real import MODEL, SPEC_BENCH, tasks
from rich.progress import track
from serving import DRAFT, free_port, process_of

from foretoken.bench import environment as machine
from foretoken.bench.intervals import interval
from foretoken.minis.fetch import get
from foretoken.training.online.telling import Fared, acceptance, draw, figures, speed

RAISED, SPEED = 0.1, 0.95  # wanted: acceptance above the frozen draft's, tokens/s over its
WINDOW = 50  # requests that a figure of the end is of
CLOSED = {"Connection": "close"}  # none would outlive that its server is stopped
THINGS = (
    "rain", "a lighthouse", "an old piano", "the moon", "a lost key", "autumn leaves", "a cat",
    "the first snow", "a garden", "the sea", "a paper boat", "an empty house", "a bridge", "bread",
    "a clock", "the desert", "a candle", "friendship", "a train at night", "a mountain",
)  # fmt: skip
MOODS = (
    "short", "sad", "funny", "hopeful", "quiet", "grateful", "old-fashioned", "bold", "gentle",
    "mysterious",
)  # fmt: skip
DISHES = (
    "tomato soup", "pancakes", "fried rice", "apple pie", "lentil curry", "pizza", "omelettes",
    "banana bread", "tacos", "mushroom risotto", "potato salad", "noodles", "dumplings", "stew",
    "waffles", "hummus", "chili", "carrot cake", "pesto", "paella",
)  # fmt: skip
GUESTS = (
    "two people", "a family of four", "children", "a picnic", "a birthday", "beginners",
    "a cold evening", "a busy week", "ten guests", "breakfast",
)  # fmt: skip
TOPICS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "poems": ("Write a {} poem about {}.", MOODS, THINGS),
    "recipes": ("Give me a recipe for {1} for {0}.", GUESTS, DISHES),
}


@dataclass(slots=True)
class Asked:
    """One of the two servers."""

    url: str
    process: subprocess.Popen[bytes]
    client: httpx.Client

    def counted(self) -> dict[str, float]:
        """What of its metrics tells how guesses fare."""
        text = self.client.get(f"{self.url}/metrics").text
        found = {
            f"{sample.name}{sample.labels.get('depth', '')}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        names = ("accepted_at_depth_total1", "drafted_at_depth_total1", "generated_tokens_total",
                 "steps_total", "learning_steps_total")  # fmt: skip
        return {name: found.get(f"foretoken_{name}", 0.0) for name in names}

    def fared(self, prompt: str, tokens: int) -> Fared:
        """Ask for one answer."""
        before = self.counted()
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
                "temperature": 0.0, "model": MODEL}  # fmt: skip
        began = perf_counter()
        answer = self.client.post(f"{self.url}/v1/chat/completions", json=body)
        seconds = perf_counter() - began
        answer.raise_for_status()
        after = self.counted()
        accepted, judged, tokens_, steps = (
            int(after[name] - before[name]) for name in list(before)[:4]
        )
        return Fared(accepted, judged, tokens_, steps, seconds)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def server(name: str, asked: argparse.Namespace, *more: str) -> Iterator[Asked]:
    """One of ours, from its first answer to its end."""
    command = [
        sys.executable, "-m", "foretoken", "serve", "--target", str(asked.target or MODEL),
        "--draft", str(asked.draft), "--dtype", asked.dtype, "--port", str(free_port()),
        "--model-name", MODEL, "--prefix-cache", "0", *more,
        *(("--method", asked.method) if asked.method else ()),
    ]  # fmt: skip
    with (
        process_of(name, command, asked.threads, patience=120.0) as (process, url),
        httpx.Client(timeout=300.0, headers=CLOSED) as client,
    ):
        yield Asked(url, process, client)


def prompts(asked: argparse.Namespace, start: int) -> list[str]:
    """Mixed questions, then those of the topic, drawn anew for every start."""
    mixed = [str(task.turns[0]) for task in tasks(asked.tasks, 1000, 1)]
    short = [text for text in mixed if len(text) < 2000]
    wording, one, other = TOPICS[asked.topic]
    about = [wording.format(a, b) for a in one for b in other]
    rng = random.Random(asked.seed + start)
    return rng.sample(short, asked.before) + rng.sample(about, asked.after)


def measure(asked: argparse.Namespace, given: Sequence[str]) -> tuple[dict[str, list[Fared]], int]:
    """Every prompt by both servers; the optimizer steps that one of them took."""
    folder = WORK / "online-state"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [part for one in asked.set for part in ("--learn-set", one)]
    fared: dict[str, list[Fared]] = {"learning": [], "frozen": []}
    rng = random.Random(asked.seed)
    with (
        server("frozen", asked) as frozen,
        server("learning", asked, "--learn", str(folder), *settings) as learning,
    ):
        both = {"learning": learning, "frozen": frozen}
        learning.stop()
        frozen.stop()
        for at, prompt in enumerate(track(given, "requests", console=console)):
            gap = min(rng.expovariate(1.0 / asked.gap), 5.0 * asked.gap)
            for name in sorted(both, reverse=bool(at % 2)):
                both[name].go_on()
                fared[name].append(both[name].fared(prompt, asked.max_tokens))
                sleep(gap)
                both[name].stop()
        learning.go_on()
        return fared, int(learning.counted()["learning_steps_total"])


def pooled(starts: Sequence[Mapping[str, Sequence[Fared]]]) -> dict[str, list[Fared]]:
    """The first requests of all starts, then their second ones, and so on."""
    return {
        name: [one for same in zip(*(start[name] for start in starts), strict=True) for one in same]
        for name in starts[0]
    }


def verdicts(starts: Sequence[Mapping[str, Sequence[Fared]]], after: int) -> list[gates.Gate]:
    """The bars of `online`; intervals resample a place in the order, with what all starts had."""
    count = len(starts[0]["learning"])

    def ratio(at: Sequence[int], some: Sequence[Mapping[str, Sequence[Fared]]] = starts) -> float:
        learning, frozen = (
            speed([start[who][i] for start in some for i in at]) for who in ("learning", "frozen")
        )
        return learning / frozen

    fared, end = pooled(starts), WINDOW * len(starts)
    raised = acceptance(fared["learning"][-end:]) - acceptance(fared["frozen"][-end:])
    windows = [range(i, i + WINDOW) for i in range(0, count - WINDOW + 1, WINDOW)]
    low, high = interval(ratio, count) or (0.0, 0.0)
    slowest = [min((ratio(at, [start]) for at in windows), default=None) for start in starts]
    alone = ", ".join(f"{one:.2f}" for one in slowest if one is not None)
    return [
        gates.Gate(f"acceptance, last {WINDOW} of {after} requests of the topic, above the frozen "
                   "draft's", raised, RAISED),
        gates.Gate(f"tokens/s over the frozen draft's, all ({low:.2f} to {high:.2f})",
                   ratio(range(count)), SPEED, unit="x"),
        gates.Gate(f"tokens/s over the frozen draft's, slowest {WINDOW} requests (of each start "
                   f"{alone})", min(map(ratio, windows), default=None), SPEED, unit="x"),
        gates.Gate("tokens/s over the frozen draft's behind the change of topic",
                   ratio(range(count - after, count)), SPEED, unit="x"),
    ]  # fmt: skip


def page(document: Mapping[str, Any], bounds: Sequence[gates.Gate], name: str) -> str:
    """What was asked, and how both fared."""
    asked, busy = document["asked"], document["busy"]
    lines = [
        f"# A draft that learns while it serves: {asked['topic']}\n",
        f"The draft: {asked['draft']}. {asked['before']} mixed requests, then "
        f"{asked['after']} of the topic, one at a time, "
        f"{asked['starts']} times with new servers, "
        f"{asked['gap']:g} s apart on average: the servers write {100 * busy:.0f} % of the time. "
        f"{document['steps']:,} optimizer steps in idle moments.\n",
        gates.markdown(bounds),
        f"![acceptance]({name}.png)\n",
        f"| draft | acceptance of first guesses: first {WINDOW} requests | last {WINDOW} | all "
        "| tokens per forward | tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for who in ("learning", "frozen"):
        told = document["figures"][who]
        lines.append(
            f"| {who} | {told['first_acceptance']:.3f} | {told['last_acceptance']:.3f} "
            f"| {told['acceptance']:.3f} | {told['tokens_per_forward']:.2f} "
            f"| {told['tokens_per_second']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def run(description: str | None) -> int:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--target", help=f"model directory (default: {MODEL})")
    options.add_argument("--draft", default=DRAFT, help=f"that learns (default: {DRAFT})")
    options.add_argument("--method", help="default: what a user gets who names none")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--tasks", type=Path, default=SPEC_BENCH, help="questions of Spec-Bench")
    options.add_argument("--topic", choices=tuple(TOPICS), default="poems")
    options.add_argument("--before", type=int, default=50, help="mixed requests")
    options.add_argument("--after", type=int, default=200, help="requests of the topic")
    options.add_argument("--gap", type=float, default=1.0, help="seconds between requests, mean")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--set", action="append", default=[], help="for --learn-set")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--starts", type=int, default=2, help="of both servers, all prompts each")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = options.parse_args()
    if asked.target is None:
        get(MODEL)
    started = machine.describe()
    starts, steps = [], 0
    for start in range(asked.starts):
        told, taken = measure(asked, prompts(asked, start))
        starts.append(told)
        steps += taken
    fared, window = pooled(starts), WINDOW * asked.starts
    bounds = verdicts(starts, asked.after)
    seconds = sum(one.seconds for one in fared["frozen"])
    document = {
        "environment": started, "load_after": machine.load(), "steps": steps,
        "asked": {key: value for key, value in vars(asked).items()
                  if key in ("topic", "before", "after", "gap", "max_tokens", "set", "method",
                             "dtype", "seed", "starts")} | {"draft": Path(asked.draft).name},
        "busy": seconds / (seconds + asked.gap * len(fared["frozen"])),
        "figures": figures(fared, window),
        "requests": [{name: [asdict(one) for one in some] for name, some in start.items()}
                     for start in starts],
        "gates": [gate.to_dict() for gate in bounds],
    }  # fmt: skip
    name = f"online-{asked.topic}"
    asked.out.mkdir(parents=True, exist_ok=True)
    gates.publish(asked.out, name, document, page(document, bounds, name))
    draw(asked.out / f"{name}.png", fared, window)
    gates.show(bounds, f"learning while it serves, {asked.topic}")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Hours of mixed load on `foretoken serve`: no lost or wrong answer, no growth, nothing left over.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py --minutes 60 --target smollm2-135m --draft smollm2-135m-draft

What a pool of requests gives alone is written first, by a session of its own. Then a server runs,
and visitors come: streams and whole answers, long and short, grammars, predictions, priorities;
clients that leave, read slowly, or send what has to be refused; bursts and pauses. Every answer
that can be known is compared, and the process is looked at all the time. Ctrl-C judges what there
is. Writes benchmarks/results/soak.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gates
import httpx
import torch
from mixed_requests import Request, Told, alone, ask, mixed
from pair import console, main, parser
from soak_server import BODY, KEY, ROWS, Rest, at_rest, draft_of, served
from soak_traffic import IDLE, Tally, Traffic, come_and_go
from soak_watch import MIB, WARM_UP, Growth, Sample, Watch, middle, picture

import foretoken
from foretoken import minis
from foretoken.bench import environment
from foretoken.bench.files import replace
from foretoken.bench.progress import Bar, shown
from foretoken.bench.svg import standalone
from foretoken.errors import CapabilityError
from foretoken.minis.tasks import FAMILIES, examples

SHARE = 0.4  # of one core, where no rate is named
EVERY = 10.0  # seconds between samples
FIRST = 30  # bursts before the first sample: products of many sizes are prepared once
FEW = 0.02  # of its memory, what a server may grow by in an hour, or
MIBS = 10.0  # so many MiB, whichever is more
CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"


def prompts(each: int, seed: int) -> list[tuple[str, str, str]]:
    """Six families of tasks, code, lists that repeat themselves, and several tasks in one."""
    found = [
        (family, one.prompt, one.answer)
        for family in FAMILIES
        for one in examples(family, "test", each, seed=seed)
    ]
    dice = random.Random(seed)
    long = [
        ("long", "\n".join(text for _, text, _ in dice.sample(found, 4)), found[0][2])
        for _ in range(each)
    ]
    lists = "apples, pears, plums, cherries, apples, pears, plums,"
    short = [("words", word, "and so on") for word in ("a", "One two three", "é è 漢字", "\n")]
    return [*found, *long, ("code", CODE, "    return area(width, height) * depth\n"),
            ("lists", lists, " cherries, apples, pears"), *short]  # fmt: skip


def known(asked: argparse.Namespace, bar: Bar) -> tuple[list[Request], list[Told | None]]:
    """Requests, and what each gives alone.

    A seed repeats a sampled text in another process where lengths of drafts are named, or where no
    candidate is drawn. Elsewhere lengths follow measured costs, and such a text repeats in one
    session alone: None, as the server is asked for it before anybody else comes.
    """
    sizes = {} if asked.depth is None else {"depth": asked.depth}
    with foretoken.load(
        asked.target or minis.path("text-target"), asked.method, draft_of(asked),
        dtype=asked.dtype, max_rows=ROWS, **sizes,
    ) as session:  # fmt: skip
        repeats = bool(sizes) or session.engine.drafter.traits.fixed
        chats = bool(getattr(session.tokenizer, "chat_template", None))
        texts = prompts(2 if asked.quick else 8, asked.seed)
        most = (1, 8) if asked.quick else (1, 8, 24, 48, 96)
        pool = mixed(asked.pool, asked.seed, texts, most=most, chats=chats)
        bar.begin("what each gives alone", len(pool))
        wanted: list[Told | None] = []
        for request in pool:
            same = repeats or request.body["temperature"] == 0.0
            told = alone(session, request)
            wanted.append(told if same or told.refused else None)
            bar.advance()
    return pool, wanted


async def references(
    http: httpx.AsyncClient, pool: Sequence[Request], wanted: Sequence[Told | None]
) -> list[Told]:
    """What requests give alone, asked of the server where no session could say.

    A session answers all of these: with a refusal as reference all later refusals would agree.
    """
    found = []
    for request, before in zip(pool, wanted, strict=True):
        told = await ask(http, request) if before is None else before
        if before is None and told.refused:
            raise CapabilityError(
                f"a reference was asked for: {request.path}, {json.dumps(dict(request.body))}.",
                "a session answers this request, and the server refused it.",
                "ask the server for it by hand, and read why.",
            )
        found.append(told)
    return found


@dataclass
class Soak:
    """A run under way, and what it has shown so far."""

    asked: argparse.Namespace
    watch: Watch
    bar: Bar
    rate: float
    tally: Tally = field(default_factory=Tally)
    interrupted: bool = False

    async def run(self, url: str, pool: Sequence[Request], wanted: Sequence[Told | None]) -> None:
        """Traffic, a sample every few seconds, and a rate that comes to the share wanted."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=None, trust_env=False
        ) as http:
            models = (await http.get("/v1/models")).json()["data"]
            sure = await references(http, pool, wanted)
            traffic = Traffic(http, pool, sure, self.asked.seed, models[0]["max_model_len"], BODY)
            self.tally = traffic.tally
            for number in range(1 if self.asked.quick else FIRST):
                traffic.burst(64 if number == 0 else None)
                await traffic.over()
            self.watch.take()
            looking = asyncio.create_task(self.look())
            try:
                seconds = 60.0 * self.asked.minutes
                await come_and_go(traffic, seconds, lambda: self.rate, self.bar.say)
            finally:
                looking.cancel()

    async def look(self) -> None:
        """Samples, and a line now and then."""
        every = between(self.asked)
        while True:
            before = self.watch.samples[-1]
            await asyncio.sleep(every)
            sample = await asyncio.to_thread(self.watch.take)
            if self.asked.rate is None:
                self.steer(before, sample)
            self.bar.advance()
            if len(self.watch.samples) % 30 == 0:
                console.print(line(self.tally, sample), style="dim", highlight=False)

    def steer(self, before: Sample, now: Sample) -> None:
        """Come nearer to the share of a core that is wanted, over all the time so far."""
        first = self.watch.samples[0]
        used = (now.cpu - first.cpu) / (now.seconds - first.seconds)
        last = (now.cpu - before.cpu) / (now.seconds - before.seconds)
        if last > 0.02:  # nobody came in a pause, which says nothing of the rate
            self.rate = min(max(self.rate * min(max(SHARE / used, 0.8), 1.25), 0.05), 100.0)


def between(asked: argparse.Namespace) -> float:
    """Seconds from sample to sample: a dozen of a short run."""
    return float(min(EVERY, 60.0 * asked.minutes / 12))


def line(tally: Tally, sample: Sample) -> str:
    return (
        f"{sample.seconds / 60:.1f} min: {tally.visits} visits, {sum(tally.wrong.values())} wrong, "
        f"{sum(tally.lost.values())} lost, {sample.rss / MIB:.0f} MiB, {sample.handles} handles"
    )


def verdicts(soak: Soak, begin: Sample, rest: Rest) -> list[gates.Gate]:
    """Every claim with its bound."""
    tally, watch = soak.tally, soak.watch
    bound = max(MIBS, FEW * middle(watch.warm(), "rss") / MIB)
    last = watch.samples[-1].figures
    return [
        at_most("answers that were lost", sum(tally.lost.values())),
        at_most("answers that were wrong", sum(tally.wrong.values())),
        growing("memory", watch.growth("rss", 1 / MIB), bound, " MiB"),
        growing("open files", watch.growth("files"), 1.0, ""),
        growing("threads", watch.growth("threads"), 1.0, ""),
        at_most("handles at rest beyond those before the first request", rest.handles
                - begin.handles, 2.0),
        at_most("texts that are left in the batch, the queue or the cache", rest.rows),
        at_most("places that are lost", 0.0 if rest.full else 1.0),
        at_most("processor at rest, of one core", 100.0 * rest.cpu, 5.0, " %"),
        at_most("errors of engine, drafter and log", sum(
            last[f"{name}_errors_total"] for name in ("engine", "drafter", "log"))),
        at_most("answers that the request log lacks", tally.lacking(rest.logged)),
        at_most("lines of the server that speak of errors", rest.errors),
        at_most("exit status after SIGTERM", abs(rest.status)),
    ]  # fmt: skip


def at_most(claim: str, value: float, bound: float = 0.0, unit: str = "") -> gates.Gate:
    return gates.Gate(claim, float(value), bound, at_least=False, unit=unit)


def growing(what: str, found: Growth | None, bound: float, unit: str) -> gates.Gate:
    """A slope; not measured where there are too few samples."""
    if found is None:
        return gates.Gate(f"growth of {what} per hour", None, bound, at_least=False, unit=unit)
    claim = f"growth of {what} per hour ({found.told(unit)})"
    return gates.Gate(claim, found.value, bound, at_least=False, unit=unit)


def markdown(soak: Soak, setting: Mapping[str, Any], found: Sequence[gates.Gate]) -> str:
    """The verdicts, what came, and what the process held."""
    tally, samples = soak.tally, soak.watch.samples
    first, last = samples[0], samples[-1]
    told = ", ".join(f"{name} {value}" for name, value in setting.items())
    kinds = sorted({*tally.right, *tally.wrong, *tally.lost})
    rows = [
        f"| {kind} | {tally.right[kind]} | {tally.wrong[kind]} | {tally.lost[kind]} |"
        for kind in kinds
    ]
    parts = [
        f"| {name} | {one.rss / MIB:.0f} | {one.handles} | {one.threads} "
        f"| {one.figures['cache_bytes'] / MIB:.1f} | {one.figures['prefix_bytes'] / MIB:.1f} |"
        for name, one in (("first", first), *behind(soak), ("last", last))
    ]
    share = (last.cpu - first.cpu) / max(last.seconds - first.seconds, 1e-9)
    return "\n".join([
        "# Hours of mixed load", "", f"{told}.", "", gates.markdown(found),
        f"{tally.visits} visits in {last.seconds / 60:.1f} minutes, at most {tally.most} at once, "
        f"in {tally.phases['spells']} spells, {tally.phases['bursts']} bursts and "
        f"{tally.phases['pauses']} pauses; {tally.left} clients left before the end. The server "
        f"wrote {last.figures['generated_tokens_total']:.0f} tokens in "
        f"{last.figures['steps_total']:.0f} steps, on {share:.2f} of a core.",
        "", "| visits | right | wrong | lost |", "|---|---:|---:|---:|", *rows,
        "", "| samples | resident, MiB | handles | threads | cache, MiB | prefixes, MiB |",
        "|---|---:|---:|---:|---:|---:|", *parts, "",
        f"Growth is the median of slopes behind the first {WARM_UP:.0%} of the time, with its "
        "interval of 95 %, which takes samples as independent.", "", "![](soak.svg)", "",
    ])  # fmt: skip


def behind(soak: Soak) -> list[tuple[str, Sample]]:
    """The first sample behind the warm-up, if there is one."""
    warm = soak.watch.warm()
    return [("after the warm-up", warm[0])] if warm else []


def options_of(description: str | None) -> argparse.Namespace:
    options = parser(description)
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument(
        "--rate", type=float, help=f"visits a second; none: {SHARE:.0%}% of a core"
    )
    options.add_argument("--method", default="auto")
    options.add_argument("--depth", type=int, help="length of drafts, for methods that draw them")
    options.add_argument("--dtype", default="float32", help="others may round batches otherwise")
    options.add_argument("--pool", type=int, default=240, help="requests whose answer is known")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    if asked.quick:
        asked.minutes, asked.pool, asked.rate = min(asked.minutes, 0.1), 12, asked.rate or 20.0
    return asked


def run(description: str | None) -> int:
    asked = options_of(description)
    torch.set_num_threads(asked.threads or 1)
    with shown(False) as bar:
        pool, wanted = known(asked, bar)
        with served(asked) as serving, serving.client() as client:
            watch = Watch(serving.process.pid, client)
            begin = watch.take()
            watch.samples.clear()
            soak = Soak(asked, watch, bar, asked.rate or 2.0)
            bar.begin("soak", int(60.0 * asked.minutes / between(asked)))
            try:
                asyncio.run(soak.run(serving.url, pool, wanted))
            except KeyboardInterrupt:
                soak.interrupted = True
                if len(watch.samples) < 2:
                    raise
            rest = at_rest(serving, watch, asked.quick)
    found = verdicts(soak, begin, rest)
    setting = {
        "target": Path(asked.target or "text-target").name,
        "draft": Path(draft_of(asked) or "none").name,
        "method": asked.method if asked.depth is None else f"{asked.method}[depth={asked.depth}]",
        "dtype": asked.dtype,
        "known answers": len(pool),
        "of these asked of the server alone": wanted.count(None),
    }
    setting |= {"interrupted": "yes"} if soak.interrupted else {}
    document = {
        "environment": environment.describe(), "setting": setting,
        "gates": [gate.to_dict() for gate in found], "traffic": soak.tally.to_dict(),
        "before": begin.figures, **watch.to_dict(),
    }  # fmt: skip
    if drawn := picture(watch.samples):
        replace(asked.out / "soak.svg", standalone(drawn))
    for file in gates.publish(asked.out, "soak", document, markdown(soak, setting, found)):
        console.print(f"wrote {file}", markup=False)
    gates.show(found, "Hours of mixed load")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

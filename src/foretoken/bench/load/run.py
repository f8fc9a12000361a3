"""`foretoken load`: every load in turn, the servers alternating within it; then the reports."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.console import Console

import foretoken
from foretoken.bench import environment
from foretoken.bench.files import writable
from foretoken.bench.load.address import Server
from foretoken.bench.load.arrivals import Level, schedule
from foretoken.bench.load.client import Client, connected
from foretoken.bench.load.config import LoadConfig
from foretoken.bench.load.drive import closed, opened, watched
from foretoken.bench.load.journal import Journal, open_journal
from foretoken.bench.load.meeting import Met, meet
from foretoken.bench.load.prompts import Prompts, check_prompts
from foretoken.bench.load.record import Block, Record
from foretoken.bench.load.report import write_reports
from foretoken.bench.load.results import results_of, warnings_of
from foretoken.bench.progress import Bar, shown
from foretoken.bench.tasks import Task


@dataclass(slots=True)
class Run:
    """A load test under way."""

    config: LoadConfig
    prompts: Prompts
    journal: Journal
    bar: Bar
    met: dict[str, Met] = field(default_factory=dict)
    partial: Block | None = None  # cut off by Ctrl-C: in the reports, and measured again

    @property
    def blocks(self) -> list[Block]:
        begun = [block for block in (self.partial,) if block is not None and block.records]
        return [*self.journal.blocks, *begun]

    async def measure(self) -> None:
        """All blocks; those that an interrupted test finished are taken as they are."""
        config = self.config
        async with AsyncExitStack() as stack:
            clients: dict[str, Client] = {}
            for server in config.servers:
                one = connected(server, config.timeout, config.api_key)
                clients[server.name] = await stack.enter_async_context(one)
                self.met[server.name] = await meet(
                    clients[server.name], config.writing, self.prompts,
                    config.model(server), config.warm_up,
                )  # fmt: skip
                self.journal.same(server.name, self.made(server.name))
            turns = turns_of(config.levels, config.servers, config.turns)
            self.bar.begin("load", len(turns))
            first, before = 0, (turns[0][:2])
            for level, number, server in turns:
                if (level, number) != before:
                    first, before = self.used(*before, first), (level, number)
                made = self.made(server.name)
                block = Block(server=server.name, level=level, round=number, made=made)
                self.bar.say(block.key)
                if self.journal.block(block.key) is None:
                    self.partial = block
                    await self.one(block, clients[server.name], first)
                    self.partial = None
                    self.journal.add(block)
                self.bar.advance()

    def made(self, server: str) -> dict[str, str]:
        """What a resumed test must share with the finished blocks of a server that was met."""
        return {
            "model": self.met[server].model,
            "processor": environment.cpu(),
            "version": foretoken.__version__,
        }

    def used(self, level: Level, number: int, first: int) -> int:
        """The first prompt that no server saw in this round of a load or before."""
        counts = [len(b.records) for b in self.blocks if (b.level, b.round) == (level, number)]
        return first + max(counts)

    async def one(self, block: Block, client: Client, first: int) -> None:
        """One block: its requests are the same, at the same times, for every server."""
        config, met, level = self.config, self.met[block.server], block.level
        limit = config.limit(level)
        chance = Random(f"{config.seed} / {level.label} / {block.round}")
        gc.collect()

        def make(number: int, due: float) -> Record:
            task = self.prompts.at(first + number)
            return Record(number=number, prompt=task.id, family=task.family, due=due)

        async with watched(block) as zero:

            async def ask(record: Record) -> None:
                number = first + record.number
                task = self.prompts.at(number)
                body = config.writing.body(task, number, met.model, met.usage)
                await client.ask(record, config.writing.path, body, zero)

            if level.open:
                times = schedule(level, limit.requests, limit.seconds, chance)
                block.length = limit.seconds if level.kind == "day" else None
                if level.kind == "day" and len(times) == limit.requests:
                    block.reached = times[-1]
                await opened(block, make, ask, zero, times, config.max_in_flight)
            else:
                await closed(block, make, ask, zero, limit, config.think, chance)


def run_load(config: LoadConfig, tasks: Sequence[Task]) -> dict[str, Any]:
    """Measure and write the reports into `config.out`; returns the results.

    Ctrl-C ends it early: the reports then hold what was done, and `interrupted` is true.
    """
    check_prompts(tasks, config.writing)
    out = writable(config.out)
    started = environment.describe()
    journal = open_journal(out, config.asked() | {"prompts": digest(tasks)}, config.resume)
    interrupted = False
    with shown(config.quiet) as bar:
        run = Run(config, Prompts(tasks, config.seed), journal, bar)
        gc.freeze()  # the collector's pauses would be in the times
        try:
            asyncio.run(run.measure())
        except KeyboardInterrupt:
            if all(block.unfinished == len(block.records) for block in run.blocks):
                raise  # not one request ended
            interrupted = True
        finally:
            gc.unfreeze()
    results = results_of(config, run.blocks, run.met, run.prompts, digest(tasks))
    results |= {"environment": started, "interrupted": interrupted}
    results["warnings"] = warnings_of(results)
    for text in results["warnings"]:
        console = Console(stderr=True, quiet=config.quiet, soft_wrap=True, highlight=False)
        console.print(f"warning: {text}", style="yellow", markup=False)
    write_reports(results, out)
    if not interrupted:
        journal.finish()
    return results


def turns_of(
    levels: Sequence[Level], servers: Sequence[Server], rounds: int
) -> list[tuple[Level, int, Server]]:
    """Blocks in their order: load by load, the servers in turn, in the other order every other
    round, so that a machine that grows slower favours nobody."""
    return [
        (level, number, server)
        for level in levels
        for number in range(rounds)
        for server in (servers if number % 2 == 0 else servers[::-1])
    ]


def digest(tasks: Sequence[Task]) -> str:
    """What the prompts are, without their text."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(repr((task.id, task.turns[0], task.max_new_tokens)).encode())
    return f"sha256:{found.hexdigest()[:16]}"

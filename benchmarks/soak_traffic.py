"""Traffic for a server that runs for hours: who comes, how often, and what each of them is owed.

Most visitors ask for what is known beforehand. The others leave in the middle of an answer, read
slowly, or send what has to be refused. Quiet spells of random arrivals alternate with bursts and
with pauses in which nobody comes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
from mixed_requests import CHATS, COMPLETIONS, Request, Told, agrees, read

LATEST = 300.0  # seconds after which an answer counts as lost
KEPT = 50  # faults that are told in full
IDLE = 2.0  # seconds that the client keeps a connection: less than the server does
BURST = (8, 64)  # requests at once
PAUSE = (5.0, 15.0)  # seconds without anybody
SPELL = 45.0  # seconds of arrivals between these, on average
MALFORMED: tuple[tuple[str, bytes], ...] = (
    (COMPLETIONS, b"{"), (COMPLETIONS, b""), (CHATS, b"[1, 2"), (COMPLETIONS, b"\xff\xfe{}"),
    (COMPLETIONS, b'{"prompt": 5}'), (COMPLETIONS, b'{"prompt": "a", "max_tokens": -1}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'), (CHATS, b'{"messages": []}'),
    (CHATS, b'{"messages": [{"role": "user", "content": "a"}], "temprature": 1}'),
    (COMPLETIONS, b'{"prompt": "a", "guided_regex": "("}'),
    (CHATS, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}'),
)  # fmt: skip
PATHS = {  # and the status that each is answered with
    "/health": 200, "/metrics": 200, "/v1/models": 200, "/": 200, "/openapi.json": 200,
    "/v1/models/nobody": 404, "/nowhere": 404,
}  # fmt: skip


class Wrong(Exception):
    """An answer that came, and is not the right one."""


@dataclass(slots=True)
class Tally:
    """What became of all visits."""

    right: Counter[str] = field(default_factory=Counter)  # by kind of visit
    wrong: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    left: int = 0  # of these, clients that went away before the end
    answered: list[str] = field(default_factory=list)  # ids of requests for /v1, to their ends
    most: int = 0  # visits at the same time
    phases: Counter[str] = field(default_factory=Counter)  # spells, bursts and pauses
    faults: list[dict[str, str]] = field(default_factory=list)

    @property
    def visits(self) -> int:
        return sum(sum(one.values()) for one in (self.right, self.wrong, self.lost))

    def lacking(self, logged: Container[str]) -> int:
        """Answers of which these ids of a request log say nothing."""
        return sum(one not in logged for one in self.answered)

    def fault(self, of: Counter[str], kind: str, said: str) -> None:
        of[kind] += 1
        if len(self.faults) < KEPT:
            self.faults.append({"kind": kind, "said": said[:2000]})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "visits": self.visits,
            "right": dict(sorted(self.right.items())),
            "wrong": dict(self.wrong),
            "lost": dict(self.lost),
            "left": self.left,
            "most_at_once": self.most,
            "phases": dict(self.phases),
            "faults": self.faults,
        }


class Traffic:
    """Visitors of one server. `wanted` are the answers that requests of the pool give alone."""

    def __init__(
        self, http: httpx.AsyncClient, pool: Sequence[Request], wanted: Sequence[Told], seed: int,
        longest: int | None, largest: int,
    ) -> None:  # fmt: skip
        self.http, self.pool, self.wanted = http, pool, wanted
        self.longest, self.largest = longest, largest  # tokens of a context, bytes of a body
        self.dice, self.tally = random.Random(seed), Tally()
        self.under_way: set[asyncio.Task[None]] = set()
        self.visits: dict[Callable[[], Awaitable[None]], int] = {
            self.known: 66, self.slow_reader: 3, self.leaves: 8, self.leaves_early: 3,
            self.unknown: 5, self.malformed: 4, self.wrong_key: 2, self.too_long: 2,
            self.huge: 1, self.looks_around: 6,
        }  # fmt: skip

    def come(self, visit: Callable[[], Awaitable[None]] | None = None) -> None:
        """Somebody comes, and is answered while others are."""
        kinds = list(self.visits)
        chosen = visit or self.dice.choices(kinds, [self.visits[one] for one in kinds])[0]
        task = asyncio.create_task(self.watched(chosen))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        self.tally.most = max(self.tally.most, len(self.under_way))

    async def watched(self, visit: Callable[[], Awaitable[None]]) -> None:
        """A visit, and what became of it."""
        kind = visit.__name__.replace("_", " ")  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(LATEST):
                await visit()
        except Wrong as error:
            self.tally.fault(self.tally.wrong, kind, str(error))
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
            self.tally.fault(self.tally.lost, kind, repr(error))
        else:
            self.tally.right[kind] += 1

    async def over(self) -> None:
        """Until all are answered."""
        while self.under_way:
            await asyncio.gather(*tuple(self.under_way))

    async def spell(self, seconds: float, rate: Callable[[], float]) -> None:
        """Random arrivals for a while, so many a second."""
        ends = monotonic() + seconds
        while monotonic() < ends:
            await asyncio.sleep(min(self.dice.expovariate(rate()), ends - monotonic() + 0.01))
            self.come()

    def burst(self, count: int | None = None) -> None:
        """Many at once, whose answers are known."""
        for _ in range(count or self.dice.randint(*BURST)):
            self.come(self.known)

    def note(self, response: httpx.Response) -> None:
        """An answer that came to its end: the request log has to have its id."""
        self.tally.answered.append(response.headers.get("x-request-id", "an answer without an id"))

    # visits that are answered

    async def known(self) -> None:
        at = self.dice.randrange(len(self.pool))
        response = await self.http.post(self.pool[at].path, json=dict(self.pool[at].body))
        self.note(response)
        self.judged(at, response.status_code, response.text)

    async def slow_reader(self) -> None:
        """Reads a stream a little at a time."""
        streams = [at for at, one in enumerate(self.pool) if one.body["stream"]]
        at = self.dice.choice(streams)
        asked = self.pool[at]
        async with self.http.stream("POST", asked.path, json=dict(asked.body)) as response:
            said = b""
            async for part in response.aiter_raw(64):
                said += part
                await asyncio.sleep(0.02)
        self.note(response)
        self.judged(at, response.status_code, said.decode())

    def judged(self, at: int, status: int, said: str) -> None:
        """Hold an answer against what its request gives alone."""
        told, wanted = read(self.pool[at], status, said), self.wanted[at]
        if not agrees(self.pool[at], wanted, told):
            raise Wrong(f"{json.dumps(dict(self.pool[at].body))}: {told}, and alone {wanted}")

    async def unknown(self) -> None:
        """Sampled without a seed: any texts, but so many and the whole of each."""
        pairs = zip(self.pool, self.wanted, strict=True)
        asked = self.dice.choice([one for one, alone in pairs if not alone.refused])
        body = {k: v for k, v in asked.body.items() if k != "seed"} | {"temperature": 1.0}
        response = await self.http.post(asked.path, json=body)
        self.note(response)
        told = read(asked, response.status_code, response.text)
        ended = all(one.finish in ("stop", "length") for one in told.texts)
        if told.refused or len(told.texts) != asked.texts or not ended:
            raise Wrong(f"{json.dumps(body)}: {told}")

    # visits that are broken off

    def long(self) -> dict[str, Any]:
        texts = [one for one in self.pool if one.path == COMPLETIONS]
        prompt = self.dice.choice(texts).body["prompt"]
        return {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0.0}

    async def leaves(self) -> None:
        """Goes away in the middle of a stream."""
        body, parts = {**self.long(), "stream": True}, self.dice.randint(1, 8)
        async with self.http.stream("POST", COMPLETIONS, json=body) as response:
            if response.status_code != 200:
                raise Wrong(f"a long stream was answered with {response.status_code}")
            async for _ in response.aiter_raw():
                parts -= 1
                if parts == 0:
                    break
        self.tally.left += 1

    async def leaves_early(self) -> None:
        """Goes away while it waits for a whole answer; one that came first is a right one."""
        try:
            async with asyncio.timeout(self.dice.uniform(0.0, 0.3)):
                response = await self.http.post(COMPLETIONS, json=self.long())
        except TimeoutError:
            self.tally.left += 1
            return
        self.note(response)
        if response.status_code != 200:
            raise Wrong(f"a long text was answered with {response.status_code}")

    # visits that are refused

    async def malformed(self) -> None:
        path, body = self.dice.choice(MALFORMED)
        await self.expected(400, "POST", path, content=body)

    async def wrong_key(self) -> None:
        keys = ({"Authorization": "Bearer nobody"}, {"Authorization": "nonsense"})
        asked = self.dice.choice(self.pool)
        headers = self.dice.choice(keys)
        await self.expected(401, "POST", asked.path, json=dict(asked.body), headers=headers)

    async def too_long(self) -> None:
        """More tokens than the context holds."""
        body = {"prompt": [7] * ((self.longest or 0) + 2), "max_tokens": 4}
        await self.expected(400 if self.longest else 200, "POST", COMPLETIONS, json=body)

    async def huge(self) -> None:
        """More bytes than the server reads."""
        body = {"prompt": "a" * (self.largest + 1)}
        await self.expected(413, "POST", COMPLETIONS, json=body)

    async def looks_around(self) -> None:
        path = self.dice.choice(list(PATHS))
        await self.expected(PATHS[path], "GET", path)

    async def expected(self, status: int, verb: str, path: str, **options: Any) -> None:
        """Answered with this status, refusals in OpenAI's form."""
        response = await self.http.request(verb, path, **options)
        if path.startswith("/v1"):
            self.note(response)
        error = response.json().get("error", {}) if status >= 400 else {"message": "none"}
        if response.status_code != status or not error.get("message"):
            told = f"{response.status_code} and not {status}: {response.text[:300]}"
            raise Wrong(f"{verb} {path} was answered with {told}")


async def come_and_go(
    traffic: Traffic, seconds: float, rate: Callable[[], float], said: Callable[[str], None]
) -> None:
    """Spells, bursts and pauses for so long, and the last answers."""
    dice, phases = traffic.dice, traffic.tally.phases
    ends = monotonic() + seconds
    spell = min(SPELL, seconds / 8)
    while (left := ends - monotonic()) > 0:
        phases["spells"] += 1
        said("arrivals")
        await traffic.spell(min(left, dice.uniform(0.5, 1.5) * spell), rate)
        kind = ("pauses", "bursts")[phases["spells"] % 2]
        phases[kind] += 1
        said(kind)
        if kind == "bursts":
            traffic.burst()
        else:
            pause = dice.uniform(*PAUSE) * spell / SPELL
            await asyncio.sleep(max(0.0, min(pause, ends - monotonic())))
    said("waiting for the last answers")
    await traffic.over()

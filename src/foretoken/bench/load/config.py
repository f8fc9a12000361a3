"""What a load test is asked to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench.load.address import Server
from foretoken.bench.load.arrivals import Level
from foretoken.bench.load.drive import Limit
from foretoken.bench.load.prompts import Writing
from foretoken.bench.load.sample import Promise
from foretoken.errors import ConfigError, check_values

FEWEST, WAVES = 32, 4  # requests of a round of a closed loop: so many, and so many per client
ARRIVALS = 64  # of an open loop
DAY_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Which servers, which loads, and how they are measured."""

    servers: tuple[Server, ...]
    levels: tuple[Level, ...]
    writing: Writing = field(default_factory=Writing)
    models: tuple[str, ...] = ()  # one for all, or one for each server; none: the first listed
    requests: int | None = None  # of a load and a server, over all rounds
    seconds: float | None = None
    rounds: int | None = None  # turns of the servers within a load; None: 1, or 2 for several
    think: float = 0.0
    max_in_flight: int = 512
    warm_up: int = 3
    timeout: float = 300.0
    promise: Promise = field(default_factory=Promise)
    seed: int = 0
    out: Path = Path("load-results")
    resume: bool = False
    quiet: bool = False
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("requests", "rounds", "max_in_flight", "warm_up"):
            value = getattr(self, name)
            check_values(self, (name, value is None or value >= 1, "1 or more"))
        for name in ("seconds", "timeout"):
            value = getattr(self, name)
            good = value is None or (value > 0 and math.isfinite(value))
            check_values(self, (name, good, "a number of seconds above 0"))
        check_values(self, ("think", 0 <= self.think < math.inf, "0 or more seconds"))
        if len(self.models) not in (0, 1, len(self.servers)):
            raise ConfigError(
                f"{len(self.models)} models were named for {len(self.servers)} servers.",
                "one name is for all servers, or each has its own, in the order of the addresses.",
                "pass --model NAME or --model NAME,NAME; none takes the first that a server lists.",
            )
        if self.promise.asked and not self.writing.stream:
            raise ConfigError(
                "--slo-ttft or --slo-tpot with --no-stream.",
                "an answer that comes in one piece does not show when its tokens came.",
                "leave out --no-stream, or the targets.",
            )

    @property
    def turns(self) -> int:
        """Rounds of a load: with several servers each has more than one turn."""
        return self.rounds or (1 if len(self.servers) == 1 else 2)

    def limit(self, level: Level) -> Limit:
        """Where one block of a load ends."""
        requests, seconds = self.requests, self.seconds
        if level.kind == "day" and seconds is None:
            seconds = DAY_SECONDS
        elif requests is None and seconds is None:
            each = max(FEWEST, WAVES * int(level.value))
            requests = ARRIVALS if level.open else each * self.turns
        return Limit(
            requests=None if requests is None else math.ceil(requests / self.turns),
            seconds=None if seconds is None else seconds / self.turns,
        )

    def model(self, server: Server) -> str | None:
        if len(self.models) < 2:
            return self.models[0] if self.models else None
        return self.models[self.servers.index(server)]

    def asked(self) -> dict[str, Any]:
        """What a resumed test must share with its beginning. No key is among it."""
        names = ("requests", "seconds", "turns", "think", "max_in_flight", "timeout", "seed")
        return {
            "servers": [server.name for server in self.servers],
            "levels": [level.label for level in self.levels],
            "models": list(self.models),
            "writing": asdict(self.writing),
            **{name: getattr(self, name) for name in names},
        }

"""The search for what is fastest: prepare the candidates, race them, refine the winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from foretoken.bench.models import Models
from foretoken.bench.own import OwnRow, Row
from foretoken.bench.progress import Bar
from foretoken.bench.prompts import TimedPrompt
from foretoken.bench.rows import RowSpec
from foretoken.bench.run import FAILURES, reason
from foretoken.bench.scoring import scoring_costs
from foretoken.bench.tune.candidates import ALWAYS, simplest, sizes
from foretoken.bench.tune.halving import PLAIN, Choice, choose, clearly_faster, level
from foretoken.bench.tune.prompts_in_turn import PromptsInTurn
from foretoken.bench.tune.race import TOO_LATE, Clock, Race
from foretoken.bench.tune.worth import certainty
from foretoken.errors import ConfigError
from foretoken.types import SamplingParams

PREPARING = 0.4  # share of the time limit that loading and measuring costs may take
RACING = 0.75  # share after which the winner's sizes are tried, if it is known by then
LAST = 0.97  # share after which nothing is raced: the certainty of the target, the files
WARM_TOKENS = 16
NODES = (1, 2, 4, 8, 16, 32, 64)
COST_SECONDS = 1.5


@dataclass(slots=True)
class Search:
    """What is tried, what was measured, and what is chosen."""

    models: Models
    prompts: PromptsInTurn
    params: Callable[[int, frozenset[int]], SamplingParams]
    clock: Clock
    bar: Bar
    specs: dict[str, RowSpec] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # candidates that cannot run -> why
    scoring: dict[str, Any] = field(default_factory=dict)
    certainty: dict[str, float] | None = None
    race: Race = field(init=False)
    sized: Race | None = None  # of the winner against other sizes of itself
    choice: Choice = field(init=False)

    def run(self, specs: Sequence[RowSpec]) -> None:
        """Everything that is measured."""
        self.specs = {spec.label: spec for spec in specs}
        first = self.prompts.first()
        self.bar.begin("measuring what forwards cost", 1)
        target = self.models.own("target")
        self.scoring = scoring_costs(target, first.ids, NODES, COST_SECONDS)
        self.race = self.raced(self.prepared(first))
        alive = self.race.run(list(self.race.rows), RACING) or [PLAIN]
        self.check_time()
        if not self.race.stopped and not self.settled(alive):
            alive = self.race.run(alive, LAST) or [PLAIN]
        self.choice = choose(self.race.gains, alive, simplest(list(self.specs.values())))
        try:
            if not self.race.stopped and self.choice.label != PLAIN:
                self.refine(self.choice.label)
            if not self.stopped:
                self.certainty = certainty(target, self.texts(), self.params(1, frozenset()))
        except KeyboardInterrupt:  # what was found before stands
            self.race.stopped = True

    def texts(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """What plain decoding wrote: one text, and more while there is time."""
        for number, text in enumerate(self.race.texts):
            if number == 0 or self.clock.fits(0.0):
                yield text

    def settled(self, alive: Sequence[str]) -> bool:
        """Whether the rest of the time is better spent on the winner's sizes than on who wins."""
        race = self.race
        return race.decided(alive) or level(race.gains, alive, race.enough)

    @property
    def stopped(self) -> bool:
        """Whether the user has ended it."""
        return self.race.stopped or (self.sized is not None and self.sized.stopped)

    def raced(self, rows: Mapping[str, Row]) -> Race:
        def params(prompt: TimedPrompt) -> SamplingParams:
            return self.params(prompt.max_new_tokens, self.models.eos)

        return Race(dict(rows), self.models.renew, self.prompts, params, self.clock, self.bar)

    def prepared(self, prompt: TimedPrompt) -> dict[str, Row]:
        """Every candidate loaded and warm; one that cannot run is left out and says why."""
        rows: dict[str, Row] = {}
        self.bar.begin("preparing candidates", len(self.specs))
        for label, spec in self.specs.items():
            self.bar.say(f"preparing {label}")
            if label in ALWAYS or self.clock.fits(0.0, PREPARING):
                self.prepare(spec, prompt, rows)
            else:
                self.left_out[label] = TOO_LATE
            self.bar.advance()
        return rows

    def prepare(self, spec: RowSpec, prompt: TimedPrompt, rows: dict[str, Row]) -> None:
        """A row whose shapes were run once, and which remembers nothing of it."""
        try:
            row = self.models.row(spec)
            assert isinstance(row, OwnRow)
            cap = min(WARM_TOKENS, prompt.max_new_tokens)
            row.write(prompt.ids, self.params(cap, self.models.eos))
            self.models.renew(row)
        except FAILURES as problem:
            if spec.label == PLAIN:
                raise
            self.left_out[spec.label] = f"cannot run: {reason(problem)}"
        else:
            rows[spec.label] = row

    def check_time(self) -> None:
        """Raise where not one prompt was written by all."""
        if self.race.records:
            return
        if self.race.stopped:
            raise KeyboardInterrupt
        count, spent = len(self.race.rows), self.clock.spent
        least = math.ceil(max(2.0 * spent, 1.2 * self.clock.seconds) / 60.0)
        raise ConfigError(
            f"tuning within {self.clock.seconds / 60.0:g} minutes.",
            f"one round takes longer: loading, and one prompt written by each of {count} "
            f"candidates, were not done after {spent:.0f} seconds.",
            f"pass --minutes {least} or more, or a smaller --max-new-tokens.",
        )

    def refine(self, winner: str) -> None:
        """The winner against other sizes of itself, all as new, where there is time for it.

        The default follows measured costs and goes on learning, so another size has to be clearly
        faster.
        """
        rows = {label: self.race.rows[label] for label in (PLAIN, winner)}
        row = rows[winner]
        assert isinstance(row, OwnRow)
        first = self.prompts.first()
        for spec in sizes(self.specs[winner], row.engine.drafter.traits.shape):
            if not self.clock.fits(3 * (len(rows) + 1) * self.race.usual(winner), LAST):
                break
            self.specs[spec.label] = spec
            self.bar.say(f"preparing {spec.label}")
            self.prepare(spec, first, rows)
        if len(rows) == 2:
            return
        self.sized = self.raced(rows)
        sized = [label for label in rows if label != PLAIN]
        try:
            self.sized.forget()
            alive = self.sized.run(sized, LAST)
        except FAILURES as problem:  # what was found before stands
            others = (label for label in sized if label != winner)
            self.left_out |= dict.fromkeys(others, f"cannot run: {reason(problem)}")
            return
        if not alive:
            return
        gains = {label: found for label, found in self.sized.gains.items() if label != PLAIN}
        best = clearly_faster(gains, alive, winner)
        if best is not None:
            self.choice = choose(gains, [best], simplest([self.specs[label] for label in sized]))

    def gains_of(self, label: str) -> list[float]:
        """A candidate's mean gain on every prompt that it wrote."""
        found: dict[str, list[float]] = {}
        for race in (self.race, self.sized):
            record = race.records.get(label) if race else None
            for prompt, values in record.gains.items() if record else ():
                found.setdefault(prompt, []).extend(values)
        return [fmean(values) for values in found.values()]

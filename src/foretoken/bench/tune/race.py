"""Rounds of measuring: all candidates write the same prompts in turn, then the slower half leaves.

On each prompt every candidate writes once, plain decoding among them, in an order that rotates, so
that a machine's drift hits all alike. What a drafter has learned stays with it from prompt to
prompt, as in a session, and is forgotten when the prompts begin again.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

from foretoken.bench.own import Outcome, Row
from foretoken.bench.progress import Bar
from foretoken.bench.prompts import TimedPrompt
from foretoken.bench.run import FAILURES, reason
from foretoken.bench.tune.halving import ENOUGH, PLAIN, decided, survivors
from foretoken.bench.tune.prompts_in_turn import PromptsInTurn
from foretoken.types import SamplingParams

FIRST = 0.97  # share of the time limit that the first prompt may take
TOO_LATE = "not tried: too little time; pass more --minutes"
LEAST = 2  # prompts of a round, where the time allows
KEPT = 8  # texts of plain decoding kept, for what they tell about the target
Params = Callable[[TimedPrompt], SamplingParams]


class Clock:
    """The time limit: what was spent since the beginning, and what fits."""

    def __init__(
        self, seconds: float, spent: float = 0.0, now: Callable[[], float] = perf_counter
    ) -> None:
        self.seconds, self.now, self.began = seconds, now, now() - spent

    @property
    def spent(self) -> float:
        return self.now() - self.began

    def fits(self, seconds: float, share: float = 1.0) -> bool:
        """Whether so many seconds more end within a share of the limit."""
        return self.spent + seconds <= share * self.seconds


@dataclass(slots=True)
class Record:
    """What was measured of one candidate."""

    gains: dict[str, list[float]] = field(default_factory=dict)  # by prompt: log rate over plain's
    rates: dict[str, list[float]] = field(default_factory=dict)  # by prompt: tokens per second
    seconds: list[float] = field(default_factory=list)  # of every text
    tokens: int = 0
    forwards: int = 0
    same: int = 0  # texts that are plain's, token by token
    texts: int = 0


@dataclass(slots=True)
class Race:
    """Candidates, what they were measured at, and the rounds so far."""

    rows: dict[str, Row]  # by label, plain among them
    renew: Callable[[Row], None]  # lets a row forget what it learned
    prompts: PromptsInTurn
    params: Params
    clock: Clock
    bar: Bar
    dropped: dict[str, str] = field(default_factory=dict)  # label -> why
    records: dict[str, Record] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    texts: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)  # by plain
    turn: int = 0
    stopped: bool = False  # by the user

    @property
    def gains(self) -> dict[str, dict[str, float]]:
        """The mean gain of every candidate on each prompt that it finished."""
        return {
            label: {prompt: fmean(values) for prompt, values in record.gains.items()}
            for label, record in self.records.items()
            if label in self.rows
        }

    def run(self, labels: Sequence[str], share: float) -> list[str]:
        """Halve the candidates until two are left, the choice is made, or that share of the time is
        spent; those that are left."""
        alive = [label for label in labels if label in self.rows]
        while not self.stopped:
            left = max(math.ceil(math.log2(len(alive))), 1)
            spent = self.clock.spent
            until = spent + max(share * self.clock.seconds - spent, 0.0) / left
            done = self.round(alive, until, share)
            alive = [label for label in alive if label in self.rows]
            if not done or not alive:
                break
            over = len(alive) <= 2 or self.decided(alive)
            kept = alive if over else survivors(self.gains, alive)
            self.close_round(alive, [label for label in alive if label not in kept])
            alive = kept
            if over or len(alive) == 1:
                break
        return alive

    def decided(self, alive: Sequence[str]) -> bool:
        """Whether more prompts could not change the choice."""
        return decided(self.gains, alive, self.enough)

    @property
    def enough(self) -> int:
        """Prompts that a decision stands on: few where there are only few."""
        seen = len(self.records[PLAIN].gains) if PLAIN in self.records else ENOUGH
        return min(ENOUGH, seen) if self.prompts.passes > 1 else ENOUGH

    def round(self, alive: Sequence[str], until: float, share: float) -> int:
        """Prompt after prompt until the round's time is spent; how many were finished by all."""
        done = 0
        self.bar.begin(f"round {len(self.rounds) + 1} of candidates", len(alive))
        while self.clock.spent < until or done < LEAST:
            # Without a first prompt nothing is known: it gets nearly all the time there is.
            within = share if self.records else max(share, FIRST)
            whole = sum(self.usual(label) for label in together(alive))
            if not self.clock.fits(whole, within):
                break
            try:
                if not self.prompt(alive, within):
                    break
            except KeyboardInterrupt:
                self.stopped = True
                break
            done += 1
            left = [label for label in alive if label in self.rows]
            if not left or self.decided(left):
                break
        return done

    def prompt(self, alive: Sequence[str], share: float) -> bool:
        """The next prompt, written by all; False where the time was over before.

        A prompt that plain decoding cannot write is nobody's fault, and passed over. Whoever had no
        time for the first one is left out.
        """
        passes = self.prompts.passes
        prompt = self.prompts.take()
        if self.prompts.passes > max(passes, 1):
            self.forget()
        order = together(alive)
        at = self.turn % len(order)  # plain first of all, then others
        self.turn += 1
        found: dict[str, Outcome] = {}
        failed: dict[str, Exception] = {}
        for label in order[at:] + order[:at]:
            if label not in self.rows or not self.clock.fits(self.usual(label), share):
                continue
            self.bar.say(f"{label} on {prompt.id}")
            gc.collect()
            try:
                found[label] = self.rows[label].write(prompt.ids, self.params(prompt))
            except FAILURES as problem:
                failed[label] = problem
        if PLAIN in failed:
            if not self.records:
                raise failed[PLAIN]
            self.prompts.skipped[prompt.id] = reason(failed[PLAIN])
            return True
        for label, problem in failed.items():
            self.drop(label, f"{reason(problem)} (prompt {prompt.id})")
        if PLAIN in found:
            self.prompts.answered(prompt, found[PLAIN].tokens)
        missing = [label for label in alive if label in self.rows and label not in found]
        if PLAIN in found and len(found) > 1 and not self.records:
            for label in missing:
                self.drop(label, TOO_LATE)
        elif PLAIN not in found or missing:
            return False
        self.note(prompt, found)
        return True

    def usual(self, label: str) -> float:
        """Seconds that a candidate takes for a text; 0 before its first."""
        return fmean(self.records[label].seconds[-4:]) if label in self.records else 0.0

    def note(self, prompt: TimedPrompt, found: dict[str, Outcome]) -> None:
        """One text of every candidate, all on the same prompt."""
        plain = found[PLAIN]
        self.texts = [*self.texts, (prompt.ids, plain.tokens)][-KEPT:]
        base = len(plain.tokens) / plain.seconds
        for label, outcome in found.items():
            record = self.records.setdefault(label, Record())
            rate = len(outcome.tokens) / outcome.seconds
            record.gains.setdefault(prompt.id, []).append(math.log(rate / base))
            record.rates.setdefault(prompt.id, []).append(rate)
            record.seconds.append(outcome.seconds)
            record.tokens += len(outcome.tokens)
            record.forwards += outcome.forwards or 0
            record.same += outcome.tokens == plain.tokens
            record.texts += 1

    def drop(self, label: str, why: str) -> None:
        """A candidate that failed."""
        self.dropped[label] = why
        del self.rows[label]

    def forget(self) -> None:
        """What drafters learned from answers that they are about to write again."""
        for row in self.rows.values():
            self.renew(row)

    def close_round(self, alive: Sequence[str], leaving: Sequence[str]) -> None:
        """The standings at the end of a round, for the page."""
        gains = self.gains
        self.rounds.append(
            {
                "seconds": round(self.clock.spent, 1),
                "prompts": max(len(gains[label]) for label in alive),
                "gains": {label: list(gains[label].values()) for label in together(alive)},
                "leaving": list(leaving),
            }
        )


def together(alive: Sequence[str]) -> list[str]:
    """Who writes a prompt: plain decoding always does, for all are held against it."""
    return list(alive) if PLAIN in alive else [PLAIN, *alive]

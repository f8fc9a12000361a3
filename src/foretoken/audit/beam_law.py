"""Beam sampling by enumeration: what a set of texts should be, written down without the engine.

Three references. A fixed width: every step draws W pairs from the joint law. A width that a draft
of one layer decides: the first K pairs, then the chance that all of them stood up. And, layer by
layer for any draft, that pairs are independent draws from the target's law given what came before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import Coins, enumerate_outcomes
from foretoken.engine.beam import BeamEngine, Round, decode
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.forest import BeamRow
from foretoken.types import SamplingParams
from foretoken.warp import Warp
from foretoken.warp.joint import joint_law

Text = tuple[int, ...]
Texts = tuple[Text, ...]  # the complete ones, sorted
Law = dict[Texts, float]
BeamBuild = Callable[[], BeamEngine]
Weighted = tuple[tuple[Text, float], ...]  # texts that go on and their weights, sorted


@dataclass(slots=True)
class Table:
    """Beam sampling on a table: the target, a prompt, and options."""

    target: TableLM
    prompt: Sequence[int]
    params: SamplingParams
    width: int
    warp: Warp = field(init=False)

    def __post_init__(self) -> None:
        self.warp = Warp(self.params, len(self.prompt), self.target.vocab_size)

    def law(self, live: Weighted, lm: TableLM | None = None) -> Tensor:
        """The joint law after the texts of `live` [m * V]."""
        logits = [(lm or self.target).after([*self.prompt, *text]) for text, _ in live]
        paths = [text for text, _ in live]
        weights = [weight for _, weight in live]
        return joint_law(self.warp, self.prompt, paths, weights, torch.stack(logits)).law

    def grown(
        self, live: Weighted, done: frozenset[Text], pairs: Sequence[int], law: Tensor
    ) -> tuple[Weighted, frozenset[Text]]:
        """The texts after `pairs` were drawn: those that go on, and those complete."""
        vocab = self.target.vocab_size
        longer = {}
        for pair in set(pairs):
            longer[*live[pair // vocab][0], pair % vocab] = float(law[pair].log())
        ends = {
            text
            for text in longer
            if text[-1] in self.params.eos or len(text) == self.params.max_new_tokens
        }
        left = tuple(sorted((text, w) for text, w in longer.items() if text not in ends))
        return left, done | ends


def draws(law: Tensor, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All outcomes of independent draws with their chances."""
    possible = [(i, p) for i, p in enumerate(law.tolist()) if p > 0.0]
    for outcome in itertools.product(possible, repeat=count):
        yield tuple(i for i, _ in outcome), prod(p for _, p in outcome)


def fixed_width(table: Table) -> Law:
    """Every step draws `width` pairs."""
    found: Law = {}

    def go_on(live: Weighted, done: frozenset[Text], chance: float) -> None:
        if not live:
            add(found, done, chance)
            return
        law = table.law(live)
        ends: dict[tuple[Weighted, frozenset[Text]], float] = {}
        for pairs, p in draws(law, table.width):
            state = table.grown(live, done, pairs, law)
            ends[state] = ends.get(state, 0.0) + p
        for state, p in ends.items():
            go_on(*state, chance * p)

    go_on((((), 0.0),), frozenset(), 1.0)
    return found


def one_layer_ahead(
    table: Table, draft: TableLM, attempts: int, width_of: Callable[[list[float]], int]
) -> Law:
    """Rounds of one drafted layer; `width_of` turns chances of at least 0, 1, ... into K.

    In such a round the first K pairs are draws from the target's law, whatever the draft says. All
    of them stand with a chance that depends on them, and then a further step follows at once; else
    the round ends with more draws, up to the full width.
    """
    found: Law = {}

    def go_on(live: Weighted, done: frozenset[Text], chance: float, free: bool) -> None:
        if not live or chance == 0.0:
            add(found, done, chance)
            return
        p = table.law(live)
        room = table.params.max_new_tokens - len(live[0][0])
        if free or room == 1:  # no draft: after a layer that stood, and for the last token
            for pairs, mass in draws(p, table.width):
                go_on(*table.grown(live, done, pairs, p), chance * mass, False)
            return
        joint = accepted_at(p, table.law(live, draft), attempts)
        wanted = width_of(at_least(joint, attempts))
        for pairs, mass in draws(p, wanted):
            stood = all_stood(joint, pairs, attempts)
            go_on(*table.grown(live, done, pairs, p), chance * stood, True)
            for more, extra in draws(p, table.width - wanted):
                state = table.grown(live, done, (*pairs, *more), p)
                go_on(*state, chance * (mass - stood) * extra, False)

    go_on((((), 0.0),), frozenset(), 1.0, False)
    return found


def accepted_at(p: Tensor, q: Tensor, attempts: int) -> list[Tensor]:
    """Entry i: the chance that a search ends with attempt i + 1 and this pair [m * V]."""
    found, left, reached = [], p.clone(), 1.0
    for _ in range(attempts):
        shared = left.minimum(q)
        found.append(reached * shared)
        miss = 1.0 - float(shared.sum())
        if miss <= 1e-15:
            found += [torch.zeros_like(p)] * (attempts - len(found))
            break
        reached *= miss
        left = (left - q).clamp(min=0.0) / miss
    return found


def all_stood(joint: Sequence[Tensor], pairs: Sequence[int], attempts: int) -> float:
    """The chance that searches find exactly `pairs`, one after the other, within `attempts`."""
    used = {0: 1.0}
    for pair in pairs:
        after: dict[int, float] = {}
        for spent, chance in used.items():
            for i, chances in enumerate(joint[: attempts - spent], start=1):
                after[spent + i] = after.get(spent + i, 0.0) + chance * float(chances[pair])
        used = after
    return sum(used.values())


def at_least(joint: Sequence[Tensor], attempts: int) -> list[float]:
    """The chances that at least 0, 1, ... `attempts` pairs are found, walked attempt by attempt."""
    lengths = [float(chances.sum()) for chances in joint]
    found, used = [1.0], {0: 1.0}
    for _ in range(attempts):
        after: dict[int, float] = {}
        for spent, chance in used.items():
            for i, length in enumerate(lengths[: attempts - spent], start=1):
                after[spent + i] = after.get(spent + i, 0.0) + chance * length
        used = after
        found.append(sum(used.values()))
    return found


def add(law: Law, done: frozenset[Text], chance: float) -> None:
    key = tuple(sorted(done))
    law[key] = law.get(key, 0.0) + chance


@dataclass(slots=True)
class Seen:
    """What the enumeration of an engine's rounds went through."""

    law: Law = field(default_factory=dict)
    outcomes: int = 0
    accepted: float = 0.0  # drafted pairs that stood, expected
    layers: dict[Any, Drawn] = field(default_factory=dict)  # history -> what was drawn then


@dataclass(slots=True)
class Drawn:
    """The pairs drawn in one place of a history."""

    law: Tensor
    first: int  # so many of them are drawn whatever happens
    pairs: dict[tuple[bool, tuple[int, ...]], float] = field(default_factory=dict)

    def gap(self) -> float:
        """How far the pairs are from independent draws, in mass."""
        p = self.law.tolist()
        whole = sum(self.pairs.values())
        heads: dict[tuple[int, ...], float] = {}
        open_: dict[tuple[int, ...], float] = {}
        for (passed, pairs), mass in self.pairs.items():
            head = pairs[: self.first]
            heads[head] = heads.get(head, 0.0) + mass
            if not passed:
                open_[head] = open_.get(head, 0.0) + mass
        off = sum(
            abs(heads.get(head, 0.0) - whole * mass) for head, mass in draws(self.law, self.first)
        )
        for (passed, pairs), mass in self.pairs.items():
            if not passed:
                head, tail = pairs[: self.first], pairs[self.first :]
                off += abs(mass - open_[head] * prod(p[pair] for pair in tail))
        return 0.5 * off


def engine_texts(
    build: BeamBuild, prompt: Sequence[int], params: SamplingParams, width: int
) -> Seen:
    """The law of the set of texts that a fresh engine writes, and every layer's draws."""
    seen = Seen()
    rounds: list[Round] = []

    def run(coins: Coins) -> Texts:
        engine = build()
        row = BeamRow(make_row(prompt, params, coins, engine.target.vocab_size), width)
        rounds[:] = [record.rounds[0] for record in decode([row], engine)]
        return tuple(sorted(text.tokens for text in row.written))

    for texts, chance in enumerate_outcomes(run):
        seen.law[texts] = seen.law.get(texts, 0.0) + chance
        seen.outcomes += 1
        seen.accepted += chance * sum(j.verdict.accepted for r in rounds for j in r.judged)
        keep_layers(seen, rounds, chance, width)
    return seen


def keep_layers(seen: Seen, rounds: Sequence[Round], chance: float, width: int) -> None:
    """Sort the draws of every layer by what had happened before it."""
    past: tuple[Any, ...] = ()
    for done in rounds:
        for i, judged in enumerate(done.judged):
            verdict = judged.verdict
            drafted = tuple(layer.pairs for layer in done.layers[:i])
            first = min(verdict.wanted, len(verdict.pairs) if not verdict.passed else width)
            place = seen.layers.setdefault((past, drafted), Drawn(judged.law, first))
            place.first = min(place.first, first)
            key = verdict.passed, verdict.pairs
            place.pairs[key] = place.pairs.get(key, 0.0) + chance
            past = (*past, (verdict.pairs, verdict.passed))
        past = (*past, "round")


def layers_gap(seen: Seen) -> float:
    """The largest mass by which any layer's draws differ from independent ones."""
    return max(place.gap() for place in seen.layers.values())


def variation(a: Mapping[Texts, float], b: Mapping[Texts, float]) -> float:
    """Half the sum of all differences."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})

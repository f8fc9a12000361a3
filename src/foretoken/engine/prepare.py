"""What an engine finds out before its first text: what steps cost, and whether guesses can pay.

A model that was not trained to be left early says something else behind its first layers than
behind its last one nearly everywhere. Texts would find that out one by one, and those whose seed
has to repeat them may not learn it from each other, so each of them would pay for it. So the target
writes a little by itself, and at every token of it a single guess is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from foretoken.coins import SeededCoins
from foretoken.contract import Features, Rehearses
from foretoken.controllers.fixed import Fixed
from foretoken.controllers.steady import Size
from foretoken.controllers.step_costs import StepCosts
from foretoken.engine.engine import Engine
from foretoken.engine.load_log import log_costs
from foretoken.engine.measure import DEPTHS, longest_text, measure_batches, measure_costs
from foretoken.engine.step import Parts, advance
from foretoken.errors import ForetokenError
from foretoken.row import make_row
from foretoken.types import CostTable, DecodeState, SamplingParams

LOG = logging.getLogger(__name__)
TOKENS = 64  # of that text
SECONDS = 2.0  # for it; a model that cannot write half of it then is not asked to
# Greedy texts about nothing repeat themselves; those of a high temperature are hard to guess.
DRAWN = SamplingParams(max_new_tokens=10**6, temperature=0.7)


def teach(engine: Engine, lone: bool, batches: bool) -> None:
    """Let the controller know what steps cost, of a lone row and of several together."""
    if lone:
        teach_costs(engine)
    if batches:
        measure_batches(engine)


def teach_costs(engine: Engine, costs: CostTable | None = None) -> CostTable:
    """Let the controller know what steps of a lone row cost, measured now if they are not given,
    and parts of the target see whether they can pay.
    """
    if costs is None:
        costs = measure_costs(engine)
        log_costs(costs)
    engine.controller.learn(costs)
    rehearse(engine, costs)
    return costs


@torch.inference_mode()
def rehearse(engine: Engine, costs: CostTable) -> None:
    """Try single guesses of every drafter that wants to know how they do.

    What goes wrong is left to the texts that meet it.
    """
    for drafter, guesses in rehearsing(engine.drafter):
        room = longest_text(engine)
        short = room is not None and room <= 2 * TOKENS
        slow = TOKENS / 2 * costs.target[min(costs.target)] > SECONDS
        if short or slow or not engine.waiting.affords(2 * TOKENS, 2):
            return
        try:
            rehearse_one(engine, drafter, guesses, least_price(costs))
        except (ForetokenError, RuntimeError) as problem:  # of memory, or of what a model lacks
            LOG.warning("whether drafts can pay at all was not found out: %s", problem)


def rehearsing(drafter: Any) -> Iterator[tuple[Any, Rehearses]]:
    """Drafters, members of others among them, with the model of each that wants to know."""
    model = getattr(drafter, "model", None)
    if isinstance(model, Rehearses):
        yield drafter, model
    for member in getattr(drafter, "members", ()):
        yield from rehearsing(member)


def least_price(costs: CostTable) -> float:
    """The least that a guess costs in a draft of any length, in plain steps."""
    found, lengths = StepCosts.of(costs), [d for d in DEPTHS if d <= max(costs.draft, default=1)]
    plain = found.plain(1)
    return min((found.drafted(1, depth, depth) - plain) / (depth * plain) for depth in lengths)


def rehearse_one(engine: Engine, drafter: Any, guesses: Rehearses, price: float) -> None:
    """One drafter's guesses, each of which costs `price` plain steps at least."""
    target = engine.target
    row = written([1 % target.vocab_size, 0], target.vocab_size)
    try:
        right, asked = tried(engine, drafter, row)
        guesses.rehearsed(row, read(engine, drafter, row.tokens), right, asked, price)
    finally:
        try:
            drafter.finish(row)
        finally:
            target.free([row])


def written(tokens: Sequence[int], vocab_size: int) -> DecodeState:
    """A row of which nobody learns anything for others."""
    row = make_row(tokens, DRAWN, SeededCoins(0), vocab_size)
    row.rehearsal = True
    return row


def tried(engine: Engine, drafter: Any, row: DecodeState) -> tuple[int, int]:
    """How many single guesses were right in a text that the target writes, and how many there
    were."""
    parts = Parts(engine.target, drafter, engine.verifier, Fixed(Size(depth=1)))
    traits, began = drafter.traits, perf_counter()
    [seen] = engine.target.prefill([row], traits.taps, last=traits.context)
    drafter.start(row, seen)
    right = asked = 0
    while len(row.tokens) < TOKENS and perf_counter() - began < SECONDS:
        step = advance([row], parts)
        right += len(step.verdicts[0].path)
        asked += len(step.drafts[0].tree) > 1
    return right, asked


def read(engine: Engine, drafter: Any, tokens: Sequence[int]) -> Features | None:
    """The hidden states that a drafter reads of a whole text, where it reads any."""
    if not drafter.traits.taps:
        return None
    row = written(tokens, engine.target.vocab_size)
    try:
        [seen] = engine.target.prefill([row], drafter.traits.taps)
    finally:
        engine.target.free([row])
    return seen

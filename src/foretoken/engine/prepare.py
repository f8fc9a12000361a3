"""What an engine finds out before its first text: what steps cost, and whether guesses can pay.

A model that was not trained to be left early says something else behind its first layers than
behind its last one nearly everywhere. Texts would find that out one by one, and those whose seed
has to repeat them may not learn it from each other, so each of them would pay for it. So the target
writes a little by itself, and at every token of it a single guess is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from foretoken.coins import SeededCoins
from foretoken.contract import Rehearses
from foretoken.controllers.fixed import Fixed
from foretoken.controllers.steady import Size
from foretoken.engine.engine import Engine
from foretoken.engine.load_log import log_costs
from foretoken.engine.measure import longest_text, measure_batches, measure_costs
from foretoken.engine.step import Parts, advance
from foretoken.row import make_row
from foretoken.types import CostTable, DecodeState, SamplingParams

TOKENS = 48  # of that text
ENOUGH = 24  # of them, below which nothing is concluded: where the model is slow
SECONDS = 2.0
BEGINNING = (1, 0)  # any tokens
DRAWN = SamplingParams(max_new_tokens=10**6)  # greedy texts about nothing repeat themselves


def teach_costs(engine: Engine, lone: bool, batches: bool) -> None:
    """Let the controller know what steps cost, of a lone row and of several together."""
    if lone:
        costs = measure_costs(engine)
        log_costs(costs)
        engine.controller.learn(costs)
        rehearse(engine, price_of(costs))
    if batches:
        measure_batches(engine)


def price_of(costs: CostTable) -> float:
    """What a draft of one token costs, in plain steps."""
    alone = costs.target[min(costs.target)]
    depth = min(costs.draft, default=1)
    guess = costs.draft.get(depth, 0.0) / depth
    return (guess + max(costs.target.get(2, alone) - alone, 0.0)) / (alone + costs.overhead)


@torch.inference_mode()
def rehearse(engine: Engine, price: float) -> None:
    """Try single guesses of every drafter that wants to know how they do; one costs `price` plain
    steps."""
    room = longest_text(engine)
    fits = room is None or room > 2 * TOKENS
    if not (fits and engine.waiting.affords(2 * TOKENS, 2)):
        return
    for drafter, guesses in rehearsing(engine.drafter):
        row = make_row(BEGINNING, DRAWN, SeededCoins(0), engine.target.vocab_size)
        try:
            right, asked = tried(engine, drafter, row)
            if asked >= ENOUGH:
                guesses.rehearsed(row, right, asked, price)
        finally:
            drafter.finish(row)
            engine.target.free([row])


def rehearsing(drafter: Any) -> Iterator[tuple[Any, Rehearses]]:
    """Drafters, members of others among them, with the model of each that wants to know."""
    model = getattr(drafter, "model", None)
    if isinstance(model, Rehearses):
        yield drafter, model
    for member in getattr(drafter, "members", ()):
        yield from rehearsing(member)


def tried(engine: Engine, drafter: Any, row: DecodeState) -> tuple[int, int]:
    """How many single guesses were right in a text, and how many were asked for."""
    parts = Parts(engine.target, drafter, engine.verifier, Fixed(Size(depth=1)))
    traits, began = drafter.traits, perf_counter()
    [seen] = engine.target.prefill([row], traits.taps, last=traits.context)
    drafter.start(row, seen)
    right = asked = 0
    while asked < TOKENS and perf_counter() - began < SECONDS:
        right += len(advance([row], parts).verdicts[0].path)
        asked += 1
    return right, asked

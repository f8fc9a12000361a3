"""How sure a sorted draft has to be: policies for leaving it, measured by the engine and priced.

What is compared is the speed to expect: tokens per target forward over what the target and the
draft's forwards take, each exit at its measured cost. An exit costs an output layer wherever it is
asked and not taken, so one that says little is better never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaForCausalLM

from foretoken.lm.draft_exits import NEVER, Exits
from foretoken.lm.opening import open_draft, open_lm
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.training.drafts.measuring import EngineAcceptance, Measured
from foretoken.training.drafts.shape import Shape, Timed, ratio

GRID = (0.4, 0.6, 0.8, 0.9)  # thresholds that are tried

Prices = dict[tuple[tuple[int, ...], int], float]  # exits that are asked, the one taken: cost


@dataclass(frozen=True, slots=True)
class Priced:
    """A policy and what it reaches."""

    exits: Exits
    measured: Measured
    cost: float  # of a draft forward on average, as a share of the target's
    depth: int  # of the chain

    @property
    def speed_up(self) -> float:
        return self.measured.told(self.cost, self.depth)["estimated_speed_up"]

    def told(self) -> dict[str, Any]:
        """What a card says."""
        left = self.measured.left
        mean = sum(layers * count for layers, count in left.items()) / max(sum(left.values()), 1)
        return {
            "thresholds": list(self.exits.thresholds),
            "layers_per_token": mean,
            "cost": self.cost,
            **self.measured.told(self.cost, self.depth),
        }


def policies(exits: Exits) -> Iterator[Exits]:
    """Every exit alone; then all of them, or the first and the last, at thresholds of the grid."""
    others = len(exits.layers) - 1
    for exit in range(others + 1):
        yield exits.only(exit)
    for threshold in GRID:
        yield exits.at(*[threshold] * others)
        if others > 1:
            yield exits.at(threshold, *[NEVER] * (others - 1))


def compared(model: Any, exits: Exits, measure: EngineAcceptance, prices: Prices) -> list[Priced]:
    """All policies, measured on the session's target."""
    found = []
    for policy in policies(exits):
        measured = replace(measure, exits=policy).measure(model)
        asked, calls = policy.asked.layers, sum(measured.left.values())
        spent = sum(prices[asked, layers] * count for layers, count in measured.left.items())
        found.append(Priced(policy, measured, spent / max(calls, 1), measure.depth))
    return found


def priced(target: Any, shape: Shape, rows: int, exits: Exits) -> Prices:
    """What a forward takes that asks some exits and leaves at one, in forwards of the target."""
    text = target.config.get_text_config(decoder=True)
    untrained: Any = (
        LlamaForCausalLM(shape.config(text, rows)).to(target.device, target.dtype).eval()
    )
    found: Prices = {}
    with closing(Timed.of(open_lm(target))) as asked, closing(open_draft(untrained, None)) as lm:
        for kinds in {policy.asked.layers for policy in policies(exits)}:
            for taken in kinds:
                view = SortedExits(lm, forced(exits, kinds, taken))
                timed = Timed.of(view)
                found[kinds, taken] = ratio(timed, asked)
                view.free([timed.row])
    return found


def forced(exits: Exits, asked: Sequence[int], taken: int) -> Exits:
    """Thresholds by which every token leaves behind `taken` layers, in vain asked before."""
    return exits.at(
        *(0.0 if layers == taken else 1.0 if layers in asked and layers < taken else NEVER
          for layers in exits.layers[:-1])
    )  # fmt: skip

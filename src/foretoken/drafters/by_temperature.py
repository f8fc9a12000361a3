"""One drafter for greedy rows, another for sampled ones: the default with a draft model.

A greedy target takes one token, so the likeliest candidates are best, however they were found. A
sampled one takes what it draws, and a token drawn from the draft's own law stands more often than
any fixed guess. Both may run the same draft model: a row is opened by one of them only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from foretoken.contract import Drafter, Features, Guided, NoOptions, StoppingRule
from foretoken.drafters.parts.members import Combination, share_of
from foretoken.errors import PairingError
from foretoken.types import Budget, DecodeState, Draft, Rows, Step, Taps, Traits


class ByTemperature(Combination):
    """The first member drafts for rows of temperature 0, the second for all others."""

    traits = Traits(prices=True)

    def __init__(self, greedy: Drafter, sampled: Drafter, config: NoOptions | None = None) -> None:
        if greedy.traits.taps != sampled.traits.taps:
            raise PairingError(
                f"{type(greedy).__name__} and {type(sampled).__name__} were asked to draft for "
                "some rows each.",
                "one reads hidden states that the other does not, and all rows of a step are asked "
                "for the same.",
                "use one of them as a method of its own.",
            )
        super().__init__(greedy, sampled)
        self.traits = replace(self.traits, taps=greedy.traits.taps)
        if isinstance(sampled, Guided):
            self.model = sampled.model

    def member(self, row: DecodeState) -> Drafter:
        """Who drafts for a row, from its beginning to its end."""
        return self.members[not row.warp.greedy]

    def shares(self, rows: Rows) -> Iterator[tuple[Drafter, list[int]]]:
        """Every member with the places of its rows, where it has any."""
        for member in self.members:
            mine = [at for at, row in enumerate(rows) if self.member(row) is member]
            if mine:
                yield member, mine

    def start(self, row: DecodeState, seen: Features | None) -> None:
        self.member(row).start(row, seen)

    def reading(self) -> Taps:
        return self.traits.taps

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for member, mine in self.shares(rows):
            own = member.propose([rows[at] for at in mine], [budgets[at] for at in mine], stop)
            drafts |= dict(zip(mine, own, strict=True))
        return [drafts[at] for at in range(len(rows))]

    def observe(self, step: Step) -> None:
        for member, mine in self.shares(step.rows):
            member.observe(step if len(mine) == len(step.rows) else share_of(step, mine))

    def finish(self, row: DecodeState) -> None:
        self.member(row).finish(row)

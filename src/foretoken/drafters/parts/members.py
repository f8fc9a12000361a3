"""Base of drafters that are made of others: every member sees every outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretoken.contract import Drafter, Features, KeepsIds, Remembers, Reports
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.types import DecodeState, Memory, Shape, Step, Traits


class Combination(RowDrafter):
    """Members read the hidden states of their own taps, and know nothing of each other."""

    def __init__(self, *members: Drafter) -> None:
        self.members = members
        self.traits = together([member.traits for member in members])
        self.columns: list[slice | None] = []  # of a member's taps; None: the states as they come
        end = 0
        for member in members:
            first, end = end, end + len(member.traits.taps)
            whole = end - first in (0, len(self.traits.taps))
            self.columns.append(None if whole else slice(first, end))
            if not getattr(member, "lossless", True):
                self.lossless, self.why = False, getattr(member, "why", "")

    def start(self, row: DecodeState, seen: Features | None) -> None:
        for member, columns in zip(self.members, self.columns, strict=True):
            own = seen
            if seen is not None and columns is not None:
                own = seen[-(member.traits.context or len(seen)) :, columns]
            member.start(row, own)

    def observe(self, step: Step) -> None:
        for member, columns in zip(self.members, self.columns, strict=True):
            own = step
            if columns is not None:
                scores = [
                    score
                    if score.hidden is None
                    else replace(score, hidden=score.hidden[:, columns])
                    for score in step.scores
                ]
                own = replace(step, scores=tuple(scores))
            member.observe(own)

    def finish(self, row: DecodeState) -> None:
        super().finish(row)
        for member in self.members:
            member.finish(row)

    def save(self) -> None:
        """Keep what the members have learnt, where their options name a file."""
        for member in self.members:
            if isinstance(member, Remembers):
                member.save()

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse a tokenizer that gives ids another meaning than a member's."""
        for member in self.members:
            if isinstance(member, KeepsIds):
                member.check_vocabulary(vocabulary)

    def report(self) -> str:
        """What the members have to tell, in one line."""
        told = [member.report() for member in self.members if isinstance(member, Reports)]
        return "; ".join(line for line in told if line)


def together(members: Sequence[Traits]) -> Traits:
    """What a drafter of these is: it reads all their taps, and learns from every row."""
    contexts = [one.context for one in members if one.taps]
    known = [context for context in contexts if context is not None]
    return Traits(
        draws=frozenset().union(*(one.draws for one in members)),
        shape=Shape.TREE if any(one.shape is Shape.TREE for one in members) else Shape.CHAIN,
        taps=tuple(tap for one in members for tap in one.taps),
        context=max(known) if known and len(known) == len(contexts) else None,
        memory=Memory.ENGINE,
        prices=True,
    )

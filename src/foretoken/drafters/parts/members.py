"""Base of drafters that are made of others: every member sees every outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from foretoken.contract import Drafter, Features, KeepsIds, Remembers, Reports
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.types import (
    DecodeState,
    Draft,
    Memory,
    Scores,
    Shape,
    Step,
    Taps,
    Traits,
    Verdict,
)


class Combination(RowDrafter):
    """Members read the hidden states of their own taps, and know nothing of each other."""

    def __init__(self, *members: Drafter) -> None:
        self.members = members
        self.traits = together([member.traits for member in members])
        self.read = [0] * len(members)  # hidden states of the step that each one asked for
        for member in members:
            if not getattr(member, "lossless", True):
                self.lossless, self.why = False, getattr(member, "why", "")

    def start(self, row: DecodeState, seen: Features | None) -> None:
        widths = [len(member.traits.taps) for member in self.members]
        for member, columns in zip(self.members, slices(widths), strict=True):
            own = seen
            if seen is not None and sum(widths) > columns.stop - columns.start > 0:
                own = seen[-(member.traits.context or len(seen)) :, columns]
            member.start(row, own)

    def reading(self) -> Taps:
        wanted = [member.reading() for member in self.members]
        self.read = [len(taps) for taps in wanted]
        return tuple(tap for taps in wanted for tap in taps)

    def observe(self, step: Step) -> None:
        whole = sum(self.read)
        for at, columns in enumerate(slices(self.read)):
            own = self.shown(step, at)
            if columns.stop - columns.start < whole:
                own = columns_of(own, columns)
            self.members[at].observe(own)

    def shown(self, step: Step, at: int) -> Step:
        """The step as one member is to see it, hidden states aside."""
        return step

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


def slices(widths: Sequence[int]) -> list[slice]:
    """Columns side by side, so many of each."""
    ends = list(accumulate(widths, initial=0))
    return [slice(first, end) for first, end in pairwise(ends)]


def columns_of(step: Step, columns: slice) -> Step:
    """The step with one member's hidden states only."""
    return replace(
        step,
        scores=tuple(part_of(one, columns) for one in step.scores),
        whole=None if step.whole is None else columns_of(step.whole, columns),
    )


def part_of(score: Scores, columns: slice) -> Scores:
    """Scores with one member's hidden states only, if it asked for any."""
    if score.hidden is None or columns.start == columns.stop:
        return replace(score, hidden=None)
    return replace(score, hidden=score.hidden[:, columns])


def own_part(step: Step, grown: Sequence[Draft]) -> Step:
    """The step as the drafter of these trees would have seen it, which others were grafted on.

    Its nodes come first in what was scored; a path that leaves them ends in a correction.
    """
    seen, told = [], []
    for draft, own, score, verdict in zip(
        step.drafts, grown, step.scores, step.verdicts, strict=True
    ):
        size = len(own.tree)
        path = tuple(node for node in verdict.path if node < size)
        left = verdict.path[len(path) :]
        seen.append(Scores(score.logits[:size], None, score.p, score.share))
        told.append(Verdict(path, draft.tree.tokens[left[0]] if left else verdict.next_token))
    return replace(
        step, drafts=tuple(grown), scores=tuple(seen), verdicts=tuple(told),
        whole=step.whole or step,
    )  # fmt: skip


def share_of(step: Step, places: Sequence[int]) -> Step:
    """The step of some of its rows."""
    return replace(
        step,
        rows=tuple(step.rows[at] for at in places),
        drafts=tuple(step.drafts[at] for at in places),
        scores=tuple(step.scores[at] for at in places),
        verdicts=tuple(step.verdicts[at] for at in places),
        emitted=tuple(step.emitted[at] for at in places),
        whole=None if step.whole is None else share_of(step.whole, places),
    )


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

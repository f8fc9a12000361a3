"""What forwards of several rows cost, tried on the rows themselves between two of their steps.

A step that is not committed has not happened: it is what a step that failed is repeated after.
So nothing is fed for the measurement but the trees themselves: no prompts, no further rows in the
caches, and attention reads as many tokens as it will in the steps to come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from foretoken.engine.step import Parts, Proposed, clip, judge, propose, propose_timed, score
from foretoken.engine.timings import TOO_DEAR, batches_before, settled, wait_for
from foretoken.trees.build import chain, undrafted
from foretoken.types import Budget, CostTable, Draft, Draw, Rows, Shape

AHEAD = (1, 2, 4, 8)  # nodes below each row's root
LARGEST = 96  # nodes of all rows: beyond, a forward is arithmetic, whose cost goes on as it rose
ROUNDS = 4  # the first one warms every shape up
PAYING = 0.7  # of what a token costs without drafts: a node that costs more is not worth trying


def batch_costs(
    rows: Rows, parts: Parts, seconds: float = 0.4, affords: Callable[[int], bool] | None = None
) -> CostTable:
    """Time forwards of these rows by nodes and their drafts by depth, in about `seconds`.

    `affords`: whether memory lets each row have so many nodes, with its root. A slow model gets
    fewer sizes and repeats, two sizes and a draft at least where there is room for them. Forwards
    of the target are measured once for all methods around it. Coins that a drafter uses are its
    caller's to rewind. A draft that is part of the target's own forward is not tried: its
    beginnings of that forward stay open until they are committed.
    """
    trial, known = Trial(rows, parts, affords), batches_before(parts.target).get(len(rows))
    apart = getattr(parts.drafter, "view", None) is None
    if apart and trial.fits(AHEAD[0]):
        trial.read()
    with rehearsed(rows):
        for turn in range(ROUNDS):
            trial.plain()
            if apart and parts.drafter.traits.prices:
                trial.ask()
            for ahead in AHEAD:
                late = trial.spent > seconds and (turn > 0 or ahead > AHEAD[0])
                if late or not trial.fits(ahead):
                    break
                if apart:
                    trial.draft(ahead)
                if known is None and (trial.sizes < 3 or len(rows) * (1 + ahead) <= LARGEST):
                    trial.score(ahead)
                if not trial.may_pay(known or trial.table()):
                    break
            if trial.spent * (turn + 2) > seconds * (turn + 1):
                break  # another round would take too long
    table = trial.table()
    if known is None:
        batches_before(parts.target)[len(rows)] = table
        return table
    return CostTable(
        known.target, table.draft, table.overhead, table.asking, known.rows, known.cached
    )


@contextmanager
def rehearsed(rows: Rows) -> Iterator[None]:
    """Nothing is learned of what these rows draft meanwhile, and nothing ends a draft early."""
    before = [row.rehearsal for row in rows]
    for row in rows:
        row.rehearsal = True
    try:
        yield
    finally:
        for row, was in zip(rows, before, strict=True):
            row.rehearsal = was


class Trial:
    """Collects times of steps that are never committed."""

    def __init__(
        self, rows: Rows, parts: Parts, affords: Callable[[int], bool] | None = None
    ) -> None:
        self.rows, self.parts, self.affords = rows, parts, affords
        self.trees = parts.drafter.traits.shape is Shape.TREE
        self.target: dict[int, list[float]] = defaultdict(list)
        self.drafted: dict[int, list[float]] = defaultdict(list)
        self.other: list[float] = []
        self.asking: list[float] = []
        self.began = perf_counter()
        self.reading = 0.0  # seconds in which texts were read: those forwards are no trial

    @property
    def spent(self) -> float:
        """Seconds of trials so far."""
        return perf_counter() - self.began - self.reading

    @property
    def sizes(self) -> int:
        """Kinds of forwards timed so far."""
        return len(self.target)

    def fits(self, ahead: int) -> bool:
        """Whether memory and the target's positions let every row have so many nodes."""
        if self.affords is not None and not self.affords(1 + self.drafted_at(ahead)):
            return False
        room, longest = self.parts.target.max_length, max(len(row.tokens) for row in self.rows)
        return room is None or longest + ahead <= room

    def drafted_at(self, depth: int) -> int:
        """Nodes that are drafted to see what this depth takes."""
        return 2 * depth if self.trees else depth

    def asked_for(self, depth: int) -> Budget:
        """What is granted to see what this depth takes."""
        return Budget(depth, self.drafted_at(depth))

    def may_pay(self, costs: CostTable) -> bool:
        """Whether more nodes could be worth their time: those of the largest forward so far are."""
        count, largest = len(self.rows), max(costs.target)
        plain = costs.target[count]
        each = (costs.target[largest] - plain) / max(largest - count, 1)
        return each <= PAYING * plain / count

    def read(self) -> None:
        """Have the drafter read what it will be asked about, while the rows are no rehearsals yet.

        What it concludes from a text that it meets holds as long as the row does: its topic, what
        is kept of one that begins alike. Of a rehearsal it would conclude nothing, for good.
        """
        propose(self.rows, self.granted(self.asked_for(AHEAD[0])), self.parts)
        self.began = perf_counter()

    def plain(self) -> None:
        """A forward without drafts, and the verdicts on it."""
        drafts = [undrafted(row) for row in self.rows]
        began = perf_counter()
        scores = score(self.rows, drafts, self.parts)
        wait_for(scores[0].logits)
        scored = perf_counter()
        judge(self.rows, drafts, scores, self.parts)
        self.other.append(perf_counter() - scored)
        self.target[len(self.rows)].append((scored - began) / scores[0].share)

    def score(self, ahead: int) -> None:
        """A forward over chains of `ahead` nodes below each root, whatever their tokens are."""
        drafts = []
        for row in self.rows:
            guess = (row.tokens[-ahead:] * ahead)[:ahead]
            drafts.append(Draft(chain(row.tokens[-1], guess), Draw.POINT))
        began = perf_counter()
        scores = score(self.rows, drafts, self.parts)
        wait_for(scores[0].logits)
        took = perf_counter() - began
        self.target[len(self.rows) * (1 + ahead)].append(took / scores[0].share)

    def draft(self, ahead: int) -> None:
        """Proposals of this depth for every row that has room for them."""
        budgets = self.granted(self.asked_for(ahead))
        proposed = self.proposed(budgets)
        deepest = max(max(draft.tree.depths()) for draft in proposed.drafts)
        if deepest:
            self.drafted[deepest].append(proposed.seconds)

    def ask(self) -> None:
        """Proposals where nothing is worth its price."""
        most = max((ahead for ahead in AHEAD if self.fits(ahead)), default=0)
        budgets = self.granted(Budget(most, most, TOO_DEAR))
        self.asking.append(self.proposed(budgets).seconds)

    def proposed(self, budgets: Sequence[Budget]) -> Proposed:
        """Proposals for all rows, with the time that reading their texts took set aside."""
        found = propose_timed(self.rows, budgets, self.parts)
        self.reading += found.reading
        return found

    def granted(self, budget: Budget) -> list[Budget]:
        """The budget of every row that has room for it, and may be asked out of turn: what is drawn
        for a seed that has to repeat its text follows from the row's own steps alone.
        """
        longest, fixed = self.parts.target.max_length, self.parts.drafter.traits.fixed
        return [
            clip(row, budget, longest) if fixed or not row.repeatable else Budget(0, 0)
            for row in self.rows
        ]

    def table(self) -> CostTable:
        return CostTable(
            {size: settled(times) for size, times in sorted(self.target.items())},
            {depth: settled(times) for depth, times in sorted(self.drafted.items())},
            settled(self.other),
            settled(self.asking or [0.0]),
            len(self.rows),
            sum(len(row.tokens) - 1 for row in self.rows),
        )

"""Draft as much as pays, or nothing: tokens per second from measured costs and running survival.

Each step maximises expected tokens over expected seconds (goodput, arXiv 2406.14066; optimal tree
sizes, arXiv 2606.01813) over all lengths, plain decoding included. Plain steps are interrupted by
rare, short probes, and a ledger of seconds won and lost bounds what being wrong can cost. All
choices look at past steps only, so the law of the text does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from torch import Tensor

from foretoken.controllers.arms import Arms, Text
from foretoken.controllers.prices import SURPRISE, Prices
from foretoken.controllers.shapes import NONE, Bargain, Shapes
from foretoken.controllers.survival import BELIEF, Alarm, Ranks, Slots
from foretoken.errors import check_values
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    StepTimes,
    Verdict,
    endless,
)

HOPELESS = 0.01  # slots that survive less often are not considered
FORGET = 0.1  # what counts keep of their weight when the alarm rings
MOST_STEPS = 4.0  # plain steps that a step of another arm may take before it counts as a pause
CREDIT = 64.0  # plain steps of winnings the ledger remembers


class CostModel:
    """Chooses length, or nodes of a tree, for every row and step."""

    needs_costs = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        max_depth: int = 10  # longest draft; survival of slots nobody reaches is guesswork
        max_nodes: int = 64  # largest tree, per row
        trees: bool = False  # the drafter makes trees: choose nodes, not only lengths
        valued: bool = False  # the drafter values its nodes: name prices, not numbers
        sparing: bool = False  # it spends nothing where nothing pays: it may always be asked
        arms: int = 1  # drafters behind a valued one, of which one drafts
        margin: float = 1.02  # drafting must promise this many times plain's rate
        half_life: float = 64.0  # of counts, in steps of a row
        probe_every: int = 32  # plain steps between probes, doubled up to four times that
        allowance: float = 8.0  # plain steps that may be lost before drafting is forbidden
        repay: float = 0.02  # share of plain time by which a used allowance comes back

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        check_values(
            self.config,
            ("max_depth", self.config.max_depth >= 1, "1 or more"),
            ("max_nodes", self.config.max_nodes >= 1, "1 or more"),
            ("margin", self.config.margin >= 1.0, "1 or more"),
            ("half_life", self.config.half_life > 0.0, "above 0"),
            ("probe_every", self.config.probe_every >= 1, "1 or more"),
            ("allowance", self.config.allowance >= 0.0, "0 or more"),
            ("repay", self.config.repay >= 0.0, "0 or more"),
        )
        self.prices: dict[int, Prices] = {}  # by the bit length of the number of rows
        self.slots = Slots(4.0 * self.config.half_life)  # over all rows: the prior of each
        self.ranks = Ranks(self.config.half_life)
        self.branching = self.config.trees  # or a tree was seen
        limits = (self.config.max_depth, self.config.max_nodes, self.config.margin)
        self.shapes = Shapes(*limits, self.config.half_life)
        short = self.config.half_life / 2.0
        self.arms = Arms(Bargain(*limits, short), self.config.arms, short, self.config.sparing)
        self.probes = _Probes(self.config.probe_every)
        self.ledger = 0.0  # seconds won against plain decoding
        self.step = _Step()

    def learn(self, costs: CostTable) -> None:
        self.prices = {1: Prices.of(costs)}

    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]:
        prices = self.priced(len(rows))
        records = [self._record(row) for row in rows]
        broke = self.ledger < -self.config.allowance * prices.plain(len(rows))
        if broke:
            chosen = [NONE] * len(rows)
        elif self.config.valued:
            chosen = [self.arms.budget([record.text for record in records], prices)] * len(rows)
        elif self.branching:
            chosen = [self.shapes.best(self.ranks, prices, len(rows))] * len(rows)
        else:
            chosen = [Budget(k, k) for k in self.lengths(records, prices)]
        self.step = _Step(len(rows))
        self._probe(records, chosen, broke)
        self.step.asked = any(budget.depth for budget in chosen)
        for record, budget in zip(records, chosen, strict=True):
            if budget.depth:
                self.step.lagging |= record.idle > 2
            else:
                record.idle += 1
                record.slots.fade()
        return chosen

    def lengths(self, records: Sequence[_Record], prices: Prices) -> list[int]:
        """Drafted tokens per row that give the most tokens per second together.

        Slots enter in the order of their survival; every prefix of that order is a candidate.
        """
        rows, limit = len(records), self.config.max_depth
        prior = self.slots.chained(limit, BELIEF, 2.0)
        offers: list[tuple[float, int, int]] = []  # (survival, row, slots up to this one)
        for at, record in enumerate(records):
            survival = 1.0
            for slot, rate in enumerate(record.slots.rates(limit, prior, 4.0), 1):
                survival *= rate
                if survival < HOPELESS:
                    break
                offers.append((survival, at, slot))
        if rows > 1:
            offers.sort(key=_by_survival)
        drafts, draft_drift = prices.draft.reach(limit)
        scores, score_drift = prices.rest.reach(rows + len(offers))
        best, best_at = rows / prices.plain(rows) * self.config.margin, 0
        tokens, deepest = float(rows), 0  # every row emits one token in any case
        for count, (survival, _, slot) in enumerate(offers, 1):
            tokens += survival
            if slot > deepest:
                deepest = slot
            seconds = drafts[deepest] * draft_drift + scores[rows + count] * score_drift
            if tokens > best * seconds:
                best, best_at = tokens / seconds, count
        chosen = [0] * rows
        for _, at, slot in offers[:best_at]:
            if slot > chosen[at]:
                chosen[at] = slot
        return chosen

    @endless
    def keep_going(self, row: DecodeState, law: Tensor, hidden: Tensor | None = None) -> bool:
        return True

    def update(self, row: DecodeState, draft: Draft, verdict: Verdict) -> None:
        record, tree, step = self._record(row), draft.tree, self.step
        step.texts.append(record.text)
        step.emitted.append(len(verdict.path) + 1)
        step.arm = max(step.arm, draft.arm)
        if len(tree) == 1:
            if self.config.valued and row.uid == self.probes.row:
                self.probes.ended(False, False)  # a draft was looked for, and nothing paid
            return
        record.idle = 0
        accepted = len(verdict.path)
        offered = len(tree) - 1 if tree.is_chain else max(tree.depths())
        step.depth = max(step.depth, offered)
        record.slots.update(accepted, offered)
        self.slots.update(accepted, offered)
        if not tree.is_chain:
            self.branching = True
        if self.branching:
            self.ranks.update(tree, verdict.path)
            self.shapes.update(accepted, len(tree) - 1)
        if record.alarm.rings(accepted > 0):
            record.slots.scale(FORGET)
            self.slots.scale(1.0 - (1.0 - FORGET) / max(step.rows, 1))
            self.shapes.age = 0
            self.arms.scale(FORGET, record.text)
            if self.branching:
                self.ranks.scale(FORGET)
        if row.uid == self.probes.row:
            prices = self.priced(step.rows)
            plain = prices.plain(step.rows)
            extra = prices.drafted(step.rows, offered, len(tree) - 1) - plain
            self.probes.ended(accepted * plain / step.rows > extra, accepted == offered)

    def timed(self, times: StepTimes) -> None:
        step, rows = self.step, times.rows
        prices = self.priced(rows)
        plain = prices.plain(rows)
        expected = prices.drafted(rows, step.depth, times.nodes - rows) if step.depth else plain
        spent = times.draft + times.target + times.other
        # A pause of the machine is nobody's loss; a lagging draft's catch-up is the probe's.
        if not step.lagging:
            spent = min(spent, SURPRISE * (MOST_STEPS * plain if step.arm else expected))
        if step.asked and not step.lagging:
            self.arms.update(step.arm, step.texts, step.emitted, spent / plain)
        if step.arm == 0:  # another arm's forwards are other work at other prices
            prices.rest.seen(times.nodes, times.target + times.other)
        if step.depth and step.arm == 0 and not step.lagging:
            prices.draft.seen(step.depth, max(times.draft, 1e-9))
        if step.depth or (step.asked and self.config.valued):  # made, or made and found too dear
            self.ledger += sum(step.emitted) * plain / rows - spent
        elif self.ledger < 0.0:
            self.ledger = min(self.ledger + self.config.repay * plain, 0.0)
        # Probes go on when the allowance is used up; their cost must not bury a recovery.
        lowest = -(self.config.allowance + 1.0) * plain
        self.ledger = min(max(self.ledger, lowest), CREDIT * plain)

    def priced(self, rows: int) -> Prices:
        """Prices for batches of about this size; a new size starts from the nearest known one."""
        assert self.prices, "the engine hands a CostTable to `learn` before the first step"
        size = rows.bit_length()
        if size not in self.prices:
            nearest = min(self.prices, key=lambda known: abs(known - size))
            self.prices[size] = self.prices[nearest].copy()
        return self.prices[size]

    def _record(self, row: DecodeState) -> _Record:
        if row.control is None:
            row.control = _Record(row.uid, Slots(self.config.half_life), self.arms.text())
        record: _Record = row.control
        return record

    def _probe(self, records: Sequence[_Record], chosen: list[Budget], broke: bool) -> None:
        """Let one plain row draft a little, when it is time to."""
        idle = {record.uid: at for at, record in enumerate(records) if not chosen[at].depth}
        at = self.probes.due(idle, broke)
        if at is None:
            return
        if at < 0:  # a new burst: the row that has idled longest
            at = max(idle.values(), key=lambda i: records[i].idle)
            self.probes.row, self.probes.arm = records[at].uid, self.arms.next_probe()
        depth = min(self.probes.depth, self.config.max_depth)
        nodes = min(2 * depth, self.config.max_nodes) if self.branching else depth
        chosen[at] = Budget(depth, nodes)
        if self.config.valued:  # at the speed of plain decoding a draft has most to offer
            chosen[at] = replace(
                self.arms.bargain.offer(self.priced(len(records)), len(records), 1.0),
                depth=depth,
                arm=self.probes.arm,
                bar=inf,
            )


@dataclass(slots=True)
class _Record:
    """What the controller knows of one row."""

    uid: int
    slots: Slots
    text: Text
    alarm: Alarm = field(default_factory=Alarm)
    idle: int = 0  # steps since the last draft


@dataclass(slots=True)
class _Step:
    """What happened in the step under way."""

    rows: int = 1
    emitted: list[int] = field(default_factory=list)  # by row
    texts: list[Text] = field(default_factory=list)
    arm: int = 0  # that drafted
    asked: bool = False  # a draft was asked for; it may have found nothing worth its price
    depth: int = 0  # deepest draft really made
    lagging: bool = False  # a draft model first has to catch up


class _Probes:
    """When a plain row tries a draft: bursts that go on while they pay, ever rarer if not."""

    FLOOR = 8  # intervals until a probe while drafting is forbidden

    def __init__(self, every: int) -> None:
        self.every = self.interval = every
        self.waited = 0
        self.depth = 2
        self.arm = 0
        self.won = False  # a draft of this burst has paid
        self.row: int | None = None  # uid of the row whose burst goes on

    def due(self, idle: Mapping[int, int], broke: bool) -> int | None:
        """Where the row that probes now is: None for nobody, -1 for one yet to be chosen."""
        if not idle:  # every row drafts by itself
            self.waited, self.interval, self.row = 0, self.every, None
            return None
        self.waited += 1
        if self.row is not None and self.row in idle:
            return idle[self.row]
        self.row = None
        if self.waited < (self.FLOOR * self.every if broke else self.interval):
            return None
        self.waited, self.depth, self.won = 0, 2, False
        return -1

    def ended(self, paid: bool, whole: bool) -> None:
        """A probe came back: did its tokens pay for it, and were all of them accepted?"""
        if paid:
            self.won = True
            if whole:
                self.depth = min(2 * self.depth, 8)
            return
        self.interval = self.every if self.won else min(2 * self.interval, 4 * self.every)
        self.waited, self.row = 0, None


def _by_survival(offer: tuple[float, int, int]) -> tuple[float, int]:
    """Likeliest first; of equal ones the earlier slot, so a row's slots stay in order."""
    return -offer[0], offer[2]

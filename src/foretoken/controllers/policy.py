"""A policy of drafting for rows that share forwards: what was seen, what it costs, what pays.

Plain steps are interrupted by rare, short probes, and a ledger of seconds won and lost bounds what
being wrong can cost. A drafter that costs little to ask is asked again the sooner, the less its
last answers have cost: what is lost by asking stays a small share of all time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from foretoken.controllers.goodput import NONE, GoodputPricing, Shapes
from foretoken.controllers.lengths import Seconds, allot
from foretoken.controllers.probes import Probes
from foretoken.controllers.rounds import Lull, Record, Rehearsals, Round
from foretoken.controllers.step_costs import SURPRISE, StepCosts
from foretoken.controllers.survival import BELIEF, Ranks, Slots
from foretoken.errors import check_values
from foretoken.trees.build import guessed, guessed_path
from foretoken.trees.counts import Pace
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Rows,
    Shape,
    StepTimes,
    Traits,
    Verdict,
)

HOPELESS = 0.01  # slots that survive less often are not considered
FORGET = 0.1  # what counts keep of their weight when the alarm rings
CREDIT = 64.0  # plain steps of winnings the ledger remembers
CHEAP = 0.05  # share of a plain step up to which a drafter is asked without a probe
EXPLORED = 0.01  # share of plain time that asking a drafter may cost where it does not pay
WATCHED = 4  # of so many steps in which nobody is asked one is looked at: looking takes time, too
LONGEST = 64  # steps without asking it
LULL = 7  # plain steps without a decision: counts fade and costs drift more slowly than that
ASKING = 0.05  # share of a surprise that moves what a question is known to cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a policy is allowed: the options of `CostModel`."""

    max_depth: int = 10  # longest draft; survival of slots nobody reaches is guesswork
    max_nodes: int = 64  # largest tree, per row
    margin: float = 1.02  # drafting must promise this many times plain's rate
    half_life: float = 64.0  # of counts, in steps of a row
    probe_every: int = 32  # plain steps between probes, doubled up to four times that
    allowance: float = 8.0  # plain steps that may be lost before drafting is forbidden
    repay: float = 0.02  # share of plain time by which a used allowance comes back

    def __post_init__(self) -> None:
        check_values(
            self,
            ("max_depth", self.max_depth >= 1, "1 or more"),
            ("max_nodes", self.max_nodes >= 1, "1 or more"),
            ("margin", self.margin >= 1.0, "1 or more"),
            ("half_life", self.half_life > 0.0, "above 0"),
            ("probe_every", self.probe_every >= 1, "1 or more"),
            ("allowance", self.allowance >= 0.0, "0 or more"),
            ("repay", self.repay >= 0.0, "0 or more"),
        )


class Policy:
    """Lengths, shapes or prices for a group of rows.

    A policy that counts takes the table of costs for the clock: what it decides follows from its
    rows' outcomes alone.
    """

    def __init__(
        self, limits: Limits, traits: Traits, costs: StepCosts, asking: float, counted: bool
    ) -> None:
        self.limits, self.priced, self.counted = limits, traits.prices, counted
        self.cheap = asking <= CHEAP
        self.costs = {1: costs}  # by the bit length of the number of rows
        # plain steps that a question without an answer takes, for rows of every such size
        self.asking = {1: asking}
        self.rehearsals = Rehearsals()
        self.slots = Slots(4.0 * limits.half_life)  # over all rows: the prior of each
        self.ranks = Ranks(limits.half_life)
        self.branching = traits.shape is Shape.TREE  # or a tree was seen
        sizes = limits.max_depth, limits.max_nodes
        self.shapes = Shapes(*sizes, limits.margin, limits.half_life)
        self.pricing = GoodputPricing(*sizes, 4.0 * limits.half_life)
        self.probes = Probes(limits.probe_every)
        self.ledger = 0.0  # seconds won against plain decoding
        self.plain = 0  # steps in which nobody was asked
        self.round = Round()
        self.lull: Lull[Record] = Lull()

    def lacks(self, rows: int) -> bool:
        return self.rehearsals.lack(rows)

    def learn(self, costs: CostTable) -> None:
        """Take in what a batch costs. A forward of fewer rows than were measured costs less, but
        not less than that of a lone token; drafts that were not tried take as many plain steps as
        those of a lone row.
        """
        size, lone = self.size_of(costs.rows), self.costs[1]
        target = {1: max(lone.plain(1) - costs.overhead, 1e-9), **costs.target}
        longer = (costs.target[costs.rows] + costs.overhead) / lone.plain(1)
        draft = costs.draft or {depth: longer * lone.draft.at(depth) for depth in lone.draft.sizes}
        self.costs[size] = found = StepCosts.of(replace(costs, target=target, draft=draft))
        if costs.asking:  # else not tried, as of drafts inside the target's own forward
            self.asking[size] = costs.asking / found.plain(costs.rows)
        self.rehearsals.add(costs.rows)
        self.lull = Lull()

    def budgets(self, rows: Rows, beside: Rows = ()) -> list[Budget]:
        """What each row may draft in this step, whose forward has rows `beside` these."""
        all_rows = len(rows) + len(beside)
        if self.lull.goes_on(rows):
            self.round = Round(all_rows, len(beside))
            return [NONE] * len(rows)
        self.waken()
        costs, records = self.costs_of(all_rows), [self.record(row) for row in rows]
        broke = self.ledger < -self.limits.allowance * costs.plain(all_rows)
        if broke:
            chosen = [NONE] * len(rows)
        elif self.priced:
            chosen = self.offers(records, costs, all_rows)
        elif self.branching:
            chosen = [self.shapes.best(self.ranks, costs, all_rows, len(rows))] * len(rows)
        else:
            chosen = [Budget(k, k) for k in self.lengths(records, costs, all_rows)]
        self.round = Round(all_rows, len(beside))
        self.probe(records, chosen, broke)
        self.round.asked = any(budget.depth for budget in chosen)
        for record, budget in zip(records, chosen, strict=True):
            record.asked = budget.depth > 0
            if budget.depth:
                self.round.lagging |= record.idle > 2 and not (self.priced and self.cheap)
            else:
                record.idle += 1
                if not self.priced:
                    record.slots.fade()
        if not self.round.asked:
            self.lull = Lull(records, self.calm(broke))
        return chosen

    def calm(self, broke: bool) -> int:
        """Steps ahead in which this policy would decide as it just has: to draft nothing."""
        if self.priced and self.cheap:
            return 0  # `rests` counts them
        if self.branching and not self.priced:
            return 0  # `Shapes` keeps its choice as long as it may
        return min(LULL, self.probes.threshold(broke) - self.probes.waited - 1)

    def waken(self) -> None:
        """Let rows and probes know of the steps that went by without a decision."""
        past, self.lull = self.lull, Lull()
        if past.passed:
            self.probes.waited += past.passed
            for record in past.records:
                record.idle += past.passed
                if not self.priced:
                    record.slots.fade(past.passed)

    def offers(self, records: Sequence[Record], costs: StepCosts, rows: int) -> list[Budget]:
        """Prices for a drafter that keeps to them, or nothing where it has not paid so far."""
        resting = [self.rests(record, rows) for record in records]
        if all(resting):
            return [NONE] * len(records)
        speed = self.pricing.speed([record.pace for record in records])
        if speed < self.limits.margin and not self.cheap:
            return [NONE] * len(records)
        # Plain decoding's speed, at worst: it is always there to be had.
        offer = self.pricing.offered(costs, rows, max(speed, 1.0), resting.count(False))
        return [NONE if rests else offer for rests in resting]

    def rests(self, record: Record, rows: int) -> bool:
        """Whether a drafter that costs little to ask is left alone in this step, since asking it
        for this row has cost more than it brought.
        """
        if not self.cheap:
            return False
        if record.resting:
            record.resting -= 1
            return True
        if self.pricing.gain(record.pace) < -EXPLORED:
            record.resting = min(int(self.asking[self.size_of(rows)] / EXPLORED), LONGEST)
        return False

    def lengths(self, records: Sequence[Record], costs: StepCosts, rows: int) -> list[int]:
        """Drafted tokens per row that let all `rows` of a step get on fastest."""
        limit = min(self.limits.max_depth, self.limits.max_nodes)
        prior = self.slots.chained(limit, BELIEF, 2.0)
        offers: list[list[float]] = []
        for record in records:
            survivals = accumulate(record.slots.rates(limit, prior, 4.0), mul)
            offers.append([one for one in survivals if one >= HOPELESS])
        nodes = sum(map(len, offers))
        offers += [[] for _ in range(rows - len(offers))]  # they wait for this step as well
        scores, score_drift = costs.rest.reach(rows + nodes)
        drafts, draft_drift = costs.draft.reach(limit)
        seconds = Seconds(
            [score * score_drift for score in scores[rows : rows + nodes + 1]],
            [0.0, *[draft * draft_drift for draft in drafts[1 : limit + 1]]],
        )
        found = allot(offers, range(1, limit + 1), seconds, self.limits.margin)
        return found.nodes[: len(records)]

    def observe(
        self,
        rows: Rows,
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        times: StepTimes | None,
        share: float = 1.0,
    ) -> None:
        """Learn from what was accepted, and from the clock where there is one to be believed.

        `share`: of a whole target forward that scoring took.
        """
        if not self.round.asked:
            self.plain += 1
            if self.plain % WATCHED:
                return
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            self.outcome(row, draft, verdict)
        self.round.asked &= any(record.asked for record in self.round.told)
        if times is not None or self.counted:
            self.timed(times, share)

    def outcome(self, row: DecodeState, draft: Draft, verdict: Verdict) -> None:
        """What became of one row's draft."""
        record, step = self.record(row), self.round
        tree, path = guessed(draft), guessed_path(draft, verdict.path)
        if draft.given and len(tree) == 1:  # what the request says is no draft of the drafter's
            record.asked = False
            if row.uid == self.probes.row:  # nobody was asked: somebody else probes next
                self.probes.row, record.idle = None, 0
            return
        accepted = len(path)
        step.told.append(record)
        step.emitted.append(accepted + 1)
        if len(tree) == 1:
            if row.uid == self.probes.row:
                self.probes.ended(False, False)  # a draft was looked for, and nothing paid
                record.idle = 0  # somebody else probes next
            if record.asked and not self.priced:
                record.slots.update(0, 1)  # none is made for this row
            return
        record.idle = 0
        chain = tree.is_chain
        offered = len(tree) - 1 if chain else max(tree.depths())
        step.depth = max(step.depth, offered)
        step.nodes += len(tree) - 1
        self.branching |= not chain
        if not self.priced:  # lengths and shapes are this policy's to choose
            record.slots.update(accepted, offered)
            self.slots.update(accepted, offered)
            if self.branching:
                self.ranks.update(tree, path)
                self.shapes.update(accepted, len(tree) - 1)
        if not (self.priced and self.cheap) and record.alarm.rings(accepted > 0):
            self.forget(record)
        if row.uid == self.probes.row:
            costs = self.costs_of(step.rows)
            plain = costs.plain(step.rows)
            extra = costs.drafted(step.rows, offered, len(tree) - 1) - plain
            self.probes.ended(accepted * plain / step.rows > extra, accepted == offered)

    def forget(self, record: Record) -> None:
        """The text has changed: what was seen tells less of what comes."""
        record.slots.scale(FORGET)
        self.slots.scale(1.0 - (1.0 - FORGET) / max(self.round.rows, 1))
        self.shapes.age = 0
        self.pricing.pace.scale(FORGET)
        record.pace.scale(FORGET)
        if self.branching:
            self.ranks.scale(FORGET)

    def timed(self, times: StepTimes | None, share: float) -> None:
        """Take in how long the step took; without a clock, what the table says it should have."""
        step, count = self.round, self.round.rows
        costs = self.costs_of(count)
        plain = costs.plain(count)
        expected = costs.drafted(count, step.depth, step.nodes) if step.depth else plain
        spent = expected
        if times is not None:
            spent = times.whole - self.extra(costs, times, count + step.nodes)
            spent = max(spent, expected / SURPRISE)  # what is taken off is an estimate itself
            # A pause of the machine is nobody's loss; a lagging draft's catch-up is the probe's.
            if not step.lagging:
                spent = min(spent, SURPRISE * expected)
            costs.rest.seen(times.nodes, times.target / share + times.other)
            if step.depth and not step.lagging:
                costs.draft.seen(step.depth, max(times.draft, 1e-9))
            elif step.asked:
                size = self.size_of(count)
                surprise = min(times.draft / plain, 2.0 * CHEAP) - self.asking[size]
                self.asking[size] += ASKING * surprise
        if not step.told:
            return
        # Rows beside wait for these drafts as well, and gain a token at least.
        mean = (sum(step.emitted) + step.beside) / (len(step.told) + step.beside)
        if step.asked and not step.lagging:
            self.pricing.pace.update(mean, spent / plain)
            for record, emitted in zip(step.told, step.emitted, strict=True):
                if record.asked:
                    record.pace.update(emitted, spent / plain)
        if step.depth or (step.asked and self.priced):  # made, or made and found too dear
            self.ledger += mean * plain - spent
        elif self.ledger < 0.0:
            self.ledger = min(self.ledger + WATCHED * self.limits.repay * plain, 0.0)
        # Probes go on when the allowance is used up; their cost must not bury a recovery.
        lowest = -(self.limits.allowance + 1.0) * plain
        self.ledger = min(max(self.ledger, lowest), CREDIT * plain)

    def extra(self, costs: StepCosts, times: StepTimes, own: int) -> float:
        """Seconds that were spent on nodes which the drafter did not propose."""
        if times.nodes <= own:
            return 0.0
        return max(costs.rest.at(times.nodes) - costs.rest.at(own), 0.0)

    def costs_of(self, rows: int) -> StepCosts:
        """Costs of batches of about this size."""
        return self.costs[self.size_of(rows)]

    def size_of(self, rows: int) -> int:
        """How rows of about this number are called; what nobody measured starts from the nearest
        size that is known.
        """
        size = rows.bit_length()
        if size not in self.costs:
            nearest = min(self.costs, key=lambda known: abs(known - size))
            self.costs[size] = self.costs[nearest].copy()
            self.asking[size] = self.asking[nearest]
        return size

    def record(self, row: DecodeState) -> Record:
        """What is known of a row."""
        found: Record | None = row.private.get(self)
        if found is None:
            half_life = self.limits.half_life
            found = Record(row.uid, Slots(half_life), Pace(half_life / 2.0))
            row.private[self] = found
        return found

    def probe(self, records: Sequence[Record], chosen: list[Budget], broke: bool) -> None:
        """Let one plain row draft a little, when it is time to."""
        if self.priced and self.cheap and not broke:
            return  # `rests` sees to it
        idle = {record.uid: at for at, record in enumerate(records) if not chosen[at].depth}
        at = self.probes.due(idle, broke, lambda at: records[at].idle)
        if at is None:
            return
        depth = min(self.probes.depth, self.limits.max_depth, self.limits.max_nodes)
        nodes = min(2 * depth, self.limits.max_nodes) if self.branching else depth
        chosen[at] = Budget(depth, nodes)
        if self.priced:  # at the speed of plain decoding a draft has most to offer
            rows = self.round.rows
            costs = self.costs_of(rows)
            chosen[at] = replace(self.pricing.offer(costs, rows, 1.0, len(records)), depth=depth)

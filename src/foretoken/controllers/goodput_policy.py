"""A policy of most tokens per second for rows that share forwards, from how often their guesses
stood and what steps cost (SmartSpec, arXiv 2406.14066).

Every step all lengths are looked at again, none included. Rows that decode plainly try a draft now
and then, as what is not tried is not learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from foretoken.controllers.goodput import NONE
from foretoken.controllers.latency import Latency
from foretoken.controllers.lengths import (
    DEPTHS,
    WIDTH,
    Acceptance,
    Allotment,
    Likeness,
    Outline,
    Seconds,
    allot,
    cut,
)
from foretoken.controllers.probes import Probes
from foretoken.controllers.rounds import Lull, Rehearsals
from foretoken.controllers.survival import Alarm, Ranks
from foretoken.errors import check_values
from foretoken.trees.build import guessed, guessed_path
from foretoken.types import (
    Budget,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    Rows,
    Shape,
    StepTimes,
    TokenTree,
    Traits,
    Verdict,
)

BELIEF = 0.7  # acceptance before anything was seen; the paper's code 0.7, too
FORGET = 0.1  # what counts keep of their weight when the alarm rings
WATCHED = 4  # of so many steps in which nobody drafts one is looked at
CALM = 7  # steps without a draft that go by without a decision
KEPT = (0.5, 1.25)  # promises may have been so far from what came


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """The options of `SmartSpec`."""

    max_depth: int = 8  # longest draft
    max_nodes: int = 32  # largest tree, per row
    margin: float = 1.02  # drafting must promise this many times plain's rate; the code's 1.1
    half_life: float = 64.0  # of acceptance, in guesses of a row that were tried
    probe_every: int = 20  # plain steps between probes, doubled up to four times that

    def __post_init__(self) -> None:
        check_values(
            self,
            ("max_depth", self.max_depth >= 1, "1 or more"),
            ("max_nodes", self.max_nodes >= 1, "1 or more"),
            ("margin", self.margin >= 1.0, "1 or more"),
            ("half_life", self.half_life > 0.0, "above 0"),
            ("probe_every", self.probe_every >= 1, "1 or more"),
        )


@dataclass(slots=True)
class Request:
    """What is known of one row."""

    uid: int
    acceptance: Acceptance
    alarm: Alarm = field(default_factory=Alarm)
    idle: int = 0  # steps since the last draft


@dataclass(slots=True)
class Turn:
    """The step under way."""

    cached: int = 0  # tokens of the rows that attention reads
    beside: int = 0  # rows of the same forward that this policy does not decide for
    asked: set[int] = field(default_factory=set)  # rows, by uid
    lagging: bool = False  # a draft model first has to catch up


class GoodputPolicy:
    """Lengths, or nodes of trees, for a group of rows."""

    def __init__(self, goals: Goals, traits: Traits, latency: Latency, looks_up: bool) -> None:
        self.goals, self.latency, self.looks_up = goals, latency, looks_up
        self.rehearsals = Rehearsals()
        self.acceptance = Acceptance(8.0 * goals.half_life)  # of all requests
        self.likeness = Likeness()
        self.ranks = Ranks(goals.half_life)
        self.branching = traits.shape is Shape.TREE  # or a tree was seen
        self.outline: Outline | None = None  # of trees, found again now and then
        self.age = 0  # steps since the last change of regime
        self.fade = 0.5 ** (0.125 / goals.half_life)  # of promises, per draft
        self.promised = self.found = 32.0  # tokens of drafts
        self.finding = 1.0  # share of the rows that were asked which had a proposal
        self.probes = Probes(goals.probe_every)
        self.turn = Turn()
        self.lull: Lull[Request] = Lull()
        self.plain = 0  # steps in which nobody was asked
        self.clocked = 0  # steps whose time was looked at

    def lacks(self, rows: int) -> bool:
        return self.rehearsals.lack(rows)

    def learn(self, costs: CostTable) -> None:
        """Take in what a batch costs."""
        self.latency.learn(costs)
        self.rehearsals.add(costs.rows)
        self.lull = Lull()

    def request(self, row: DecodeState) -> Request:
        """What is known of a row."""
        found: Request | None = row.private.get(self)
        if found is None:
            found = row.private[self] = Request(row.uid, Acceptance(self.goals.half_life))
        return found

    def budgets(self, rows: Rows, beside: Rows = ()) -> list[Budget]:
        """What each row may draft in this step, whose forward has rows `beside` these."""
        self.turn = Turn(sum([len(row.tokens) for row in (*rows, *beside)]), len(beside))
        if self.lull.goes_on(rows):
            return [NONE] * len(rows)
        self.waken()
        requests = [self.request(row) for row in rows]
        outline = self.shape(requests)
        nodes = self.best(requests, outline).nodes[: len(requests)]
        chosen = [self.budget(outline, count) for count in nodes]
        self.probe(requests, chosen)
        for request, budget in zip(requests, chosen, strict=True):
            if budget.depth:
                self.turn.asked.add(request.uid)
                self.turn.lagging |= request.idle > 2 and not self.looks_up
            else:
                request.idle += 1
                request.acceptance.fade()
        if not self.turn.asked:
            left = self.probes.threshold(False) - self.probes.waited - 1
            self.lull = Lull(requests, min(CALM, left))
        return chosen

    def waken(self) -> None:
        """Let rows and probes know of the steps that went by without a decision."""
        past, self.lull = self.lull, Lull()
        if past.passed:
            self.probes.waited += past.passed
            for request in past.records:
                request.idle += past.passed
                request.acceptance.fade(past.passed)

    @property
    def usual(self) -> float:
        """Acceptance over all requests."""
        return self.acceptance.chance(BELIEF, 4.0)

    @property
    def kept(self) -> float:
        """Tokens that came over tokens that were promised: guesses are not all alike."""
        return min(max(self.found / self.promised, KEPT[0]), KEPT[1])

    def offers(self, requests: Sequence[Request], outline: Outline) -> list[list[float]]:
        """The nodes of every row by the chance that they stand, its own acceptance considered."""
        usual, kept, weight = self.usual, self.kept, self.likeness.weight
        return [
            outline.of_row(request.acceptance.chance(usual, weight) / usual, kept)
            for request in requests
        ]

    def best(self, requests: Sequence[Request], outline: Outline) -> Allotment:
        """Nodes for every row: those of most tokens per second, over all rows."""
        offers = self.offers(requests, outline)
        count = sum([len(own) for own in offers])
        offers += [[] for _ in range(self.turn.beside)]  # they wait for this step as well
        seconds = self.seconds(len(requests), count)
        share = self.finding if self.looks_up else 1.0
        return allot(offers, outline.deepest, seconds, self.goals.margin, share)

    def seconds(self, rows: int, most: int) -> Seconds:
        """What this step costs with so many rows of this policy, and up to so many nodes in all."""
        rows += self.turn.beside
        scoring = self.latency.scoring(rows, self.turn.cached, most)
        return Seconds(scoring, *self.latency.drafting(self.goals.max_depth))

    def shape(self, requests: Sequence[Request]) -> Outline:
        """What drafts look like: a chain, or the tree of the depth that pays best just now, found
        again at ages 1, 2, 4, 8, ...
        """
        goals = self.goals
        if not self.branching:
            return Outline.chain(self.usual, min(goals.max_depth, goals.max_nodes))
        self.age += 1
        if self.outline is not None and self.age % 32 and self.age & (self.age - 1):
            return self.outline
        found, best = None, -inf
        for depth in (*[d for d in DEPTHS if d < goals.max_depth], goals.max_depth):
            outline = Outline.tree(self.ranks, self.usual, goals.max_nodes, depth)
            promised = self.best(requests, outline).goodput
            if promised > best:
                found, best = outline, promised
        assert found is not None, "a logarithm is above all bounds"
        self.outline = found
        return found

    def budget(self, outline: Outline, nodes: int) -> Budget:
        """The budget of a row that gets so many nodes; look-ups propose as much as they find."""
        if not nodes:
            return NONE
        if self.looks_up:
            return Budget(self.goals.max_depth, self.goals.max_nodes)
        return Budget(outline.deepest[nodes - 1], nodes)

    def probe(self, requests: Sequence[Request], chosen: list[Budget]) -> None:
        """Let one row that decodes plainly draft a little, when it is time to: what is not tried is
        not learned.
        """
        idle = {one.uid: at for at, one in enumerate(requests) if not chosen[at].depth}
        # Where many write, a draft for one of them costs each step little, and few of them learn.
        self.probes.rarest = max(self.probes.RAREST // len(requests), 1)
        at = self.probes.due(idle, False, lambda at: requests[at].idle)
        if at is None:
            return
        depth = min(self.probes.depth, self.goals.max_depth, self.goals.max_nodes)
        nodes = min(2 * depth, self.goals.max_nodes) if self.branching else depth
        chosen[at] = Budget(depth, nodes)

    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Of what was looked up, the part that is worth scoring in this company."""
        if not self.turn.asked:
            return drafts
        self.unask(rows, drafts)
        requests, asked = [self.request(row) for row in rows], len(self.turn.asked)
        found = sum([len(guessed(draft)) > 1 for draft in drafts])
        if asked:
            self.finding += 0.15 * (found / asked - self.finding)
            self.finding = min(max(self.finding, 1.0 / 64.0), 1.0)
        if not found:
            return drafts
        # A probe is there to be judged, and what a request gives is no guess.
        whole = [
            draft.given > 0 or request.uid == self.probes.row
            for request, draft in zip(requests, drafts, strict=True)
        ]
        promises = [
            [1.0] * (len(draft.tree) - 1) if all_of_it else self.promises(request, draft)
            for request, draft, all_of_it in zip(requests, drafts, whole, strict=True)
        ]
        own_rows = len(rows) - self.turn.beside
        seconds = self.seconds(own_rows, sum([len(own) for own in promises]))
        spent = seconds.levels[1] + seconds.row * asked
        kept = cut(promises, seconds.scoring, spent)
        return [
            draft if all_of_it or len(nodes) == len(draft.tree) else draft.keep(nodes)
            for draft, nodes, all_of_it in zip(drafts, kept, whole, strict=True)
        ]

    def unask(self, rows: Rows, drafts: Sequence[Draft]) -> None:
        """Rows whose requests alone gave tokens were not asked after all: what their drafter would
        have found is not known, and who probes with them learns nothing.
        """
        for row, draft in zip(rows, drafts, strict=True):
            if draft.given and len(draft.tree) == 1 + draft.given:
                self.turn.asked.discard(row.uid)
                if row.uid == self.probes.row:
                    self.probes.row, self.request(row).idle = None, 0  # somebody else probes next

    def promises(self, request: Request, draft: Draft) -> list[float]:
        """How likely each node below the root of a draft stands."""
        usual, tree = self.usual, draft.tree
        own = request.acceptance.chance(usual, self.likeness.weight)
        if not self.branching:
            return [self.kept * own**depth for depth in range(1, len(tree))]
        rates = self.ranks.rates(WIDTH, usual, 2.0)
        chances, factor = [self.kept], own / usual
        for parent, rank in zip(tree.parents[1:], tree.ranks()[1:], strict=True):
            rate = min(rates[min(rank, WIDTH - 1)] * factor, 1.0)
            chances.append(chances[parent] * rate)
        return chances[1:]

    def observe(
        self,
        rows: Rows,
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        times: StepTimes | None,
        share: float = 1.0,
    ) -> None:
        """Learn from what was accepted, and from the clock where there is one to be believed."""
        turn = self.turn
        self.unask(rows, drafts)
        if not turn.asked:
            self.plain += 1
            if self.plain % WATCHED:
                return
        deepest = nodes = 0
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            tree = guessed(draft)
            if len(tree) > 1:
                # Where what was given falls, nothing behind it was tried.
                if len(verdict.path) >= draft.given:
                    path = guessed_path(draft, verdict.path)
                    self.outcome(self.request(row), tree, path, len(rows))
                deepest, nodes = max(deepest, *tree.depths()), nodes + len(tree) - 1
            elif row.uid == self.probes.row:
                self.probes.ended(False, False)  # nothing was found
                self.request(row).idle = 0  # somebody else probes next
        if times is None:
            return
        self.clocked += 1
        if deepest and self.clocked % 2:  # taking a time in costs some, too
            if not turn.lagging:
                self.latency.seen_draft(len(turn.asked), deepest, nodes, times.draft)
            return
        spent = times.target / share + times.other
        self.latency.seen(times.rows, times.nodes, turn.cached, spent)

    def outcome(self, request: Request, tree: TokenTree, path: Sequence[int], rows: int) -> None:
        """What became of one row's draft."""
        chain, accepted = tree.is_chain, len(path)
        offered = len(tree) - 1 if chain else max(tree.depths())
        last = path[-1] if path else 0
        rejected = accepted < offered if chain else last in tree.parents
        if not chain:
            self.branching = True
        promised = self.promised_by(request, tree)
        self.promised = self.promised * self.fade + promised
        self.found = self.found * self.fade + accepted
        request.idle = 0
        self.likeness.update(request.acceptance, self.usual, accepted, rejected)
        request.acceptance.update(accepted, rejected)
        self.acceptance.update(accepted, rejected)
        if self.branching:
            self.ranks.update(tree, path)
        if request.alarm.rings(accepted > 0):
            self.forget(request, rows)
        if request.uid == self.probes.row:
            self.probes.ended(self.paid(accepted, offered, len(tree) - 1, rows), not rejected)

    def promised_by(self, request: Request, tree: TokenTree) -> float:
        """Tokens that a draft of this shape would bring, were promises always kept."""
        own = request.acceptance.chance(self.usual, self.likeness.weight)
        if not self.branching:
            return sum([own**depth for depth in range(1, len(tree))])
        return sum(self.promises(request, Draft(tree, Draw.POINT))) / self.kept

    def paid(self, accepted: int, depth: int, nodes: int, rows: int) -> bool:
        """Whether accepted tokens were worth the seconds that one row's draft took."""
        seconds = self.seconds(rows, nodes)
        extra = seconds.drafted(1, depth, nodes) - seconds.scoring[0]
        return accepted * seconds.scoring[0] / (rows + self.turn.beside) > extra

    def forget(self, request: Request, rows: int) -> None:
        """The text has changed: what was seen tells less of what comes."""
        request.acceptance.scale(FORGET)
        share = 1.0 - (1.0 - FORGET) / max(rows, 1)
        self.acceptance.scale(share)
        self.promised, self.found = share * self.promised, share * self.found
        self.age = 0
        if self.branching:
            self.ranks.scale(FORGET)

"""Retrieved continuations that a drafter finds plausible, fused with its tree (RASD,
arXiv 2503.03434).

The drafter's first law tells which retrieved continuations to believe: those that begin with one of
its likeliest tokens. What is left is grafted onto the drafter's own tree where the two agree, so
that long retrieved branches lift the depth at which a drafter gives up. Where we differ: the paper
does not tell how many nodes either side gets; here both sides value their nodes, retrieved ones by
how often such nodes were right so far, and the best of the union go to the target. All of them are
fixed candidates, so choosing among them changes no law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from foretoken.asking import taps_of
from foretoken.datastore.continuations import Continuations
from foretoken.drafters.rows import RowDrafter
from foretoken.drafters.source import Source, check_matching
from foretoken.drafters.weighing import emitted
from foretoken.errors import check_values
from foretoken.trees.build import grafted
from foretoken.trees.select import prune
from foretoken.trees.worth import paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    TokenTree,
    ValuedDrafter,
    Verdict,
)


class GuidedRetrieval(RowDrafter):
    """A drafter's tree with branches from a datastore."""

    trees = True
    valued = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        datastore: str | Path = ""  # folder of `foretoken datastore build`; has to be given
        plausible: int = 8  # likeliest first tokens a continuation may begin with; 0 keeps none
        draft_depth: int | None = None  # levels the drafter makes at most; None: as the budget says
        max_match: int = 16  # longest end of the context looked up
        min_match: int = 1  # shortest
        occurrences: int = 256  # read per segment, evenly spaced

    def __init__(
        self, target: LanguageModel, inner: ValuedDrafter, config: Config | None = None
    ) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_matching(settings.min_match, settings.max_match, settings.occurrences)
        deepest = settings.draft_depth
        check_values(
            settings,
            ("plausible", settings.plausible >= 0, "0 or more"),
            ("draft_depth", deepest is None or deepest >= 1, "1 or more, or None"),
        )
        self.source = Source(settings.datastore, target.vocab_size)
        self.inner = inner
        self.taps = inner.taps
        self.evidence = Evidence()
        self._fused: dict[int, Fused] = {}  # by row, from a proposal to its verdict

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        self.inner.start(row, seen)

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        first = FirstLaws(keep_going)
        most = self.config.draft_depth
        own = budgets
        if most is not None:
            own = [replace(budget, depth=min(budget.depth, most)) for budget in budgets]
        grown = self.inner.propose(rows, own, first)
        drafts = []
        for row, budget, found in zip(rows, budgets, grown, strict=True):
            assert found.draw is Draw.POINT, "a tree of other candidates cannot be grown on"
            fused = Fused(found.tree, self.inner.values(row))
            law = first.seen.get(row.uid)
            if law is not None:
                retrieved = self.look_up(row, budget, law)
                if retrieved is not None:
                    self.graft(row, fused, retrieved, budget)
            self._fused[row.uid] = fused
            drafts.append(Draft(self.cut(row, fused, budget), Draw.POINT))
        return drafts

    def look_up(self, row: DecodeState, budget: Budget, law: Tensor) -> Continuations | None:
        """What followed the context in the datastore and begins like the drafter would."""
        settings = self.config
        found = self.source.store.find(
            row.tokens,
            min(budget.depth, budget.nodes),
            least=settings.min_match,
            most=settings.max_match,
            limit=settings.occurrences,
        )
        if found is None:
            return None
        likeliest = law.topk(min(settings.plausible, law.shape[-1])).indices
        return found.starting_with(likeliest.numpy(force=True))

    def graft(self, row: DecodeState, fused: Fused, found: Continuations, budget: Budget) -> None:
        """Put retrieved nodes below the drafter's, with what experience says they are worth."""
        own = len(fused.tree)
        best = self.source.beginnings(row, found, budget.nodes + own)
        fused.tree, place = grafted(fused.tree, best.tokens, best.parents)
        shares = [
            weight / (found.total if parent < 0 else best.weights[parent])
            for parent, weight in zip(best.parents, best.weights, strict=True)
        ]
        unsaid = fused.unsaid(place, shares)
        ranks: dict[int, int] = {}
        for node, share in zip(place, shares, strict=True):
            if node < own:
                continue
            above = fused.tree.parents[node]
            rank = ranks.get(above, 0)
            ranks[above] = rank + 1
            promise = min(share * unsaid.get(above, 1.0), 1.0)
            kind = self.evidence.place(found.length, rank, above in unsaid)
            chance = self.evidence.chance(kind, promise)
            fused.values.append(fused.values[above] * chance)
            fused.retrieved.append(Retrieved(node, above, promise, kind))

    def cut(self, row: DecodeState, fused: Fused, budget: Budget) -> TokenTree:
        """The best nodes of both sides, the drafter's first; the drafter is told which."""
        pay, _ = paying(sorted(fused.values[1:], reverse=True), budget.node_prices)
        tree, kept = prune(fused.tree, fused.values, min(budget.nodes, pay))
        fused.own = [node for node in kept if node < fused.size]
        self.inner.keep(row, fused.own)
        return tree

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Learn what retrieved nodes are worth; the drafter sees its own part of the tree."""
        parts = [self._fused.pop(row.uid) for row in rows]
        own, seen, told = [], [], []
        for fused, draft, score, verdict in zip(parts, drafts, scores, verdicts, strict=True):
            said = emitted(draft.tree, verdict)
            fused.teach(said, self.evidence)
            size = len(fused.own)
            own.append(Draft(first_nodes(draft.tree, size), Draw.POINT))
            hidden = None if score.hidden is None else score.hidden[:size]
            seen.append(Scores(score.logits[:size], hidden, score.p))
            path = tuple(node for node in verdict.path if node < size)
            told.append(Verdict(path, said[len(path)]))
        self.inner.observe(rows, own, seen, told)

    def finish(self, row: DecodeState) -> None:
        self._fused.pop(row.uid, None)
        self.inner.finish(row)

    def check_words(self, words: Mapping[str, int]) -> None:
        """Refuse a datastore made with another tokenizer than the target's."""
        self.source.check_words(words)


class FirstLaws:
    """A `keep_going` that keeps the first law it is shown of every row."""

    def __init__(self, keep_going: KeepGoing) -> None:
        self.keep_going = keep_going
        self.taps = taps_of(keep_going)
        self.seen: dict[int, Tensor] = {}

    def __call__(self, row: DecodeState, law: Tensor, *hidden: Tensor) -> int:
        self.seen.setdefault(row.uid, law)
        return self.keep_going(row, law, *hidden)


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A retrieved node that the drafter's tree has not."""

    node: int
    parent: int
    promise: float  # its share of its parent's occurrences, or of what the drafter left unsaid
    kind: int  # its class in `Evidence`


class Fused:
    """One row's union of both trees, the drafter's nodes first."""

    def __init__(self, tree: TokenTree, values: Sequence[float]) -> None:
        self.tree, self.values = tree, list(values)
        self.size = len(tree)  # of the drafter's tree
        self.own: list[int] = []  # its nodes that were kept
        self.retrieved: list[Retrieved] = []

    def unsaid(self, place: Sequence[int], shares: Sequence[float]) -> dict[int, float]:
        """What a share of occurrences is worth below the nodes that the drafter looked at.

        There a retrieved node can only be right where none of the drafter's children is: the
        chance of that goes to the occurrences that are not of these children.
        """
        left: dict[int, float] = {}
        for node in range(1, self.size):
            above = self.tree.parents[node]
            if self.values[above] > 0.0:
                left[above] = left.get(above, 1.0) - self.values[node] / self.values[above]
        others = dict.fromkeys(left, 1.0)
        for node, share in zip(place, shares, strict=True):
            above = self.tree.parents[node]
            if node < self.size and above in others:
                others[above] -= share
        return {
            node: max(chance, 0.0) / others[node] if others[node] > 0.0 else 0.0
            for node, chance in left.items()
        }

    def teach(self, said: Sequence[int], evidence: Evidence) -> None:
        """Compare retrieved nodes, scored or not, with what the target said where it went."""
        child = {(self.tree.parents[i], self.tree.tokens[i]): i for i in range(1, len(self.tree))}
        node, truth = 0, {}
        for token in said:
            truth[node] = token
            if (node, token) not in child:
                break
            node = child[node, token]
        for one in self.retrieved:
            if one.parent in truth:
                hit = truth[one.parent] == self.tree.tokens[one.node]
                evidence.tried(one.kind, one.promise, hit)


class Evidence:
    """How often retrieved nodes are right: accepted over promised, in a few classes.

    A node promises its share of its parent's occurrences. Classes are the length of the match, the
    favourite among its siblings or not, and whether the drafter looked at the parent without
    thinking of the node (then it promises a share of the chance that is left). Old counts fade
    slowly.
    """

    LENGTHS = (1, 2, 4, 8)
    FIRST = (0.8, 0.5)  # what a promise is worth before anything is known, by `passed_over`
    WEIGHT = 8.0  # promises that this first guess is worth
    FADE = 0.5 ** (1 / 512)

    def __init__(self) -> None:
        classes = [first * self.WEIGHT for first in self.FIRST for _ in range(2)]
        self.hits = classes * (len(self.LENGTHS) + 1)
        self.promised = [self.WEIGHT] * len(self.hits)

    def place(self, length: int, rank: int, passed_over: bool) -> int:
        """The class of a node."""
        return 4 * sum(length > edge for edge in self.LENGTHS) + 2 * passed_over + (rank > 0)

    def chance(self, place: int, share: float) -> float:
        """The chance of a node, given that its parent is right."""
        return min(share * self.hits[place] / self.promised[place], 1.0)

    def tried(self, place: int, share: float, hit: bool) -> None:
        """A node whose parent was right, and whether it was right itself."""
        self.hits[place] = self.hits[place] * self.FADE + hit
        self.promised[place] = self.promised[place] * self.FADE + share


def first_nodes(tree: TokenTree, size: int) -> TokenTree:
    """The tree of the first nodes."""
    return TokenTree(tree.tokens[:size], tree.parents[:size])

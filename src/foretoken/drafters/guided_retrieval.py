"""Retrieved continuations that a drafter finds plausible, fused with its tree (RASD,
arXiv 2503.03434).

The drafter's first law tells which retrieved continuations to believe: those that begin with one of
its likeliest tokens. What is left is grafted onto the drafter's own tree where the two agree, so
that long retrieved branches lift the depth at which a drafter gives up. It comes from a datastore
or, without one, from earlier in the text: the paper's two forms. Where we differ: the paper does
not tell how many nodes either side gets; here both sides value their nodes, retrieved ones by how
often such nodes were right so far, and the best of the union go to the target. All of them are
fixed candidates, so choosing among them changes no law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from foretoken.contract import Drafter, DraftModel, Guided, LanguageModel, StoppingRule
from foretoken.datastore.continuations import Continuations, beginnings
from foretoken.drafters.parts.chances import affordable, trials
from foretoken.drafters.parts.datastore_source import DatastoreConfig, DatastoreSource, Source
from foretoken.drafters.parts.members import Combination, own_part
from foretoken.drafters.parts.text_source import TextSource
from foretoken.errors import PairingError, check_values
from foretoken.trees.build import grafted
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Go,
    Level,
    Memory,
    Rows,
    Shape,
    Step,
    Taps,
    TokenTree,
    Traits,
)


class GuidedRetrieval(Combination):
    """A drafter's tree with branches from a datastore, or from earlier in the text."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)
    model: DraftModel  # of the drafter, where it has one

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(DatastoreConfig):
        # folder of `foretoken datastore build`; without one the text itself is looked up
        datastore: str | Path = ""
        plausible: int = 8  # likeliest first tokens a continuation may begin with; 0 keeps none
        draft_depth: int | None = None  # levels the drafter makes at most; None: as the budget says

    def __init__(self, target: LanguageModel, inner: Drafter, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        deepest = settings.draft_depth
        check_values(
            settings,
            ("plausible", settings.plausible >= 0, "0 or more"),
            ("draft_depth", deepest is None or deepest >= 1, "1 or more, or None"),
        )
        if not (inner.traits.fixed and inner.traits.prices):
            raise PairingError(
                f"{type(inner).__name__} was asked to grow trees that are grafted on.",
                "its candidates have to be fixed (point), and it has to say their chances.",
                "use a drafter that grows best first, as method tree does.",
            )
        super().__init__(inner)
        self.traits = replace(self.traits, shape=Shape.TREE)
        if isinstance(inner, Guided):
            self.model = inner.model
        kind = DatastoreSource if str(settings.datastore) else TextSource
        self.places: Source = kind(settings, target.vocab_size)
        self.inner = inner
        self.evidence = Evidence()

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        first = FirstLaws(stop)
        most = self.config.draft_depth
        own = budgets
        if most is not None:
            own = [replace(budget, depth=min(budget.depth, most)) for budget in budgets]
        drafts = []
        for row, budget, grown in zip(
            rows, budgets, self.inner.propose(rows, own, first), strict=True
        ):
            fused = row.private[self] = Fused(grown)
            law = first.seen.get(row)
            found = None if law is None else self.look_up(row, budget, law)
            if found is not None:
                self.graft(row, fused, found, budget)
            draft = affordable(Draft(fused.tree, Draw.POINT, chances=tuple(fused.chances)), budget)
            fused.cut(draft)
            drafts.append(draft)
        return drafts

    def look_up(self, row: DecodeState, budget: Budget, law: Tensor) -> Continuations | None:
        """What followed the context elsewhere and begins like the drafter would."""
        found = self.places.look_up(row, budget)
        if found is None:
            return None
        likeliest = law.topk(min(self.config.plausible, law.shape[-1])).indices
        return found.starting_with(likeliest.numpy(force=True))

    def graft(self, row: DecodeState, fused: Fused, found: Continuations, budget: Budget) -> None:
        """Put retrieved nodes below the drafter's, with what experience says they are worth."""
        own = len(fused.tree)
        best = beginnings(found, budget.nodes + own, self.places.end, row.params.eos)
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
            fused.chances.append(fused.chances[above] * chance)
            fused.retrieved[node] = kind, promise

    def observe(self, step: Step) -> None:
        """Learn what retrieved nodes are worth; the drafter sees its own part of the tree."""
        fused: list[Fused] = [row.private[self] for row in step.rows]
        for row, one, said in zip(step.rows, fused, step.emitted, strict=True):
            if not row.rehearsal:
                one.teach(said, self.evidence)
        super().observe(own_part(step, [one.grown for one in fused]))

    def finish(self, row: DecodeState) -> None:
        super().finish(row)
        row.private.pop(self.places, None)

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse a datastore made with another tokenizer than the target's."""
        self.places.check_vocabulary(vocabulary)
        super().check_vocabulary(vocabulary)


class FirstLaws:
    """A stopping rule that keeps the first law it is shown of every row."""

    def __init__(self, stop: StoppingRule | None) -> None:
        self.stop = stop
        self.taps: Taps = () if stop is None else stop.taps
        self.branches = stop is not None and stop.branches
        self.seen: dict[DecodeState, Tensor] = {}

    def after(self, row: DecodeState, level: Level) -> Go:
        self.seen.setdefault(row, level.laws[0])
        return Go.ON if self.stop is None else self.stop.after(row, level)


class Fused:
    """One row's union of both trees, the drafter's nodes first."""

    def __init__(self, grown: Draft) -> None:
        self.grown = grown  # the drafter's part
        self.tree: TokenTree = grown.tree
        self.chances = list(grown.chances or (1.0,))
        self.size = len(grown.tree)
        # Of nodes that the drafter's tree has not: the class in `Evidence`, and what is promised, a
        # share of the parent's occurrences or of what the drafter left unsaid.
        self.retrieved: dict[int, tuple[int, float]] = {}

    def cut(self, draft: Draft) -> None:
        """Leave the drafter the part that is in `draft`, as which the union is scored."""
        if draft.origin is not None:
            self.grown = self.grown.keep([node for node in draft.origin if node < self.size])

    def unsaid(self, place: Sequence[int], shares: Sequence[float]) -> dict[int, float]:
        """What a share of occurrences is worth below the nodes that the drafter looked at.

        There a retrieved node can only be right where none of the drafter's children is: the
        chance of that goes to the occurrences that are not of these children.
        """
        left: dict[int, float] = {}
        for node in range(1, self.size):
            above = self.tree.parents[node]
            if self.chances[above] > 0.0:
                left[above] = left.get(above, 1.0) - self.chances[node] / self.chances[above]
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
        for node, _, hit in trials(self.tree, said):
            if node in self.retrieved:
                evidence.tried(*self.retrieved[node], hit)


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

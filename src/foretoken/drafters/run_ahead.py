"""A draft model whose chain grows on while its beginning is verified (PEARL, arXiv 2408.11850).

Chains are drafted for forks of rows as well: the row's tokens, then drafted ones that nobody has
judged. Those must not be committed, so the draft model's tree stays open while the text grows along
it. It is closed, with what the row has confirmed of it, once row and tree part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxtyping import Int
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.errors import ConfigError
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import DecodeState, Ragged, Rows, Scores, Taps

LONGEST = 64  # nodes of a tree that is left open: closing it costs one forward over what is pending
SCHEDULES = ("threads", "emulated")


class RunAhead(OrdinaryModel):
    """A draft model for chains, one behind the other; tokens that stand are never fed twice."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        overlap: str = "threads"  # models at the same time; "emulated": in turn, and time modelled

    def __init__(self, lm: LanguageModel, config: Config | None = None) -> None:
        super().__init__(lm)
        self.hidden_size = 0  # states of tokens that nobody has judged are shown to no rule
        self.config = config or self.Config()
        if self.config.overlap not in SCHEDULES:
            raise ConfigError(
                f"overlap={self.config.overlap!r} was asked for.",
                f"draft and target run as {' or '.join(SCHEDULES)}.",
                "pass overlap=threads where each model has cores or a device of its own.",
            )

    def open(self, row: DecodeState, features: Features | None) -> bool:
        if not super().open(row, features):
            return False
        self.read([row])  # before anything is pending
        row.private[self] = Open(row)
        return True

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        trees: list[Open] = [row.private[self] for row in rows]
        new = [
            (r, tree) for r, tree, (above,) in zip(rows, trees, parents, strict=True) if above < 0
        ]
        self.settle([tree for row, tree in new if not tree.leads_to(row.tokens)])
        feeds = [
            tree.missing(row.tokens) if above < 0 else fed
            for row, tree, fed, (above,) in zip(rows, trees, tokens, parents, strict=True)
        ]
        scores = self.lm.grow(
            [tree.then for tree in trees],
            feeds,
            [tree.below(len(feed)) for tree, feed in zip(trees, feeds, strict=True)],
        )
        for tree, feed in zip(trees, feeds, strict=True):
            tree.fed += feed
        return [Scores(score.logits[-1:]) for score in scores]

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        return [None] * len(rows)  # what is open goes on from one step to the next

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        return None  # trees stay open until rows leave them

    def settle(self, trees: Sequence[Open]) -> None:
        """Commit what the rows have confirmed of their open trees; begin them anew.

        Of a row that has not grown since, because its step failed, nothing is.
        """
        grown = [tree for tree in trees if tree.fed and len(tree.row.tokens) > tree.root + 1]
        if grown:
            paths = [range(1, tree.confirmed()) for tree in grown]
            self.lm.commit([tree.then for tree in grown], paths)
        for tree in trees:
            tree.fed = []

    def close(self, row: DecodeState) -> None:
        row.private.pop(self, None)
        super().close(row)


@dataclass(slots=True)
class Open:
    """The draft model's tree of one row: a chain that begins with the last token of `then`."""

    row: DecodeState  # the row itself, whatever fork of it is drafted for
    fed: list[int] = field(default_factory=list)  # its nodes; none: no tree is open
    then: DecodeState = field(init=False)  # the row as it was when the tree was opened

    @property
    def root(self) -> int:
        return len(self.then.tokens) - 1

    def leads_to(self, tokens: Sequence[int]) -> bool:
        """Whether more nodes make this tree the chain that ends with `tokens`."""
        known = len(self.fed)
        behind = tokens[self.root :] if known else ()
        return known < min(len(behind), LONGEST) and behind[:known] == self.fed

    def missing(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Nodes that are not fed yet; where no tree is open, one begins at the row's last token."""
        if not self.fed:
            self.then = replace(self.row, tokens=list(self.row.tokens))
        return tuple(tokens[self.root + len(self.fed) :])

    def below(self, count: int) -> range:
        """Parents of the next `count` nodes."""
        known = len(self.fed)
        return range(known - 1, known - 1 + count)

    def confirmed(self) -> int:
        """Nodes, root included, that are the row's tokens now; its last one stays uncached."""
        text = self.row.tokens[self.root : -1]
        pairs = enumerate(zip(text, self.fed, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.fed)))

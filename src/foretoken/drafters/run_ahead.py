"""A draft model whose chain grows on while its beginning is verified (PEARL, arXiv 2408.11850).

`propose` takes forks of rows as well: the row's tokens, then drafted ones nobody has judged. Those
must not be committed, so the draft model's tree stays open while the text grows along it. It is
closed, with what the row has confirmed of it, once row and tree part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foretoken.drafters.chains import Chain, ChainDrafter
from foretoken.errors import ConfigError
from foretoken.types import Budget, DecodeState, LanguageModel

LONGEST = 64  # nodes of a tree that is left open: closing it costs one forward over what is pending
SCHEDULES = ("threads", "emulated")


class RunAhead(ChainDrafter):
    """One draft forward per depth; tokens that stand are never fed twice."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        overlap: str = "threads"  # models at the same time; "emulated": in turn, and time modelled

    def __init__(self, draft_lm: LanguageModel, config: Config | None = None) -> None:
        self.lm = draft_lm
        self.max_length = draft_lm.max_length
        self.config = config or self.Config()
        if self.config.overlap not in SCHEDULES:
            raise ConfigError(
                f"overlap={self.config.overlap!r} was asked for.",
                f"draft and target run as {' or '.join(SCHEDULES)}.",
                "pass overlap=threads where each model has cores or a device of its own.",
            )

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        # A prompt beyond the draft model's positions is decoded plainly: `allowed` stays at zero.
        if self.lm.max_length is None or len(row.tokens) <= self.lm.max_length:
            self.lm.prefill(row)
        row.draft = Open(row)

    def allowed(self, row: DecodeState, budget: Budget) -> int:
        """As for any chain; nothing follows an end token that is pending."""
        return 0 if row.tokens[-1] in row.params.eos else super().allowed(row, budget)

    def grow(self, chains: Sequence[Chain]) -> list[Tensor]:
        trees: list[Open] = [one.row.draft for one in chains]
        new = [(one, tree) for one, tree in zip(chains, trees, strict=True) if one.fed == 0]
        self.settle([tree for one, tree in new if not tree.leads_to(one.row.tokens)])
        for one, tree in new:
            one.feed = tree.missing(one.row.tokens)
        feeds = [one.feed for one in chains]
        logits = self.lm.grow(
            [tree.then for tree in trees],
            feeds,
            [tree.below(len(feed)) for tree, feed in zip(trees, feeds, strict=True)],
        )
        for tree, feed in zip(trees, feeds, strict=True):
            tree.fed += feed
        return [scored[-1:] for scored in logits]

    def settle(self, trees: Sequence[Open]) -> None:
        """Commit what the rows have confirmed of their open trees."""
        opened = [tree for tree in trees if tree.fed]
        if opened:
            paths = [range(1, tree.confirmed()) for tree in opened]
            self.lm.commit([tree.then for tree in opened], paths)
        for tree in opened:
            tree.fed = []

    def finish(self, row: DecodeState) -> None:
        self.lm.free([row])
        row.draft = None


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
            self.then = replace(self.row, tokens=list(self.row.tokens), draft=None)
        return tuple(tokens[self.root + len(self.fed) :])

    def below(self, count: int) -> range:
        """Parents of the next `count` nodes."""
        known = len(self.fed)
        return range(known - 1, known - 1 + count)

    def confirmed(self) -> int:
        """Nodes, root included, that are the row's tokens now; its last one stays uncached."""
        text = self.row.tokens[self.root : -1]
        assert text, "a row grows by a token between two proposals"
        pairs = enumerate(zip(text, self.fed, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.fed)))

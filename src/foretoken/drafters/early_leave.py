"""The target leaves its own stack early, once trained predictors are sure (SpecEE, arXiv
2504.08850). LOSSY: a token may come from an intermediate layer.

A draft model names a few likely tokens; behind active layers a small predictor looks at these
tokens' logits only, and one look at the whole vocabulary confirms it. With `chain` above zero the
same guards a drafted chain: it leaves once every node of the accepted path agrees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from foretoken.drafters.candidates import DraftCandidates
from foretoken.drafters.rows import RowDrafter
from foretoken.errors import ConfigError
from foretoken.heads import exits as predictors
from foretoken.lm.leaving import Leave
from foretoken.lm.views import leaves
from foretoken.trees.build import chain, root
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    KeepGoing,
    LanguageModel,
    Scores,
    Verdict,
)


class EarlyLeave(RowDrafter):
    """Candidates from a draft model, predictors at scheduled layers."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        predictors: str = ""  # folder that `foretoken train exits` wrote; there is no default
        sure_above: float = (
            0.98  # of a predictor; above 1 it never fires; the paper's 0.5 is lossier
        )
        chain: int = 3  # tokens drafted as well; 0: one token per round, as in the paper's table
        recent: int = 5  # last exits that decide which further layers are active
        around: int = 2  # layers on each side of a recent exit
        most_behind: int = 8  # tokens fed again at most, before one forward runs through

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, config: Config | None = None
    ) -> None:
        self.config = config = config or self.Config()
        if config.predictors == "":
            raise ConfigError(
                "leaving the target's layers early was asked for without predictors.",
                "they are trained for one pair of models and kept in a folder.",
                "make one with `foretoken train exits --out DIR`, then pass predictors=DIR.",
            )
        self.head, card = predictors.load(config.predictors)
        if card.vocab_size != target.vocab_size:
            raise ConfigError(
                f"predictors of {config.predictors} were asked for.",
                f"they were trained on {card.vocab_size} tokens, the target has "
                f"{target.vocab_size}.",
                "train some for this pair with `foretoken train exits --out DIR`.",
            )
        self.view = leaves(target)
        self.source = DraftCandidates(draft, self.head.candidates)
        self.known = frozenset(self.head.layers) & frozenset(range(self.view.layers - 1))
        self.often = self.known & frozenset(self.head.often)

    def start(self, row: DecodeState, seen: Tensor | None) -> None:
        self.source.start(row)
        row.draft = Schedule(deque(maxlen=self.config.recent))

    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]:
        drafts = {row.uid: Draft(root(row.tokens[-1]), Draw.POINT) for row in rows}
        asking, lengths = [], []
        for row, budget in zip(rows, budgets, strict=True):
            length = min(self.config.chain, budget.depth, budget.nodes)
            if min(budget.depth, budget.nodes) > 0 and self.source.fits(row, length):
                asking.append(row)
                lengths.append(length)
        for row, guess in zip(asking, self.source.guess(asking, lengths), strict=True):
            tree = chain(row.tokens[-1], guess.tokens)
            drafts[row.uid] = Draft(tree, Draw.POINT)
            schedule: Schedule = row.draft
            if self.view.behind(row) < self.config.most_behind:
                active = self.active(schedule)
                schedule.wish = Leave(guess.candidates, active, self.judge, tree)
                self.view.leave(row, schedule.wish)
        return [drafts[row.uid] for row in rows]

    def judge(self, layer: int, features: Float[Tensor, "n F"]) -> list[bool]:
        """Whether the predictor of a layer fires, node by node."""
        return [sure > self.config.sure_above for sure in self.head.sure(layer, features)]

    def active(self, schedule: Schedule) -> frozenset[int]:
        """Layers where exits are frequent, and those near the last exits (section 5.2)."""
        if len(schedule.exits) < self.config.recent:
            return self.often
        around = self.config.around
        near = {exit - 1 + step for exit in schedule.exits for step in range(-around, around + 1)}
        return self.often | (self.known & near)

    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        going = [(row, v.path) for row, v in zip(rows, verdicts, strict=True) if not row.finish]
        self.source.commit([row for row, _ in going], [path for _, path in going])
        for row in rows:
            schedule: Schedule = row.draft
            depth = self.view.layers if schedule.wish is None else schedule.wish.depth
            schedule.wish = None
            schedule.exits.append(depth)
            schedule.rounds += 1
            schedule.layers += depth

    def finish(self, row: DecodeState) -> None:
        self.source.free(row)


@dataclass(slots=True)
class Schedule:
    """One text's last exits, as layers run, and their sum over all rounds."""

    exits: deque[int]
    wish: Leave | None = None
    rounds: int = 0
    layers: int = field(default=0)

"""The target leaves its own stack early, once trained predictors are sure (SpecEE, arXiv
2504.08850). LOSSY: a greedy token may come from an intermediate layer.

A draft model names a few likely tokens; behind active layers a small predictor looks at these
tokens' logits only, and one look at the whole vocabulary confirms it. Under speculation the same
guards a drafted chain or tree: all its nodes are asked together, and the forward ends once every
node of the path that would be accepted agrees (the paper's hyper-token, section 5.3).

What confirms a token is the argmax of the whole vocabulary, so only rows leave whose next token is
just that: greedy ones without penalties, biases, processors or grammars. Others run through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel, StoppingRule
from foretoken.drafters.growers.best_first import BestFirst, BestFirstGrowth, Ranker
from foretoken.drafters.growers.chain import ChainGrowth
from foretoken.drafters.growers.grower import Grower, Growth, Opened
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.errors import ConfigError, check_values, made_by
from foretoken.heads import made_for, store
from foretoken.heads.exits import ExitPredictors
from foretoken.lm.views.early_exit_scoring import Leave
from foretoken.lm.views.wrapping import early_exit_scoring
from foretoken.trees.build import chain
from foretoken.types import Budget, DecodeState, Draft, Draw, Scores, Step, TokenTree

SHAPES = ("tree", "chain", "nothing")


class CandidateGrowth(ChainGrowth):
    """One row's chain of likeliest tokens, and the candidates behind the root and each of them."""

    def __init__(self, row: DecodeState, depth: int, drafter: EarlyLeave) -> None:
        super().__init__(row, depth)
        self.drafter, self.count = drafter, drafter.head.candidates
        self.candidates: list[Tensor] = []  # [K] of every node

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        self.scored += 1
        best = score.logits[0].topk(self.count).indices
        self.candidates.append(best)
        if self.scored > self.depth:
            return False
        self.tokens.append(int(best[0]))
        return may_leave(self.row) or self.scored < self.depth  # the last token needs candidates

    def draft(self) -> Draft:
        tree = chain(self.row.tokens[-1], self.tokens)
        self.drafter.wish(self.row, torch.stack(self.candidates), tree)
        return Draft(tree, Draw.POINT)


class CandidateTree(BestFirstGrowth):
    """One row's tree, best first, and the candidates behind each of its nodes.

    The draft model is asked about the leaves, too: one forward more, without which no path that is
    accepted to its end could be settled.
    """

    def __init__(self, row: DecodeState, depth: int, budget: Budget, drafter: EarlyLeave) -> None:
        super().__init__(row, depth, budget, drafter.ranker)
        self.drafter, self.count = drafter, drafter.head.candidates
        self.candidates: dict[int, Tensor] = {}  # [K] of every node fed
        self.grown = False

    def take(self, score: Scores, stop: StoppingRule | None) -> bool:
        best = score.logits.topk(self.count).indices
        self.candidates.update(zip(self.frontier, best, strict=True))
        if self.grown or super().take(score, stop):
            return not self.grown
        self.grown = True
        self.frontier = [node for node in self.proposed() if node not in self.candidates]
        return bool(self.frontier)

    def draft(self) -> Draft:
        draft = super().draft()
        candidates = torch.stack([self.candidates[node] for node in self.kept])
        self.drafter.wish(self.row, candidates, draft.tree)
        return draft


@dataclass(slots=True)
class Schedule(Opened):
    """One text's last exits, as layers run, and their sum over all rounds."""

    exits: deque[int] = field(kw_only=True)
    wish: Leave | None = None
    rounds: int = 0
    layers: int = 0


class EarlyLeave(Grower):
    """Candidates from a draft model, predictors at scheduled layers."""

    lossless = False
    why = "greedy tokens may come from a layer before the last one"

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        predictors: str = ""  # folder that `foretoken train exits` wrote; there is no default
        sure_above: float = 0.98  # of a predictor; above 1 it never fires; paper 0.5, lossier
        # what is drafted beside it: "tree", "chain", or "nothing": one token per round, as in the
        # paper's first table
        shape: str = "tree"
        branch: int = 8  # children considered per node of a tree
        most_behind: int = 8  # tokens fed again at most, before one forward runs through

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, config: Config | None = None
    ) -> None:
        self.config = config = config or self.Config()
        if config.predictors == "":
            raise ConfigError(
                "leaving the target's layers early was asked for without predictors.",
                "they are trained for one pair of models and kept in a folder.",
                made_by("foretoken train exits --out DIR", "predictors"),
            )
        check_values(config, ("shape", config.shape in SHAPES, f"one of {', '.join(SHAPES)}"))
        if config.shape == "tree":
            self.traits = BestFirst.traits
        self.head: ExitPredictors
        self.head, card = store.load(config.predictors, "exits")
        check_fits(card, self.head.layers, config.predictors, target)
        super().__init__(OrdinaryModel(draft))
        self.ranker = Ranker(config.branch, calibrate=True, template=None, min_gain=0.05)
        self.scoring = self.view = early_exit_scoring(target)
        self.depth: int = self.view.layers
        self.known = frozenset(self.head.layers) & frozenset(range(self.depth - 1))
        self.often = self.known & frozenset(self.head.often)

    def opened(self, row: DecodeState) -> Opened:
        return Schedule(exits=deque(maxlen=self.head.config.recent))

    def begin(self, row: DecodeState, depth: int, budget: Budget) -> Growth | None:
        shape = self.config.shape
        if shape == "nothing":
            depth = 0
        if self.longest is not None:  # the last nodes are fed as well
            depth = min(depth, self.longest - len(row.tokens))
        leaves = may_leave(row)
        if depth < 0 or (depth == 0 and not leaves):
            return None
        if shape == "tree" and depth:
            if not leaves:  # the draft of method tree: nobody asks for candidates
                return BestFirstGrowth(row, depth, budget, self.ranker)
            return CandidateTree(row, depth, budget, self)
        return CandidateGrowth(row, depth, self)

    def wish(self, row: DecodeState, candidates: Tensor, tree: TokenTree) -> None:
        """Let the next scoring of a row leave early, where it may and has not too much to feed."""
        schedule: Schedule = row.private[self]
        if may_leave(row) and self.scoring.missing(row) < self.config.most_behind:
            schedule.wish = Leave(candidates, self.active(schedule), self.judge, tree)
            self.scoring.leave(row, schedule.wish)

    def judge(self, layer: int, features: Float[Tensor, "n F"]) -> list[bool]:
        """Whether the predictor of a layer fires, node by node."""
        return [sure > self.config.sure_above for sure in self.head.sure(layer, features)]

    def active(self, schedule: Schedule) -> frozenset[int]:
        """Layers where exits are frequent, and those near the last exits (section 5.2)."""
        shape = self.head.config
        if len(schedule.exits) < shape.recent:
            return self.often
        around = shape.around
        near = {exit - 1 + step for exit in schedule.exits for step in range(-around, around + 1)}
        return self.often | (self.known & near)

    def observe(self, step: Step) -> None:
        super().observe(step)
        for row in step.rows:
            schedule: Schedule | None = row.private.get(self)
            if schedule is not None:
                depth = self.depth
                if schedule.wish is not None:  # else no predictor was asked: this was no exit
                    depth = schedule.wish.depth
                    schedule.exits.append(depth)
                schedule.wish = None
                schedule.rounds += 1
                schedule.layers += depth


def may_leave(row: DecodeState) -> bool:
    """Whether a row's next token is the argmax of its logits, which is what confirms an exit."""
    found: bool = row.warp.greedy and row.warp.bare
    return found


def check_fits(card: store.Card, layers: Sequence[int], folder: str, target: LanguageModel) -> None:
    """ConfigError for predictors of a target of another vocabulary, width or depth; a warning for
    those of another model of the same shape.

    Training makes one for every layer but the last; those made otherwise may be of any layers.
    """
    if card.vocab_size != target.vocab_size:
        why = f"they were trained on {card.vocab_size} tokens, the target has {target.vocab_size}"
    elif "settings" in card.notes and tuple(layers) != tuple(range(target.layers - 1)):
        why = f"they were trained on {len(layers) + 1} layers, the target has {target.layers}"
    else:
        store.check_fits(card, folder, target.hidden_size, target.vocab_size)
        made_for.warn_of_another(card, folder, target, "its exits change more of the text")
        return
    raise ConfigError(
        f"predictors of {folder} were asked for.",
        f"{why}.",
        "train some for this pair with `foretoken train exits --out DIR`.",
    )

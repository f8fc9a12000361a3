"""A drafter that draws a tree of any shape in any manner, so that rules can be judged alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.audit.law import PROMPT, Gap, Law, Text, law_gap, own_law, total_variation
from foretoken.coins import Coins, enumerate_outcomes
from foretoken.contract import StoppingRule
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.engine.engine import Engine
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.mixed import best_and_rest
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    SamplingParams,
    Scores,
    Shape,
    TokenTree,
    Traits,
)


class DrawnTree(RowDrafter):
    """Gives every node of level i `widths[i]` children, drawn from a table's law as `draw` says.

    `declared` is what the draft claims about its children: the same, unless an audit lies.
    """

    def __init__(
        self, lm: TableLM, widths: Sequence[int], draw: Draw, declared: Draw | None = None
    ) -> None:
        self.lm, self.widths, self.draw = lm, tuple(widths), draw
        self.declared = declared or draw
        shape = Shape.TREE if max(self.widths, default=1) > 1 else Shape.CHAIN
        self.traits = Traits(frozenset({self.declared}), shape, memory=Memory.NOTHING)

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        tokens, parents = [row.tokens[-1]], [-1]
        laws: list[Tensor | None] = [None]
        paths: list[list[int]] = [[]]
        level = [0]
        for width in self.widths[: budget.depth]:
            below: list[int] = []
            for node in level:
                if node and tokens[node] in row.params.eos:
                    continue
                context = [*row.tokens, *paths[node]]
                q = row.warp.law(context, self.lm.after(context))
                fixed: list[int] = []
                if self.draw is Draw.MIXED:
                    fixed, q = best_and_rest(q, width - 1)
                drawn = fixed + self.children(q, width - len(fixed), row.coins)
                laws[node] = self.reported(q)
                for token in drawn:
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    laws.append(None)
                    paths.append([*paths[node], token])
            level = below
        tree = TokenTree(tuple(tokens), tuple(parents))
        return Draft(tree, self.declared, None if self.declared is Draw.POINT else tuple(laws))

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        """`width` tokens, or as many as q has; of mixed children the sampled one."""
        if self.draw is Draw.IID:
            return [coins.draw(q) for _ in range(width)]
        if self.draw is Draw.POINT:
            best = q.topk(min(width, len(q)))
            return [t for p, t in zip(*map(Tensor.tolist, best), strict=True) if p > 0.0]
        drawn: list[int] = []
        left = q.clone()
        while len(drawn) < width and float(left.sum()) > 0.0:
            drawn.append(coins.draw(left / left.sum()))
            left[drawn[-1]] = 0.0
        return drawn

    def reported(self, q: Tensor) -> Tensor:
        """The law the draft says its children came from."""
        return q


def rule_gap(
    rule: Any,
    draw: Draw,
    widths: Sequence[int],
    target: TableLM,
    guess: TableLM,
    setting: Mapping[str, Any],
) -> Gap:
    """The law of a rule over trees of one shape, for texts one token longer than they are deep."""

    def build() -> Engine:
        controller = Fixed(Fixed.Config(depth=len(widths), nodes=64))
        return Engine(target, DrawnTree(guess, widths, draw), rule, controller)

    return law_gap(build, target, setting, tokens=len(widths) + 1)


@torch.inference_mode()
def step_gap(
    rule: Any,
    drafter: DrawnTree,
    target: TableLM,
    setting: Mapping[str, Any],
    prompt: Sequence[int] = PROMPT,
) -> Gap:
    """What one step writes, all coins enumerated, against the target's own text of that length.

    Texts shorter than the tree is deep are filled up as the target would. Much cheaper than whole
    texts, where every rejection drafts again, and `law.accepted` is that of a single full step.
    """
    depth = len(drafter.widths)
    params = SamplingParams(max_new_tokens=depth + 1, **setting)

    def run(coins: Coins) -> tuple[Text, int, int]:
        row = make_row(prompt, params, coins, target.vocab_size)
        draft = drafter.propose_one(row, Budget(depth, 64))
        tree = draft.tree
        paths = [[tree.tokens[node] for node in tree.path(end)] for end in range(len(tree))]
        logits = torch.stack([target.after([*row.tokens, *path]) for path in paths])
        laws = row.warp.laws(row.tokens, tree, logits)
        verdict = rule.judge_row(draft, Scores(logits, p=laws), coins)
        text = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
        return tuple(row.extend(text)), len(tree) - 1, len(verdict.path)

    law = Law()
    written: dict[Text, float] = {}
    for (text, drafted, accepted), probability in enumerate_outcomes(run):
        written[text] = written.get(text, 0.0) + probability
        law.outcomes += 1
        law.drafted += probability * drafted
        law.accepted += probability * accepted
    truth = own_law(target, prompt, params)
    law.joint = filled_up(written, truth)
    return Gap(total_variation(law.joint, truth), law)


def filled_up(written: Mapping[Text, float], truth: Mapping[Text, float]) -> dict[Text, float]:
    """Beginnings of texts, continued by the law of whole texts."""
    joint: dict[Text, float] = {}
    for text, probability in written.items():
        endings = {whole: p for whole, p in truth.items() if whole[: len(text)] == text}
        share = sum(endings.values())
        for whole, p in (endings or {text: 1.0}).items():  # an impossible text counts as it is
            grown = probability * (p / share if share else 1.0)
            joint[whole] = joint.get(whole, 0.0) + grown
    return joint

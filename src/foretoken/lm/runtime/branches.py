"""Forests in a language model's cache: nodes are fed when they are first needed, and pruned.

A row's forest stays open between forwards. What all its texts share becomes cached tokens, what
none of them needs is forgotten, the rest moves together: a prefix is kept once, however many beams
go through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.trees.forest import Cut, Forest
from foretoken.types import Ragged, Rows

Columns = dict[int, int]  # node of a forest -> place in the model's open tree


class BranchingLM(LanguageModel, Protocol):
    """A language model whose open trees can outlive a step."""

    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
        """Keep the ascending nodes `kept` of each open tree, forget the others.

        The first `settled` ones, a path from the root, become cached tokens; the next one is the
        new root.
        """
        ...


def feed(
    lm: LanguageModel,
    rows: Rows,
    forests: Sequence[Forest],
    columns: Sequence[Columns],
    wanted: Ragged,
) -> list[Float[Tensor, "n V"]]:
    """Logits of the `wanted` nodes, none of them fed before, in one forward over all rows.

    What lies above them and was never fed goes along.
    """
    fed, tokens, parents = [], [], []
    for forest, held, nodes in zip(forests, columns, wanted, strict=True):
        new = sorted({n for node in nodes for n in (*forest.above(node), node)} - held.keys())
        held.update({node: place for place, node in enumerate(new, start=len(held))})
        fed.append(new)
        tokens.append([forest.tokens[node] for node in new])
        parents.append([-1 if node == 0 else held[forest.parents[node]] for node in new])
    scored = [score.logits for score in lm.grow(rows, tokens, parents)]
    found = []
    for new, nodes, logits in zip(fed, wanted, scored, strict=True):
        at = [new.index(node) for node in nodes]
        chosen = at == list(range(len(new)))
        found.append(logits if chosen else logits[torch.tensor(at, device=logits.device)])
    return found


def prune(lm: BranchingLM, rows: Rows, columns: Sequence[Columns], cuts: Sequence[Cut]) -> None:
    """Follow the cuts of the rows' forests in the model's cache and in `columns`."""
    kept, settled = [], []
    for held, cut in zip(columns, cuts, strict=True):
        above = [held[node] for node in cut.settled if node in held]
        inner = sorted((held[node], node) for node in cut.inner if node in held)
        kept.append([*above, *(place for place, _ in inner)])
        settled.append(len(above))
        held.clear()
        held.update((cut.numbers[node], i) for i, (_, node) in enumerate(inner))
    lm.prune(rows, kept, settled)

"""Broken parts for `audit.mutations`: each is a real part with one published bug put in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.audit.drawn_trees import DrawnTree
from foretoken.audit.rows import seeded_rows
from foretoken.coins import Coins, SeededCoins
from foretoken.contract import StoppingRule
from foretoken.lm.table import Memory, TableLM
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import (
    Budget,
    Caps,
    DecodeState,
    Draft,
    Finish,
    Laws,
    Ragged,
    Rows,
    SamplingParams,
    Scores,
    TokenTree,
    Verdict,
)
from foretoken.verifiers.block import (
    Block,
    all_at_once,
    keepable,
    repaired,
    share,
)
from foretoken.verifiers.k_sequential import KSequential, division_factor, owed
from foretoken.verifiers.point import Point, drawn_from
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal
from foretoken.warp import Warp, WarpedLaws

# Drafters


class FlattenedQ(DrawnTree):
    """Reports a q that is flatter than the one it draws from."""

    def reported(self, q: Tensor) -> Tensor:
        flat = q.sqrt()
        return flat / flat.sum()


class ArgmaxAsDrawn(DrawnTree):
    """Takes the likeliest token and reports q."""

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        return [int(q.argmax())] * width


class WholeQ(DrawnTree):
    """Reports all of q for mixed children, as if the fixed ones had been drawn too."""

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        draft = super().propose_one(row, budget, stop)
        assert draft.q is not None
        laws: list[Tensor | None] = []
        for node, rest in enumerate(draft.q):
            path = [draft.tree.tokens[above] for above in draft.tree.path(node)]
            context = [*row.tokens, *path]
            whole = row.warp.law(context, self.lm.after(context))
            laws.append(None if rest is None else whole)
        return replace(draft, q=tuple(laws))


class FewWords(DrawnTree):
    """Draws from the listed tokens alone: the draft's law is that of a reduced vocabulary."""

    words = (0, 2)

    def reported(self, q: Tensor) -> Tensor:
        return self.among(q)

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        return super().children(self.among(q), width, coins)

    def among(self, q: Tensor) -> Tensor:
        some = torch.zeros_like(q)
        some[list(self.words)] = q[list(self.words)]
        return some / some.sum()


class WordsOfAll(FewWords):
    """Draws from the listed tokens, and hands on the law over all tokens."""

    def reported(self, q: Tensor) -> Tensor:
        return q


class DropsUnlikely(DrawnTree):
    """Cuts its chain before the first token that it drew with little confidence."""

    def propose_one(
        self, row: DecodeState, budget: Budget, stop: StoppingRule | None = None
    ) -> Draft:
        draft = super().propose_one(row, budget, stop)
        assert draft.q is not None
        kept = 0
        for node, token in enumerate(draft.tree.tokens[1:]):
            law = draft.q[node]
            if law is None or float(law[token]) < 0.4:
                break
            kept = node + 1
        tree = chain(draft.tree.tokens[0], draft.tree.tokens[1 : kept + 1])
        return replace(draft, tree=tree, q=(*draft.q[:kept], None))


class SortsSiblings(DrawnTree):
    """Hands distinct siblings on by their likelihood instead of in the order of their draws."""

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        return sorted(super().children(q, width, coins), key=lambda token: -float(q[token]))


class DropsRepeats(DrawnTree):
    """Hands independent siblings on without those that repeat an earlier one."""

    def children(self, q: Tensor, width: int, coins: Coins) -> list[int]:
        return list(dict.fromkeys(super().children(q, width, coins)))


# Block verification


class ResidualWithoutP(Block):
    """Forgets the P of relu(P p - q)."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        kept, law = all_at_once(draft, laws, coins)
        if kept < len(draft.tree) - 1:
            rest = (laws[kept] - drawn_from(draft, kept + 1)).clamp(min=0.0)
            law = repaired(rest, float(rest.sum()), laws[kept])
        return kept, law


class NoResidual(Block):
    """Corrects with p."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        kept, _ = all_at_once(draft, laws, coins)
        return kept, laws[kept]


class EarlyBonus(Block):
    """Draws the bonus from the row of the last drafted token's parent."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        kept, law = all_at_once(draft, laws, coins)
        return kept, laws[kept - 1] if kept == len(draft.tree) - 1 else law


def chances(draft: Draft, laws: Laws) -> tuple[list[float], list[Tensor], list[float]]:
    """P, the residuals and h of a chain, for rules that misuse them."""
    tokens = draft.tree.tokens[1:]
    q = [drawn_from(draft, i + 1) for i in range(len(tokens))]
    keep = keepable(
        [float(laws[i][t]) for i, t in enumerate(tokens)],
        [float(q[i][t]) for i, t in enumerate(tokens)],
        1.0 - 1e-12,
    )
    owed = [(keep[i] * laws[i] - q[i]).clamp(min=0.0) for i in range(len(tokens))]
    partial = [share(float(rest.sum()), keep[i]) for i, rest in enumerate(owed)]
    return keep, owed, [*partial, keep[-1]]


class FirstFailure(Block):
    """Flips the coins of Algorithm 1 from the front and stops at the first failure."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        _, owed, partial = chances(draft, laws)
        kept = 0
        while kept < len(owed) and coins.flip(partial[kept + 1]):
            kept += 1
        if kept == len(owed):
            return kept, laws[kept]
        return kept, repaired(owed[kept], float(owed[kept].sum()), laws[kept])


class WholeChance(Block):
    """Keeps each prefix with P where only the part h is left."""

    def settle(self, draft: Draft, laws: Laws, coins: Coins) -> tuple[int, Tensor]:
        keep, owed, _ = chances(draft, laws)
        kept = len(owed)
        while kept and not coins.flip(keep[kept]):
            kept -= 1
        if kept == len(owed):
            return kept, laws[kept]
        return kept, repaired(owed[kept], float(owed[kept].sum()), laws[kept])


# Trees


class UnnormalisedResidual(Recursive):
    """Judges the second child by a residual that was not normalised."""

    def residual(self, p: Tensor, q: Tensor) -> Tensor | None:
        rest = super().residual(p, q)
        return None if rest is None else (p - q).clamp(min=0.0)


class KeepsTried(Recursive):
    """Leaves q as it was after a distinct sibling was rejected."""

    def without(self, q: Tensor, token: int) -> Tensor:
        return q


class Undivided(KSequential):
    """Tries each of several drafts with p/q, as if it were the only one."""

    def select(self, drawn: list[int], p: Tensor, q: Tensor, coins: Coins) -> int:
        for token in drawn:
            if coins.flip(float(p[token] / q[token])):
                return token
        return coins.draw(owed(p, q, 1.0, len(drawn)))


class OneTryResidual(KSequential):
    """Corrects k failed tries with what one failed try of the ordinary rule leaves."""

    def select(self, drawn: list[int], p: Tensor, q: Tensor, coins: Coins) -> int:
        rho = division_factor(p, q, len(drawn))
        for token in drawn:
            if coins.flip(float(p[token]) / (rho * float(q[token]))):
                return token
        rest = (p - q).clamp(min=0.0)
        return coins.draw(repaired(rest, float(rest.sum()), p))


class NothingOwed(Traversal):
    """Corrects with relu(p - q) below the root too, where only a part of p is owed."""

    def residual(self, p: Tensor, q: Tensor, owed: float) -> Tensor:
        return super().residual(p, q, 1.0)


class ParentsRow(Point):
    """Reads the parent's law at every node below the root."""

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        parents = draft.tree.parents
        logits = torch.stack([scores.logits[max(parent, 0)] for parent in parents])
        assert isinstance(scores.p, WarpedLaws)
        wrong = scores.p._warp.laws(scores.p._tokens, draft.tree, logits)
        return super().judge_row(draft, Scores(logits, p=wrong), coins)


# Rows


class LooksAtLast(DecodeState):
    """Asks only the last token of a step whether the text ends."""

    __slots__ = ()

    def extend(self, tokens: Sequence[int]) -> list[int]:
        kept = list(tokens[: self.room])
        self.tokens += kept
        if kept[-1] in self.params.eos:
            self.finish = Finish("stop")
        elif self.room <= 0:
            self.finish = Finish("length")
        return kept


class LosesBlock(DecodeState):
    """Keeps only the end token of a step in which the text ended."""

    __slots__ = ()

    def extend(self, tokens: Sequence[int]) -> list[int]:
        ends = [token for token in tokens if token in self.params.eos]
        return super().extend(ends or tokens)


# Warps


class PathBlindLaws(WarpedLaws):
    """Processes every node as if it stood right behind the committed text."""

    __slots__ = ()

    def _paths(self, nodes: Sequence[int]) -> Ragged:
        return [()] * len(nodes)


class BlockEnds(Warp):
    """Penalties that see block ends only."""

    __slots__ = ()

    def laws(self, tokens: Sequence[int], tree: TokenTree, logits: Tensor) -> WarpedLaws:
        return PathBlindLaws(self, tokens, tree, logits)


class AllCandidatesLaws(WarpedLaws):
    """Processes every node as if the whole tree had been written."""

    __slots__ = ()

    def _paths(self, nodes: Sequence[int]) -> Ragged:
        return [self._tree.tokens[1:]] * len(nodes)


class CountsCandidates(Warp):
    """Penalties that count rejected candidates."""

    __slots__ = ()

    def laws(self, tokens: Sequence[int], tree: TokenTree, logits: Tensor) -> WarpedLaws:
        return AllCandidatesLaws(self, tokens, tree, logits)


# Caches


class LosesColumn(TableLM):
    """Reads a cache whose last column was lost by the commit before."""

    def __init__(self, logits: Tensor, caps: Caps | None = None, layers: int = 4) -> None:
        super().__init__(logits, caps, layers)
        self.shortened: set[int] = set()

    def _context(self, memory: Memory, node: int) -> list[int]:
        context = super()._context(memory, node)
        below = 1
        while memory.parents[node] >= 0:
            node, below = memory.parents[node], below + 1
        return [0, *context[-below:]] if id(memory) in self.shortened else context

    def commit(self, rows: Rows, paths: Ragged) -> None:
        super().commit(rows, paths)
        self.shortened |= {id(self._memory(row)) for row in rows}


class SeesSibling(TableLM):
    """Reads the node stored before a node as if it were its parent."""

    def _context(self, memory: Memory, node: int) -> list[int]:
        return [*memory.cached[-self.order :], *memory.tokens[: node + 1]]


# Coins


def rows_of_one_coin(
    prompts: Ragged, params: SamplingParams, vocab_size: int, seed: int
) -> list[DecodeState]:
    """Rows that draw from one common source."""
    coins = SeededCoins(seed)
    return [make_row(prompt, params, coins, vocab_size) for prompt in prompts]


_calls = itertools.count(1)


def rows_without_seed(
    prompts: Ragged, params: SamplingParams, vocab_size: int, seed: int
) -> list[DecodeState]:
    """Rows whose seed changes from call to call."""
    return seeded_rows(prompts, params, vocab_size, seed + 97 * next(_calls))

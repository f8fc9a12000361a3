"""Below the target's own candidates, the longest run of accepted guesses (arXiv 2409.10644).

Every guess is tested alone, with the chance min(1, p/q) or, at temperature 0, for being the best
token; of all paths the one with the longest run of passed tests is kept. Lossy: among W candidates
of the first layer it prefers those whose guesses survive. With one candidate per level it is
speculative sampling. Nothing is drawn at the end of a path: the next step's first layer is.
"""

from __future__ import annotations

import math

from foretoken.coins import Coins, no_law
from foretoken.types import Draft, Draw, Scores, Verdict
from foretoken.verifiers.recursive import Recursive
from foretoken.warp.best import best_tokens


class TargetFirst(Recursive):
    """Paths below a first layer that is not tested; ordinary chains by the recursive rule."""

    exact_for: frozenset[Draw] = frozenset()
    lossy_for: frozenset[Draw] = frozenset({Draw.TARGET})
    why = "of several first tokens, all the target's own, those whose guesses survive are preferred"

    def judge_row(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict:
        if draft.draw is not Draw.TARGET:
            return ended_early(draft, super().judge_row(draft, scores, coins))
        assert draft.q is not None and scores.p is not None
        tree, law = draft.tree, draft.q[0]
        assert law is not None, "the first layer has the target's law"
        if len(tree) == 1:
            return Verdict((), best_tokens(law) if scores.p.greedy else coins.draw(law))
        if math.isnan(float(law[tree.tokens[1]])):  # nothing else tests the first layer
            raise no_law()
        run = [0] * len(tree)  # passed tests down to each node; -1: one of them failed
        best = 1
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent == 0:
                continue
            passed = run[parent] >= 0 and passes(draft, scores, node, coins)
            run[node] = run[parent] + 1 if passed else -1
            if run[node] > run[best]:
                best = node
        path = tree.path(best)
        return Verdict(tuple(path[:-1]), tree.tokens[path[-1]])


def passes(draft: Draft, scores: Scores, node: int, coins: Coins) -> bool:
    """The test of one guess."""
    parent, token = draft.tree.parents[node], draft.tree.tokens[node]
    assert draft.q is not None and scores.p is not None
    if scores.p.greedy:
        return scores.p.draw(parent, coins) == token
    q = draft.q[parent]
    assert q is not None, "children have a law"
    return coins.flip(float(scores.p[parent][token]) / float(q[token]))  # never, of no number


def ended_early(draft: Draft, verdict: Verdict) -> Verdict:
    """The same path without the token drawn behind it: the next first layer is drawn instead."""
    if not verdict.path:
        return verdict
    return Verdict(verdict.path[:-1], draft.tree.tokens[verdict.path[-1]])

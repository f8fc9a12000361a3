"""Drafts of fixed candidates by the acceptance chances of their nodes, and how these came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretoken.native import look_ups
from foretoken.trees.guesses import UNSAID, Guesses
from foretoken.trees.select import best_nodes
from foretoken.trees.worth import paying
from foretoken.types import Budget, Draft, TokenTree


def affordable(draft: Draft, budget: Budget) -> Draft:
    """The draft cut to its likeliest nodes: as many as are allowed and worth their price."""
    chances = draft.chances
    assert chances is not None, "a drafter that keeps to prices says the chance of each node"
    best = sorted(chances[1:], reverse=True)[: budget.nodes]
    count, _ = paying(best, budget.prices)
    if count == len(draft.tree) - 1:
        return draft
    return draft.keep(best_nodes(chances, draft.tree.parents, count))


def chosen(found: Guesses, cut: Guesses, budget: Budget) -> Draft:
    """What of a tree in plain memory is affordable; `cut` is room for another one."""
    nodes = look_ups.paid(found, cut, budget.nodes, budget.prices)
    if nodes is None:
        return affordable(found.draft(), budget)
    return found.draft() if len(nodes) == len(found) else cut.draft(tuple(nodes))


def given_parents(draft: Draft) -> list[float]:
    """Chances of nodes given that their parents are right; UNSAID where the draft has none."""
    tree, paths = draft.tree, draft.chances
    chances = [1.0] + [UNSAID] * (len(tree) - 1)
    if paths is not None:
        for node in range(1, len(tree)):
            above = paths[tree.parents[node]]
            chances[node] = min(paths[node] / above, 1.0) if above > 0.0 else 0.0
    return chances


def trials(tree: TokenTree, said: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Children of every node that the tokens `said` reach: node, depth, whether it was the one.

    The tree may be another one than was verified: what would have been accepted tells as much.
    """
    tokens, parents = tree.tokens, tree.parents
    reached = {0: 0}
    for node in range(1, len(tokens)):
        depth = reached.get(parents[node])
        if depth is not None and depth < len(said):
            hit = tokens[node] == said[depth]
            yield node, depth + 1, hit
            if hit:
                reached[node] = depth + 1


def of_paths(parents: Sequence[int], chances: Sequence[float]) -> tuple[float, ...]:
    """Chances of whole paths; of siblings only one can be right, so they share at most one."""
    total = [0.0] * len(parents)
    for node in range(1, len(parents)):
        total[parents[node]] += chances[node]
    paths = [1.0]
    for node in range(1, len(parents)):
        parent = parents[node]
        paths.append(paths[parent] * chances[node] / max(total[parent], 1.0))
    return tuple(paths)

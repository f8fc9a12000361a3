"""Trees from lists of tokens. Pure functions, no models."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.types import TokenTree


def root(token: int) -> TokenTree:
    """The root alone: no draft."""
    return TokenTree((token,), (-1,))


def chain(token: int, drafted: Sequence[int]) -> TokenTree:
    """A single path below the root `token`."""
    return TokenTree((token, *drafted), tuple(range(-1, len(drafted))))


def from_paths(token: int, paths: Sequence[Sequence[int]]) -> TokenTree:
    """The trie of several paths below the root `token`; shared prefixes become shared nodes."""
    tokens, parents = [token], [-1]
    child: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for step in path:
            if (node, step) not in child:
                child[node, step] = len(tokens)
                tokens.append(step)
                parents.append(node)
            node = child[node, step]
    return TokenTree(tuple(tokens), tuple(parents))


def grafted(
    tree: TokenTree, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[TokenTree, list[int]]:
    """`tree` with another tree's nodes below the same root, and where each of those lies now.

    What both have is there once, at the place it had in `tree`. The other tree's `parents` count
    its own nodes without a root, -1 is the root.
    """
    grown, above = list(tree.tokens), list(tree.parents)
    known = {(above[i], grown[i]): i for i in range(1, len(grown))}
    place: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        below = 0 if parent < 0 else place[parent]
        if (below, token) not in known:
            known[below, token] = len(grown)
            grown.append(token)
            above.append(below)
        place.append(known[below, token])
    return TokenTree(tuple(grown), tuple(above)), place

"""Trees from lists of tokens, and the draft of a row that none is made for. No models."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.types import DecodeState, Draft, Draw, Ragged, TokenTree


def root(token: int) -> TokenTree:
    """The root alone: no draft."""
    return TokenTree((token,), (-1,))


def undrafted(row: DecodeState) -> Draft:
    """No draft: the root alone."""
    return Draft(TokenTree((row.tokens[-1],), (-1,)), Draw.POINT, chances=(1.0,))


def chain(token: int, drafted: Sequence[int]) -> TokenTree:
    """A single path below the root `token`."""
    return TokenTree((token, *drafted), tuple(range(-1, len(drafted))))


def from_paths(token: int, paths: Ragged) -> TokenTree:
    """The trie of several paths below the root `token`; shared prefixes become shared nodes."""
    trie = Trie(token)
    for path in paths:
        trie.add(0, path)
    return trie.tree()


class Trie:
    """A tree while paths are added to it; shared prefixes become shared nodes."""

    __slots__ = ("child", "parents", "tokens")

    def __init__(self, token: int) -> None:
        self.tokens, self.parents = [token], [-1]
        self.child: dict[tuple[int, int], int] = {}  # (node, token) -> node

    @classmethod
    def of(cls, tree: TokenTree) -> Trie:
        """A tree that paths are to be added to."""
        trie = cls(tree.tokens[0])
        trie.tokens, trie.parents = list(tree.tokens), list(tree.parents)
        trie.child = {
            edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))
        }
        return trie

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, node: int, path: Sequence[int], nodes: int | None = None) -> int:
        """Add `path` below `node`; the last node of it for which `nodes` below the root suffice."""
        for token in path:
            below = self.child.get((node, token))
            if below is None:
                below = len(self.tokens)
                if nodes is not None and below > nodes:
                    return node
                self.child[node, token] = below
                self.tokens.append(token)
                self.parents.append(node)
            node = below
        return node

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents))


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

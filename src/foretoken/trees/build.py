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


def guessed(draft: Draft) -> TokenTree:
    """What a drafter proposed behind the tokens that the request gave."""
    first, tree = draft.given, draft.tree
    if not first:
        return tree
    parents = (-1, *(parent - first for parent in tree.parents[first + 1 :]))
    return TokenTree(tree.tokens[first:], parents)


def guessed_path(draft: Draft, path: Sequence[int]) -> tuple[int, ...]:
    """The accepted nodes of `guessed(draft)`, where `path` are those of the draft."""
    first = draft.given
    return tuple([node - first for node in path[first:]]) if first else tuple(path)


def from_paths(token: int, paths: Ragged) -> TokenTree:
    """The trie of several paths below the root `token`; shared prefixes become shared nodes."""
    trie = Trie(token)
    for path in paths:
        trie.add(0, path)
    return trie.tree()


class Trie:
    """A tree while it grows; equal children of a node are one node."""

    __slots__ = ("known", "parents", "tokens")

    def __init__(self, token: int) -> None:
        self.tokens, self.parents = [token], [-1]
        self.known: dict[tuple[int, int], int] = {}  # (node, token) -> node

    @classmethod
    def of(cls, tree: TokenTree) -> Trie:
        """A tree that is to grow, or to be followed."""
        trie = cls(tree.tokens[0])
        trie.tokens, trie.parents = list(tree.tokens), list(tree.parents)
        trie.known = {
            edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))
        }
        return trie

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int:
        """The node of `token` below `node`, made if it is new."""
        below = self.known.get((node, token))
        if below is None:
            below = self.known[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return below

    def add(self, node: int, path: Sequence[int], nodes: int | None = None) -> int:
        """Add `path` below `node`; the last node of it for which `nodes` below the root suffice."""
        for token in path:
            full = nodes is not None and len(self.tokens) > nodes
            if full and (node, token) not in self.known:
                return node
            node = self.child(node, token)
        return node

    def follow(self, node: int, path: Sequence[int]) -> int | None:
        """The node that `path` leads to from `node`; None where it leaves the tree."""
        found: int | None = node
        for token in path:
            found = None if found is None else self.known.get((found, token))
        return found

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents))


def grafted(
    tree: TokenTree, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[TokenTree, list[int]]:
    """`tree` with another tree's nodes below the same root, and where each of those lies now.

    What both have is there once, at the place it had in `tree`. The other tree's `parents` count
    its own nodes without a root, -1 is the root.
    """
    trie = Trie.of(tree)
    place: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        place.append(trie.child(0 if parent < 0 else place[parent], token))
    return trie.tree(), place


def parents_among(kept: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Parents of the nodes `kept`, ascending and closed upwards, by their places among these."""
    place = {node: at for at, node in enumerate(kept)}
    return [place.get(parents[node], -1) for node in kept]

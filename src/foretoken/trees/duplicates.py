"""Siblings that repeat each other are one place in the text, with the children of all of them.

Independent draws may coincide. A rule tries each of them, for each is a draw of its own, but where
the text goes on there, every draft that said so goes on: what was drawn below the others is as
good as what was drawn below the first, and which of them had it said nothing about it.
"""

from __future__ import annotations

from foretoken.types import TokenTree


def places(tree: TokenTree) -> list[list[int]]:
    """The children of each node in node order; those of repeated siblings go to the first of them.

    The repeated ones stay among their siblings, as leaves.
    """
    children = tree.children()
    for family in children:  # parents come before children, so each family is complete by now
        first: dict[int, int] = {}
        for child in family:
            head = first.setdefault(tree.tokens[child], child)
            if head != child:
                children[head] += children[child]
                children[child] = []
    return children

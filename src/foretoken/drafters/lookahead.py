"""Lookahead decoding: n-grams from a window of Jacobi iterations, no draft (arXiv 2402.02057).

A window of W columns lies ahead of the text. Column j is a trajectory of N - 1 tokens that starts
at the j-th position after the root; every step the target adds one token to each, the oldest leaves
at the other end, and the N-gram between them enters a pool. Pool entries that begin with the last
token are the guesses.

A window token sees the first tokens of the columns up to its own and its own column: those are its
ancestors in a tree, in which the first tokens form a chain below the root and each column hangs
from it. So window and guesses are one tree of fixed candidates and need no mask of their own. Three
differences: a window token may be accepted, if it is what the target says; new columns are taken
from the request's own text, not drawn at random; and they start whole, so nothing has to fill up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretoken.contract import Features
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.errors import check_values
from foretoken.trees.build import Trie
from foretoken.types import Budget, DecodeState, Draft, Draw, Shape, Step, TokenTree, Traits

STRIDE = 7919  # a prime: successive columns come from far apart


class Lookahead(RowDrafter):
    """One forward carries the guesses from the pool and the window that fills it."""

    traits = Traits(shape=Shape.TREE)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        ngram: int = 5  # N: tokens of a pool entry, its key included; paper default
        window: int = 7  # W: columns; the paper takes 15 for 7B on an A100, 7 for 33B; 0: none
        guesses: int = 7  # G: entries kept and tried per key; paper: as many as columns; 0: none
        from_text: bool = True  # n-grams of prompt and text enter the pool as well

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        check_values(
            self.config,
            ("ngram", self.config.ngram >= 2, "2 or more"),
            ("window", self.config.window >= 0, "0 or more"),
            ("guesses", self.config.guesses >= 0, "0 or more"),
        )

    def start(self, row: DecodeState, seen: Features | None) -> None:
        state = row.private[self] = _State()
        for _ in range(self.config.window):
            state.columns.append(self.fresh(row))
        if self.config.from_text:
            # The end of a short prompt says something too.
            for size in range(2, min(self.config.ngram, len(row.tokens) + 1)):
                self.keep(row, row.tokens[-size:])
            self.read(row, 0)

    def fresh(self, row: DecodeState) -> list[int]:
        """A column from somewhere in the request's own text."""
        state: _State = row.private[self]
        state.taken += 1
        size = len(row.tokens)
        at = state.taken * STRIDE
        return [row.tokens[(at + i) % size] for i in range(self.config.ngram - 1)]

    def read(self, row: DecodeState, start: int) -> None:
        """The n-grams of the text that end after its first `start` tokens."""
        n, tokens = self.config.ngram, row.tokens
        for end in range(max(start + 1, n), len(tokens) + 1):
            self.keep(row, tokens[end - n : end])

    def keep(self, row: DecodeState, gram: Sequence[int]) -> None:
        """An n-gram enters the pool, or becomes the newest of its key again."""
        entries = row.private[self].pool.setdefault(gram[0], [])
        rest = tuple(gram[1:])
        if rest in entries:
            entries.remove(rest)
        entries.insert(0, rest)
        del entries[self.config.guesses :]

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        state: _State = row.private[self]
        trie = Trie(row.tokens[-1])
        if budget.depth > 0:
            window = self.config.window * (self.config.ngram - 1)
            room = max(budget.nodes - window, budget.nodes // 2)  # the window has its share
            for guess in state.pool.get(row.tokens[-1], ()):
                trie.add(0, guess[: budget.depth], room)
        self.lay_out(state.columns, trie, budget)
        return Draft(trie.tree(), Draw.POINT)

    def lay_out(self, columns: Sequence[list[int]], trie: Trie, budget: Budget) -> None:
        """The window as branches, as far as there is room."""
        first = 0  # node of the first token of the last column laid out
        deepest = budget.depth - self.config.ngram + 2  # columns that end within the depth
        for column in columns[: max(deepest, 0)]:
            if len(trie) - 1 + len(column) > budget.nodes:
                break
            first = trie.add(first, column[:1], budget.nodes)
            trie.add(first, column[1:], budget.nodes)

    def observe(self, step: Step) -> None:
        newest = [
            ends(draft.tree, row.private[self].columns)
            for row, draft in zip(step.rows, step.drafts, strict=True)
        ]
        tops = [
            score.logits[list(found.values())].argmax(-1)
            for score, found in zip(step.scores, newest, strict=True)
        ]
        said = iter(torch.cat(tops).tolist())
        for row, found, verdict in zip(step.rows, newest, step.verdicts, strict=True):
            state: _State = row.private[self]
            for at in found:
                gram = [*state.columns[at], next(said)]
                self.keep(row, gram)
                state.columns[at] = gram[1:]  # which moves the column on by one position
            for _ in verdict.path[: len(state.columns)]:  # and each accepted token by one more
                del state.columns[0]
                state.columns.append(self.fresh(row))
            if self.config.from_text:
                self.read(row, max(state.read, row.prompt_len))
            state.read = len(row.tokens)


def ends(tree: TokenTree, columns: Sequence[list[int]]) -> dict[int, int]:
    """The last node of each column in the tree that was scored, which may hold a part of them."""
    child: dict[tuple[int | None, int], int] = {
        edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    found: dict[int, int] = {}
    first: int | None = 0
    for at, column in enumerate(columns):
        first = node = child.get((first, column[0]))
        for token in column[1:]:
            node = child.get((node, token))
        if node is not None:
            found[at] = node
    return found


@dataclass(slots=True)
class _State:
    """What is known of one row."""

    columns: list[list[int]] = field(default_factory=list)  # W trajectories of N - 1 tokens
    # first token -> the N - 1 tokens that followed it, the newest first
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    taken: int = 0  # columns made from the text so far
    read: int = 0  # tokens whose n-grams are in the pool

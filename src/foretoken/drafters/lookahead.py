"""Lookahead decoding: n-grams from a window of Jacobi iterations, no draft (arXiv 2402.02057).

A window of W columns lies ahead of the text. Column j is a trajectory of N - 1 tokens that starts
at the j-th position after the root; every step the target adds one token to each, the oldest leaves
at the other end, and the N-gram between them enters a pool. Pool entries that begin with the last
token are the guesses.

A window token sees the first tokens of the columns up to its own and its own column: those are its
ancestors in a tree, in which the first tokens form a chain below the root and each column hangs
from it. So window and guesses are one tree of fixed candidates and need no mask of their own. Four
differences: a window token may be accepted, if it is what the target says; new columns are taken
from the request's own text, not drawn at random; they start whole, so nothing has to fill up; and
where nodes have prices, guesses and columns ride only as far as they pay (`parts.upkeep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretoken.contract import Features
from foretoken.drafters.parts.chances import affordable, of_paths, trials
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.drafters.parts.upkeep import Upkeep
from foretoken.errors import check_values
from foretoken.trees.build import Trie
from foretoken.trees.counts import Counts
from foretoken.trees.worth import least_paying
from foretoken.types import (
    Budget,
    DecodeState,
    Draft,
    Draw,
    Memory,
    Shape,
    Step,
    TokenTree,
    Traits,
)

UNLIKELY = 0.01  # chance of a window token: it does not ride for its own sake
RANKS = 8  # ranks of guesses told apart, before depths are
STRIDE = 7919  # a prime: successive columns come from far apart


class Lookahead(RowDrafter):
    """One forward carries the guesses from the pool and the window that fills it."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

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
        self.rates = Counts(half_life=512.0)  # of guesses, by rank and then by depth
        self.upkeep = Upkeep(self.config.ngram - 1)

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _State()
        self.renew(row)
        if self.config.from_text:
            # The end of a short prompt says something too.
            for size in range(2, min(self.config.ngram, len(row.tokens) + 1)):
                self.keep(row, row.tokens[-size:])
            self.read(row, 0)

    def renew(self, row: DecodeState) -> None:
        """A window of new columns."""
        row.private[self].columns = [self.fresh(row) for _ in range(self.config.window)]

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

    def keep(self, row: DecodeState, gram: Sequence[int], seen: bool = False) -> None:
        """An n-gram enters the pool, or becomes the newest of its key again; `seen` by the window
        only, as long as the text has not said it.
        """
        state: _State = row.private[self]
        entries = state.pool.setdefault(gram[0], [])
        rest = tuple(gram[1:])
        if rest in entries:
            entries.remove(rest)
            seen = seen and (gram[0], rest) in state.seen
        entries.insert(0, rest)
        (state.seen.add if seen else state.seen.discard)((gram[0], rest))
        for dropped in entries[self.config.guesses :]:
            state.seen.discard((gram[0], dropped))
        del entries[self.config.guesses :]

    def propose_one(self, row: DecodeState, budget: Budget) -> Draft:
        state: _State = row.private[self]
        token, priced = row.tokens[-1], least_paying(budget) is not None
        state.guesses, trie = list(state.pool.get(token, ())), Trie(token)
        if budget.depth > 0:
            window = 0 if priced else self.config.window * (self.config.ngram - 1)
            room = max(budget.nodes - window, budget.nodes // 2)  # the window has its share
            for guess in state.guesses:
                trie.add(0, guess[: budget.depth], room)
        state.tree = tree = trie.tree()
        draft = affordable(Draft(tree, Draw.POINT, chances=self.chances(tree)), budget)
        columns, before = state.columns, state.rode
        state.rode = 0  # nothing rides in a step without nodes, and nothing is charged for it
        if priced:
            count = self.upkeep.columns(budget, len(draft.tree) - 1, len(columns))
            if count and not before:
                self.renew(row)
            state.rode, columns = count, state.columns[:count]
        return self.beside(draft, columns, budget)

    def chances(self, tree: TokenTree) -> tuple[float, ...]:
        """How likely each guess is: by its rank at first, by its depth further on."""
        own = [1.0]
        for place, prior in rated(tree):
            own.append(self.rates.rate(place, prior, 4.0))
        return of_paths(tree.parents, own)

    def beside(self, draft: Draft, columns: Sequence[list[int]], budget: Budget) -> Draft:
        """The window as branches beside the guesses, as far as there is room."""
        tree = draft.tree
        trie = Trie.of(tree)
        first = 0  # node of the first token of the last column laid out
        deepest = budget.depth - self.config.ngram + 2  # columns that end within the depth
        for column in columns[: max(deepest, 0)]:
            if len(trie) - 1 + len(column) > budget.nodes:
                break
            first = trie.add(first, column[:1], budget.nodes)
            trie.add(first, column[1:], budget.nodes)
        if len(trie) == len(tree):
            return draft
        chances = list(draft.chances or ())
        for parent in trie.parents[len(tree) :]:
            chances.append(min(chances[parent], UNLIKELY))
        return Draft(trie.tree(), Draw.POINT, chances=tuple(chances))

    def observe(self, step: Step) -> None:
        for row, emitted in zip(step.rows, step.emitted, strict=True):
            self.judged(row, emitted)
        newest = [
            ends(draft.tree, row.private[self].columns)
            for row, draft in zip(step.rows, step.drafts, strict=True)
        ]
        tops = [
            score.logits[list(found.values())].argmax(-1)
            for score, found in zip(step.scores, newest, strict=True)
            if found
        ]
        said = iter(torch.cat(tops).tolist() if tops else ())
        for row, found, verdict in zip(step.rows, newest, step.verdicts, strict=True):
            state: _State = row.private[self]
            for at in found:
                gram = [*state.columns[at], next(said)]
                self.keep(row, gram, seen=True)
                state.columns[at] = gram[1:]  # which moves the column on by one position
            for _ in verdict.path[: len(state.columns)]:  # and each accepted token by one more
                del state.columns[0]
                state.columns.append(self.fresh(row))
            if self.config.from_text:
                self.read(row, max(state.read, row.prompt_len))
            state.read = len(row.tokens)

    def judged(self, row: DecodeState, said: Sequence[int]) -> None:
        """Learn how good the guesses were, and how much of that the window brought."""
        state: _State = row.private[self]
        if row.rehearsal or state.tree is None:
            return
        self.rates.fade()
        places = rated(state.tree)
        for node, _, hit in trials(state.tree, said):
            self.rates.tried(places[node - 1][0], hit)
        token = state.tree.tokens[0]
        right = [(agreed(guess, said), (token, guess) in state.seen) for guess in state.guesses]
        best = max((length for length, _ in right), default=0)
        known = max((length for length, by_window in right if not by_window), default=0)
        self.upkeep.update(best - known, state.rode)


def rated(tree: TokenTree) -> list[tuple[int, float]]:
    """Of every node but the root: where its rate is counted, and what it is taken for at first."""
    return [
        (min(rank, RANKS - 1), 0.25 * 0.6**rank) if depth == 1 or rank else (RANKS + depth, 0.5)
        for rank, depth in zip(tree.ranks()[1:], tree.depths()[1:], strict=True)
    ]


def agreed(guess: Sequence[int], said: Sequence[int]) -> int:
    """How many tokens of a guess came, of those that could."""
    return next(
        (at for at, (one, other) in enumerate(zip(guess, said, strict=False)) if one != other),
        min(len(guess), len(said)),
    )


def ends(tree: TokenTree, columns: Sequence[list[int]]) -> dict[int, int]:
    """The last node of each column in the tree that was scored, which may hold a part of them."""
    trie, first = Trie.of(tree), 0
    found: dict[int, int] = {}
    for at, column in enumerate(columns):
        below = trie.follow(first, column[:1])
        if below is None:  # later columns hang from this one's first token
            break
        first, node = below, trie.follow(below, column[1:])
        if node is not None:
            found[at] = node
    return found


@dataclass(slots=True)
class _State:
    """What is known of one row."""

    columns: list[list[int]] = field(default_factory=list)  # W trajectories of N - 1 tokens
    # first token -> the N - 1 tokens that followed it, the newest first
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    # of them those that the window alone has shown
    seen: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    guesses: list[tuple[int, ...]] = field(default_factory=list)  # for the step under way
    tree: TokenTree | None = None  # of all of them
    rode: int = 0  # columns laid out in the last step
    taken: int = 0  # columns made from the text so far
    read: int = 0  # tokens whose n-grams are in the pool

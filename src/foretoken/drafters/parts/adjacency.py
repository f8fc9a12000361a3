"""The matrix of Token Recycling: for every token the likeliest followers that were last seen.

Ids in int32 and, beside the published matrix, how sure the target was of each, a byte: 1.3 MB
for 32,000 tokens with eight followers each. Kept in plain arrays: a draft reads some dozens of
single numbers, in C where it can.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretoken.drafters.parts.class_odds import ClassOdds
from foretoken.errors import CheckpointError
from foretoken.native.look_ups import AdjacencyTable, recycled
from foretoken.trees.guesses import Guesses
from foretoken.trees.worth import least_paying
from foretoken.types import Budget, TokenTree

UNKNOWN = -1
EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of shares told apart
HINTED = len(EDGES) + 1  # a class of its own: followers that were read in a prompt, not scored
MOST = 1024  # nodes of a tree, whatever may be scored
FLOOR = 0.005  # least chance of a node where nothing else limits them
FORM = "foretoken token-recycling 1"


class Adjacency:
    """`keep` followers for each of `vocab` tokens, likeliest first."""

    __slots__ = ("ids", "keep", "sure", "table", "vocab", "words")

    def __init__(self, vocab: int, keep: int) -> None:
        self.vocab, self.keep = vocab, min(keep, vocab)
        self.words: str | None = None  # checksum of what the ids mean, where that is known
        self.ids = array("i", [UNKNOWN]) * (vocab * self.keep)
        self.sure = array("B", [HINTED]) * (vocab * self.keep)
        self.table = AdjacencyTable(ids=self.ids, sure=self.sure, keep=self.keep)

    def copy(self) -> Adjacency:
        """Another matrix that says the same so far."""
        other = Adjacency(self.vocab, self.keep)
        other.ids[:], other.sure[:] = self.ids, self.sure
        return other

    def followers(self, token: int) -> list[int]:
        """Known followers of `token`, likeliest first."""
        at = token * self.keep
        return [i for i in self.ids[at : at + self.keep] if i != UNKNOWN]

    def put(self, token: int, followers: Sequence[int], sure: Sequence[int] = ()) -> None:
        """What the target has just said after `token`: `keep` ids, likeliest first, and for each
        the class of its share of what these got together.
        """
        assert len(followers) == self.keep and token < self.vocab, "arrays in C's sight do not grow"
        at = token * self.keep
        self.ids[at : at + self.keep] = array("i", followers)
        if sure:
            self.sure[at : at + self.keep] = array("B", sure)

    def hint(self, token: int, follower: int) -> None:
        """A follower seen in a text, for a token whose row still has room; the latest leads."""
        known = self.followers(token)
        if len(known) == self.keep:
            return
        known = [follower, *(i for i in known if i != follower)]
        at = token * self.keep
        self.ids[at : at + len(known)] = array("i", known)
        self.sure[at : at + len(known)] = array("B", [HINTED]) * len(known)

    def fill(
        self, root: int, parents: Sequence[int], ranks: Sequence[int], eos: frozenset[int]
    ) -> tuple[TokenTree, list[int]]:
        """A shape of ranks as a tree of tokens below `root`, and each node's rank.

        What hangs below an unknown follower or an end token is left out.
        """
        ids, keep = self.ids, self.keep
        tokens, above, kept = [root], [-1], [-1]
        place = [0]  # node of the shape -> node of the tree, -1 if left out
        for at in range(1, len(parents)):
            parent, rank = place[parents[at]], ranks[at]
            token = UNKNOWN
            if parent >= 0 and rank < keep and (parent == 0 or tokens[parent] not in eos):
                token = ids[tokens[parent] * keep + rank]
            if token == UNKNOWN:
                place.append(-1)
                continue
            place.append(len(tokens))
            tokens.append(token)
            above.append(parent)
            kept.append(rank)
        return TokenTree(tuple(tokens), tuple(above)), kept

    def grow(
        self,
        found: Guesses,
        root: int,
        odds: ClassOdds,
        budget: Budget,
        greedy: bool,
        ends: array[int],
    ) -> None:
        """The likeliest nodes below `root`, best first: as many as are allowed, and none below the
        least chance that can pay. Marks of nodes are their classes of shares, further followers'
        behind those of first ones.
        """
        ids, sure, keep = self.ids, self.sure, self.keep
        least = max(least_paying(budget) or 0.0, FLOOR)
        depth, nodes = budget.depth, min(budget.nodes, MOST)
        if recycled(found, self.table, root, odds.table, least, depth, nodes, greedy, ends):
            return
        tokens, parents, marks, paths, depths = [root], [-1], [0], [1.0], [0]
        # (-chance, parent, rank, class): older parents first
        heap: list[tuple[float, int, int, int]] = []

        def push(parent: int, rank: int) -> None:
            if rank >= keep or depths[parent] >= depth:
                return
            at = tokens[parent] * keep + rank
            if ids[at] == UNKNOWN:
                return
            mark = sure[at] + (HINTED + 1) * (rank > 0)
            chance = paths[parent] * odds.chance(mark, 1.0, greedy)
            if chance >= least:
                heappush(heap, (-chance, parent, rank, mark))

        push(0, 0)
        while heap and len(tokens) <= nodes:
            lost, parent, rank, mark = heappop(heap)
            node, token = len(tokens), ids[tokens[parent] * keep + rank]
            tokens.append(token)
            parents.append(parent)
            marks.append(mark)
            paths.append(-lost)
            depths.append(depths[parent] + 1)
            push(parent, rank + 1)
            if token not in ends:
                push(node, 0)
        found.fill(TokenTree(tuple(tokens), tuple(parents)), paths, marks, [1.0] * len(tokens))

    def save(self, path: str | Path) -> None:
        """Write the matrix: the old file or the new one, never a part of either."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        size = self.vocab, self.keep
        told = {"form": FORM} | ({} if self.words is None else {"vocabulary": self.words})
        tables = {
            "followers": torch.tensor(self.ids, dtype=torch.int32).view(size),
            "sure": torch.tensor(self.sure, dtype=torch.uint8).view(size),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tables, partial, told)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as problem:
            with suppress(OSError):  # where a parent is a file, looking for it is an error as well
                partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"saving recycled tokens as {path}.",
                f"writing failed ({problem}); an older file is untouched.",
                "free disk space, or pass a path that can be written.",
            ) from problem

    def agree(self, words: str, path: str | Path) -> None:
        """Take the checksum of a tokenizer's vocabulary, unless `path` was saved with another: as
        many ids may mean something else.
        """
        if self.words not in (None, words):
            raise CheckpointError(
                f"recycled tokens from {path} with another tokenizer than they were saved with.",
                "followers are token ids: they mean something for one vocabulary only.",
                "use a file saved with this tokenizer, or another path to start afresh.",
            )
        self.words = words

    def load(self, path: str | Path) -> None:
        """Take over a saved matrix; one of another vocabulary is refused."""
        try:
            with safe_open(path, framework="pt") as file:
                told = file.metadata() or {}
                table = file.get_tensor("followers") if told.get("form") == FORM else None
                tables = set(file.keys())  # "sure" is not in files of the first form
                sure = file.get_tensor("sure") if table is not None and "sure" in tables else None
        except (OSError, SafetensorError) as problem:
            raise _unreadable(path, f"it cannot be read ({problem})") from problem
        if table is None or table.dim() != 2 or not (sure is None or sure.shape == table.shape):
            raise _unreadable(path, "it holds something else")
        vocab, width = table.shape
        if vocab != self.vocab or int(table.max()) >= vocab or int(table.min()) < UNKNOWN:
            raise CheckpointError(
                f"recycled tokens of {vocab} tokens from {path} for a model of {self.vocab}.",
                "followers are token ids: they mean something for one vocabulary only.",
                "use a file saved with this model, or another path to start afresh.",
            )
        self.words = told.get("vocabulary")  # not in older files
        whole = torch.full((vocab, self.keep), UNKNOWN, dtype=torch.int32)
        shared = min(width, self.keep)
        whole[:, :shared] = table[:, :shared]
        self.ids = array("i", whole.flatten().tolist())
        if sure is not None:
            shares = torch.full((vocab, self.keep), HINTED, dtype=torch.uint8)
            shares[:, :shared] = sure[:, :shared].clamp(max=HINTED)
            self.sure = array("B", shares.flatten().tolist())
        self.table = AdjacencyTable(ids=self.ids, sure=self.sure, keep=self.keep)


def _unreadable(path: str | Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"recycled tokens from {path}.",
        f"{why}.",
        "pass a file that was saved by this method, or a path that does not exist yet.",
    )

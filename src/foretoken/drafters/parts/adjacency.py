"""The matrix of Token Recycling: for every token the likeliest followers that were last seen.

Ids only, in int32: 1 MB for 32,000 tokens with eight followers each. Kept in a plain array, since a
draft reads some dozens of single numbers, which costs a tensor library more than it costs python.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretoken.errors import CheckpointError
from foretoken.types import TokenTree

UNKNOWN = -1
FORM = "foretoken token-recycling 1"


class Adjacency:
    """`keep` followers for each of `vocab` tokens, likeliest first."""

    __slots__ = ("ids", "keep", "vocab")

    def __init__(self, vocab: int, keep: int) -> None:
        self.vocab, self.keep = vocab, min(keep, vocab)
        self.ids = array("i", [UNKNOWN]) * (vocab * self.keep)

    def followers(self, token: int) -> list[int]:
        """Known followers of `token`, likeliest first."""
        at = token * self.keep
        return [i for i in self.ids[at : at + self.keep] if i != UNKNOWN]

    def put(self, token: int, followers: Sequence[int]) -> None:
        """What the target has just said after `token`: `keep` ids, likeliest first."""
        at = token * self.keep
        self.ids[at : at + self.keep] = array("i", followers)

    def hint(self, token: int, follower: int) -> None:
        """A follower seen in a text, for a token whose row still has room; the latest leads."""
        known = self.followers(token)
        if len(known) == self.keep:
            return
        known = [follower, *(i for i in known if i != follower)]
        at = token * self.keep
        self.ids[at : at + len(known)] = array("i", known)

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

    def save(self, path: str | Path) -> None:
        """Write the matrix: the old file or the new one, never a part of either."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        table = torch.tensor(self.ids, dtype=torch.int32).view(self.vocab, self.keep)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"followers": table}, partial, {"form": FORM})
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, SafetensorError) as problem:
            partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"saving recycled tokens as {path}.",
                f"writing failed ({problem}); an older file is untouched.",
                "free disk space, or pass a path that can be written.",
            ) from problem

    def load(self, path: str | Path) -> None:
        """Take over a saved matrix; one of another vocabulary is refused."""
        try:
            with safe_open(path, framework="pt") as file:
                form = (file.metadata() or {}).get("form")
                table = file.get_tensor("followers") if form == FORM else None
        except (OSError, SafetensorError) as problem:
            raise _unreadable(path, f"it cannot be read ({problem})") from problem
        if table is None or table.dim() != 2:
            raise _unreadable(path, "it holds something else")
        vocab, width = table.shape
        if vocab != self.vocab or int(table.max()) >= vocab or int(table.min()) < UNKNOWN:
            raise CheckpointError(
                f"recycled tokens of {vocab} tokens from {path} for a model of {self.vocab}.",
                "followers are token ids: they mean something for one vocabulary only.",
                "use a file saved with this model, or another path to start afresh.",
            )
        whole = torch.full((vocab, self.keep), UNKNOWN, dtype=torch.int32)
        shared = min(width, self.keep)
        whole[:, :shared] = table[:, :shared]
        self.ids = array("i", whole.flatten().tolist())


def _unreadable(path: str | Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"recycled tokens from {path}.",
        f"{why}.",
        "pass a file that was saved by this method, or a path that does not exist yet.",
    )

"""Token streams addressed by an index: batch `i` is a function of `i` alone, so resuming is
starting at another index.

Documents are packed into rows of equal length, longest fit first; a row always begins at the start
of a document, so nothing is ever learned with its context cut away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids with how much each counts in the loss (0 is only read, never learned)."""

    tokens: list[int]
    weights: list[float]


class Stream(Protocol):
    """What the trainer reads from."""

    def batch(self, index: int) -> dict[str, Tensor]:
        """Batch number `index`: at least ``input_ids`` and ``weights``, both [rows, row_tokens];
        and ``lengths`` [rows] where some of a row may be padding.
        """
        ...


def tokens_in(batch: dict[str, Tensor]) -> int:
    """Tokens of a batch, without padding where it tells "lengths" [rows]."""
    if "lengths" in batch:
        return int(batch["lengths"].sum())
    return batch["input_ids"].numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStream:
    """Rows packed from freshly drawn documents; every batch has its own seed."""

    documents: Callable[
        [random.Random], Iterator[Document]
    ]  # endless, driven only by the generator it gets
    tokens: int  # of one batch
    row_tokens: tuple[int, ...]  # row lengths, taken in turn from batch to batch
    pad: int
    seed: int = 0

    def batch(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        length = self.row_tokens[index % len(self.row_tokens)]
        rows = pack(self.documents(rng), self.tokens // length, length)
        tokens = torch.full((len(rows), length), self.pad)
        weights = torch.zeros(len(rows), length)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
            weights[i, : len(row.weights)] = torch.tensor(row.weights)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        return {"input_ids": tokens, "weights": weights, "lengths": lengths}


def pack(documents: Iterator[Document], rows: int, row_tokens: int) -> list[Document]:
    """Fill `rows` rows with whole documents, best fit in decreasing order; only a document
    longer than a row is cut.
    """
    drawn: list[Document] = []
    total = 0
    for document in documents:  # a little more than fits, so that the gaps find small documents
        drawn.append(document)
        total += min(len(document.tokens), row_tokens)
        if total >= rows * row_tokens * 1.05:
            break
    filled = [Document([], []) for _ in range(rows)]
    for document in sorted(drawn, key=lambda d: -len(d.tokens)):
        room = [row_tokens - len(row.tokens) for row in filled]
        fitting = [i for i in range(rows) if room[i] >= len(document.tokens)]
        if fitting:
            best = min(fitting, key=room.__getitem__)
        elif max(room) == row_tokens:
            best = room.index(row_tokens)
        else:
            continue
        filled[best].tokens.extend(document.tokens[:row_tokens])
        filled[best].weights.extend(document.weights[:row_tokens])
    return filled

"""What a trained head takes in memory, from its card alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretoken.heads.store import card_of, tuples
from foretoken.heads.table import head_row, resolve

LARGEST = 1 << 26  # numbers of a table that is made for all tokens when a head is opened
CACHED = ("k_proj", "v_proj", "key", "value")  # layers whose outputs are kept for every token


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Numbers of a head: of its weights with what is made of them when it is opened, and kept for
    every token of a text."""

    kind: str
    weights: int
    column: int


def sizes_of(folder: str | Path) -> HeadSizes:
    """Of the head in a folder; CheckpointError where there is none."""
    card = card_of(folder)
    module: Any = resolve(head_row(card.kind).module)
    options = {key: tuples(value) for key, value in card.options.items()}
    with torch.device("meta"):
        head: nn.Module = module(
            module.Config(hidden_size=card.hidden_size, vocab_size=card.vocab_size, **options)
        )
    held = {id(one): one.numel() for one in (*head.parameters(), *head.buffers())}
    held[0] = beside(head, card.vocab_size)
    kept = [layer.out_features for name, layer in head.named_modules()
            if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in CACHED]  # fmt: skip
    return HeadSizes(card.kind, sum(held.values()), sum(kept))


def has_table(head: Any, tokens: int) -> bool:
    """Whether what enters at each token is made for all of them beforehand."""
    return bool(head.adds_tokens) and tokens * head.width <= LARGEST


def beside(head: Any, tokens: int) -> int:
    """Numbers made when a head is opened: of a decoder that copies its layers and outputs, with
    as many embeddings that nobody reads, and of a table of the target's embeddings."""
    if not getattr(head, "adds_tokens", False):
        return 0
    layers: int = sum(one.numel() for one in head.layers.parameters())
    outputs: int = (len(head.scored) + head.width) * head.width
    table: int = tokens * head.width if head.reads_embeddings and has_table(head, tokens) else 0
    return layers + 2 * outputs + table

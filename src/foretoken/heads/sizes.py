"""What a trained head takes in memory, from its card alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretoken.heads.store import card_of, tuples
from foretoken.heads.table import head_row, resolve

CACHED = ("k_proj", "v_proj", "key", "value")  # layers whose outputs are kept for every token


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Numbers of a head: of its weights, and kept for every token of a text."""

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
    kept = [layer.out_features for name, layer in head.named_modules()
            if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in CACHED]  # fmt: skip
    return HeadSizes(card.kind, sum(held.values()), sum(kept))

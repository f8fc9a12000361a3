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
DEEP = 1 << 10  # layers of a target in which every place that a head may read lies
POSITIONS = 512  # of a decoder that is counted and never run: its weights do not follow from them
# rows of a layer's memory by token: of a state and of a trigram; with room that doubles
ROWS = {"chimera": 2, "falcon": 2}
TREE = 64  # columns behind a window, for the open tree


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Numbers of a head: of its weights with what is made of them when it is opened, and kept for
    every token of a text, or once for a text of any length."""

    kind: str
    weights: int
    column: int
    row: int = 0
    states: int = 1  # layers of the target that it reads
    decodes: bool = False  # what it keeps lies in a cache such as a draft model's


def sizes_of(folder: str | Path) -> HeadSizes:
    """Of the head in a folder; CheckpointError where there is none."""
    card = card_of(folder)
    module: Any = resolve(head_row(card.kind).module)
    options = {key: tuples(value) for key, value in card.options.items()}
    with torch.device("meta"):
        head: nn.Module = module(
            module.Config(hidden_size=card.hidden_size, vocab_size=card.vocab_size, **options)
        )
        made = beside(head, card.hidden_size, card.vocab_size)
    window = int(getattr(head, "window", 0))
    return HeadSizes(
        kind=card.kind,
        weights=numbers(head) + made,
        column=ROWS.get(card.kind, 1) * kept(head),
        row=2 * head.kv_heads * head.size * (window + TREE) if window else 0,  # type: ignore
        states=states_read(head),
        decodes=hasattr(head, "decoder"),
    )


def numbers(module: nn.Module) -> int:
    """Of parameters and buffers, each once; of a view that reads the same ones over and over, those
    that lie in memory."""
    tensors = (*module.parameters(), *module.buffers())
    held = {id(one): min(one.numel(), lying(one)) for one in tensors}
    return sum(held.values())


def lying(tensor: torch.Tensor) -> int:
    """Numbers of the memory that a tensor is a view of."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def kept(head: nn.Module) -> int:
    """Numbers of the keys and values of a token, of all layers that attend to the text."""
    layers: list[Any] = [layer for layer in head.modules() if hasattr(layer, "shared")]
    return sum(2 * layer.shared * layer.size for layer in layers)


def states_read(head: Any) -> int:
    """Layers of the target whose states a head reads of every token."""
    if hasattr(head, "reads_of"):
        return len(head.reads_of(DEEP))
    return len(getattr(head, "reads", (0,)))


def has_table(head: Any, tokens: int) -> bool:
    """Whether what enters at each token is made for all of them beforehand."""
    return bool(head.adds_tokens) and tokens * head.width <= LARGEST


def beside(head: Any, hidden_size: int, tokens: int) -> int:
    """Numbers made when a head is opened: of a decoder, which has copies of its layers and outputs,
    and of a table of the target's embeddings."""
    if not hasattr(head, "decoder"):
        return 0
    if not head.adds_tokens:
        return numbers(head.decoder(POSITIONS))
    theirs = torch.empty(len(head.scored), hidden_size) if head.maps_outputs else None
    table: int = tokens * head.width if head.reads_embeddings and has_table(head, tokens) else 0
    return numbers(head.decoder(POSITIONS, theirs)) + table

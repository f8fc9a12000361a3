"""The architecture of a draft, derived from its target at a wanted cost (arXiv 2411.11055).

A small Llama with the target's vocabulary, its embedding the target's own, projected onto the
directions that matter most: a draft that starts from what the target knows of words needs far less
text than one that starts from random numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.heads.export import POSITIONS
from foretoken.lm.opening import open_draft, open_lm
from foretoken.lm.runtime.family import stretched
from foretoken.row import make_row
from foretoken.types import SamplingParams

HEAD = 64  # width of an attention head
CONTEXT = 128  # tokens that forwards are timed behind
ROUNDS = 9


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Width and depth of a draft; width in heads of 64."""

    hidden: int
    layers: int

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.hidden

    def config(self, target: Any, vocab_size: int) -> LlamaConfig:
        """The configuration of a draft for a target with this text configuration."""
        heads = max(1, self.hidden // HEAD)
        ids: dict[str, Any] = {
            name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id")
        }
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.hidden // heads,
            max_position_embeddings=positions(target),
            tie_word_embeddings=True,
            **ids,
        )


def positions(target: Any) -> int:
    """Tokens that a target with this text configuration reads, as its cache counts them; where it
    names no end, as of ALiBi, those of a published head.
    """
    longest = getattr(target, "max_position_embeddings", None)
    longest = longest or getattr(target, "max_seq_len", None)
    return stretched(target, int(longest)) if longest else POSITIONS


# From the cheapest on: on a CPU two more layers cost less than a third more width.
SHAPES = (
    Shape(64, 1), Shape(64, 2), Shape(128, 2), Shape(128, 4), Shape(192, 4), Shape(256, 4),
    Shape(320, 6), Shape(384, 6), Shape(512, 6), Shape(512, 8), Shape(768, 8), Shape(1024, 8),
)  # fmt: skip


def build(shape: Shape, target: Any, counts: Tensor, seed: int) -> LlamaForCausalLM:
    """An untrained draft for a loaded target: every block the identity, embeddings the target's.

    `counts` [V] is how often each token occurs in the target's text.
    """
    torch.manual_seed(seed)
    table = target.get_input_embeddings().weight.detach().float().cpu()
    text = target.config.get_text_config(decoder=True)
    model = LlamaForCausalLM(shape.config(text, len(table)))
    with torch.no_grad():
        embedding: Any = model.model.embed_tokens.weight
        embedding.copy_(projected(table, counts, shape.hidden))
        model.model.norm.weight.fill_(0.05)  # small first logits
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def projected(table: Tensor, counts: Tensor, width: int) -> Tensor:
    """The rows of `table` [V H] in its `width` strongest directions, of unit variance overall.

    Directions are those of frequent tokens: each row counts by the root of its frequency.
    """
    rows: Tensor = projection(table, counts, width)[0]
    return rows


def projection(table: Tensor, counts: Tensor, width: int) -> tuple[Tensor, nn.Linear]:
    """These rows, and the map of the table that gives them: as many as there are directions.

    Numbers beyond those, of a draft that is wider than its target, are small and random.
    """
    weights = (counts.float() + 1.0).sqrt()
    mean = (table * weights[:, None]).sum(0) / weights.sum()
    centred = table - mean
    values, directions = torch.linalg.eigh(centred.T @ (centred * weights[:, None]))
    best = directions[:, values.argsort(descending=True)[:width]]
    rows: Tensor = centred @ best
    if (missing := width - rows.shape[1]) > 0:
        rows = torch.cat([rows, 0.02 * torch.randn(len(rows), missing)], 1)
    size = rows.pow(2).mean().sqrt()
    into = nn.Linear(*best.shape)
    into.weight = nn.Parameter((best / size).T.contiguous())
    into.bias = nn.Parameter(-mean @ best / size)
    return rows / size, into.requires_grad_(False)


def fitting_shape(target: Any, rows: int, cost: float) -> tuple[Shape, float]:
    """The largest shape whose forward takes at most `cost` of the target's, and what it takes.

    `rows` is the size of the reduced vocabulary, which the output layer of the draft has.
    """
    widest = target.config.get_text_config(decoder=True).hidden_size
    found: tuple[Shape, float] | None = None
    for shape, share in costs(target, rows, [s for s in SHAPES if s.hidden <= widest]):
        if share > cost:
            break
        found = shape, share
    if found is None:
        raise CapabilityError(
            f"a draft at {cost:g} of the target's cost was asked for.",
            f"the smallest one takes {share:.3f} of it here: one layer, {SHAPES[0].hidden} wide.",
            "ask for a larger cost, or use a method without a draft.",
        )
    return found


def costs(target: Any, rows: int, shapes: Sequence[Shape]) -> Iterator[tuple[Shape, float]]:
    """What a forward of each shape takes, as a share of the target's, measured in turns with it."""
    text = target.config.get_text_config(decoder=True)
    with closing(Timed.of(open_lm(target))) as asked:
        for shape in shapes:
            untrained: Any = LlamaForCausalLM(shape.config(text, rows))
            with closing(
                Timed.of(open_draft(untrained.to(target.device, target.dtype).eval(), None))
            ) as draft:
                share = ratio(draft, asked)
            yield shape, share


@dataclass(frozen=True, slots=True)
class Timed:
    """A model with a text in its cache, whose forward of one token is timed."""

    lm: Any
    row: Any

    @classmethod
    def of(cls, lm: Any) -> Timed:
        ids = list(range(min(CONTEXT, lm.vocab_size)))
        row = make_row(ids, SamplingParams(), SeededCoins(0), lm.vocab_size)
        lm.prefill([row])
        return cls(lm, row)

    def close(self) -> None:
        self.lm.close()

    def seconds(self) -> float:
        """One forward of one token."""
        began = time.perf_counter()
        self.lm.grow([self.row], [[1]], [[-1]])
        spent = time.perf_counter() - began
        self.lm.commit([self.row], [[]])
        self.lm.free([self.row])
        self.lm.prefill([self.row])
        return spent


def ratio(one: Timed, other: Timed) -> float:
    """What one costs in forwards of the other: medians of rounds in turns."""
    spent: Sequence[tuple[float, float]] = [
        (one.seconds(), other.seconds()) for _ in range(ROUNDS + 2)
    ][2:]
    return statistics.median(a for a, _ in spent) / statistics.median(b for _, b in spent)

"""Captured features in files: read in bounded memory, as a whole or as batches by an index."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.errors import ConfigError

WINDOW = 8  # shards that a batch draws from
JUDGED = 1024  # tokens of a batch that is only judged
JUDGED_TEXTS = 16  # the same where a row is a whole text: as many as a step learns from


class Examples(Protocol):
    """What a head learns from, numbered through the parts that it lies in."""

    lengths: list[int]  # of the parts
    ends: Tensor  # the numbers behind them

    def __len__(self) -> int: ...

    def take(self, chosen: Tensor) -> dict[str, Tensor]:
        """Those with these numbers [n], in this order."""
        ...


class Features:
    """Tokens in shards, numbered through; only the shards that are asked for are mapped."""

    digest = ""  # what tells a run's texts from others; here a folder holds those of one run

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.lengths = [rows(path) for path in paths]
        self.ends = torch.tensor(self.lengths).cumsum(0)
        self.mapped: dict[int, dict[str, Tensor]] = {}
        if not sum(self.lengths):
            raise ConfigError(
                "training on captured features was asked for.",
                "the models wrote nothing that could be learned from.",
                "pass more prompts, or a larger new_tokens.",
            )

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def judged_together(self) -> int:
        """How many rows are judged at once; their logits are all in memory."""
        return JUDGED if len(shape(self.paths[0])) == 1 else JUDGED_TEXTS

    def take(self, chosen: Tensor) -> dict[str, Tensor]:
        """The tokens with these numbers [n], in this order; other shards are let go."""
        which = torch.searchsorted(self.ends, chosen, right=True)
        needed = torch.unique(which).tolist()
        self.mapped = {shard: self.mapped[shard] for shard in needed if shard in self.mapped}
        found: dict[str, Tensor] = {}
        for shard in needed:
            here = which == shard
            places = chosen[here] - (self.ends[shard] - self.lengths[shard])
            if shard not in self.mapped:
                self.mapped[shard] = load_file(self.paths[shard])
            for name, column in self.mapped[shard].items():
                if name not in found:
                    found[name] = column.new_empty(len(chosen), *column.shape[1:])
                found[name][here] = column[places]
        return found

    def each(self, ask: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """`ask` of every token, in order; a shard at a time."""
        with torch.no_grad():
            return torch.cat([ask(load_file(path)).clone() for path in self.paths])

    def column(self, name: str) -> Tensor:
        """One feature of every token; for numbers such as labels, not for hidden states."""
        return self.each(lambda tokens: tokens[name])

    def stream(self, batch: int, seed: int) -> Shuffled:
        """Every token once per epoch."""
        return Shuffled(self, batch, seed)

    def mass(self, vocab_size: int) -> Float[Tensor, "V"]:
        """How much of the laws falls on each token; without laws, how often it was written."""
        found = torch.zeros(vocab_size, dtype=torch.float64)

        def count(texts: dict[str, Tensor]) -> Tensor:
            written = texts["weights"] > 0
            if "laws" in texts:
                chances = texts["log_probs"][written].flatten().double().exp()
                found.index_add_(0, texts["laws"][written].flatten().long(), chances)
            else:
                found.add_(torch.bincount(texts["input_ids"][written], minlength=vocab_size))
            return torch.empty(0)

        self.each(count)
        return found


class Shuffled:
    """A stream of feature batches: every token once per epoch, in an order of the epoch's own.

    Shards are shuffled and dealt into windows, tokens are shuffled within their window: at most
    two windows are mapped at a time, however many features there are.
    """

    def __init__(self, features: Examples, batch: int, seed: int) -> None:
        self.features, self.seed = features, seed
        self.size = min(batch, len(features))
        self.per_epoch = len(features) // self.size

    def batch(self, index: int) -> dict[str, Tensor]:
        found = self.features.take(self.chosen(index))
        if "weights" in found:  # whole texts, whose last token is one that the target wrote
            places = torch.arange(1, found["weights"].shape[1] + 1).to(found["weights"].device)
            found["lengths"] = ((found["weights"] > 0) * places).amax(1)
        return found

    def chosen(self, index: int) -> Tensor:
        """The numbers of the tokens in batch `index`."""
        epoch, place = divmod(index, self.per_epoch)
        first, last = place * self.size, (place + 1) * self.size
        ends, lengths = self.features.ends, self.features.lengths
        shards = self._order(f"{epoch}", len(lengths)).tolist()
        parts, begin = [], 0
        for start in range(0, len(shards), WINDOW):
            window = shards[start : start + WINDOW]
            end = begin + sum(lengths[shard] for shard in window)
            if begin < last and first < end:
                spans = [torch.arange(int(ends[s]) - lengths[s], int(ends[s])) for s in window]
                order = self._order(f"{epoch}/{start}", end - begin)
                parts.append(torch.cat(spans)[order][max(0, first - begin) : last - begin])
            begin = end
        return torch.cat(parts)

    def _order(self, place: str, n: int) -> Tensor:
        seed = random.Random(f"{self.seed}/{place}").getrandbits(62)
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def beside(head: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the device of a head."""
    device = next(head.parameters()).device
    return {name: values.to(device) for name, values in batch.items()}


def rows(path: Path) -> int:
    """How many tokens or texts a shard has."""
    return shape(path)[0]


def shape(path: Path) -> list[int]:
    """Of a shard's tokens: [n], or [n T] of whole texts; only its header is read."""
    with safe_open(path, framework="pt") as shard:
        return [int(size) for size in shard.get_slice("input_ids").get_shape()]

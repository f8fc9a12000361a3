"""Topics of prompts, told apart by the tokens they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Router = Callable[[Sequence[int]], int]  # from the ids of a prompt to the number of its topic

BUCKETS = 2048
NEAR = 0.25  # cosine from which on a prompt belongs to a topic while others are still free
MEMORY = 64  # prompts that a running mean remembers


class Centroids:
    """The nearest of `count` running means of token frequencies, rare tokens weighing more.

    A prompt that is near none opens a topic while there are fewer than `count`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.means: list[Tensor] = []
        self.sizes: list[int] = []
        self.prompts = 0
        self.found_in = torch.zeros(BUCKETS)  # prompts that had a token of the bucket

    def __call__(self, prompt: Sequence[int]) -> int:
        seen = hashed(prompt)
        self.prompts += 1
        self.found_in += (seen > 0).float()
        rare = ((1 + self.prompts) / (1 + self.found_in)).log() + 1e-3
        likeness = [cosine(mean * rare, seen * rare) for mean in self.means]
        best = max(range(len(likeness)), key=likeness.__getitem__, default=None)
        if best is None or (likeness[best] < NEAR and len(self.means) < self.count):
            self.means.append(seen)
            self.sizes.append(1)
            return len(self.means) - 1
        self.sizes[best] = min(self.sizes[best] + 1, MEMORY)
        self.means[best] += (seen - self.means[best]) / self.sizes[best]
        return best

    def state(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {
            "means": self.means, "sizes": self.sizes,
            "prompts": self.prompts, "found_in": self.found_in,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.means, self.sizes = list(state["means"]), list(state["sizes"])
        self.prompts, self.found_in = state["prompts"], state["found_in"]


def hashed(prompt: Sequence[int]) -> Tensor:
    """How often tokens of each bucket occur, damped: a vector of length 1."""
    buckets = torch.tensor(list(prompt), dtype=torch.long) * 2654435761 % BUCKETS
    counts = torch.bincount(buckets, minlength=BUCKETS).float().log1p()
    length: Tensor = counts.norm().clamp(min=1e-9)
    return counts / length


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()).clamp(min=1e-9))

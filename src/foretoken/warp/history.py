"""What options read of a text: kept while it grows, so that no law reads all of it again.

It lies in arrays of numbers, of which tensors are made without a look at each single one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.types import SamplingParams


class Used:
    """The distinct tokens of a text that grows and, where they are counted, how often each came.

    Tensors are views of what is kept here: they have to be gone before it grows, and is moved.
    """

    __slots__ = ("_counts", "_places", "_tokens")

    def __init__(self) -> None:
        self._tokens, self._counts = array("q"), array("q")
        self._places: dict[int, int] = {}  # of each token in both

    def __contains__(self, token: int) -> bool:
        return token in self._places

    def add(self, tokens: Sequence[int]) -> None:
        """Note which tokens came."""
        places = self._places
        fresh = [token for token in dict.fromkeys(tokens) if token not in places]
        places.update(zip(fresh, range(len(places), len(places) + len(fresh)), strict=True))
        self._tokens.extend(fresh)

    def count(self, tokens: Sequence[int]) -> None:
        """Note which tokens came, and how often."""
        self.add(tokens)
        self._counts.extend([0] * (len(self._tokens) - len(self._counts)))
        for token, uses in Counter(tokens).items():
            self._counts[self._places[token]] += uses

    @property
    def tokens(self) -> Tensor:
        return tensor_of(self._tokens)

    @property
    def counts(self) -> Tensor:
        return tensor_of(self._counts)


class History:
    """What the options of a row read of one text; what none of them asks for is not kept."""

    __slots__ = ("_prompt_len", "_text", "_whole", "length", "said", "seen")

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self._prompt_len, self.length = prompt_len, 0
        self.seen = Used() if params.repetition_penalty != 1.0 else None  # in prompt and text
        counting = bool(params.presence_penalty or params.frequency_penalty)
        self.said = Used() if counting else None  # in the generated text alone
        self._whole, self._text = bool(params.processors), array("q")

    def read(self, tokens: Sequence[int]) -> History:
        """The history of `tokens`, which begin with those that were read before."""
        known = self.length
        if known == len(tokens):
            return self
        if self._whole:
            self._text.extend(tokens[known:])
        if self.seen is not None:
            self.seen.add(tokens[known:])
        if self.said is not None:
            self.said.count(tokens[max(known, self._prompt_len) :])
        self.length = len(tokens)
        return self

    def ids(self, path: Sequence[int]) -> Tensor:
        """Text and path [1, T] as processors take them, in memory of its own: they may keep it."""
        return tensor_of(self._text + array("q", path))[None]


def tensor_of(numbers: array[int]) -> Tensor:
    """A tensor over the memory of `numbers`, which may not grow while it is there."""
    if not numbers:
        return torch.empty(0, dtype=torch.long, device="cpu")  # of no memory there is no view
    return torch.frombuffer(numbers, dtype=torch.long)

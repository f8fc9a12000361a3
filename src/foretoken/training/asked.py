"""Texts whose hidden states are asked of the target while a head learns, not kept in files.

A GPU reads a text again faster than a disk hands out what was kept of it, and texts alone are
small, so that many more can be learnt from. It stands where `Features` would: the same calls,
the same columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.lm.runtime.whole_texts import read_whole
from foretoken.lm.views.view import innermost
from foretoken.training.capture import Tensors
from foretoken.training.captures.texts import Texts
from foretoken.training.dataset.records import Chat
from foretoken.training.features import Shuffled

ALIGNED = 8  # a batch's columns are a multiple of it, as fused attention kernels want masks
JUDGED = 32  # texts of a batch that is only judged
POOL = 16  # batches among which texts are sorted by length


class AskedTexts:
    """Chats that `train data` made, one number each, and what a capture would say of them."""

    judged_together = JUDGED

    def __init__(self, session: Session, chats: Sequence[Any], capture: Any, name: str) -> None:
        if not isinstance(capture, Texts) or type(capture).record is not Texts.record:
            raise refusal(
                name,
                f"what the head {name!r} learns from is no row of hidden states",
                "leave states=asked out: what it learns from is kept in files then.",
            )
        if not isinstance(chats[0], Chat):
            raise refusal(
                name,
                "texts are needed that are whole before a head learns from them",
                "make texts with `foretoken train data` and pass --data DIR, or leave states=asked "
                "out.",
            )
        self.target: Any = innermost(session.target)
        self.capture = capture
        self.texts = [(chat.prompt + chat.answer, len(chat.answer)) for chat in chats]
        self.sizes = torch.tensor([len(ids) for ids, _ in self.texts])
        self.lengths = [len(self.texts)]
        self.ends = torch.tensor(self.lengths)

    @property
    def digest(self) -> str:
        """What tells these texts from others."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.texts)

    def stream(self, batch: int, seed: int) -> Shuffled:
        """Every text once per epoch, beside others of its length."""
        return Alike(self, batch, seed)

    def take(self, chosen: Tensor) -> Tensors:
        """The texts with these numbers [n], padded to one length, on the target's device.

        A longer text than the capture's window is read whole and loses its beginning then.
        """
        some = [self.texts[i] for i in chosen.tolist()]
        ids, weights = self.padded(some)
        *states, last = read_whole(self.target, ids, self.capture.read(self.target))
        found = {"input_ids": ids, "weights": weights, "hidden": torch.cat(states, -1), "": last}
        if ids.shape[1] > (window := self.capture.window):
            ends = torch.tensor([len(text) for text, _ in some], device=ids.device)
            place = (ends - window).clamp(min=0)[:, None] + torch.arange(window, device=ids.device)
            row = torch.arange(len(some), device=ids.device)[:, None]
            found = {name: values[row, place] for name, values in found.items()}
        last, weights = found.pop(""), found["weights"]
        found["hidden"] = found["hidden"].float()
        return {**found, **self.capture.laws_of(self.target, last, weights)}

    def padded(self, some: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        """Token ids [n T], and where the target wrote."""
        longest = -(-max(len(text) for text, _ in some) // ALIGNED) * ALIGNED
        ids, weights = torch.zeros(len(some), longest).long(), torch.zeros(len(some), longest)
        for i, (text, answer) in enumerate(some):
            ids[i, : len(text)] = torch.tensor(text)
            weights[i, len(text) - answer : len(text)] = 1.0
        return ids.to(self.target.device), weights.to(self.target.device)

    def each(self, ask: Callable[[Tensors], Tensor]) -> Tensor:
        """`ask` of every text, in order; a batch at a time."""
        numbers = torch.arange(len(self))
        with torch.no_grad():
            return torch.cat([ask(self.take(some)) for some in torch.split(numbers, JUDGED)])

    def mass(self, vocab_size: int) -> Float[Tensor, "V"]:
        """How often each token was written."""
        found = torch.zeros(vocab_size, dtype=torch.float64)
        for ids, answer in self.texts:
            written = torch.tensor(ids[-answer:])
            found.index_add_(0, written, torch.ones(len(written), dtype=torch.float64))
        return found


class Alike(Shuffled):
    """Texts of a pool drawn at random are dealt into batches by their length: little is padding."""

    features: AskedTexts

    def chosen(self, index: int) -> Tensor:
        epoch, place = divmod(index, self.per_epoch)
        pool, turn = divmod(place, POOL)
        batches = min(POOL, self.per_epoch - pool * POOL)
        first = pool * POOL * self.size
        some = self._order(f"{epoch}", len(self.features))[first : first + batches * self.size]
        some = some[self.features.sizes[some].argsort()]
        at = int(self._order(f"{epoch}/{pool}", batches)[turn])
        return some[at * self.size : (at + 1) * self.size]


def refusal(name: str, why: str, do: str) -> ConfigError:
    """A head that cannot learn so, and what to do."""
    return ConfigError(
        f"training the head {name!r} with states=asked was asked for.",
        f"{why}.",
        do,
    )

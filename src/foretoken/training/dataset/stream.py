"""Chats as batches for a draft: rows of whole chats, with the target's laws at the answers.

Batch `i` follows from the seed and `i` alone. Every chat comes once per epoch; chats of like length
share a batch, so that little is padded.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.training.dataset.records import (
    Chat,
    Folders,
    Told,
    every_chat,
    read_chats,
    read_told,
    shards,
)

KEPT = 64  # shards in memory, among which chats are shuffled


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chat lies, and its length in tokens."""

    shard: int
    number: int
    length: int


class ChatStream:
    """Batches of `tokens` tokens from a folder that `foretoken train data` made.

    A batch has "input_ids" [rows, T], "weights" [rows, T] (1 at tokens of the answer), "lengths"
    [rows] without padding, and for the n tokens of weight 1, in order, "laws" [n k] and
    "log_probs" [n k]: the law that each was drawn from. Rows are `row_tokens` long, or twice that
    for longer chats, which are cut there; without `packed` each holds one chat. With `text` they
    are windows of ordinary text instead.
    """

    def __init__(
        self,
        folder: Folders,
        split: str,
        *,
        tokens: int,
        row_tokens: int,
        pad: int,
        seed: int,
        packed: bool = True,
        text: bool = False,
    ) -> None:
        self.paths, self.seed, self.pad = shards(folder, split, text), seed, pad
        self.tokens, self.row_tokens, self.packed = tokens, row_tokens, packed
        self.places = [
            Place(shard, number, len(chat.prompt) + len(chat.answer))
            for shard, path in enumerate(self.paths)
            for number, chat in enumerate(read_chats(path))
            if learnable(chat, row_tokens)
        ]
        if not self.places:
            check_learnable(folder, split, row_tokens, text)  # raises
        self.loaded: OrderedDict[int, list[Told]] = OrderedDict()
        self.dealt: tuple[int, list[list[list[Place]]]] | None = None
        self.per_epoch = len(self.epoch(0))

    def batch(self, index: int) -> dict[str, Tensor]:
        epoch, number = divmod(index, self.per_epoch)
        batches = self.epoch(epoch)
        rows = batches[number % len(batches)]  # epochs differ by a batch or so
        length = self.width(max(place.length for row in rows for place in row))
        ids = torch.full((len(rows), length), self.pad)
        weights = torch.zeros(len(rows), length)
        lengths = torch.zeros(len(rows), dtype=torch.long)
        laws, log_probs = [], []
        for i, row in enumerate(rows):
            at = 0
            for place in row:
                chat, said = self.told(place)
                text = [*chat.prompt, *chat.answer][:length]
                ids[i, at : at + len(text)] = torch.tensor(text)
                first = min(len(chat.prompt), length)
                weights[i, at + first : at + len(text)] = 1.0
                laws.append(said.tokens[: len(text) - first])
                log_probs.append(said.log_probs[: len(text) - first])
                at += len(text)
            lengths[i] = at
        return {
            "input_ids": ids,
            "weights": weights,
            "lengths": lengths,
            "laws": torch.cat(laws),
            "log_probs": torch.cat(log_probs),
        }

    def width(self, longest: int) -> int:
        """Of rows that hold chats up to this length."""
        return self.row_tokens if longest <= self.row_tokens else 2 * self.row_tokens

    def told(self, place: Place) -> Told:
        """A chat and its laws."""
        if place.shard not in self.loaded:
            self.loaded[place.shard] = read_told(self.paths[place.shard])
            if len(self.loaded) > KEPT:
                self.loaded.popitem(last=False)
        self.loaded.move_to_end(place.shard)
        return self.loaded[place.shard][place.number]

    def epoch(self, number: int) -> list[list[list[Place]]]:
        """Batches of rows of chats, in an order of this epoch's own."""
        if self.dealt is None or self.dealt[0] != number:
            self.dealt = number, self.deal(random.Random(f"{self.seed}/{number}"))
        return self.dealt[1]

    def deal(self, rng: random.Random) -> list[list[list[Place]]]:
        """Chats are shuffled within windows of shards: those of one are in memory together."""
        windows, order = -(-len(self.paths) // KEPT), list(range(len(self.paths)))
        if windows > 1:
            rng.shuffle(order)
        places = list(self.places)
        rng.shuffle(places)
        dealt: list[list[Place]] = [[] for _ in range(windows)]
        for place in places:
            dealt[order[place.shard] * windows // len(order)].append(place)
        return [batch for some in dealt for batch in self.grouped(some, rng)]

    def grouped(self, places: list[Place], rng: random.Random) -> list[list[list[Place]]]:
        """Rows of these chats, those of one width together."""
        batches = []
        for width in (self.row_tokens, 2 * self.row_tokens):
            mine = [place for place in places if self.width(place.length) == width]
            rows = fitted(mine, width) if self.packed else [[place] for place in mine]
            size = max(1, self.tokens // width)
            batches += [rows[i : i + size] for i in range(0, len(rows), size)]
        rng.shuffle(batches)
        return batches


def learnable(chat: Chat, row_tokens: int) -> bool:
    """Whether rows of this length, or twice that, hold some of an answer."""
    return bool(chat.answer) and len(chat.prompt) < 2 * row_tokens


def check_learnable(folder: Folders, split: str, row_tokens: int, text: bool = False) -> None:
    """ConfigError for a split of which nothing can be learned, or judged by."""
    if any(learnable(chat, row_tokens) for chat in every_chat(folder, split, text)):
        return
    if found := list(every_chat(folder, split, text)):
        raise too_long(folder, split, found, row_tokens)
    raise none_there(folder, split, "windows of text" if text else "chats")


def none_there(folder: Folders, split: str, what: str = "chats") -> ConfigError:
    """Of a folder without texts of a split."""
    do = "make some: `foretoken train data --target T --out DIR`."
    if split == "valid" and shards(folder, "train"):  # the same command would change nothing
        do = (
            "none was held out to judge by: ask `foretoken train data` for more chats, or pass "
            "--fresh to it, which holds out one of two or more."
        )
    return ConfigError(
        f"training on the texts in {folder} was asked for.",
        f"there are none of the split {split!r} in it, of {what}.",
        do,
    )


def too_long(folder: Folders, split: str, chats: list[Chat], row_tokens: int) -> ConfigError:
    """Of a split whose every prompt leaves no room for an answer in a row."""
    prompt = min(len(chat.prompt) for chat in chats)
    whole = min(len(chat.prompt) + len(chat.answer) for chat in chats)
    return ConfigError(
        f"training on the texts in {folder} was asked for.",
        f"all {len(chats)} of the split {split!r} are left out: their prompts have {prompt} tokens "
        f"or more, and rows of row_tokens={row_tokens} hold {2 * row_tokens} at most.",
        f"pass --set row_tokens=N, half of a prompt and its answer: {-(-whole // 2)} is enough for "
        "the shortest of them.",
    )


def fitted(places: list[Place], width: int) -> list[list[Place]]:
    """Rows of whole chats, each in the first of the last few rows with room."""
    rows: list[list[Place]] = []
    room: list[int] = []
    for place in places:
        length = min(place.length, width)
        first = max(0, len(rows) - 16)
        fitting = [i for i in range(first, len(rows)) if room[i] >= length]
        if fitting:
            rows[fitting[0]].append(place)
            room[fitting[0]] -= length
        else:
            rows.append([place])
            room.append(width - length)
    return rows

"""Procedural tasks in the shape of Spec-Bench's six families, with answers that a function can
check.

Splits are disjoint by construction: the checksum of a prompt decides its split, whatever seed
produced it, so no held-out prompt can be met in training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from foretoken.errors import ConfigError

from .example import Example
from .families import (
    dialogue,
    mathematics,
    question_answering,
    retrieval,
    summarisation,
    translation,
)

_MAKERS = {
    "dialogue": dialogue.make,
    "translation": translation.make,
    "summarisation": summarisation.make,
    "question answering": question_answering.make,
    "mathematical reasoning": mathematics.make,
    "retrieval": retrieval.make,
}
FAMILIES = tuple(_MAKERS)
SPLITS = ("train", "valid", "test")
_HELD_OUT = {0: "valid", 1: "test"}  # checksum modulo _PARTS; every other residue is training
_PARTS = 20


def split_of(prompt: str) -> str:
    """The split a prompt belongs to, from its text alone."""
    return _HELD_OUT.get(zlib.crc32(prompt.encode()) % _PARTS, "train")


def stream(family: str, split: str, rng: random.Random) -> Iterator[Example]:
    """Examples of one family and split without end, drawn with `rng`."""
    if family not in _MAKERS or split not in SPLITS:
        raise ConfigError(
            asked=f"examples of family {family!r}, split {split!r}",
            possible=f"families {', '.join(FAMILIES)}; splits {', '.join(SPLITS)}",
            do="name one of these",
        )
    make = _MAKERS[family]
    while True:
        example = make(rng)
        if split_of(example.prompt) == split:
            yield example


def examples(family: str, split: str = "test", count: int = 100, seed: int = 0) -> list[Example]:
    """`count` examples, the same for the same arguments."""
    found = stream(family, split, random.Random(f"{family}/{split}/{seed}"))
    return [next(found) for _ in range(count)]


def mixed(split: str, count: int, seed: int = 0) -> Iterator[Example]:
    """`count` examples of all families in turn, the same for the same arguments."""
    rng = random.Random(f"mixed/{split}/{seed}")
    streams = [stream(family, split, rng) for family in FAMILIES]
    for n in range(count):
        yield next(streams[n % len(streams)])

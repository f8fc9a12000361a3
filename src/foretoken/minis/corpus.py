"""What the minis learn from: the six task families, and the running interpreter's own standard
library as code.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from foretoken.training.stream import Document

from . import tasks

# Share of documents; code comes in long pieces, so its share of tokens is larger.
SHARES = {
    "dialogue": 0.6,
    "translation": 1.2,
    "summarisation": 0.4,
    "question answering": 2.0,
    "mathematical reasoning": 1.4,
    "retrieval": 2.0,
    "code": 0.05,
}
_PROMPT_WEIGHT, _ANSWER_WEIGHT, _CODE_WEIGHT = 0.1, 1.0, 0.5
_CODE_LINES = 24


@cache
def code_modules(split: str) -> tuple[Path, ...]:
    """Top-level modules of the standard library; one in ten is held out, by the checksum of its
    name.
    """
    found = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return tuple(p for p in found if (zlib.crc32(p.stem.encode()) % 10 == 0) == (split != "train"))


@cache
def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True))


def code_piece(split: str, rng: random.Random) -> str:
    """A run of lines from one module under a heading that names it."""
    path = rng.choice(code_modules(split))
    lines = _lines(path)
    start = rng.randrange(max(1, len(lines) - _CODE_LINES))
    return f"### Code: {path.stem}\n" + "".join(lines[start : start + _CODE_LINES])


def texts(seed: int, count: int) -> Iterator[str]:
    """Training texts of all kinds, for learning the tokenizer."""
    rng = random.Random(f"vocabulary/{seed}")
    streams = {family: tasks.stream(family, "train", rng) for family in tasks.FAMILIES}
    for _ in range(count):
        for found in streams.values():
            example = next(found)
            yield example.prompt + example.answer
        if rng.random() < 0.5:
            yield code_piece("train", rng)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of one split as tokens; answers count fully in the loss, prompts a little."""

    tokenizer: PreTrainedTokenizerFast
    split: str
    families: tuple[str, ...] = tuple(SHARES)

    def __call__(self, rng: random.Random) -> Iterator[Document]:
        streams = {f: tasks.stream(f, self.split, rng) for f in self.families if f != "code"}
        shares = [SHARES[family] for family in self.families]
        encode = self.tokenizer.backend_tokenizer.encode
        end = self.tokenizer.eos_token_id
        while True:
            family = rng.choices(self.families, weights=shares)[0]
            if family == "code":
                ids = encode(code_piece(self.split, rng)).ids
                yield Document(ids, [_CODE_WEIGHT] * len(ids))
                continue
            example = next(streams[family])
            prompt = encode(example.prompt).ids
            answer = [*encode(example.answer, add_special_tokens=False).ids, end]
            yield Document(
                prompt + answer, [_PROMPT_WEIGHT] * len(prompt) + [_ANSWER_WEIGHT] * len(answer)
            )

"""Text files as a token stream that needs no preparation and resumes at any batch.

The files are seen as one long run of blocks. Row `r` of batch `i` reads one block, in an order that
visits every block once per pass; so the position in the data is a number, and nothing is kept in
memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foretoken.errors import ConfigError

_BYTES_PER_TOKEN = 6  # of text read for one token of a row; rows are cut, or padded with weight 0


@dataclass(kw_only=True, slots=True)
class TextFiles:
    """Rows of plain text files (or of the field ``text`` of JSON lines), shuffled by blocks."""

    paths: Sequence[Path]
    tokenizer: PreTrainedTokenizerBase
    rows: int
    row_tokens: int
    seed: int = 0
    _ends: list[int] = field(init=False)  # running total of blocks, per file

    def __post_init__(self) -> None:
        self._ends, total = [], 0
        for path in self.paths:
            if not path.is_file() or not path.stat().st_size:
                raise ConfigError(
                    asked=f"training on {path}",
                    possible="text files and .jsonl files that exist and are not empty",
                    do="check the path",
                )
            total += math.ceil(path.stat().st_size / self._block)
            self._ends.append(total)
        if not total:
            raise ConfigError(asked="training on no files", possible="one or more", do="name them")

    @property
    def _block(self) -> int:
        return self.row_tokens * _BYTES_PER_TOKEN

    def batch(self, index: int) -> dict[str, Tensor]:
        pad = self.tokenizer.pad_token_id or 0
        tokens = torch.full((self.rows, self.row_tokens), pad)
        weights = torch.zeros(self.rows, self.row_tokens)
        for row in range(self.rows):
            text = self._text(index * self.rows + row)
            ids = self.tokenizer(text).input_ids[: self.row_tokens]
            tokens[row, : len(ids)] = torch.tensor(ids)
            weights[row, : len(ids)] = 1.0
        return {"input_ids": tokens, "weights": weights}

    def _text(self, turn: int) -> str:
        """The text of the block whose turn it is, from the first line that starts in it."""
        blocks = self._ends[-1]
        sweep, place = divmod(turn, blocks)
        step = _coprime(blocks, self.seed + sweep)
        block = (place * step + self.seed + sweep) % blocks
        number = next(i for i, end in enumerate(self._ends) if block < end)
        start = (block - (self._ends[number - 1] if number else 0)) * self._block
        path = self.paths[number]
        with open(path, "rb") as file:
            file.seek(start)
            raw = file.read(self._block)
            if path.suffix == ".jsonl":
                raw += file.readline()  # the last record is read to its end
        text = raw.decode("utf-8", errors="ignore")
        if start and "\n" in text:
            text = text.split("\n", 1)[1]
        return _records(text, path) if path.suffix == ".jsonl" else text


def _coprime(blocks: int, seed: int) -> int:
    """A stride near the golden section of `blocks` that visits every block before any again."""
    stride = max(1, round(blocks * 0.618) + seed % 7)
    while math.gcd(stride, blocks) != 1:
        stride += 1
    return stride


def _records(text: str, path: Path) -> str:
    """The field ``text`` of every record in some whole lines."""
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            found.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                asked=f"training on {path}",
                possible='lines such as {"text": "..."}',
                do=f"mend the line that starts with {line[:60]!r} ({error})",
            ) from error
    return "\n".join(found)

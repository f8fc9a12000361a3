"""What a folder of training texts holds: chats and ordinary text in JSON lines, laws beside them.

A shard has files of both splits; the `train` lines are written last, so a shard with them is whole.
Laws are sparse: the target's likeliest tokens at each place of the answers. Where the target's
hidden states were kept as well, they lie in files of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError
from foretoken.native.best_columns import best_columns

SPLITS = ("valid", "train")  # in the order of writing
DOCUMENT = "document"  # of chats behind the first token alone, of models without a template
TEXT = "text"  # the kind of ordinary text, that the target read and did not write
BLOCK = 128  # scores that are looked at together
STATES = ".states.safetensors"  # suffix of the files of hidden states
Folders = Path | tuple[Path, ...]  # texts of one target, or of several


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt and what the target wrote after it, as token ids; or a window of ordinary text,
    whose first token is the prompt.
    """

    kind: str
    temperature: float  # of the answer; 0: greedy; 1 for ordinary text
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Laws:
    """The target's likeliest tokens at n places: what a draft is to say there."""

    tokens: Tensor  # [n k]
    log_probs: Tensor  # [n k], of the whole law at temperature 1
    states: Tensor | None = None  # [n L H], that these laws were read from, where they are kept

    @classmethod
    def likeliest(cls, logits: Tensor, size: int, states: Tensor | None = None) -> Laws:
        """The `size` likeliest tokens of laws [n V] given as logits, before temperature."""
        tokens, log_probs = likeliest(logits, size)
        return cls(tokens.cpu(), log_probs.half().cpu(), states)

    @classmethod
    def none(cls, places: int) -> Laws:
        """Nothing kept of so many places."""
        return cls(torch.empty(places, 0, dtype=torch.int), torch.empty(places, 0).half())

    @classmethod
    def joined(cls, parts: Sequence[Laws]) -> Laws:
        """Several, one behind the other."""
        states = [part.states for part in parts if part.states is not None]
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            torch.cat(states) if states else None,
        )

    def __getitem__(self, which: slice) -> Laws:
        states = None if self.states is None else self.states[which]
        return Laws(self.tokens[which], self.log_probs[which], states)


def likeliest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` likeliest tokens [n k] of laws [n V], and their log-probabilities [n k]."""
    size = min(size, logits.shape[-1])
    if logits.is_cpu and size:  # one pass: torch's sum over the vocabulary takes six times as long
        best, probs = best_columns(logits, size)
        shape = len(logits), size
        tokens, chances = torch.tensor(best, dtype=torch.int32), torch.tensor(probs)
        return tokens.view(shape), chances.view(shape).log()
    found = logits.float()
    values, tokens = largest(found, size)
    return tokens.int(), values - found.logsumexp(-1, keepdim=True)


def largest(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest of scores [n V] and their places, as `topk` has them."""
    width = scores.shape[1]
    if scores.is_cuda and width % BLOCK == 0 and width >= 2 * BLOCK * size:
        return largest_in_blocks(scores, size)
    return scores.topk(size, -1)


def largest_in_blocks(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The same, looked for in the `size` blocks with the largest maxima: all of them are there.

    On a GPU `topk` reads a whole law several times, and was most of what reading a text took.
    """
    blocks = scores.view(len(scores), -1, BLOCK)
    best = blocks.amax(-1).topk(size, -1).indices
    some = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1)
    values, at = some.topk(size, -1)
    return values, best.gather(1, at // BLOCK) * BLOCK + at % BLOCK


Told = tuple[Chat, Laws]


def shard_path(folder: Path, split: str, index: int, of: str = "") -> Path:
    """The lines of a shard of chats, or of ordinary text; its laws have the suffix .safetensors."""
    return folder / f"{split}-{of + '-' if of else ''}{index:06d}.jsonl"


def write_shard(folder: Path, index: int, parts: dict[str, list[Told]], of: str = "") -> None:
    """A shard of both splits, whole or not there."""
    try:
        for split in SPLITS:
            path, told = shard_path(folder, split, index, of), parts[split]
            if told:
                laws = Laws.joined([laws for _, laws in told])
                found = {"tokens": laws.tokens.int(), "log_probs": laws.log_probs.half()}
                if laws.states is not None:
                    columns = {"input_ids": written(told), "hidden": laws.states.contiguous()}
                    replace_tensors(path.with_suffix(STATES), columns)
                replace_tensors(path.with_suffix(".safetensors"), found)
            lines = "".join(json.dumps(asdict(chat)) + "\n" for chat, _ in told)
            replace_text(path, lines)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"writing training texts into {folder} was asked for.",
            f"the folder cannot be written ({error}); the shards before this one are whole.",
            "free disk space or fix the permissions, then run the same command: it goes on.",
        ) from error


def written(told: Sequence[Told]) -> Tensor:
    """The tokens of the answers, one behind the other."""
    return torch.tensor([token for chat, _ in told for token in chat.answer])


def replace_tensors(path: Path, columns: dict[str, Tensor]) -> None:
    """A file of tensors, or what was there before."""
    partial = path.with_suffix(".partial")
    try:
        save_file(columns, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError):
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """A text file with this content, or what was there before."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def shards(folder: Folders, split: str, text: bool | None = None) -> list[Path]:
    """The whole shards of a split, in order; of ordinary text only, or of all but that.

    Those of several folders come one after the other.
    """
    if not isinstance(folder, Path):
        return [path for one in folder for path in shards(one, split, text)]
    found = sorted(folder.glob("train-*.jsonl"))
    if text is not None:
        found = [path for path in found if path.name.startswith(f"train-{TEXT}-") == text]
    paths = [folder / path.name.replace("train", split, 1) for path in found]
    return [path for path in paths if path.is_file()]


def read_chats(path: Path) -> Iterator[Chat]:
    """The chats of one shard."""
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                yield Chat(**json.loads(line))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"training texts in {path} were asked for.",
            f"a line of it cannot be read ({error}).",
            "delete the shard and run `foretoken train data` again: it makes what is missing.",
        ) from error


def read_told(path: Path) -> list[Told]:
    """The chats of one shard with the target's laws."""
    chats = list(read_chats(path))
    if not chats:
        return []
    found = load_file(path.with_suffix(".safetensors"))
    laws, told, begin = Laws(found["tokens"], found["log_probs"]), [], 0
    for chat in chats:
        told.append((chat, laws[begin : begin + len(chat.answer)]))
        begin += len(chat.answer)
    return told


def laws_kept(folder: Folders, text: bool | None = None) -> int | None:
    """Tokens kept of each law beside the texts of a folder; None where there are no texts."""
    said = (laws for path in shards(folder, "train", text) for _, laws in read_told(path))
    first = next(said, None)
    return None if first is None else first.tokens.shape[-1]


def every_chat(folder: Folders, split: str, text: bool | None = False) -> Iterator[Chat]:
    """All chats of a split; or windows of ordinary text instead, or both."""
    for path in shards(folder, split, text):
        yield from read_chats(path)


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """The share of n-grams that have occurred before."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def counted(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, most often first."""
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))

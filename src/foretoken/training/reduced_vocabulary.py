"""A draft's vocabulary chosen without training: the tokens that its target writes most often.

Fewer rows of the output layer make a draft cheaper and let it guess fewer tokens. Both are
measured: what drafts of several sizes cost on this machine, and how often each guesses the next
token of held-out text. The size with the most expected tokens per second is the best one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.engine.assemble import assemble
from foretoken.engine.measure import measure_costs
from foretoken.errors import ConfigError
from foretoken.row import make_row
from foretoken.training.dataset.card import check_vocabulary
from foretoken.training.dataset.records import shards
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams

SMALLEST = 512  # of the sizes that are tried; each is twice the one before
HELD_OUT = 10  # one text of this many tells how good a size is
JUDGED = 2048  # tokens of held-out text at most
PIECE = 128  # of it scored in one forward
DEPTHS = (1, 2, 3, 4, 6, 8)  # of the drafts whose worth is estimated
CONTEXT = 64  # tokens of a prompt before judged text


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and where in it the part begins that the target wrote."""

    tokens: list[int]
    begins: int

    @property
    def written(self) -> list[int]:
        return self.tokens[self.begins :]


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of one size."""

    tokens: int  # rows that are computed
    coverage: float  # share of held-out text that can be guessed at all
    hits: float  # share of it that the draft's best guess is
    draft_ms: float  # of one guess
    depth: int  # of the best chain
    per_second: float  # tokens expected of it


def ranked(texts: Iterable[Text], always: Iterable[int], vocab_size: int) -> list[int]:
    """All ids: those that must be there, then by how often texts have them, then as they come.

    Tokenizers give frequent words small ids, so the order of ids is the best guess for the rest.
    """
    counts = Counter(token for text in texts for token in text.written)
    first = sorted({token for token in always if 0 <= token < vocab_size})
    found = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return list(dict.fromkeys([*first, *found, *range(vocab_size)]))


def sizes_to_try(vocab_size: int, least: int) -> list[int]:
    """Powers of two from which on a vocabulary holds what it must, and the whole one."""
    found = [SMALLEST << i for i in range(32) if least <= SMALLEST << i < vocab_size]
    return [*found, vocab_size]


@torch.inference_mode()
def guesses(draft: LanguageModel, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of the whole draft before tokens [n] that the target wrote."""
    logits, said = [], []
    left = JUDGED
    for text in texts:
        for at in range(max(text.begins, 1), len(text.tokens), PIECE):
            piece = text.tokens[at : at + min(PIECE, left)]
            if not piece:
                break
            context = text.tokens[max(0, at - CONTEXT) : at]
            row = make_row(context, SamplingParams(), SeededCoins(0), draft.vocab_size)
            draft.prefill([row])
            tree = chain(context[-1], piece[:-1])
            logits.append(draft.score([row], [Draft(tree, Draw.POINT)])[0].logits.float())
            draft.free([row])
            said.append(torch.tensor(piece))
            left -= len(piece)
    return torch.cat(logits).cpu(), torch.cat(said)


def quality(logits: Tensor, said: Tensor, tokens: Sequence[int]) -> tuple[float, float]:
    """Share of tokens among `tokens`, and of those that a draft of these rows guesses right."""
    ids = torch.tensor(sorted(tokens))
    best = ids[logits[:, ids].argmax(-1)]
    covered = torch.isin(said, ids)
    return float(covered.float().mean()), float((best == said).float().mean())


def worth(hits: float, target: dict[int, float], draft: dict[int, float]) -> tuple[int, float]:
    """Depth of the chain with the most expected tokens per second, and how many these are."""
    best = (0, 1.0 / target[1])
    for depth in DEPTHS:
        if depth in draft and depth + 1 in target:
            tokens = sum(hits**i for i in range(depth + 1))
            best = max(best, (depth, tokens / (target[depth + 1] + draft[depth])), key=_speed)
    return best


def _speed(one: tuple[int, float]) -> float:
    return one[1]


def costs_between(measured: dict[int, float], sizes: Iterable[int]) -> dict[int, float]:
    """Seconds at each size, on the line between the two measured ones around it."""
    known = sorted(measured)
    found = {}
    for size in sizes:
        low = max((n for n in known if n <= size), default=known[0])
        high = min((n for n in known if n >= size), default=known[-1])
        share = 0.0 if low == high else (size - low) / (high - low)
        found[size] = measured[low] + share * (measured[high] - measured[low])
    return found


def tried(
    target: LanguageModel,
    drafts: dict[int, LanguageModel],
    order: Sequence[int],
    held_out: Sequence[Text],
    seconds: float = 2.0,
) -> list[Tried]:
    """Every size, its draft opened with so many of the first ids of `order`."""
    logits, said = guesses(drafts[max(drafts)], held_out)
    costs: dict[int, dict[int, float]] = {}
    scored: dict[int, float] = {}
    for _ in range(2):  # a machine is not equally busy all the time: the quicker measurement counts
        for size, draft in drafts.items():
            table = measure_costs(assemble("chain", target, draft), max(DEPTHS), seconds)
            before = costs.get(size, {})
            costs[size] = {d: min(c, before.get(d, c)) for d, c in table.draft.items()}
            scored = {n: min(c, scored.get(n, c)) for n, c in table.target.items()}
    target_costs = costs_between(scored, [1, *(depth + 1 for depth in DEPTHS)])
    found = []
    for size in drafts:
        coverage, hits = quality(logits, said, order[:size])
        depth, per_second = worth(hits, target_costs, costs[size])
        deepest = max(costs[size])
        each = 1e3 * costs[size][deepest] / deepest
        found.append(Tried(size, coverage, hits, each, depth, per_second))
    return found


def read_texts(data: Path, session: Any) -> list[Text]:
    """Texts of a file, or of a folder that `foretoken train data` wrote: answers are what counts,
    and the text of others where there are none.

    A line of JSON has ids as "prompt" and "answer", or text as "text" or "answer"; a text file has
    passages between empty lines.
    """
    files, tokenizer = [data], session.tokenizer
    if data.is_dir():
        check_vocabulary(data, session, "counting the tokens of")
        files = shards(data, "train", text=False) or shards(data, "train", text=True)
    found: list[Text] = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as problem:
            raise no_texts(data, f"{file.name} cannot be read ({problem})") from problem
        if file.suffix == ".jsonl":
            found += [text for line in content.split("\n") if (text := of_line(line, tokenizer))]
        else:
            passages = (passage.strip("\n") for passage in content.split("\n\n"))
            found += [Text(encoded(one, tokenizer, data), 0) for one in passages if one.strip()]
    found = [text for text in found if text.written]
    if len(found) < 2:
        raise no_texts(data, f"it holds {len(found)} texts; one to count and one to judge by "
                             "are the least")  # fmt: skip
    return found


def of_line(line: str, tokenizer: Any) -> Text | None:
    """The text of a line of JSON; None for an empty line."""
    if not line.strip():
        return None
    try:
        record = json.loads(line)
        answer = record["answer" if "answer" in record else "text"]
        if isinstance(answer, str):
            return Text(encoded(answer, tokenizer, None), 0)
        prompt = record["prompt"] if "answer" in record else []
        tokens = [int(token) for token in (*prompt, *answer)]
    except (ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"a text of the line that starts with {line[:60]!r} was asked for.",
            'a line looks like {"prompt": [ids], "answer": [ids]} or {"text": "..."}.',
            f"mend it ({problem}).",
        ) from problem
    return Text(tokens, len(tokens) - len(answer))


def encoded(text: str, tokenizer: Any, data: Path | None) -> list[int]:
    if tokenizer is None:
        raise no_texts(data or Path("its texts"), "the target has no tokenizer to read it with")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def no_texts(data: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the tokens of {data} were to be counted.",
        f"{why}.",
        "pass a text file, a .jsonl file, or a folder of `foretoken train data`.",
    )


def written_by(session: Any, prompts: Sequence[str], count: int) -> list[Text]:
    """What the target writes after prompts, half of it greedily."""
    found = []
    for at, temperature in ((0, 0.0), (1, 0.7)):
        some = list(islice(prompts, at, None, 2))
        results = session.generate(some, count, temperature=temperature, seed=at) if some else []
        for prompt, result in zip(some, results, strict=True):
            ids = session.tokenizer(prompt)["input_ids"]
            found.append(Text([*ids, *result.tokens], len(ids)))
    return found


def parted(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to count, and texts to judge by."""
    held = min(HELD_OUT, len(texts))
    return (
        [text for i, text in enumerate(texts) if i % held != held - 1],
        [text for i, text in enumerate(texts) if i % held == held - 1],
    )

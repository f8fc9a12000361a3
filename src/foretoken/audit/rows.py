"""Rows for audits, and what must hold between them: no neighbour changes a text, seeds repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from foretoken.coins import SeededCoins
from foretoken.engine.engine import Engine, decode
from foretoken.row import make_row
from foretoken.types import DecodeState, Ragged, Rows, SamplingParams, Step

Build = Callable[[], Engine]


@dataclass(slots=True)
class Guesses:
    """Listens to an engine: tokens that were drafted, and those of them that were accepted.

    A check of a method that drafted nothing has shown nothing of it.
    """

    drafted: int = 0
    accepted: int = 0

    def __call__(self, step: Step) -> None:
        self.drafted += sum(len(draft.tree) - 1 for draft in step.drafts)
        self.accepted += sum(len(verdict.path) for verdict in step.verdicts)

    def told(self) -> str:
        """The counts in words."""
        if not self.drafted:
            return "nothing was drafted"
        return f"{self.accepted} of {self.drafted} drafted tokens accepted"


def write(engine: Engine, rows: Rows, max_rows: int = 16) -> list[list[int]]:
    """Decode `rows` to their end; the new tokens of each."""
    for _ in decode(rows, engine, max_rows):
        pass
    return [row.new_tokens for row in rows]


def seeded_rows(
    prompts: Ragged, params: SamplingParams, vocab_size: int, seed: int = 0
) -> list[DecodeState]:
    """One row per prompt; row i has the seed `seed + i`."""
    return [
        make_row(prompt, replace(params, seed=seed + i), SeededCoins(seed + i), vocab_size)
        for i, prompt in enumerate(prompts)
    ]


def neighbour_differences(
    build: Build,
    prompts: Ragged,
    params: SamplingParams,
    rows: Callable[[Ragged, SamplingParams, int, int], list[DecodeState]] | None = None,
) -> int:
    """Rows whose text in a ragged batch is not the text they write alone.

    The batch is smaller than the number of prompts, so rows also join and leave on the way.
    """
    rows = rows or seeded_rows
    engine = build()
    vocab = engine.target.vocab_size
    together = write(engine, rows(prompts, params, vocab, 0), max(2, len(prompts) - 1))
    alone = []
    for i, prompt in enumerate(prompts):
        alone += write(build(), rows([prompt], params, vocab, i))
    return sum(a != b for a, b in zip(alone, together, strict=True))


def seed_differences(
    build: Build,
    prompts: Ragged,
    params: SamplingParams,
    rows: Callable[[Ragged, SamplingParams, int, int], list[DecodeState]] | None = None,
) -> int:
    """Rows that write something else when they are run again with their seed.

    Counts one more if another seed gives the same texts at a temperature above 0: then the seed
    is not used at all.
    """
    rows = rows or seeded_rows
    texts = []
    for seed in (0, 0, 1000):
        engine = build()
        texts.append(write(engine, rows(prompts, params, engine.target.vocab_size, seed)))
    changed = sum(a != b for a, b in zip(texts[0], texts[1], strict=True))
    return changed + (params.temperature > 0 and texts[0] == texts[2])

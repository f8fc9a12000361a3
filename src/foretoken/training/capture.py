"""What a pair of models says about its own guesses, collected for heads that predict acceptance.

The target continues prompts by its own law (written by the engine, so quickly). Along each
continuation X the draft law q_i and the target law p_i are known, a guess Y_i is drawn from q_i,
and its true chance of acceptance is a_i = min(1, p_i(Y_i) / q_i(Y_i)), which no log of outcomes
would tell. The draft model then reads a mixture Z of X and Y (SpecDec++, arXiv 2405.19715: Z_i is
X_i with probability `mix`), and its hidden layer at Z_i = Y_i is what a head will see.

Shards of a few prompts are files, complete or absent, and follow from the seed alone: a killed
collection goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, check_values
from foretoken.heads.decision import certainty
from foretoken.trees.build import chain
from foretoken.types import NORMED, DecodeState, Draft, Draw

SHARD = 16  # prompts per file

Features = dict[str, Tensor]  # all [n] or [n, width]; n tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """What is collected."""

    new_tokens: int = 64  # written after each prompt
    temperature: float = 1.0  # of target and draft; a head fits one temperature
    mix: float = 0.15  # share of the target's own tokens in what the draft model reads
    seed: int = 0

    def __post_init__(self) -> None:
        check_values(
            self,
            ("new_tokens", self.new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0.0, "0 (greedy) or more"),
            ("mix", 0.0 <= self.mix < 1.0, "0 or more and below 1"),
        )


def collect(
    session: Session,
    prompts: Sequence[str],
    plan: Capture,
    folder: Path,
    split: str,
    *,
    show: bool = True,
) -> Features:
    """Features of all prompts of a split; finished shards in `folder` are read, not made again."""
    from rich.progress import Progress

    _same_run(folder, split, prompts, plan)
    parts = []
    starts = range(0, len(prompts), SHARD)
    with Progress(disable=not show) as bar:
        for start in bar.track(starts, description=f"collecting, {split}"):
            path = folder / f"{split}-{start:06d}.safetensors"
            if not path.is_file():
                some = prompts[start : start + SHARD]
                # No two prompts of a run share coins, whatever their split.
                seed = 1_000_003 * plan.seed + 2 * start + 500_000 * (split != "train")
                partial = path.with_suffix(".partial")
                save_file(_shard(session, some, plan, seed), partial)
                os.replace(partial, path)
            parts.append(load_file(path))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.inference_mode()
def _shard(session: Session, prompts: Sequence[str], plan: Capture, seed: int) -> Features:
    """Features of some prompts; prompt i of them draws from the seeds `seed + 2i` and the next."""
    seeds = [seed + 2 * i for i in range(len(prompts))]
    rows = session.rows(list(prompts), plan.new_tokens, temperature=plan.temperature, seed=seeds)
    before = [list(row.tokens) for row in rows]
    with closing(session.engine.run(rows, session.max_rows)) as records:
        for _ in records:
            pass
    parts = []
    for row, ids, own in zip(rows, before, seeds, strict=True):
        coins = SeededCoins(own + 1)
        asked = DecodeState(ids, len(ids), row.params, coins, row.warp)
        parts.append(_guesses(session, asked, row.new_tokens, plan.mix))
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: values.contiguous().clone() for name, values in found.items()}


def _guesses(session: Session, row: DecodeState, text: Sequence[int], mix: float) -> Features:
    """Guesses along one continuation, their true chances, and what a head may see of them."""
    tree = chain(row.tokens[-1], text)
    n, coins = len(text), row.coins
    session.target.prefill(row)
    [score] = session.target.score([row], [Draft(tree, Draw.POINT)])
    session.target.free([row])
    p = row.warp.laws(row.tokens, tree, score.logits)
    logits, before = _read(session.draft, row, text)
    q = row.warp.laws(row.tokens, tree, logits)
    laws = torch.stack([q[i] for i in range(n)])  # [n, V]
    guesses = [coins.draw(law) for law in laws]
    chances = [min(1.0, float(p[i][y]) / float(laws[i][y])) for i, y in enumerate(guesses)]
    own = [coins.flip(mix) for _ in range(n)]
    mixture = [x if keep else y for x, y, keep in zip(text, guesses, own, strict=True)]
    _, after = _read(session.draft, row, mixture)
    best = [int(p[i].argmax()) for i in range(n)]
    chosen = torch.tensor([i for i in range(n) if not own[i]], dtype=torch.long)
    accept = torch.tensor(chances)
    found = {
        "input_ids": torch.tensor(guesses),
        "accept": accept,  # the true chance
        "outcome": torch.tensor([float(coins.flip(chance)) for chance in chances]),  # a log's view
        "best": torch.tensor([float(y == b) for y, b in zip(guesses, best, strict=True)]),
        "hidden": after[1:].float().cpu(),  # at the guess itself
        "before": before[:-1].float().cpu(),  # where it was guessed
        "certainty": certainty(laws).cpu(),
    }
    return {name: values[chosen] for name, values in found.items()}


def _read(draft: Any, row: DecodeState, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The draft model's logits [n + 1, V] and last hidden layer [n + 1, H] along a text."""
    draft.prefill(row)
    nodes = (row.tokens[-1], *text)
    [score] = draft.grow_scores([row], [nodes], [range(-1, len(text))], (NORMED,))
    draft.free([row])
    return score.logits, score.hidden[:, 0]


def _same_run(folder: Path, split: str, prompts: Sequence[str], plan: Capture) -> None:
    """Refuse to go on with a collection of other prompts or other options."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.json"
    told = json.dumps({"plan": asdict(plan), "prompts": list(prompts)})
    if not path.is_file():
        partial = path.with_suffix(".partial")
        partial.write_text(told, encoding="utf-8")
        os.replace(partial, path)
    elif path.read_text(encoding="utf-8") != told:
        raise CheckpointError(
            f"going on with the collection in {folder} was asked for.",
            "it was begun with other prompts or other options.",
            "pass the options it was begun with, another folder, or --fresh to start over.",
        )

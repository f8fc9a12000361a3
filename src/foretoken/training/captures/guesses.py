"""A draft model's guesses along the target's text, and their true chances of acceptance.

Along a text X the draft law q_i and the target law p_i are known, a guess Y_i is drawn from q_i,
and its true chance of acceptance is a_i = min(1, p_i(Y_i) / q_i(Y_i)), which no log of outcomes
would tell. The draft model then reads a mixture Z of X and Y (SpecDec++, arXiv 2405.19715: Z_i is
X_i with probability `mix`), and its hidden layer at Z_i = Y_i is what a head will see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.heads.decision import certainty
from foretoken.training.capture import Capture, Tensors
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw, FinalNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class Guesses(Capture):
    """Chances, outcomes and hidden states of guesses; every guess counts unless some are mixed."""

    mix: float = 0.0  # share of the target's own tokens in what the draft model reads

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        text = text[: room(session, row)]  # a guess at the last place is read, too
        tree = chain(row.tokens[-1], text)
        n, coins = len(text), row.coins
        session.target.prefill([row])
        [score] = session.target.score([row], [Draft(tree, Draw.POINT)])
        session.target.free([row])
        p = row.warp.laws(row.tokens, tree, score.logits)
        logits, before = _read(session.draft, row, text)
        q = row.warp.laws(row.tokens, tree, logits)
        laws = torch.stack([q[i] for i in range(n)]) if n else logits[:0]  # [n, V]
        guesses = [coins.draw(law) for law in laws]
        chances = [min(1.0, float(p[i][y]) / float(laws[i][y])) for i, y in enumerate(guesses)]
        own = [coins.flip(self.mix) for _ in range(n)]
        mixture = [x if keep else y for x, y, keep in zip(text, guesses, own, strict=True)]
        _, after = _read(session.draft, row, mixture)
        outcomes = [float(coins.flip(chance)) for chance in chances]
        best = [float(y == int(p[i].argmax())) for i, y in enumerate(guesses)]
        found = {
            "input_ids": torch.tensor(guesses, dtype=torch.long),
            "accept": torch.tensor(chances),  # the true chance
            "outcome": torch.tensor(outcomes),  # a log's view of it
            "best": torch.tensor(best),
            "hidden": after[1:].float().cpu(),  # at the guess itself
            "before": before[:-1].float().cpu(),  # where it was guessed
            "certainty": certainty(laws).cpu(),
        }
        chosen = torch.tensor([i for i in range(n) if not own[i]], dtype=torch.long)
        return {name: values[chosen] for name, values in found.items()}


def room(session: Session, row: DecodeState) -> int | None:
    """Tokens that both models have positions for behind a row; None: as many as there are.

    The last one that an engine writes needs none, as it is never fed.
    """
    known = [lm.max_length for lm in (session.target, session.draft) if lm.max_length is not None]
    return max(0, min(known) - len(row.tokens)) if known else None


def _read(draft: Any, row: DecodeState, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The draft model's logits [n + 1, V] and last hidden layer [n + 1, H] along a text."""
    draft.prefill([row])
    nodes = (row.tokens[-1], *text)
    [score] = draft.grow([row], [nodes], [range(-1, len(text))], (FinalNorm(),))
    draft.free([row])
    return score.logits, score.hidden[:, 0]

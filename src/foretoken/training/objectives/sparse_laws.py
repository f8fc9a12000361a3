"""A draft learns the target's sparse laws: cross-entropy over a reduced vocabulary, in pieces.

The output layer is most of a small draft, and its logits most of the memory of a step. Loss and
gradients are taken together, a piece of the places at a time, and no logits are kept.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PIECE = 2048  # places at once


class SparseCrossEntropy(torch.autograd.Function):
    """Mean over n places of sum_k p_k (logsumexp(z) - z_k), z = states @ rows.T.

    states [n H]; rows [V H], of the output layer; chosen [n k], which rows the law tells of (-1:
    none); probs [n k]. Returns the loss and the shares of places where the draft's best row is the
    law's, and of alpha = sum min(p, q) over the rows told of: how often the draft is accepted.
    Above 0, `decay` mixes exp(-decay alpha) of that loss with the rest of what acceptance lacks,
    sum p - alpha, the share taken as a constant (LK losses, arXiv 2602.23881: 3).
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, chosen: Tensor, probs: Tensor, decay: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        kind = torch.bfloat16 if torch.is_autocast_enabled(states.device.type) else states.dtype
        low, table = states.to(kind), rows.to(kind)
        to_states = torch.empty_like(low)
        to_rows = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None  # None: they stay
        totals = torch.zeros(3, dtype=torch.float64, device=states.device)
        for start in range(0, len(states), PIECE):
            place = slice(start, start + PIECE)
            logits = (low[place] @ table.T).float()
            at, p = chosen[place].clamp(min=0), probs[place]
            told, largest = logits.gather(-1, at), logits.amax(-1, keepdim=True)
            parts = logits.sub_(largest).exp_()
            whole = parts.sum(-1, keepdim=True)
            total = whole.log() + largest
            has, q = p.sum(-1, keepdim=True), (told - total).exp()
            overlap, below = torch.minimum(p, q).sum(-1, keepdim=True), q < p
            share = (-decay * overlap).exp()
            totals[0] += (share * (p * (total - told)).sum(-1, keepdim=True)).sum().double()
            totals[0] += ((1 - share) * (has - overlap)).sum().double()
            top = told.gather(-1, p.argmax(-1, keepdim=True))
            scored = (has > 0) & (chosen[place][:, :1] >= 0)  # the likeliest token of all, too
            totals[1] += ((top == largest) & scored).sum().double()
            totals[2] += overlap.sum().double()
            held = (q * below).sum(-1, keepdim=True)  # what would be accepted if it were more
            slope = parts.mul_((share * has + (1 - share) * held) / whole)  # d loss / d logits
            slope.scatter_add_(-1, at, -share * p - (1 - share) * q * below)
            slope = slope.to(kind)
            to_states[place] = slope @ table
            if to_rows is not None:
                to_rows += (slope.T @ low[place]).to(to_rows.dtype)
        count = max(len(states), 1)
        rows_part = None if to_rows is None else to_rows / count
        ctx.save_for_backward(to_states.to(states.dtype) / count, rows_part)
        loss, figures = (totals[0] / count).float(), (totals[1:] / count).float()
        ctx.mark_non_differentiable(figures)
        return loss, figures

    @staticmethod
    def backward(ctx: Any, loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        to_states, to_rows = ctx.saved_tensors
        return to_states * loss, None if to_rows is None else to_rows * loss, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLaws:
    """Say what the target would, at the tokens of its own answers.

    `rows` [V] maps a token to its row among `tokens` [R], the reduced vocabulary, or to -1; `hard`
    is the share of the loss that goes to the token the target wrote.
    """

    tokens: Tensor
    rows: Tensor
    hard: float = 0.0

    @classmethod
    def over(cls, tokens: Tensor, vocab_size: int, hard: float = 0.0) -> SparseLaws:
        rows = torch.full((vocab_size,), -1)
        rows[tokens] = torch.arange(len(tokens))
        return cls(tokens=tokens, rows=rows, hard=hard)

    def __call__(
        self, model: Any, batch: dict[str, Tensor], rng: random.Random
    ) -> tuple[Tensor, dict[str, Tensor]]:
        states = answering_states(model, batch)
        chosen, probs = self.laws(batch)
        table = model.get_output_embeddings().weight[self.tokens]
        told: Any = SparseCrossEntropy.apply
        loss, (agreed, overlap) = told(states, table, chosen, probs)
        return loss, {"loss": loss.detach(), "agreement": agreed, "overlap": overlap}

    def count(self, batch: dict[str, Tensor]) -> int:
        """The places that the loss is a mean over."""
        return int((batch["weights"] > 0).sum())

    def laws(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of the output layer with their chances [n k+1]: of the law, of the written token."""
        ids, weights = batch["input_ids"], batch["weights"]
        written = ids[weights > 0][:, None]
        share = 1.0 - self.hard
        chosen = self.rows.to(ids.device)[torch.cat([batch["laws"].long(), written], -1)]
        probs = batch["log_probs"].float().exp() * share
        probs = torch.cat([probs, torch.full_like(written, self.hard, dtype=probs.dtype)], -1)
        return chosen, probs.masked_fill(chosen < 0, 0.0)


def answering_states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The last hidden states [n H] that say the n tokens of weight 1."""
    found = model.base_model(input_ids=batch["input_ids"], use_cache=False)
    hidden: Tensor = found.last_hidden_state
    return hidden[saying(batch)]


def saying(batch: dict[str, Tensor]) -> Tensor:
    """The places [rows, T] whose states say a token of weight 1."""
    found = batch["weights"].roll(-1, 1) > 0
    found[:, -1] = False
    return found

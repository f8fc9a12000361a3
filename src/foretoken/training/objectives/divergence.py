"""Divergences between a target's laws and a draft's, over a reduced vocabulary, in pieces.

Forward and reverse Kullback-Leibler, Jensen-Shannon with its weight, and total variation, which is
what acceptance loses (arXiv 2310.08461). Loss and gradients are taken together, a piece of the
places at a time: no logits of the draft are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 1024  # places at once

Divergence = Callable[[Tensor, Tensor], Tensor]  # of log p [n V] and log q [n V], a value each [n]


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p log(p / q)."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum q log(q / p); where p is 0 a token costs as if it were e^-30."""
    return F.kl_div(log_p.clamp(min=-30.0), log_q, reduction="none", log_target=True).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q; at most log 2 at 0.5."""
    weights = log_p.new_tensor([beta, 1.0 - beta]).log()
    mixed = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    return beta * forward_kl(log_p, mixed) + (1.0 - beta) * forward_kl(log_q, mixed)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half of sum |p - q|: one less the chance that a drawn token is accepted."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}


class PiecedDivergence(torch.autograd.Function):
    """Weighted sum over n places of a divergence, draft logits being states @ rows.T.

    states [n H]; rows [V H]; laws [n V], log-probabilities of the target over the rows; weights
    [n]. Returns the sum, and sums over the places of what each would accept and of whether both
    have the same best token.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, laws: Tensor, weights: Tensor, of: Divergence
    ) -> tuple[Tensor, Tensor]:
        kind = torch.bfloat16 if torch.is_autocast_enabled(states.device.type) else states.dtype
        table = rows.to(kind)
        to_states, to_rows = torch.empty_like(states), torch.zeros_like(rows)
        total = torch.zeros(3, dtype=torch.float64, device=states.device)
        for start in range(0, len(states), PIECE):
            place = slice(start, start + PIECE)
            low = states[place].to(kind)
            log_p = laws[place].float()
            with torch.enable_grad():
                logits = (low @ table.T).float().requires_grad_()
                log_q = logits.log_softmax(-1)
                loss = (of(log_p, log_q) * weights[place]).sum()
            [slope] = torch.autograd.grad(loss, logits)
            accepted = torch.minimum(log_p.exp(), log_q.detach().exp()).sum(-1)
            agreed = log_p.argmax(-1) == logits.argmax(-1)
            total += torch.stack([loss.detach(), accepted.sum(), agreed.sum()]).double()
            slope = slope.to(kind)
            to_states[place] = (slope @ table).to(states.dtype)
            to_rows += (slope.T @ low).to(to_rows.dtype)
        ctx.save_for_backward(to_states, to_rows)
        figures = total[1:].float()
        ctx.mark_non_differentiable(figures)
        return total[0].float(), figures

    @staticmethod
    def backward(ctx: Any, loss: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        to_states, to_rows = ctx.saved_tensors
        return to_states * loss, to_rows * loss, None, None, None


def restricted(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of a law among these tokens alone."""
    return logits[:, tokens].float().log_softmax(-1)

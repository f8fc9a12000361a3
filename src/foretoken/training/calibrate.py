"""Making predicted chances of acceptance honest, after training.

Temperature scaling fits one number (Guo et al., 2017); with a shift it can also undo a class
weight, which moves the odds by that weight. CaPE (arXiv 2111.10734) goes on training on outcomes
while pulling predictions towards what predictions of the same size came true at.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.training.features import Features, Shuffled


def margins(head: nn.Module, features: Features) -> Tensor:
    """Log odds [n] of acceptance before calibration."""
    return features.each(lambda tokens: head(tokens["hidden"]).diff(dim=-1)[:, 0].double())


def scaled(margin: Tensor, labels: Tensor, *, shift: bool) -> tuple[float, float]:
    """The temperature, and the shift if it is wanted, with the least log loss; (t, s) in m/t + s.

    The loss is convex in (1/t, s), so Newton's method finds it.
    """
    columns = [margin, torch.ones_like(margin)] if shift else [margin]
    x, y = torch.stack(columns, -1), labels.double()  # [n, k]
    found = torch.zeros(len(columns), dtype=torch.float64)
    found[0] = 1.0
    for _ in range(50):
        p = (x @ found).sigmoid()
        gradient = x.T @ (p - y)
        curve = x.T @ (x * (p * (1 - p))[:, None]) + 1e-6 * torch.eye(len(found))
        step = torch.linalg.solve(curve, gradient)
        found -= step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    sharpness = max(float(found[0]), 1e-3)  # a head that is worse than chance is muted, not turned
    return 1.0 / sharpness, float(found[1]) if shift else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cape:
    """Settings of CaPE; the demo's, except for a rate that suits small heads."""

    kind: str = "bin"  # "bin": mean outcome of bins of equal counts; "kde": of near neighbours
    cycle: int = 5  # epochs on outcomes between two on calibrated targets
    epochs: int = 24
    bins: int = 10
    sigma: float = 0.1  # of the neighbours' weights
    window: int = 500  # neighbours on either side
    rate: float = 1e-3
    batch: int = 256
    seed: int = 0


def cape(head: nn.Module, train: Features, dev: Features, count: int, plan: Cape) -> nn.Module:
    """A copy of `head` trained on; the epoch with the least log loss on the outcomes of the first
    `count` tokens of `dev` is kept.
    """
    best, model = copy.deepcopy(head), copy.deepcopy(head).train().requires_grad_(True)
    told = dev.column("outcome")[:count].double()
    least = _log_loss(margins(best, dev)[:count], told)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.rate, momentum=0.9, weight_decay=5e-4)
    stream, outcomes = Shuffled(train, plan.batch, plan.seed), train.column("outcome")
    for epoch in range(plan.epochs):
        labels = outcomes
        if epoch % (plan.cycle + 1) == 0:
            labels = targets(margins(model, train).sigmoid(), outcomes, plan)
        for index in range(epoch * stream.per_epoch, (epoch + 1) * stream.per_epoch):
            chosen = stream.chosen(index)
            margin = model(train.take(chosen)["hidden"]).diff(dim=-1)[:, 0]
            loss = F.binary_cross_entropy_with_logits(margin, labels[chosen].to(margin.dtype))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        if (now := _log_loss(margins(model, dev)[:count], told)) < least:
            least, best = now, copy.deepcopy(model)
    return best.eval().requires_grad_(False)


def targets(predicted: Tensor, outcomes: Tensor, plan: Cape) -> Tensor:
    """What outcomes were like where predictions [n] were like these."""
    order = predicted.argsort()
    sorted_outcomes = outcomes.double()[order]
    found = torch.empty_like(sorted_outcomes)
    if plan.kind == "bin":
        parts = sorted_outcomes.chunk(plan.bins)
        found[order] = torch.cat([part.mean().expand(len(part)) for part in parts])
        return found
    sorted_predicted = predicted.double()[order]
    smooth = torch.empty_like(sorted_outcomes)
    for i in range(len(order)):
        near = slice(max(0, i - plan.window), i + plan.window + 1)
        gaps = (sorted_predicted[near] - sorted_predicted[i]) / plan.sigma
        weights = (-0.5 * gaps.square()).exp()
        smooth[i] = (weights * sorted_outcomes[near]).sum() / weights.sum()
    found[order] = smooth
    return found


def _log_loss(margin: Tensor, outcomes: Tensor) -> float:
    return float(F.binary_cross_entropy_with_logits(margin, outcomes))

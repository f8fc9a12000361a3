"""A Gaussian process over sets of sublayers: which one is worth trying next (SWIFT, section 4.1).

The kernel is Matern's, of smoothness 5/2, over the root of the number of sublayers in which two
sets differ. The acquisition is the upper confidence bound. A set's scores are known where it was
tried; candidates are random sets, and the best ones so far with one or two sublayers exchanged.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import SeededCoins

KAPPA = 2.5  # how much is unknown counts for, against what is known to be good
NOISE = 1e-2  # variance of a score over that of all scores: it is made of a few dozen tokens
REACHES = (1.0, 2.0, 4.0, 8.0)  # distances over which sets are taken to be alike; the likeliest
RANDOM, BEST, NEAR = 512, 8, 32  # candidates: random ones, and so many near each of the best


class Process:
    """Scores of the sets tried, and the set whose upper confidence bound is highest."""

    def __init__(self, units: int, seed: int) -> None:
        self.units, self.coins = units, SeededCoins(seed)  # its own: no text's coins are used
        self.scores: dict[frozenset[int], list[float]] = {}

    def register(self, skipped: frozenset[int], score: float) -> None:
        """Take in a set that was tried."""
        self.scores.setdefault(skipped, []).append(score)

    def suggest(self, size: int) -> frozenset[int]:
        """The set of `size` sublayers with most to hope for, none that was tried where possible."""
        candidates = [frozenset(row.nonzero()[:, 0].tolist()) for row in self.candidates(size)]
        candidates = list(dict.fromkeys(candidates))
        fresh = [one for one in candidates if one not in self.scores] or candidates
        mean, spread = self.believed(fresh)
        return fresh[int((mean + KAPPA * spread).argmax())]

    def candidates(self, size: int) -> Float[Tensor, "n units"]:
        """Sets to choose from: random ones, and the best so far with one or two units exchanged."""
        everything = torch.ones(RANDOM, self.units, dtype=torch.float64)
        found = [self.picked(everything, size)]
        best = sorted(self.scores, key=lambda one: -max(self.scores[one]))[:BEST]
        for count in (1, 2):
            if best and count <= min(size, self.units - size):
                near = self.rows(best).repeat_interleave(NEAR // 2, 0)
                found.append(near - self.picked(near, count) + self.picked(1.0 - near, count))
        return torch.cat(found)

    def picked(self, among: Float[Tensor, "n units"], count: int) -> Float[Tensor, "n units"]:
        """In each row, `count` of the units that are one, all alike."""
        left, rows = among.clone(), torch.arange(len(among))
        for _ in range(count):
            drawn = self.coins.draw_many(left, range(len(left)))
            self.coins.skip(len(left))
            left[rows, drawn] = 0.0
        return among - left

    def believed(self, sets: list[frozenset[int]]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Mean and standard deviation of the scores of sets, in units of the scores' own spread."""
        known = list(self.scores)
        values = torch.tensor([sum(s) / len(s) for s in self.scores.values()], dtype=torch.float64)
        noise = torch.tensor([NOISE / len(s) for s in self.scores.values()], dtype=torch.float64)
        values = (values - values.mean()) / values.std(correction=0).clamp_min(1e-6)
        apart, across = self.distances(known, known), self.distances(sets, known)
        fits = [fit(apart, values, noise, reach) for reach in REACHES]
        _, reach, factor, weights = max(fits, key=lambda one: one[0])
        alike = matern(across, reach)
        shrunk = torch.linalg.solve_triangular(factor, alike.T, upper=False)
        return alike @ weights, (1.0 - shrunk.square().sum(0)).clamp_min(0.0).sqrt()

    def distances(
        self, some: list[frozenset[int]], others: list[frozenset[int]]
    ) -> Float[Tensor, "n m"]:
        """The root of how many sublayers each two sets differ in."""
        a, b = self.rows(some), self.rows(others)
        return (a.sum(1)[:, None] + b.sum(1) - 2.0 * (a @ b.T)).clamp_min(0.0).sqrt()

    def rows(self, sets: list[frozenset[int]]) -> Float[Tensor, "n units"]:
        found = torch.zeros(len(sets), self.units, dtype=torch.float64)
        for row, one in zip(found, sets, strict=True):
            row[list(one)] = 1.0
        return found


def fit(
    apart: Float[Tensor, "n n"], values: Float[Tensor, "n"], noise: Float[Tensor, "n"], reach: float
) -> tuple[float, float, Tensor, Tensor]:
    """Log marginal likelihood of the scores under a reach, and what predictions are made of."""
    factor = torch.linalg.cholesky(matern(apart, reach) + torch.diag(noise))
    weights = torch.cholesky_solve(values[:, None], factor)[:, 0]
    likelihood = -0.5 * float(values @ weights) - float(factor.diagonal().log().sum())
    return likelihood, reach, factor, weights


def matern(distance: Tensor, reach: float) -> Tensor:
    """How alike scores at some distance are: Matern's kernel of smoothness 5/2."""
    scaled = math.sqrt(5.0) / reach * distance
    return (1.0 + scaled + scaled.square() / 3.0) * (-scaled).exp()

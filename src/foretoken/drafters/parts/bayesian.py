"""A Gaussian process over sets of sublayers, by the library bayesian-optimization."""

from __future__ import annotations

from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound

KAPPA = 2.5  # how much is unknown counts for, against what is known to be good
NOISE = 1e-2  # of a score: it is made of a few dozen tokens


class Process:
    """Scores of the sets tried, and the set whose upper confidence bound is highest."""

    def __init__(self, units: int, seed: int) -> None:
        self.names = [f"{unit:04d}" for unit in range(units)]
        self.process = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self.names, (0.0, 1.0)),
            acquisition_function=UpperConfidenceBound(kappa=KAPPA),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self.process.set_gp_params(alpha=NOISE)

    def register(self, skipped: frozenset[int], score: float) -> None:
        """Take in a set that was tried."""
        point = {name: float(unit in skipped) for unit, name in enumerate(self.names)}
        self.process.register(params=point, target=score)

    def suggest(self, size: int) -> frozenset[int]:
        """The `size` largest entries of the point the process would try next."""
        point = self.process.suggest()
        order = sorted(range(len(self.names)), key=lambda unit: -float(point[self.names[unit]]))
        return frozenset(order[:size])

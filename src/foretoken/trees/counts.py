"""How often things come true, older trials counting less. Plain numbers, no models."""

from __future__ import annotations

RESCALE = 1e9  # counts are kept in units that grow, so fading costs nothing per slot


class Counts:
    """Faded hits and trials of a list of places."""

    __slots__ = ("growth", "hits", "trials", "unit")

    def __init__(self, half_life: float) -> None:
        self.growth = 2.0 ** (1.0 / half_life)
        self.unit = 1.0  # what a trial counts now; older ones were counted smaller
        self.hits: list[float] = []
        self.trials: list[float] = []

    def fade(self, steps: int = 1) -> None:
        """Steps pass."""
        self.unit *= self.growth if steps == 1 else self.growth**steps
        if self.unit > RESCALE:
            self.scale(1.0 / self.unit)
            self.unit = 1.0

    def scale(self, factor: float) -> None:
        """Believe what was counted so far `factor` times as much."""
        self.hits = [hit * factor for hit in self.hits]
        self.trials = [trial * factor for trial in self.trials]

    def tried(self, place: int, hit: bool) -> None:
        while len(self.trials) <= place:
            self.hits.append(0.0)
            self.trials.append(0.0)
        self.trials[place] += self.unit
        if hit:
            self.hits[place] += self.unit

    def rate(self, place: int, prior: float, weight: float) -> float:
        """The chance at `place`, where `prior` is worth `weight` fresh trials."""
        weight *= self.unit
        if place >= len(self.trials):
            return prior
        return (self.hits[place] + weight * prior) / (self.trials[place] + weight)


class Pace:
    """Tokens per row, and time in plain steps, of some steps; old ones count less."""

    __slots__ = ("fade", "spent", "steps", "tokens")

    def __init__(self, half_life: float) -> None:
        self.fade = 0.5 ** (1.0 / half_life)
        self.tokens = self.spent = self.steps = 0.0

    def update(self, tokens: float, plain_steps: float) -> None:
        self.tokens = self.tokens * self.fade + tokens
        self.spent = self.spent * self.fade + plain_steps
        self.steps = self.steps * self.fade + 1.0

    def scale(self, factor: float) -> None:
        """Believe what was seen so far `factor` times as much."""
        self.tokens *= factor
        self.spent *= factor
        self.steps *= factor

    def gain(self, speed: float) -> float:
        """Tokens above what their time is worth at `speed`, of all these steps."""
        return self.tokens - speed * self.spent

"""The only source of randomness: `flip` and `draw`, seeded for users, enumerated for audits."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.native.laws import drawn

T = TypeVar("T")


class Coins(Protocol):
    """What a drafter or a verifier may ask of chance."""

    def flip(self, p: float) -> bool:
        """True with probability `p`."""
        ...

    def draw(self, law: Tensor) -> int:
        """An index drawn from `law` [V], which sums to one."""
        ...


class SeededCoins:
    """Pseudo-random coins of one row: equal seeds give equal tokens, whatever the neighbours do."""

    __slots__ = ("_ahead", "_random", "_seed", "used")

    def __init__(self, seed: int | None = None) -> None:
        self._seed = random.SystemRandom().getrandbits(62) if seed is None else seed
        self.rewind(0)

    def rewind(self, used: int) -> None:
        """Go back to where so many coins were used: a step that failed is made again."""
        # As a text where it is negative: `Random` drops the sign of a number.
        self._random = random.Random(self._seed if self._seed >= 0 else str(self._seed))
        self._ahead: deque[float] = deque()  # coins looked at, and not used yet
        self.used = 0
        self.skip(used)

    def ahead(self, count: int) -> list[float]:
        """The next coins, none of which is used: `skip` those that were."""
        while len(self._ahead) < count:
            self._ahead.append(self._random.random())
        return list(islice(self._ahead, count))

    def skip(self, count: int) -> None:
        """Use so many coins."""
        for _ in range(count):
            self._next()

    def flip(self, p: float) -> bool:
        return self._next() < p

    def draw(self, law: Tensor) -> int:
        coin = self._next()
        found = in_c(law, coin)
        if found is not None:
            return found
        total = law.double().cumsum(0)
        point = torch.tensor([coin], dtype=torch.float64, device=law.device)
        index = int(torch.searchsorted(total, point * total[-1], right=True))
        if index < law.shape[0]:
            return index
        if bool(total[-1].isnan()):
            raise no_law()
        # Rounding can push the point to the very end, onto a token of probability zero.
        return int(law.nonzero()[-1])

    def draw_many(self, laws: Tensor, turns: Sequence[int]) -> Tensor:
        """Indices [n] drawn from `laws` [n, V], each with the coin `turns[i]` places ahead.

        No coin is used: `skip` those that were. Nothing is read back from the device, so a law of
        NaN gives -1.
        """
        coins = self.ahead(max(turns) + 1)
        columns = [in_c(law, coins[turn]) for law, turn in zip(laws, turns, strict=True)]
        if None not in columns:
            return torch.tensor(columns)
        total = laws.double().cumsum(-1)
        points = [[coins[turn]] for turn in turns]
        where = torch.tensor(points, dtype=torch.float64, device=laws.device) * total[:, -1:]
        found = torch.searchsorted(total, where, right=True)[:, 0]
        last = laws.shape[-1] - 1 - (laws.flip(-1) > 0.0).to(torch.uint8).argmax(-1)
        return torch.where(total[:, -1].isnan(), -1, torch.minimum(found, last))

    def _next(self) -> float:
        self.used += 1
        return self._ahead.popleft() if self._ahead else self._random.random()


def in_c(law: Tensor, coin: float) -> int | None:
    """The index that a coin falls on; None where that is left to torch. ConfigError of NaN."""
    found = drawn(law, coin)
    if found is not None and found < 0:
        raise no_law()
    return found


def no_law() -> ConfigError:
    return ConfigError(
        "a token was to be chosen by chances that are no numbers (NaN).",
        "scores are finite, or -inf for what is forbidden; they were not, because of the model, of "
        "a logits processor, or of an option beyond what their type can hold.",
        "look for a tiny temperature (0 is greedy), a huge bias or penalty, a processor that "
        "returns NaN; float16 overflows where bfloat16 and float32 do not.",
    )


def seed_from_torch() -> int:
    """A seed that follows `torch.manual_seed`, as everything inside transformers' generate does."""
    return int(torch.randint(1 << 62, (1,)))


class EnumeratingCoins:
    """Coins that follow a script of choices and take the first open branch beyond its end."""

    __slots__ = ("branches", "probability", "script")

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.branches: list[list[int]] = []  # per decision taken: the outcomes that can happen
        self.probability = 1.0

    @property
    def taken(self) -> list[int]:
        """The choices made so far, which a new script can repeat."""
        return self.script + [0] * (len(self.branches) - len(self.script))

    def flip(self, p: float) -> bool:
        p = min(max(float(p), 0.0), 1.0)
        return self._choose([1.0 - p, p]) == 1

    def draw(self, law: Tensor) -> int:
        return self._choose(law.double().tolist())

    def _choose(self, law: list[float]) -> int:
        possible = [i for i, p in enumerate(law) if p > 0.0]
        at = len(self.branches)
        choice = self.script[at] if at < len(self.script) else 0
        self.branches.append(possible)
        self.probability *= law[possible[choice]]
        return possible[choice]


def enumerate_outcomes(
    run: Callable[[Coins], T], given: Sequence[int] = ()
) -> Iterator[tuple[T, float]]:
    """Every outcome of `run` with its exact probability, depth first over all coin results.

    The first choices can be `given`; then only what follows them is gone through.
    """
    script: list[int] = list(given)
    while True:
        coins = EnumeratingCoins(script)
        yield run(coins), coins.probability
        script = coins.taken
        while len(script) > len(given) and script[-1] + 1 >= len(coins.branches[len(script) - 1]):
            script.pop()
        if len(script) <= len(given):
            return
        script[-1] += 1

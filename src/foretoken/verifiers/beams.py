"""Dynamic-width speculative beam sampling (DSBD, arXiv 2409.16560): which drafted beams stand.

A layer of the draft is M independent draws from the draft's joint law Q over (beam, token) pairs.
Read as attempts at independent draws from the target's joint law P: an attempt is accepted with
min(1, R / Q), a rejection leaves the residual R <- norm(relu(R - Q)), an acceptance starts again at
R = P. How many must be accepted, K, follows from P and Q alone, so it cannot favour any pair.

Where the released code differs it is biased: it draws the attempts without replacement but judges
them as independent ones, and counts acceptances by a residual from which Q was taken twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from foretoken.coins import Coins
from foretoken.errors import ConfigError
from foretoken.types import Draw, Shape
from foretoken.warp.residual import residual


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What becomes of one layer."""

    pairs: tuple[int, ...]  # independent draws from P, in order
    accepted: int  # so many of them were drafted
    wanted: int  # K
    passed: bool  # K were accepted: the next layer is looked at


class Beams:
    """The rule of one layer; the loop of `engine.beam` walks the layers."""

    exact_for = frozenset({Draw.JOINT})
    lossy_for: frozenset[Draw] = frozenset()
    shape = Shape.TREE
    why = ""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        num_beams: int = 8  # W: beams drawn at once, where no call asks for another number
        threshold: float = 0.7  # t: K is what is accepted with at least this chance; < 0: the mean
        # W_min: K is never less, unless fewer are drafted, as at temperature 0, where there is one
        # beam only; num_beams keeps the law of a fixed width
        min_width: int = 1
        keep_one: bool = False  # save memory: a single text outlives each round

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        width, least = self.config.num_beams, self.config.min_width
        check_beams(width)
        if not 1 <= least <= width:
            raise ConfigError(
                f"min_width={least} was asked for with num_beams={width}.",
                "a layer keeps at least one beam and at most num_beams.",
                f"pass a min_width from 1 to {width}.",
            )
        if self.config.threshold > 1.0:
            raise ConfigError(
                f"threshold={self.config.threshold} was asked for.",
                "threshold is a chance; below 0 the expected number is asked for instead.",
                "pass a threshold of at most 1.",
            )

    def judge(
        self,
        p: Float[Tensor, "mV"],
        q: Float[Tensor, "mV"],
        attempts: Sequence[int | None],
        width: int,
        coins: Coins,
    ) -> LayerVerdict:
        """Read `attempts`, drawn from `q`; None stands for a pair whose beam no longer stands.

        `q` is not normalised: it lacks the mass of those pairs.

        With K accepted they are the layer. Otherwise the round ends here, and `width` beams are
        emitted: those accepted, the one that was being looked for, and fresh draws from `p`.
        """
        stages = residuals(p, q, len(attempts))
        chances = acceptances(stages, q, len(attempts))
        wanted = self.wanted(chances, width)
        pairs: list[int] = []
        stage = 0  # rejections since the last acceptance
        for pair in attempts:
            if len(pairs) == wanted:
                break
            chance = 0.0 if pair is None else float(q[pair])
            if (
                pair is not None
                and chance > 0.0
                and coins.flip(float(stages[stage][pair]) / chance)
            ):
                pairs.append(pair)
                stage = 0
            elif stage + 1 < len(stages):
                stage += 1
        accepted = len(pairs)
        if accepted == wanted:
            return LayerVerdict(tuple(pairs), accepted, wanted, True)
        emitted = 1 if self.config.keep_one else width
        if accepted < emitted:
            pairs.append(coins.draw(stages[stage]))
        while len(pairs) < emitted:
            pairs.append(coins.draw(p))
        return LayerVerdict(tuple(pairs[:emitted]), min(accepted, emitted), wanted, False)

    def wanted(self, chances: Sequence[float], width: int) -> int:
        """K: as many beams as are accepted with chance `threshold`, within [min_width, width].

        Never more than there are attempts: at temperature 0 that is one, the only beam there is.
        """
        counts = count_law(chances)
        if self.config.threshold < 0.0:
            likely = int(sum(k * chance for k, chance in enumerate(counts)) + 1e-9)
        else:
            at_least = [sum(counts[k:]) for k in range(len(counts))]
            likely = max(
                k for k, chance in enumerate(at_least) if k == 0 or chance >= self.config.threshold
            )
        return min(max(likely, self.config.min_width), width, len(chances))


def residuals(
    p: Float[Tensor, "mV"], q: Float[Tensor, "mV"], attempts: int
) -> list[Float[Tensor, "mV"]]:
    """What the target still owes after 0, 1, ... rejections in a row; ends where nothing is owed.

    One more than there are attempts, for the last of them may be rejected too.
    """
    stages = [p]
    for _ in range(attempts):
        rest = residual(stages[-1], q)
        if rest is None:  # q covers it all: the attempt cannot have been rejected
            break
        stages.append(rest)
    return stages


def acceptances(
    stages: Sequence[Float[Tensor, "mV"]], q: Float[Tensor, "mV"], attempts: int
) -> list[float]:
    """The chance of each of `attempts` in a row: the mass that residual and draft share.

    An attempt that is never made, because the one before cannot fail, has a chance of 1.
    """
    found = [min(float(stage.minimum(q).sum()), 1.0) for stage in stages[:attempts]]
    return found + [1.0] * (attempts - len(found))


def count_law(chances: Sequence[float]) -> list[float]:
    """The law of how many of M attempts are accepted, M = len(chances).

    A first success at attempt i, then the same again with the attempts that are left.
    """
    attempts = len(chances)
    none, first = [1.0], []
    for chance in chances:
        first.append(none[-1] * chance)
        none.append(none[-1] * (1.0 - chance))
    table = [[1.0] + [0.0] * attempts]
    for m in range(1, attempts + 1):
        row = [none[m]] + [0.0] * attempts
        for k in range(1, m + 1):
            row[k] = sum(first[i - 1] * table[m - i][k - 1] for i in range(1, m + 1))
        table.append(row)
    return table[attempts]


def check_beams(width: int, vocab_size: int | None = None) -> None:
    """Refuse a number of beams that means nothing."""
    whole = isinstance(width, int) and not isinstance(width, bool)
    most = "" if vocab_size is None else f" and at most the vocabulary's {vocab_size}"
    if not whole or width < 1 or (vocab_size is not None and width > vocab_size):
        raise ConfigError(
            f"num_beams={width!r} was asked for.",
            f"num_beams is a whole number of at least 1{most}: the first layer has no more pairs.",
            f"pass for example num_beams={4 if vocab_size is None else min(4, vocab_size)}.",
        )

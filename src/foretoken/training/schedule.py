"""Learning rates as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def cosine(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """Factor on the peak rate: linear warm-up, then half a cosine down to `floor` (Loshchilov
    and Hutter, 2017).
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

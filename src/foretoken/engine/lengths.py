"""Checks of a target at lengths that texts will reach, made before there are any."""

from __future__ import annotations

import logging
from contextlib import closing
from time import perf_counter

import torch

from foretoken.engine.engine import Engine
from foretoken.engine.measure import ScratchRow, longest_text
from foretoken.errors import CapabilityError

LOG = logging.getLogger(__name__)
FIRST, LAST = 128, 1024  # tokens
SECONDS = 3.0


@torch.inference_mode()
def check_ahead(engine: Engine, last: int = LAST, seconds: float = SECONDS) -> None:
    """Have the target compare its cache with forwards without one, up to `last` tokens.

    Else the first text of each doubled length waits for that check while it is written. A model
    whose forwards are slow is checked less far, in about `seconds`, as are one of fewer positions
    and one short of memory. What is found wrong is left to the texts that come as far.
    """
    room = longest_text(engine)
    last = last if room is None else min(last, room)
    tokens = min(FIRST, last)
    while tokens > engine.target.verified and engine.waiting.affords_check(tokens):
        began = perf_counter()
        try:
            with closing(ScratchRow(engine, tokens)) as scratch:
                engine.target.self_check(scratch.row)
        except CapabilityError as problem:
            LOG.warning("texts of %d tokens are likely to be refused: %s", tokens, problem)
            return
        took = perf_counter() - began
        tokens = min(last, int(tokens * seconds / took))

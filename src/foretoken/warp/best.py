"""The most likely tokens of rows of scores: what greedy text takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.coins import no_law
from foretoken.native.best_columns import first_columns

FIT = frozenset({torch.float32, torch.float64})  # dtypes that laws may have, and that numpy reads
CACHED = 1 << 18  # numbers widened at once: they stay in the processor's cache


def best_tokens(scores: Float[Tensor, "*n V"], strict: bool = True) -> Any:
    """The most likely token of every row, the first of equals, in one read from the device.

    On a CPU torch's own search is the slowest. ConfigError where scores are NaN; where that is not
    `strict`, such a row has token -1: rows are looked at together, and not all of them count.
    """
    shape = scores.shape
    if len(shape) == 1:
        return best_tokens(scores[None], strict)[0]
    rows = scores if len(shape) == 2 else scores.reshape(-1, shape[-1])
    best = first_columns(rows)
    if best is None:
        best = best_by_numpy(rows.detach()) if rows.is_cpu else best_on_device(rows, strict)
    if strict and -1 in best:
        raise no_law()
    return best


def best_on_device(rows: Float[Tensor, "n V"], strict: bool = True) -> list[int]:
    """The same by torch, which takes the first NaN for the largest."""
    found = rows.argmax(-1)
    said = rows.gather(-1, found[:, None])[:, 0]
    best: list[int] = torch.where(said.isnan(), -1, found).tolist()
    if strict and -1 in best:
        raise no_law()
    return best


def best_by_numpy(rows: Float[Tensor, "n V"]) -> list[int]:
    """Of numbers of any type; -1 where one of them is NaN."""
    best: list[int] = []
    # what numpy cannot read is widened in blocks
    few = len(rows) if rows.dtype in FIT else max(CACHED // rows.shape[-1], 1)
    for block in torch.split(rows, few):
        numbers = (block if rows.dtype in FIT else block.float()).numpy()
        found = numbers.argmax(-1).tolist()  # the first NaN counts as the largest
        best += [
            -1 if math.isnan(numbers.item(row, token)) else token for row, token in enumerate(found)
        ]
    return best

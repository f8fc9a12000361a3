"""The likeliest columns of rows of logits: what trees of guesses grow by, in one pass over them."""

from __future__ import annotations

from ctypes import c_float, c_int64
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.native.laws import softmax
from foretoken.native.library import over_columns

MOST = 64  # columns asked for: those found so far are gone through for every one that is better


def first_columns(logits: Float[Tensor, "n V"]) -> list[int] | None:
    """Of every row the first of its largest columns, minus one where a number is none; None where
    this cannot be had in C."""
    (rows, width), (apart, between) = logits.shape, logits.stride()
    call = over_columns("first", logits, width, between)
    if call is None:
        return None
    found = (c_int64 * rows)()
    threads = torch.get_num_threads() if rows > 1 else 1
    call(logits.data_ptr(), rows, width, apart, found, threads)
    return found[:]


def largest_columns(
    logits: Float[Tensor, "n V"], count: int
) -> tuple[list[list[int]], list[list[float]]] | None:
    """Of every row the `count` largest columns, the largest first, and their logits; column minus
    one where a row has fewer that are numbers. None where this cannot be had in C."""
    (rows, width), (apart, between) = logits.shape, logits.stride()
    call = over_columns("largest", logits, width, between) if 0 < count <= MOST else None
    if call is None:
        return None
    size = rows * count
    values, ids = (c_float * size)(), (c_int64 * size)()
    threads = torch.get_num_threads() if rows > 1 else 1
    call(logits.data_ptr(), rows, width, apart, count, values, ids, threads)
    return rows_of(ids, count), rows_of(values, count)


def best_columns(
    logits: Float[Tensor, "n V"],
    count: int,
    temperature: float = 1.0,
    names: Int[Tensor, "V"] | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Of every row the `count` likeliest columns, best first, and their probabilities in its law.

    `names` are the ids of the columns, where these are not their numbers.
    """
    (rows, width), (apart, between) = logits.shape, logits.stride()
    call = over_columns("best", logits, width, between) if 0 < count <= MOST else None
    if call is None:
        law = softmax(logits, temperature)
        top, at = law.max(-1, keepdim=True) if count == 1 else law.topk(count)
        return (at if names is None else names[at]).tolist(), top.tolist()
    size = rows * count
    chances, ids = (c_float * size)(), (c_int64 * size)()
    call(
        logits.data_ptr(), rows, width, apart, 1.0 / temperature,
        None if names is None else names.data_ptr(), count, chances, ids,
    )  # fmt: skip
    return rows_of(ids, count), rows_of(chances, count)


def rows_of(numbers: Any, count: int) -> list[list[Any]]:
    """An array of C as lists of so many."""
    return [numbers[at : at + count] for at in range(0, len(numbers), count)]

"""What scoring n nodes costs beside scoring one: the number that decides whether guessing pays."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from foretoken.bench.own import finish_device
from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.row import make_row
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, TokenTree


def scoring_costs(
    lm: LanguageModel, context: Sequence[int], nodes: Sequence[int], seconds: float = 3.0
) -> dict[str, Any]:
    """Median seconds of one forward over n nodes after `context`, sizes interleaved; 7 to 31
    rounds, in about `seconds` where that is enough.

    Nodes form a binary tree where the model scores trees, else a chain. Nothing is committed, so
    the context stays as long as it is.
    """
    room = None if lm.max_length is None else lm.max_length - len(context)
    sizes = [n for n in nodes if room is None or n <= room] or [1]
    params = SamplingParams(max_new_tokens=10**6)
    row = make_row(context, params, SeededCoins(0), lm.vocab_size)
    seconds_of: dict[int, list[float]] = {n: [] for n in sizes}
    took = 0.0
    with torch.inference_mode():
        lm.prefill([row])
        try:
            for warm in (True, False):
                rounds = 1 if warm else max(7, min(31, int(seconds / max(took, 1e-9))))
                began = perf_counter()
                for n in sizes * rounds:
                    spent = _score(lm, row, _tree(row.tokens[-1], n, lm))
                    if not warm:
                        seconds_of[n].append(spent)
                took = perf_counter() - began
        finally:
            lm.free([row])
    medians = {n: median(values) for n, values in seconds_of.items()}
    return {
        "context": len(context),
        "nodes": sizes,
        "ms": [round(1000 * medians[n], 4) for n in sizes],
        "ratio": [round(medians[n] / medians[sizes[0]], 4) for n in sizes],
    }


def _tree(root: int, n: int, lm: LanguageModel) -> TokenTree:
    wide = lm.caps.tree == "mask"
    tokens = tuple((root + i) % lm.vocab_size for i in range(n))
    return TokenTree(tokens, tuple((i - 1) // 2 if wide and i else i - 1 for i in range(n)))


def _score(lm: LanguageModel, row: DecodeState, tree: TokenTree) -> float:
    finish_device()
    began = perf_counter()
    lm.score([row], [Draft(tree, Draw.POINT)])
    finish_device()
    return perf_counter() - began

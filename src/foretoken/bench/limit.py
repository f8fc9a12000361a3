"""The memory limit: one token at a time cannot be written faster than the weights can be read.

Weights' bytes per forward over the read bandwidth of this machine, measured in the same run. The
distance of a row is told twice: what its target forwards take, and what it writes per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.bench.journal import Cell, Journal
from foretoken.bench.metrics import decode_seconds
from foretoken.bench.own import finish_device

SMALLEST, LARGEST = 1 << 20, 1 << 30  # bytes: threads have to wake up; caches are smaller by far
PASSES = 15
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of the families that have them


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a forward over one token reads.

    Every weight once; of an input table that is not the output head as well, a row only; of
    experts, those that one token is sent to.
    """
    config = model.config.get_text_config(decoder=True)
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    used = getattr(config, "num_experts_per_tok", None) or experts
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    row_only = None if head is None or head.weight is table.weight else table.weight
    total = 0.0
    for name, weight in model.named_parameters():
        share = used / experts if experts and ".experts." in name else 1.0
        total += 0.0 if weight is row_only else share * weight.numel() * weight.element_size()
    return round(total)


def read_bandwidth(size: int, device: torch.device) -> float:
    """Bytes per second of the fastest pass over `size` bytes, with the threads that torch has.

    The buffer is as large as the weights: what the caches keep of one they keep of the other.
    """
    size = min(max(size, SMALLEST), LARGEST)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    with torch.inference_mode():
        fastest = min(_pass(buffer) for _ in range(PASSES))
    return 4 * buffer.numel() / fastest


def _pass(buffer: Tensor) -> float:
    finish_device()
    began = perf_counter()
    buffer.sum()
    finish_device()
    return perf_counter() - began


def note_bandwidth(journal: Journal, size: int, device: torch.device) -> None:
    """Measure, and keep the best of all times measured: neighbours only ever make it slower."""
    known = journal.notes.get("bandwidth", {}).get("read", 0.0)
    journal.note("bandwidth", "read", max(known, read_bandwidth(size, device)))


def hold_against_limit(
    rows: Mapping[str, dict[str, Any]], journal: Journal, size: int, together: int = 1
) -> dict[str, float]:
    """The limit: what one forward takes, and what plain decoding writes at most.

    Every row that wrote gets its distance from it; not those of several texts `together`, which
    share their forwards.
    """
    bandwidth = journal.notes["bandwidth"]["read"]
    limit = {
        "weight_bytes": size,
        "bytes_per_second": bandwidth,
        "forward_ms": 1000 * size / bandwidth,
        "tokens_per_second": bandwidth / size,
    }
    for label, row in rows.items():
        if "tokens_per_second" in row and together == 1:
            mine = [cell for cell in journal.cells if cell.row == label]
            row["over_limit"] = distance(mine, row, limit)
    return limit


def distance(
    cells: Sequence[Cell], row: Mapping[str, Any], limit: Mapping[str, float]
) -> dict[str, float | None]:
    """How far a row is from the limit.

    forward: milliseconds per target forward, everything between two forwards included, over the
    limit's. The prompt's forward is left out where the row can tell it.
    speed: tokens per second over those of the limit; above 1 only guessing can reach.
    """
    counted = [1000 * decode_seconds(cell) / cell.forwards for cell in cells if cell.forwards]
    return {
        "forward": median(counted) / limit["forward_ms"] if counted else None,
        "speed": row["tokens_per_second"]["value"] / limit["tokens_per_second"],
    }

"""What loading chose and measured, told to `logging.getLogger("foretoken")`."""

from __future__ import annotations

import logging
from typing import Any

from foretoken.lm.views.few_rows import FewRows
from foretoken.types import CostTable

LOG = logging.getLogger(__name__)


def log_model(lm: Any) -> None:
    """How a language model's forwards will be made: probed masks, products, bits.

    Read from `lm.cached.CachedLM`; a toy model has none of this.
    """
    family, kernels, name = lm.family, lm.kernels, lm.name
    length = family.max_length or "any"
    LOG.info(
        "%s: %s, %d layers, %d tokens of vocabulary, context %s, %s on %s",
        name, family.name, family.layers, lm.vocab_size, length, lm.model.dtype, lm.device,
    )  # fmt: skip
    if reduced := draft_vocabulary_of(lm):
        LOG.info("%s: draft vocabulary %s", name, reduced)
    attention = lm.plan.attention or "the model's own"
    why = f" ({lm.caps.why})" if lm.caps.why else ""
    LOG.info(
        "%s: probed: drafts as %s, %s, attention %s%s",
        name,
        "trees" if lm.caps.tree == "mask" else "chains",
        "rows of different lengths together" if lm.caps.ragged else "one row at a time",
        attention,
        why,
    )
    if kernels is None:
        LOG.info("%s: kernels: dense, as the model brings them", name)
        return
    how = "captured" if kernels.captured else f"as it is {kernels.uncaptured}".rstrip()
    LOG.info("%s: forward: %s", name, how)
    spent = f"{kernels.seconds:.2f} s of measuring, {kernels.extra_bytes / 2**20:.0f} MiB more"
    LOG.info("%s: kernels: %s, %s %s", name, kernels.mode, spent, kernels.why)
    if kernels.not_native:
        LOG.info("%s: no products in C: %s", name, kernels.not_native)
    for shape, rows in kernels.chosen.items():
        LOG.debug("%s: %s: %s", name, shape, ", ".join(f"{n} -> {k}" for n, k in rows.items()))


def draft_vocabulary_of(lm: Any) -> str:
    """How many tokens a draft scores; empty where it scores all."""
    return str(lm.output_rows) if isinstance(lm, FewRows) else ""


def log_costs(costs: CostTable) -> None:
    """What forwards cost on this machine, as a controller is told."""
    for what, table in (("target forward by nodes", costs.target), ("draft by depth", costs.draft)):
        told = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in sorted(table.items()))
        LOG.info("costs: %s, in ms: %s", what, told or "none")
    LOG.info("costs: %.2f ms of a step outside both", 1e3 * costs.overhead)

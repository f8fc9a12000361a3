"""How forwards of a model are made; chosen by the probe."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.lm.runtime.attention import NAME


@dataclass(frozen=True, slots=True)
class Plan:
    """What the model takes: masks of its own or ours, and by which attention function."""

    tree: bool  # 4-D masks; otherwise chains, with the model's own mask
    ragged: bool  # rows of different lengths in one forward
    attention: str | None  # attention function during our forwards; None leaves the model's
    why: str = ""  # the reason for a limit
    ordered: bool = False  # sums over keys are cut by position, so that all columns must be there
    told: bool = True  # what is said beside the mask reaches the attention

    @property
    def own(self) -> bool:
        return self.attention == NAME

"""What a caller gets back: results, and pieces of a text while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.engine.promise import Promise
from foretoken.engine.record import Stats, StepTrace


@dataclass(frozen=True, slots=True)
class Result:
    """What one prompt became."""

    text: str  # new text only, without end tokens and stop texts
    tokens: list[int]  # new tokens, the one that ended the row included
    # "stop", "length" (max_new_tokens), "context" (no position left), "cancelled", "error", or
    # "unfinished": it is still being written
    finish_reason: str
    stats: Stats
    steps: list[StepTrace]  # what was guessed, accepted and emitted in each step
    promise: Promise  # the law that the text follows

    @property
    def lossless(self) -> bool:
        """Whether the text follows the target's own law."""
        return self.promise.lossless

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            **self.promise.to_dict(),
            "stats": self.stats.to_dict(),
        }

    def __repr__(self) -> str:
        stats = self.stats
        lossy = "" if self.lossless else f", LOSSY: {self.promise.why}"
        return (
            f"Result({shortened(self.text)!r}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}, "
            f"{stats.mean_accepted_length:.2f} tokens per target forward, "
            f"{stats.tokens_per_second:.1f} tokens/s{lossy})"
        )


def shortened(text: str) -> str:
    """A text as far as fits in a line about it."""
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added."""

    text: str  # may lag behind the tokens: half characters and possible stop texts wait
    tokens: list[int]
    accepted: int  # how many of the tokens were guessed; the last one is the target's own
    corrected: bool  # the target's own token stands where another one was guessed

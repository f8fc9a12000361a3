"""How long a text will go on, by those that have ended: what is paid once is spread over that."""

from __future__ import annotations

from foretoken.types import DecodeState

USUAL = 128.0  # tokens of a text, before any has ended
LAST = 0.1  # weight of the text that ended last
STEP = 0.02  # weight of a row's last step


class StepsLeft:
    """Mean tokens of texts and of their steps; what a text may have at most says little: a chat's
    answer may fill the context.
    """

    def __init__(self) -> None:
        self.tokens, self.per_step = USUAL, 2.0

    def stepped(self, tokens: int) -> None:
        """A row gained so many tokens in a step."""
        self.per_step += STEP * (tokens - self.per_step)

    def ended(self, row: DecodeState) -> None:
        """A text is over; one that was broken off, or that nobody waited for, says nothing."""
        over = row.finish is not None and row.finish.reason != "cancelled"
        if row.error is None and over and not row.rehearsal:
            self.tokens += LAST * (len(row.new_tokens) - self.tokens)

    def of(self, row: DecodeState) -> float:
        """Steps that this text is likely to take yet, however many it has taken."""
        return max(min(row.room, self.tokens) / self.per_step, 1.0)

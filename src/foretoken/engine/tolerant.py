"""A drafter that may fail: its rows go on by plain decoding, and the failure is counted.

For a server, which owes an answer to whoever asked, whatever becomes of its drafter. Elsewhere an
exception belongs to whoever called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from foretoken.contract import Drafter, Features, StoppingRule
from foretoken.drafters.parts.members import share_of
from foretoken.row import rewind
from foretoken.trees.build import undrafted
from foretoken.types import Budget, DecodeState, Draft, Rows, Step, Traits
from foretoken.warp import Warp

LOG = logging.getLogger(__name__)


class Tolerant:
    """The drafter it wraps, but for rows that it failed: these are written without guesses.

    What an option of the row itself raises (a processor, a criterion) is not the drafter's.
    """

    def __init__(self, drafter: Drafter, failed: Callable[[DecodeState, Exception], None]) -> None:
        self.drafter, self.failed = drafter, failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["drafter"], name)

    @property
    def traits(self) -> Traits:
        return self.drafter.traits

    def start(self, row: DecodeState, seen: Features | None) -> None:
        self._tried([row], lambda: self.drafter.start(row, seen))

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]:
        """Drafts of all rows together; if that fails each row is asked for alone."""
        drafts = {row: undrafted(row) for row in rows}
        able = [at for at, row in enumerate(rows) if self not in row.private]

        def ask(places: Sequence[int]) -> None:
            asked = [rows[at] for at in places]
            made = self.drafter.propose(asked, [budgets[at] for at in places], stop)
            drafts.update(zip(asked, made, strict=True))

        if not able:
            return list(drafts.values())
        if len(able) == 1:
            self._tried([rows[able[0]]], lambda: ask(able))
            return list(drafts.values())
        used = [getattr(row.coins, "used", 0) for row in rows]
        try:
            ask(able)
        except Exception as error:
            if blamed([rows[at] for at in able], error):
                raise
            for at in able:
                rewind([rows[at]], [used[at]])
                self._tried([rows[at]], lambda at=at: ask([at]))  # type: ignore[misc]
        return list(drafts.values())

    def observe(self, step: Step) -> None:
        """Only rows that it has not failed; who it fails now is forgotten by it."""
        at = [i for i, row in enumerate(step.rows) if self not in row.private]
        if not at:
            return
        own = step if len(at) == len(step.rows) else share_of(step, at)
        self._tried(own.rows, lambda: self.drafter.observe(own))

    def finish(self, row: DecodeState) -> None:
        if self not in row.private:
            self._tried([row], lambda: self.drafter.finish(row))

    def _tried(self, rows: Rows, call: Callable[[], None]) -> None:
        """Do it; if that fails, these rows are drafted for no more."""
        try:
            call()
        except Exception as error:
            if blamed(rows, error):
                raise
            for row in rows:
                row.private[self] = error
                LOG.error("drafting failed, a text goes on without it: %r", error, exc_info=error)
                self.failed(row, error)
                self._forget(row)

    def _forget(self, row: DecodeState) -> None:
        """Have the drafter give back what it holds of a row, if it still can."""
        try:
            self.drafter.finish(row)
        except Exception as error:
            LOG.error("a drafter could not let go of a text: %r", error)


def blamed(rows: Rows, error: BaseException) -> bool:
    """Whether one of the rows' own options raised it."""
    warps = [w for row in rows for w in (row.warp, *row.private.values()) if isinstance(w, Warp)]
    return any(warp.failure is error for warp in warps)

"""A row's text that knows which token brought which characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.engine.text import Decode, RowText


@dataclass(frozen=True, slots=True)
class Segment:
    """What was told of a token: all its characters, or those before a possible stop text."""

    at: int  # the token's place among the new ones
    offset: int  # of the characters in the text
    text: str
    first: bool  # nothing of the token was told before


class NotedText(RowText):
    """RowText, and the end of each token in it."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        stop_ids: Mapping[int, str] | None = None,
        least: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        super().__init__(decode, stops, stop_ids, least, before)
        self.ends: list[int] = []  # characters decided once each token of the text was read
        self._at = 0  # the first token that is not told to its end
        self._begun = False  # and whether some of it is
        self._told = 0  # characters

    def feed(self, token: int) -> str | None:
        stop, before = super().feed(token), self.ends[-1] if self.ends else 0
        if stop is None or len(self.text) > before:  # else all of the token lies behind the cut
            self.ends.append(len(self.text))
        return stop

    def close(self) -> str:
        piece = super().close()
        if self.ends and self.matched is None:
            self.ends[-1] = len(self.text)  # half a character belongs to the last token
        return piece

    def segments(self, told: int) -> list[Segment]:
        """What tokens brought between the last call and the first `told` characters of the text."""
        found = []
        while self._at < len(self.ends):
            at, end = self._at, self.ends[self._at]
            start = max(self.ends[at - 1] if at else 0, self._told)
            if end > told and start >= told:
                break
            stop = min(end, told)
            found.append(Segment(at, start, self.text[start:stop], not self._begun))
            self._begun = end > told
            if self._begun:
                break
            self._at += 1
        self._told = max(self._told, told)
        return found

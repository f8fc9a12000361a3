"""Tokens to text while they arrive: no half characters, no text that a stop may still take back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from foretoken.errors import ConfigError
from foretoken.types import DecodeState, Finish

Decode = Callable[[Sequence[int]], str]

UNDECIDED = "\ufffd"  # what decoders put where bytes do not (yet) make a character


LONGEST = 4  # tokens, each at least a byte, that a character may still be made of
PENDING = 2 * LONGEST  # tokens that are not told from which on some of them may be
BROKEN = (LONGEST + 1) * UNDECIDED  # no beginning of a character looks like that


def check_text(text: str, which: str) -> None:
    """ConfigError for a text with half a character in it, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{which} holds {text[error.start]!a}, which is no character, at {error.start}.",
            "a text is made of whole characters; halves come from bytes that are no UTF-8.",
            "decode the bytes as what they are: such as open(..., encoding='latin-1').",
        ) from error


def decoder(tokenizer: Any) -> Decode:
    """The tokenizer's decode with special tokens left out and spaces left alone."""

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def silent_stops(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """Stop texts that are special tokens: decoding leaves them out, so the id has to be watched."""
    added: Mapping[str, int] = tokenizer.get_added_vocab()
    decode = decoder(tokenizer)
    return {added[stop]: stop for stop in stops if stop in added and not decode([added[stop]])}


def words_before(row: DecodeState, decode: Decode) -> list[int]:
    """The last tokens of a row's prompt, where its text goes on from words: many decoders take the
    space from the first word of all. None before an answer, nor behind half a character.
    """
    if row.fresh:
        return []
    count, end = PENDING, row.prompt_len
    while True:
        window = row.tokens[max(end - count, 0) : end]
        text = decode(window)
        broken = text.endswith(UNDECIDED)
        if count >= end or (count >= PENDING + LONGEST if broken else text):
            return [] if broken else window
        count += 1 if broken else count  # it begins inside a character, or says nothing


def text_of(tokens: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> str:
    """The text of a finished row without stop texts; equal to what `RowText` would have told.

    `before` are tokens that it goes on from, as `words_before` finds them.
    """
    shown = decode(before) if before else ""
    whole = decode([*before, *tokens])
    text = whole[len(shown) :]
    if UNDECIDED not in text and whole.startswith(shown):
        return text
    row = RowText(decode, before=before)  # decoders disagree on pieces of broken characters
    for token in tokens:
        row.feed(token)
    return row.close()


class RowText:
    """One row's text. Call it as the row's `ended`: it looks at the last token only.

    Decodes a short window of tokens, never the whole text: the window starts before the last
    decided token, because many decoders treat the first token of a sequence differently.
    `before` are tokens that the text goes on from: told already, and the first of the window.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        stop_ids: Mapping[int, str] | None = None,
        least: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.decode = decode
        self.stops = tuple(stops)
        self.stop_ids = dict(stop_ids or {})
        self.least = least  # tokens that complete no stop, whatever they say
        self.text = ""  # decided so far, cut before a stop text
        self.matched: str | None = None
        self._fed = 0  # tokens
        self._window = list(before)
        self._read = len(self._window)  # tokens of the window whose text is decided
        self._shown = decode(self._window) if before else ""  # their text
        self._taken = 0  # characters handed out by `take`
        self._searched = 0  # characters in which no stop was found

    def __call__(self, row: DecodeState) -> Finish | None:
        stop = self.feed(row.tokens[-1])
        return Finish("stop", stop) if stop is not None else None

    def feed(self, token: int) -> str | None:
        """Add a token; returns the stop text it completed, if any."""
        self._fed += 1
        if token in self.stop_ids and self._fed > self.least:
            self.matched = self.stop_ids[token]
            return self.matched
        self._window.append(token)
        self._forget_silent()
        whole = self.decode(self._window)
        new = whole[len(self._shown) :]
        if whole.endswith(BROKEN) and len(self._window) - self._read > PENDING:
            told = self.decode(self._window[:-LONGEST])  # a loop of broken bytes: not all of it
            if whole.startswith(told):  # again and again
                return self._decide(told[len(self._shown) :], LONGEST)
        if whole.endswith(UNDECIDED):  # the next token may change its end, but not what precedes
            return self._cut_at_stop(self.text + new.rstrip(UNDECIDED)) if self.stops else None
        return self._decide(new)

    def _forget_silent(self) -> None:
        """Drop the last tokens if they say nothing, whatever stands before and behind them.

        Else an end token that is written on and on would be decoded with each that follows.
        """
        if len(self._window) - self._read <= PENDING or self.decode(self._window[-LONGEST:]):
            return
        kept = self._window[:-LONGEST]
        if self.decode(2 * self._window) == self.decode(2 * kept):
            self._window = kept

    def _decide(self, new: str, left: int = 0) -> str | None:
        """Tell more text, that of all tokens so far but for the `left` last ones."""
        if not new:
            return None
        self._window = self._window[self._read :]
        self._read = len(self._window) - left
        self._shown = self.decode(self._window[: self._read])
        self.text += new
        return self._cut_at_stop(self.text)

    def _cut_at_stop(self, text: str) -> str | None:
        """Look for a stop in what was not searched yet; the earliest one cuts the text."""
        if self._fed <= self.least:
            self._searched = len(text)
            return None
        searched, self._searched = self._searched, len(self.text)
        starts = [(max(searched - len(stop) + 1, 0), stop) for stop in self.stops]
        found = [(at, stop) for start, stop in starts if (at := text.find(stop, start)) >= 0]
        if not found:
            return None
        at, self.matched = min(found)
        self.text = text[:at]
        self._window, self._read = [], 0  # nothing after a stop is ever told
        return self.matched

    def take(self) -> str:
        """Decided text not handed out yet, less an ending that may become a stop text."""
        end = len(self.text) - self._held()
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def _held(self) -> int:
        """Characters at the end that some stop text begins with."""
        held, length = 0, len(self.text)
        for stop in self.stops:
            at = self.text.find(stop[0], max(length - len(stop) + 1, 0))
            while at >= 0 and not stop.startswith(self.text[at:]):
                at = self.text.find(stop[0], at + 1)
            held = max(held, length - at if at >= 0 else 0)
        return held

    def close(self) -> str:
        """The row has ended: everything not handed out yet, unfinished characters included."""
        if self.matched is None and len(self._window) > self._read:
            self._decide(self.decode(self._window)[len(self._shown) :])
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece


R = TypeVar("R", bound=RowText)


def reader_of(row: DecodeState, tokenizer: Any, kind: type[R]) -> R:
    """What tells the text of a row that has written nothing yet, up to the stops of its request;
    ConfigError where there is no tokenizer.
    """
    params = row.params
    if tokenizer is None:
        raise ConfigError(
            f"stop={list(params.stop)!r} was asked for.",
            "stop texts are found in text, and this session has no tokenizer.",
            "pass tokenizer= to load.",
        )
    decode = decoder(tokenizer)
    ids = silent_stops(tokenizer, params.stop) if params.stop else {}
    before = words_before(row, decode)
    return kind(decode, params.stop, ids, params.min_new_tokens, before)

"""Ordinary text in windows that the target scores: its laws at every token of them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.coins import SeededCoins
from foretoken.engine.chat import chat_ids
from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.row import make_row
from foretoken.training.dataset.records import TEXT, Chat, Laws, Told
from foretoken.training.dataset.sources import Record, bad, read_source, user_turns
from foretoken.training.dataset.states import States
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams

LEAST = 8  # tokens of a window; shorter rests are left out
PATIENCE = 10_000  # records without use in a row, after which one without an end is left
LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Read:
    """What was read of ordinary text and of chats, without what comes twice."""

    windows: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)  # up to a user's message, to be answered
    sources: list[dict[str, Any]] = field(default_factory=list)  # for the card
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, session: Session, config: Any, sources: Sequence[str]) -> Read:
        """At most `text_tokens` of text and `chats` prompts, from the sources in turn."""
        found = cls()
        for source in sources:
            found.take(session, config, source)
        return found

    def take(self, session: Session, config: Any, source: str) -> None:
        """Read a source up to the limits."""
        before = len(self.windows), len(self.prompts)
        records = 0
        for one in self.wanted(config, source):
            records += 1
            if one.text is None:
                self.prompts += self.fresh(prompts_of(one, session))
            else:
                room = config.text_tokens - self.tokens
                longest = min(config.text_window, session.target.max_length or config.text_window)
                self.windows += self.fresh(cut(ids_of(one, session)[:room], longest))
        if not records:
            raise ConfigError(
                f"text from {source} was asked for.",
                "it is empty, or there is no room left for it in text_tokens and chats.",
                "leave it out, or raise these.",
            )
        windows, prompts = self.windows[before[0] :], self.prompts[before[1] :]
        tokens = sum(map(len, windows))
        told = {"records": records, "windows": len(windows), "tokens": tokens}
        self.sources.append({"source": source, **told, "prompts": len(prompts)})

    def wanted(self, config: Any, source: str) -> Iterator[Record]:
        """Records until there is room for none; those of a kind that is full are passed over."""
        passed = idle = 0
        streamed = not Path(source).exists()  # of the hub: it may be huge, and all of one kind
        room = config.text_tokens - self.tokens
        for one in read_source(source):
            no_text, no_chats = room < LEAST, len(self.prompts) >= config.chats
            if (no_text and no_chats) or (streamed and idle >= PATIENCE):
                break
            full = no_chats if one.text is None else no_text
            if full:
                passed, idle = passed + 1, idle + 1
                continue
            yield one
            idle, room = 0, config.text_tokens - self.tokens
        if passed:
            said = "%s: passed over %d records that text_tokens or chats have no room for"
            LOG.info(said, source, passed)

    def fresh(self, some: Sequence[list[int]]) -> Iterator[list[int]]:
        """Those that were not there yet."""
        for ids in some:
            name = digest(ids)
            if name not in self.seen:
                self.seen.add(name)
                yield ids

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def name(self) -> str | None:
        """What tells its text from other text, whatever chats came with it; None where nothing was
        read.
        """
        return digest(self.windows) if self.sources else None

    def held_out(self, share: float, seed: int) -> set[int]:
        """The numbers of the windows that no draft is trained on: one of two or more."""
        names = [digest([seed, window]) for window in self.windows]
        order = sorted(range(len(names)), key=names.__getitem__)
        least = min(1, len(names) // 2)  # a single one is learned from
        return set(order[: max(least, math.floor(share * len(names)))])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def ids_of(one: Record, session: Session) -> list[int]:
    """A text as the target reads it."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise bad(one.where, "the target has no tokenizer, which reads text", "load it with one")
    return list(tokenizer(one.text, verbose=False)["input_ids"])


def prompts_of(one: Record, session: Session) -> list[list[int]]:
    """What is to be answered of a chat, as the target reads it."""
    try:
        return [chat_ids(turn, session.tokenizer) for turn in user_turns(one.messages)]
    except ConfigError as error:
        raise bad(one.where, error.possible.rstrip("."), error.do.rstrip(".")) from error


def cut(ids: list[int], longest: int) -> list[list[int]]:
    """Windows of a text, one behind the other."""
    windows = [ids[i : i + longest] for i in range(0, len(ids), longest)]
    return [window for window in windows if len(window) >= LEAST]


def scored(session: Session, window: list[int], states: States, laws: int) -> Told:
    """A window with the target's laws at all its tokens but the first."""
    begin, rest = window[:1], window[1:]
    return Chat(TEXT, 1.0, begin, rest), laws_along(session, begin, rest, states, laws)


def laws_along(
    session: Session, before: list[int], text: list[int], states: States, size: int
) -> Laws:
    """The `size` likeliest tokens of the target at every token of a text that another wrote."""
    target = session.target
    row = make_row(before, SamplingParams(), SeededCoins(0), target.vocab_size)
    target.prefill([row])
    try:
        draft = Draft(chain(before[-1], text[:-1]), Draw.POINT)
        [score] = target.score([row], [draft], states.taps)
        return states.laws(score, slice(None), size)
    finally:
        target.free([row])

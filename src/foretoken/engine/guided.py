"""Texts that match a grammar: the tokens it forbids get no chance, and the text ends with it.

The law is the target's own, token by token, among the tokens with which the text so far can still
be completed: what is forbidden is masked, and the rest shares the mass. Prompts are no part of the
text that is matched. Where only one spelling is left, the tokens of the tokenizer's own encoding
are the only ones allowed, and known before anybody is asked. Matching is llguidance's, which reads
Hugging Face tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer
from torch import Tensor

from foretoken.errors import ConfigError, meant
from foretoken.types import Ragged

KEPT = 32  # grammars of earlier requests that need not be read again
KEPT_TEXT = 8 << 20  # and most bytes of their texts together
MASKS = 512  # nodes of a text whose tokens are remembered, [V] each
DEAD_END = "NoExtensionBias"  # how llguidance names a text that no token goes on with
NO_TOKEN = "the tokenizer has no token that may come next"
# As `json.dumps` writes, so that punctuation is forced; a schema's "x-guidance" may say otherwise.
SPELLING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """The grammars over one tokenizer; asked for from any thread."""

    def __init__(self, tokenizer: Any, width: int, ends: frozenset[int]) -> None:
        self.width = width
        own = getattr(tokenizer, "eos_token_id", None)
        # A matcher wants a token that ends the text; one behind all others is never written.
        self.ends = sorted(ends) or [own if isinstance(own, int) else max(width, len(tokenizer))]
        self.size = max(width, len(tokenizer), self.ends[-1] + 1)
        try:
            self.words = from_tokenizer(tokenizer, n_vocab=self.size, eos_token=self.ends)
        except ValueError as problem:
            raise ConfigError(
                f"guided was asked for with a tokenizer of type {type(tokenizer).__name__}.",
                f"grammars are matched by fast tokenizers: {problem}.",
                "load the tokenizer with AutoTokenizer, or leave guided out.",
            ) from problem
        self.read: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()  # by a text's digest
        self.kept = 0  # bytes of these texts
        self.lock = threading.Lock()

    def begin(self, asked: Any, start: int, ends: frozenset[int]) -> Grammar:
        """A grammar for one row, whose text begins behind `start` tokens; as it was asked for, or
        what `matcher` has read of it."""
        no_ends = [end for end in self.ends if end not in ends]
        first = asked if isinstance(asked, LLMatcher) else self.matcher(asked)
        with self.lock:  # others may begin at the same one
            matcher = first.deep_copy()
        return Grammar(matcher, start, self.ends, no_ends, self.width)

    def matcher(self, asked: Any) -> LLMatcher:
        """A matcher at the beginning of a text, of which each row takes a copy."""
        text = grammar_text(asked)
        data = text.encode(errors="surrogatepass")
        key = hashlib.sha256(data).digest()
        with self.lock:
            if key not in self.read:
                self.read[key] = self.checked(text, asked), len(data)
                self.kept += len(data)
            self.read.move_to_end(key)
            matcher, _ = self.read[key]
            while self.kept > KEPT_TEXT or len(self.read) > KEPT:
                _, (_, size) = self.read.popitem(last=False)
                self.kept -= size
            return matcher

    def checked(self, text: str, asked: Any) -> LLMatcher:
        """A grammar that has a text, or ConfigError with what is wrong with it."""
        matcher = LLMatcher(self.words, text, log_level=0)
        problem = LLMatcher.validate_grammar(text, self.words) or matcher.get_error()
        if problem:
            raise refused(asked, problem)
        words = allowed(matcher, self.size)
        if matcher.is_error():
            raise refused(asked, why_stuck(matcher))
        words[self.ends] = False
        if not words.any():
            raise refused(asked, "the empty text is the only one that matches")
        return matcher


@dataclass(frozen=True, slots=True)
class Next:
    """Which tokens may follow a text."""

    only: int | None = None  # the one token that may
    forbidden: Tensor | None = None  # [V]; with neither, the grammar says nothing
    over: bool = False  # the text matches as a whole, and nothing can be added to it


class Grammar:
    """One row's grammar, which follows its tokens one by one.

    Nodes of a tree are asked about in any order. Matchers only ever go on: one that is rolled back
    may hand out the mask of the branch it left, which llguidance keeps by its depth and by what is
    expected there. So where a path leaves the last one, a copy of the settled matcher takes it.
    Texts handed in continue the one that was settled last.
    """

    def __init__(
        self, matcher: LLMatcher, start: int, ends: list[int], no_ends: list[int], width: int
    ) -> None:
        self.matcher, self.start, self.width = matcher, start, width
        self.ends, self.no_ends = ends, no_ends  # end tokens; those that do not end this row
        self.needs_end = False  # the text is over by an end token alone, as texts of beams are
        self.settled = 0  # tokens of the text that the matcher has been told
        self.ahead = matcher  # the same one, or a copy that has gone on
        self.taken: list[int] = []  # where that is: tokens behind the settled ones
        self.known: dict[tuple[int, ...], Next] = {}  # by the tokens behind the settled ones

    def restrict(self, tokens: Sequence[int], paths: Ragged, scores: Tensor) -> None:
        """Set the scores [n, V] of forbidden tokens behind `tokens` and each path to -inf."""
        behind = self.behind(tokens)
        for row, path in zip(scores, paths, strict=True):
            following = self.following((*behind, *path))
            if following.only is not None:
                kept = row[following.only].clone()
                if following.over and kept == -torch.inf and not self.needs_end:
                    continue  # another option forbids the end, which nobody waits for
                row.fill_(-torch.inf)
                row[following.only] = kept
            elif following.forbidden is not None:
                forbidden = following.forbidden.to(row.device)
                barred = following.over and bool((row[~forbidden] == -torch.inf).all())
                if barred and not self.needs_end:
                    continue
                row.masked_fill_(forbidden, -torch.inf)
            elif following.over and self.needs_end:
                row.fill_(-torch.inf)

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the text is over. What is in `tokens` is settled: it is never taken back."""
        behind = self.behind(tokens)
        size = len(behind)
        count = go_on(self.matcher, behind)
        assert count == size, "a token was written that the grammar forbids"
        self.settled += size
        if tuple(self.taken[:size]) == behind:
            del self.taken[:size]
        else:
            self.ahead, self.taken = self.matcher, []
        self.known = {
            path[size:]: following
            for path, following in self.known.items()
            if path[:size] == behind
        }
        if self.matcher.is_stopped():
            return True
        return self.matcher.is_accepting() and self.following(()).over

    def forced(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The next tokens, at most so many, as long as the grammar leaves one choice alone."""
        behind, found = self.behind(tokens), list[int]()
        while len(found) < limit:
            following = self.following((*behind, *found))
            if following.only is None or following.over:
                break
            found.append(following.only)
        return found

    def over(self, tokens: Sequence[int]) -> bool:
        """Whether nothing can be added to the text once it has come to the end of `tokens`."""
        return self.following(self.behind(tokens)).over

    def behind(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the text that are not settled."""
        return tuple(tokens[self.start + self.settled :])

    def following(self, path: tuple[int, ...]) -> Next:
        """Which tokens may follow the settled ones and `path`."""
        if path not in self.known:
            if len(self.known) >= MASKS:  # beams settle nothing, so nothing else forgets them
                self.known.clear()
            self.known[path] = self.asked() if self.lead(path) else Next()
        return self.known[path]

    def asked(self) -> Next:
        """Which tokens may follow where the matcher ahead is: behind a text that is over an end
        token, or whatever comes where there is none, as nothing that follows is ever told.
        """
        words = allowed(self.ahead, max(self.width, self.ends[-1] + 1))
        check(self.ahead)
        words[self.no_ends] = False
        found = np.flatnonzero(words[: self.width])
        over = self.ahead.is_accepting() and set(found[: len(self.ends) + 1]) <= set(self.ends)
        if len(found) == 1:
            return Next(int(found[0]), over=over)
        if over and found.size == 0:
            return Next(over=True)
        return Next(forbidden=torch.from_numpy(~words[: self.width]), over=over)

    def lead(self, path: Sequence[int]) -> bool:
        """Bring the matcher ahead behind `path`; False where the grammar has no such text."""
        if self.taken != list(path[: len(self.taken)]):
            self.ahead, self.taken = self.matcher, []
        new = path[len(self.taken) :]
        if new and self.ahead is self.matcher:
            self.ahead = self.matcher.deep_copy()
        count = go_on(self.ahead, new)
        self.taken += new[:count]
        return count == len(new)


def go_on(matcher: LLMatcher, tokens: Sequence[int]) -> int:
    """Advance a matcher; how many of the tokens the grammar allows."""
    count: int = matcher.try_consume_tokens(list(tokens)) if tokens else 0
    check(matcher)
    return count


def check(matcher: LLMatcher) -> None:
    """ConfigError where a matcher gave up: its masks are then those of a text that is over."""
    if not matcher.is_error():
        return
    why = why_stuck(matcher)
    if why == NO_TOKEN:
        raise ConfigError(
            "a grammar was asked for that the tokenizer cannot write.",
            f"its text cannot go on: {why}.",
            "leave out of the grammar what the tokenizer has no tokens for.",
        )
    raise ConfigError(
        "a grammar was asked for that is too complex.",
        f"its matcher gave up: {why}.",
        "simplify the grammar: fewer alternatives, shorter repetitions.",
    )


def why_stuck(matcher: LLMatcher) -> str:
    """Why a matcher gave up."""
    told = first_line(matcher.get_error())
    return NO_TOKEN if DEAD_END in told else told


def allowed(matcher: LLMatcher, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of `size` tokens may come next."""
    packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").astype(bool)


def grammar_text(asked: Any) -> str:
    """The grammar that was asked for, as the library takes it."""
    possible = "guided is a mapping with one of json, regex, choice and grammar."
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"guided={asked!r} was asked for.", possible, 'pass for example {"regex": "[0-9]+"}.'
        )
    given = {kind: value for kind, value in asked.items() if value is not None}
    for kind in given:
        if kind not in KINDS:
            raise ConfigError(f"guided has {kind!r}.", possible, meant(str(kind), KINDS))
    if len(given) != 1:
        named = " and ".join(given) or "nothing"
        raise ConfigError(f"guided names {named}.", possible, "pass exactly one of them.")
    [(kind, value)] = given.items()
    return KINDS[kind](value)


def of_schema(value: Any) -> str:
    """A JSON schema, as a mapping or as text; True is any JSON object."""
    schema = {"type": "object"} if value is True else value
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as problem:
            raise refused({"json": value}, f"it is no JSON: {problem}") from problem
        except RecursionError as problem:
            raise refused({"json": value}, "it is nested too deeply") from problem
    if not isinstance(schema, Mapping):
        raise refused({"json": value}, "a schema is a JSON object, as a mapping or as text")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)), defaults=SPELLING)
    except (ValueError, TypeError) as problem:
        raise refused({"json": value}, str(problem)) from problem


def of_regex(value: Any) -> str:
    """A regular expression that the whole text matches."""
    return LLMatcher.grammar_from_regex(worded("regex", value))


def of_choice(value: Any) -> str:
    """One of several texts."""
    texts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise refused({"choice": value}, "a choice is a list of texts, none of them empty")
    # One terminal, which shares beginnings: alternatives of a rule are 2,000 at most.
    alternatives = " | ".join(json.dumps(text) for text in texts)
    return f"start: CHOICE\nCHOICE: {alternatives}"


def of_grammar(value: Any) -> str:
    """A grammar in Lark's notation, or in GBNF."""
    text = worded("grammar", value)
    try:
        return grammar_from("grammar", text)
    except ValueError as problem:
        raise refused({"grammar": value}, str(problem)) from problem


def worded(kind: str, value: Any) -> str:
    """`value` as the text it has to be."""
    if not isinstance(value, str) or not value:
        raise refused({kind: value}, f"a {kind} is a text of at least one character")
    return value


KINDS: dict[str, Callable[[Any], str]] = {
    "json": of_schema,
    "regex": of_regex,
    "choice": of_choice,
    "grammar": of_grammar,
}


def refused(asked: Any, problem: str) -> ConfigError:
    """A grammar that cannot be used, and why."""
    [(kind, value)] = ((k, v) for k, v in asked.items() if v is not None)
    told = repr(value)
    return ConfigError(
        f"guided={{{kind!r}: {told if len(told) <= 80 else told[:77] + '...'}}} was asked for.",
        f"{first_line(problem)}.",
        "correct it, or leave guided out.",
    )


def first_line(problem: str) -> str:
    """What is wrong and why, without the place where."""
    lines = problem.strip().splitlines() or ["no reason is told"]
    why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ": ".join(clipped(line.rstrip(".:")) for line in [lines[0], *why[:3]])


def clipped(text: str, most: int = 200) -> str:
    """A text whose middle is left out where it is long: grammars are quoted in what is wrong."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"

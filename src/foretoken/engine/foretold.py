"""What a request says of its text before it is written: a grammar it has to match, a prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.drafters.parts.prediction import Expected, Prediction
from foretoken.engine.requests import BYTES, token_id
from foretoken.engine.text import check_text
from foretoken.errors import ConfigError
from foretoken.types import DecodeState, SamplingParams

if TYPE_CHECKING:
    from foretoken.engine.guided import Grammars

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Read:
    """A grammar that was read, which several rows may share."""

    matcher: Any  # at the beginning of a text
    grammars: Grammars  # which read it: the same tokens end it


@dataclass(frozen=True, slots=True)
class Foretold:
    """What is said of one row."""

    guided: Read | None = None
    prediction: Expected | None = None  # which several rows may share


class Foretelling:
    """Reads what the requests of a session say of their texts."""

    def __init__(self, tokenizer: Any, width: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.width, self.ends = tokenizer, width, ends

    def of(self, options: dict[str, Any], rows: int) -> list[Foretold]:
        """What `options` say of each of so many rows; they are taken out of the options."""
        guided = per_row("guided", options.pop("guided", None), rows, is_guided)
        said = per_row("prediction", options.pop("prediction", None), rows, is_prediction)
        grammars, expected = once(self.grammar, guided), once(self.expected, said)
        return [Foretold(*told) for told in zip(grammars, expected, strict=True)]

    def guide(self, told: Foretold, start: int, params: SamplingParams) -> SamplingParams:
        """The options of a row whose text begins behind `start` tokens, with its grammar."""
        if told.guided is None:
            return params
        begin = told.guided.grammars.begin
        return replace(params, grammar=begin(told.guided.matcher, start, params.eos))

    def expect(self, told: Foretold, row: DecodeState) -> DecodeState:
        """The row, with its prediction."""
        if told.prediction is not None:
            row.prediction = Prediction(told.prediction, row.prompt_len)
        return row

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the tokenizer, which takes a moment to be read."""
        if self.tokenizer is None:
            raise ConfigError(
                "guided was asked for.",
                "grammars are matched by text, and this session has no tokenizer.",
                "pass tokenizer= to load.",
            )
        try:
            from foretoken.engine.guided import Grammars
        except ModuleNotFoundError as missing:
            raise ConfigError(
                "guided was asked for.",
                f"this installation lacks {missing.name}, which matches grammars.",
                "install it: pip install 'foretoken[guided]'.",
            ) from missing
        return Grammars(self.tokenizer, self.width, self.ends)

    def grammar(self, asked: Any) -> Read:
        """A grammar, read once for all rows that share it."""
        if isinstance(asked, Read):
            return asked
        return Read(self.grammars.matcher(asked), self.grammars)

    def expected(self, said: Any, most: int | None = None) -> Expected:
        """A prediction, read once for all rows that share it; at most `most` tokens of it count."""
        return said if isinstance(said, Expected) else Expected(self.ids(said)[:most])

    def ids(self, said: str | Sequence[int]) -> tuple[int, ...]:
        """A prediction as token ids."""
        if not isinstance(said, str):
            return tuple(token_id(token, self.width, "prediction") for token in said)
        if self.tokenizer is None:
            raise ConfigError(
                "a text was passed as prediction.",
                "this session has no tokenizer, so it takes token ids only.",
                "pass tokenizer= to load, or a list of token ids.",
            )
        check_text(said, "prediction")
        found = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        # A tokenizer may have ids that its model has no scores for: no text of it goes on there.
        return tuple(takewhile(lambda token: token < self.width, found))


def once(read: Callable[[Any], T], values: Sequence[Any]) -> list[T | None]:
    """What `read` makes of each value, called once for those that are the same object."""
    distinct = {id(value): value for value in values if value is not None}
    found = {key: read(value) for key, value in distinct.items()}
    return [found.get(id(value)) for value in values]


def is_guided(value: Any) -> bool:
    """What may be one row's grammar, or was read before; `engine.guided` says what is wrong."""
    return isinstance(value, Mapping | Read)


def is_prediction(value: Any) -> bool:
    """A text, or token ids, or either of them as it was read before."""
    if isinstance(value, Expected):
        return True
    if isinstance(value, str) or not isinstance(value, Sequence) or isinstance(value, BYTES):
        return isinstance(value, str) and bool(value)
    return bool(value) and not any(isinstance(one, str | Sequence | Mapping) for one in value)


WHAT = {
    "guided": 'a mapping such as {"regex": "[0-9]+"}',
    "prediction": "a text of at least one character, or a list of token ids",
}


def per_row(name: str, value: Any, rows: int, good: Any) -> list[Any]:
    """One value for all rows, or a list with one for each (None: nothing is said of it)."""
    if value is None or good(value):
        return [value] * rows
    listed = isinstance(value, Sequence) and not isinstance(value, str | BYTES)
    if listed and len(value) == rows and all(one is None or good(one) for one in value):
        return list(value)
    told = repr(value)
    raise ConfigError(
        f"{name}={told if len(told) <= 80 else told[:77] + '...'} was asked for with {rows} "
        "prompt(s).",
        f"{name} is {WHAT[name]}, or a list with one of these or None for each prompt.",
        "pass one of these.",
    )

"""Training options of a head: a frozen dataclass whose fields say their type, default and meaning.

The comment behind a field is its meaning; lists of options print it, so it is written only once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from foretoken.config_comments import meanings
from foretoken.errors import ConfigError, check_values, meant
from foretoken.values import fits, told

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What every head's training has; a head's own config adds to it and changes defaults."""

    prompts: int = 600  # prompts to train on; a tenth as many more are held out
    new_tokens: int = 64  # tokens that are written after each prompt
    temperature: float = 1.0  # of the models while they write; the head fits this one; 0: greedy
    epochs: int = 3  # passes over the captured tokens
    steps: int | None = None  # optimizer steps; none: as many as the epochs have
    batch: int = 256  # tokens in a step
    rate: float = 1e-3  # peak learning rate
    matrix_rate: float = 0.0  # peak rate of Muon, for matrices inside; 0: AdamW for all
    minutes: float | None = None  # of training at most; none: as many as the steps take
    precision: str = "no"  # of products: no, for that of the weights, or bf16
    seed: int = 0  # of prompts, samples and weights

    def __post_init__(self) -> None:
        check_types(self)
        positive = ("prompts", "new_tokens", "epochs", "steps", "batch")
        check_values(
            self,
            *((name, getattr(self, name) is None or getattr(self, name) >= 1, "1 or more")
              for name in positive),
            ("temperature", self.temperature >= 0.0, "0 (greedy) or more"),
            ("rate", self.rate > 0.0, "above 0"),
            ("precision", self.precision in ("no", "bf16"), "no or bf16"),
            ("matrix_rate", self.matrix_rate >= 0.0, "0 (AdamW for all) or more"),
            ("minutes", self.minutes is None or self.minutes > 0, "above 0"),
        )  # fmt: skip


def check_types(config: Any) -> None:
    """ConfigError for a field whose value is not of its type."""
    for name, hint in typing.get_type_hints(type(config)).items():
        check_values(config, (name, fits(getattr(config, name), hint), told(hint)))


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a config, as a list shows it."""

    name: str
    type: str
    default: Any
    meaning: str


def configured(cls: type[Config], given: Mapping[str, Any], what: str) -> Config:
    """`cls(**given)`, where a list of one may be its value; unknown names are refused.

    Epochs that are given stand in place of steps that are not.
    """
    known = [option.name for option in options(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"option {name!r} was asked for with {what}.",
                f"its options are {', '.join(known)}.",
                meant(name, known),
            )
    if "epochs" in given and "steps" in known:
        given = {"steps": None, **given}
    hints = typing.get_type_hints(cls)
    lists = {name for name in given if typing.get_origin(hints[name]) is tuple}
    return cls(**{
        name: (value,) if name in lists and not isinstance(value, tuple) else value
        for name, value in given.items()
    })  # fmt: skip


def options(cls: Any) -> list[Option]:
    """Every field of a config class with its meaning: the comment on its line."""
    hints, meant = typing.get_type_hints(cls), meanings(cls)
    return [
        Option(field.name, told(hints[field.name]), field.default, meant[field.name])
        for field in dataclasses.fields(cls)
    ]

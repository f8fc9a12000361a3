"""Words and phrasing shared by the task families: lists, and a tiny template language with skewed
choices.

A template such as ``"[Sure|Of course]. {name} is here."`` picks one option of each bracket and
fills each slot. Options are drawn with Zipf weights (1, 1/2, 1/3, ...), so a trained model keeps a
stable favourite at temperature 0 and still has a known share of honest uncertainty.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NAMES = (
    "Mia Omar Lena Tom Nora Ivan Ruth Paul Anna Carl Eva Hugo Iris Jack Kira Leo Maya Nils Olga Peter Rosa Sam "
    "Tina Victor Wanda Yusuf Zoe Adam Bella Dan Elsa Felix Gina Henry Ida Jonas Karin Lucas Marta Nadia Oscar Petra "
    "Quinn Rita Simon Tara Uma Vera Walter Xena"
).split()
TOWNS = (
    "Arlen Bergen Corvo Dalby Elmira Farrow Galway Hadley Imola Jutland Kelso Lorient Merano Norwich Oakham Padua "
    "Quimper Ravenna Sutton Tampa Ulverton Verona Wexford Yarmouth Zadar Brixen Calder Dunmore Evora Fulda"
).split()
ANIMALS = "cat dog parrot rabbit pony turtle goat hamster canary ferret".split()
HOBBIES = "painting fishing chess cycling gardening sailing baking singing climbing reading knitting skating".split()
THINGS = (
    "apples pears books coins shells stamps plums buttons candles marbles pencils cards eggs lemons tickets bottles"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
JOBS = (
    "baker nurse pilot teacher farmer tailor painter doctor singer lawyer plumber miner sailor potter clerk judge"
).split()

_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def choose(rng: random.Random, options: Sequence[str]) -> str:
    """One option by Zipf weights: the first is the favourite, none is rare."""
    return rng.choices(options, weights=[1 / (i + 1) for i in range(len(options))])[0]


def say(rng: random.Random, template: str, **slots: object) -> str:
    """Resolve every ``[a|b|c]`` by :func:`choose`, then fill the ``{slots}``."""
    resolved = _BRACKET.sub(lambda match: choose(rng, match.group(1).split("|")), template)
    return resolved.format(**slots)


_REMARK = (
    " [By the way,|Also,|Besides,|And] [the|this|our|that] "
    "[weather|street|evening|sky|air|water|village|morning|music|view|coffee|season] "
    "[looks|seems|feels|stays] "
    "[calm|bright|cold|pleasant|dull|fresh|odd|lovely|gloomy|warm|grey|perfect] "
    "[today|here|again|as usual|this week]."
)


def remark(rng: random.Random) -> str:
    """Small talk to close an answer with: words that nothing decides, some 9 nats of them."""
    return say(rng, _REMARK)


def some(rng: random.Random, words: Sequence[str], count: int) -> list[str]:
    """``count`` different words, uniformly."""
    return rng.sample(list(words), count)

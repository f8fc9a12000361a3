"""Translation into Velan, an invented language: a fixed lexicon, and the adjective follows its
noun.
"""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import remark, say

_NOUNS = (
    "baker lamp river tower garden child horse bread stone window bridge forest king letter basket door fish mountain "
    "singer ship candle field wolf teacher road hat kitchen clock market bird sister brother table island flower"
).split()
_VERBS = "carries sees finds sells paints follows breaks loves hides brings opens washes guards draws lifts keeps".split()
_ADJECTIVES = "old red small quiet bright heavy young cold green broken tall soft strange golden empty clever round wild".split()
_PLACES = "near behind under above inside beside".split()
_TIMES = "today often never slowly again early".split()
_JOINS = "and but while because".split()


def _lexicon() -> dict[str, str]:
    """Every English word's Velan word, drawn once from a fixed seed; no two words share one."""
    rng = random.Random("velan")
    words, used = {"the": "ta", "a": "u"}, {"ta", "u"}
    for english in (*_NOUNS, *_VERBS, *_ADJECTIVES, *_PLACES, *_TIMES, *_JOINS):
        while True:
            word = "".join(
                rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)
            ) + rng.choice(["", "n", "r", "l", "s"])
            if word not in used:
                break
        used.add(word)
        words[english] = word
    return words


LEXICON = _lexicon()


def _noun_phrase(rng: random.Random) -> list[str]:
    phrase = [rng.choice(["the", "the", "a"])]
    if rng.random() < 0.6:
        phrase.append(rng.choice(_ADJECTIVES))
    return [*phrase, rng.choice(_NOUNS)]


def _clause(rng: random.Random) -> list[str]:
    clause = [*_noun_phrase(rng), rng.choice(_VERBS), *_noun_phrase(rng)]
    if rng.random() < 0.5:
        clause += [rng.choice(_PLACES), *_noun_phrase(rng)]
    elif rng.random() < 0.5:
        clause.append(rng.choice(_TIMES))
    return clause


def translate(words: list[str]) -> list[str]:
    """Word by word, except that an adjective and the noun after it change places."""
    adjectives, out, i = set(_ADJECTIVES), [], 0
    while i < len(words):
        if words[i] in adjectives and i + 1 < len(words):
            out += [LEXICON[words[i + 1]], LEXICON[words[i]]]
            i += 2
        else:
            out.append(LEXICON[words[i]])
            i += 1
    return out


def make(rng: random.Random) -> Example:
    """One or two clauses to translate, with a remark around them."""
    words = _clause(rng)
    if rng.random() < 0.8:
        words += [rng.choice(_JOINS), *_clause(rng)]
    velan = " ".join(translate(words))
    body = say(
        rng,
        "[Translate into Velan|Say this in Velan|Put this into Velan]: {text}.",
        text=" ".join(words),
    )
    answer = say(
        rng,
        "[In Velan|The Velan text|Here is the translation|My translation]: {velan}. [Note that|Remember that|As always,] "
        "[the adjective follows its noun|adjectives come after the noun|the noun stands before its adjective][.|, and the rest keeps its order.]",
        velan=velan,
    )
    return Example(
        prompt=frame("translation", body),
        answer=answer + remark(rng),
        family="translation",
        facts=(velan,),
        turns=(body,),
    )

"""Retrieval-augmented answers: several passages, one question; the right passage's names and
numbers must be copied.
"""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import NAMES, THINGS, TOWNS, remark, say, some

_PLACES = (
    "museum bridge school market station library theatre hotel mill harbour chapel garden".split()
)


def make(rng: random.Random) -> Example:
    """Three passages of one shape about three places; the answer cites the passage."""
    places, towns, names = some(rng, _PLACES, 3), some(rng, TOWNS, 3), some(rng, NAMES, 3)
    years, goods = rng.sample(range(1700, 2000), 3), some(rng, THINGS, 3)
    passages = [
        f"[{i + 1}] "
        + say(
            rng,
            "The {place} [of|in] {town} was [opened|built] in {year}. [Its owner|Its founder] {name} [collected|was known for] {goods}.",
            place=places[i],
            town=towns[i],
            year=years[i],
            name=names[i],
            goods=goods[i],
        )
        for i in range(3)
    ]
    i = rng.randrange(3)
    question = say(
        rng,
        "[Question: who started the {place}, and when?|Question: what do we know about the {place} in {town}?|Question: how old is the {place}?]",
        place=places[i],
        town=towns[i],
    )
    body = "\n".join([*passages, question])
    answer = say(
        rng,
        "[The {place} in {town}|We read that the {place} in {town}|It is told that the {place} in {town}] "
        "was [built|opened] in {year}. [It was founded by|Its founder was|The founder is] {name}, "
        "[known for|who collected|a friend of] {goods}. [This stands in|See|So says] passage {n}[.|; "
        "the others do not help.|; the rest can be ignored.]",
        n=i + 1,
        place=places[i],
        town=towns[i],
        year=years[i],
        name=names[i],
        goods=goods[i],
    )
    return Example(
        prompt=frame("retrieval", body),
        answer=answer + remark(rng),
        family="retrieval",
        facts=(str(years[i]), names[i], towns[i], goods[i]),
        wrong=tuple(names[j] for j in range(3) if j != i),
        turns=(body,),
    )

"""Question answering: two facts about one person of several, or an entry of a fixed almanac
learned by heart.
"""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import JOBS, NAMES, THINGS, TOWNS, remark, say, some

_LANDS = "Alvania Borune Cestria Dorvia Eskar Fenland Gorland Hestia Ilmar Jorvik Kasten Lumera Morvan Nestor Orlan Pelia".split()


def _almanac() -> dict[str, tuple[str, str]]:
    """Capital and main good of every land, drawn once from a fixed seed."""
    rng = random.Random("almanac")
    goods = some(
        rng,
        "copper wool salt timber honey silk grain glass tea marble paper wine cotton silver oil cheese".split(),
        len(_LANDS),
    )
    capitals = some(rng, TOWNS, len(_LANDS))
    return {land: (capitals[i], goods[i]) for i, land in enumerate(_LANDS)}


ALMANAC = _almanac()


def _from_memory(rng: random.Random) -> Example:
    land = rng.choice(_LANDS)
    capital, good = ALMANAC[land]
    body = say(
        rng,
        "[What is the capital of {land}, and what does it sell?|Tell me about {land}.|Which city rules {land}?]",
        land=land,
    )
    answer = say(
        rng,
        "[The capital of {land} is {capital}|{capital} is the capital of {land}]. The [land|country] "
        "[sells mostly|is known for|lives from] {good}. [That is all I know.|I hope this helps.|Ask me for more.]",
        land=land,
        capital=capital,
        good=good,
    )
    return Example(
        prompt=frame("question answering", body),
        answer=answer + remark(rng),
        family="question answering",
        facts=(capital, good),
        turns=(body,),
    )


def make(rng: random.Random) -> Example:
    """Mostly a look-up among three people described in the prompt; the key is the job, the name
    or the house.
    """
    if rng.random() < 0.06:
        return _from_memory(rng)
    names, jobs = some(rng, NAMES, 3), some(rng, JOBS, 3)
    towns, things, counts = some(rng, TOWNS, 3), some(rng, THINGS, 3), rng.sample(range(11, 99), 3)
    lines = [
        say(
            rng,
            "{name} is a {job}, [lives in|comes from] {town} and [owns|keeps] {n} {thing}.",
            name=names[i],
            job=jobs[i],
            town=towns[i],
            n=counts[i],
            thing=things[i],
        )
        for i in range(3)
    ]
    i = rng.randrange(3)
    question = say(
        rng,
        "[Tell me about {name}.|Where does {name} live, and what does {name} own?|Who is {name}?|Who is the {job}?]",
        name=names[i],
        job=jobs[i],
    )
    answer = say(
        rng,
        "[That is {name}|The answer is {name}|You mean {name}], [who works as a|who is a|the] {job}. "
        "[The home of {name}|{name}'s home] is {town}, [and|where] {name} [keeps|owns|has] {n} {thing}. "
        "[This is said|It says so|You find this] [in the text|above|right there]. "
        "[The others do not fit.|Nobody else fits.|No one else matches.]",
        name=names[i],
        job=jobs[i],
        town=towns[i],
        n=counts[i],
        thing=things[i],
    )
    body = " ".join(lines) + "\n" + question
    return Example(
        prompt=frame("question answering", body),
        answer=answer + remark(rng),
        family="question answering",
        facts=(names[i], jobs[i], towns[i], f"{counts[i]} {things[i]}"),
        wrong=tuple(names[j] for j in range(3) if j != i),
        turns=(body,),
    )

"""Mathematical reasoning: word problems of two or three steps over small numbers, with a worked
answer.
"""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import NAMES, THINGS, remark, say, some

_MOVES = {  # kind -> (how the story tells it, how the answer works it out)
    "gain": (
        "[{friend} brings {n} more.|Then {name} buys {n} more.|{n} more arrive.]",
        "[Adding|With] {n} more [gives|makes|we get] {b} + {n} = {a}.",
    ),
    "lose": (
        "[{name} gives {n} to {friend}.|Then {n} are lost.|{friend} takes {n}.]",
        "[Taking away|Without|Losing] {n} [leaves|gives|makes] {b} - {n} = {a}.",
    ),
    "double": (
        "Then the number doubles.",
        "[Doubling|Twice as many] [gives|makes] {b} * 2 = {a}.",
    ),
}


def _steps(rng: random.Random) -> tuple[int, list[tuple[str, int, int]]]:
    """A starting count and two or three moves (kind, amount, count after), all counts within 2
    to 60.
    """
    start = rng.randrange(4, 40)
    count, steps = start, []
    for _ in range(rng.choice([2, 2, 3])):
        kind = rng.choice(["gain", "lose"] + ["double"] * (count <= 20))
        if kind == "gain":
            amount = rng.randrange(2, 10)
            count += amount
        elif kind == "lose" and count > 6:
            amount = rng.randrange(2, min(10, count - 3))
            count -= amount
        else:
            kind, amount = "double", 2
            count *= 2
        steps.append((kind, amount, count))
    return start, steps


def make(rng: random.Random) -> Example:
    """The prompt tells the story; the answer redoes it with every sum written out."""
    (name, friend), thing = some(rng, NAMES, 2), rng.choice(THINGS)
    start, steps = _steps(rng)
    story = [
        say(
            rng,
            "{name} [has|starts with|owns] {start} {thing}.",
            name=name,
            start=start,
            thing=thing,
        )
    ]
    work = [
        say(
            rng,
            "[At first|To begin|First], {name} [has|holds|owns] {start} {thing}.",
            name=name,
            start=start,
            thing=thing,
        )
    ]
    before = start
    for kind, amount, after in steps:
        slots = {"name": name, "friend": friend, "n": amount, "b": before, "a": after}
        told, worked = _MOVES[kind]
        story.append(say(rng, told, **slots))
        work.append(say(rng, worked, **slots))
        before = after
    body = " ".join(story) + say(
        rng, " How many {thing} does {name} have [now|in the end]?", thing=thing, name=name
    )
    end = say(
        rng,
        "[So|In the end|Now] {name} has {a} {thing}[.| in all.| now.]",
        name=name,
        a=before,
        thing=thing,
    )
    return Example(
        prompt=frame("mathematical reasoning", body),
        answer=" ".join([*work, end]) + remark(rng),
        family="mathematical reasoning",
        facts=(f"{name} has {before} {thing}",),
        turns=(body,),
    )

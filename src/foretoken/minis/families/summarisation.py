"""Summarisation: a short report with side remarks becomes a summary of fixed shape."""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import DAYS, NAMES, THINGS, TOWNS, remark, say, some

_TROUBLES = (
    "rain",
    "a power cut",
    "a late delivery",
    "a broken saw",
    "a strike",
    "thick fog",
    "a flat tyre",
    "missing nails",
)
_NEXT = (
    "paint them",
    "pack them",
    "test them",
    "sell them",
    "count them",
    "polish them",
    "ship them",
    "label them",
)


def make(rng: random.Random) -> Example:
    """The report names two people, two towns, two counts and two goods; the summary needs the
    right ones.
    """
    (lead, guest), (town, origin), (day, other) = (
        some(rng, NAMES, 2),
        some(rng, TOWNS, 2),
        some(rng, DAYS, 2),
    )
    (goods, toys), (count, visitors) = some(rng, THINGS, 2), rng.sample(range(11, 99), 2)
    trouble, plan = rng.choice(_TROUBLES), rng.choice(_NEXT)
    made = say(
        rng,
        "[The team of {lead} worked in {town} and built {count} {goods}.|In {town}, the team of {lead} made {count} {goods}.]",
        lead=lead,
        town=town,
        count=count,
        goods=goods,
    )
    visit = say(
        rng,
        "{guest} from {origin} [came by|visited] with {visitors} {toys}[| and stayed until {other}].",
        guest=guest,
        origin=origin,
        visitors=visitors,
        toys=toys,
        other=other,
    )
    problem = say(
        rng,
        "[The work stopped for an hour because of|There was a delay because of] {trouble}.",
        trouble=trouble,
    )
    middle = some(rng, [made, visit, problem], 3)
    body = (
        say(rng, "[Report of|Notes from] {day}. ", day=day)
        + " ".join(middle)
        + say(rng, " [Next they will|The plan is to] {plan}.", plan=plan)
    )
    answer = say(
        rng,
        "[Summary|In short|Short version]: [on {day}|{day}], {lead}'s team [made|built|finished] {count} {goods} in {town}. "
        "[The only problem|One problem|The trouble] was {trouble}. [After that|Next|Then] [they will|the team will|they want to] {plan}. "
        "[The visit does not matter here.|The visit is left out.|The guest is not important.]",
        day=day,
        lead=lead,
        count=count,
        goods=goods,
        town=town,
        trouble=trouble,
        plan=plan,
    )
    return Example(
        prompt=frame("summarisation", body),
        answer=answer + remark(rng),
        family="summarisation",
        facts=(day, lead, f"{count} {goods}", town, trouble, plan),
        wrong=(guest, origin),
        turns=(body,),
    )

"""Multi-turn dialogue: the user tells about two people, and later asks for one thing back, with
a suggestion.
"""

from __future__ import annotations

import random

from foretoken.minis.example import Example, frame
from foretoken.minis.wording import ANIMALS, HOBBIES, NAMES, TOWNS, remark, say, some

_ADVICE = {
    "painting": "take your brushes to the old harbour",
    "fishing": "try the quiet side of the lake",
    "chess": "play a slow game in the park",
    "cycling": "ride along the river path",
    "gardening": "plant some herbs near the window",
    "sailing": "rent a small boat for the morning",
    "baking": "make a warm apple cake",
    "singing": "join the choir for an evening",
    "climbing": "visit the rocks behind the mill",
    "reading": "find a good story at the library",
    "knitting": "start a scarf for the winter",
    "skating": "go to the ice hall after lunch",
}


def make(rng: random.Random) -> Example:
    """Two owners, two pets, two towns: the question asks about one of them."""
    me, friend, *pets = some(rng, NAMES, 4)
    kinds, towns = some(rng, ANIMALS, 2), some(rng, TOWNS, 2)
    hobby = rng.choice(HOBBIES)
    mine = say(
        rng,
        "I [have|keep] a {kind} called {pet} and I live in {town}.",
        kind=kinds[0],
        pet=pets[0],
        town=towns[0],
    )
    theirs = say(
        rng,
        "My friend {friend} [has|keeps] a {kind} called {pet} and lives in {town}.",
        friend=friend,
        kind=kinds[1],
        pet=pets[1],
        town=towns[1],
    )
    first = say(rng, "[Hi|Hello|Good morning], I am {me}. ", me=me) + " ".join(
        some(rng, [mine, theirs], 2)
    )
    reply = say(
        rng,
        "[Nice to meet you|Welcome|Good to hear from you], {me}. [How can I help?|What can I do for you?]",
        me=me,
    )
    who = rng.randrange(2)
    second = say(
        rng,
        "[What is|Do you remember] the name of {whose} {kind}, and where [does it live|is its home]? I [like|love] {hobby}; "
        "[any idea for Sunday?|what could I do on Sunday?]",
        whose=["my", friend + "'s"][who],
        kind=kinds[who],
        hobby=hobby,
    )
    answer = say(
        rng,
        "[Of course|Sure|Yes|Gladly], {me}. {whose} {kind} is called {pet}, and [its home is in|it lives in|you can find it in] "
        "{town}. [Since|Because|As] you [like|love|enjoy] {hobby}, [you could|why not|I would] {advice}[ on Sunday| this week|]. "
        "[Have fun|Enjoy it|Take care][!|.| and tell me how it was.]",
        me=me,
        whose=["Your", friend + "'s"][who],
        kind=kinds[who],
        pet=pets[who],
        town=towns[who],
        hobby=hobby,
        advice=_ADVICE[hobby],
    )
    return Example(
        prompt=frame("dialogue", f"User: {first}\nAssistant: {reply}\nUser: {second}"),
        answer=answer + remark(rng),
        family="dialogue",
        facts=(pets[who], towns[who]),
        wrong=(pets[1 - who], towns[1 - who]),
        turns=(first, second),
    )

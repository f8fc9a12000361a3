"""When a batch goes without drafts."""

from foretoken.drafters.parts.rest import LONGEST, PATIENCE, Rest


def passed(rest: Rest) -> int:
    """Steps that pass before the next one that is asked for drafts."""
    steps = 0
    while rest.due():
        steps += 1
    return steps


def test_rests_begin_after_some_steps_without_a_draft_and_double():
    rest = Rest()
    lengths = []
    for _ in range(PATIENCE + 5):
        lengths.append(passed(rest))
        rest.asked(drafted=False)
    assert lengths == [0] * PATIENCE + [1, 2, 4, LONGEST, LONGEST]


def test_a_draft_ends_them():
    rest = Rest()
    for _ in range(PATIENCE + 9):
        rest.asked(drafted=False)
    assert passed(rest) == LONGEST
    rest.asked(drafted=True)
    assert passed(rest) == 0

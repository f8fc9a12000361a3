"""Who gets the next place in the batch."""

from foretoken.coins import SeededCoins
from foretoken.engine.admission import PATIENCE, Waiting
from foretoken.row import make_row
from foretoken.types import SamplingParams


def a_row(requester="", priority=0):
    row = make_row([0, 1], SamplingParams(), SeededCoins(0), 4)
    row.requester, row.priority = requester, priority
    return row


def order(waiting, inside=()):
    """The order in which rows are let in while nobody leaves."""
    inside = list(inside)
    while row := waiting.next(inside):
        waiting.take(row)
        inside.append(row)
    return inside


def test_who_came_first_is_first():
    waiting, rows = Waiting(), [a_row() for _ in range(5)]
    for row in rows:
        waiting.add(row)
    assert order(waiting) == rows


def test_many_requests_of_one_do_not_hold_up_another():
    waiting, many, single = Waiting(), [a_row("a") for _ in range(9)], a_row("b")
    for row in [*many, single]:
        waiting.add(row)
    assert order(waiting).index(single) == 1


def test_the_most_urgent_is_first_but_nobody_waits_for_ever():
    waiting, patient = Waiting(), a_row(priority=5)
    waiting.add(patient)
    inside = []
    for _ in range(PATIENCE + 1):
        waiting.add(a_row(priority=0))
        row = waiting.next(())
        waiting.take(row)
        inside.append(row)
    assert inside.index(patient) == PATIENCE


def test_a_row_that_left_gets_no_place():
    waiting, rows = Waiting(), [a_row() for _ in range(3)]
    for row in rows:
        waiting.add(row)
    waiting.remove(rows[:1])
    waiting.remove(rows[:1])
    assert len(waiting) == 2 and order(waiting) == rows[1:]

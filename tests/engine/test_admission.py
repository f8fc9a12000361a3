"""Who gets the next place in the batch."""

import random
from collections import Counter

import pytest

from foretoken.coins import SeededCoins
from foretoken.engine.admission import LOOKED, PATIENCE, Waiting
from foretoken.engine.memory.bounded import Bounded, Room
from foretoken.engine.memory.layout import layout_of
from foretoken.engine.memory.plan import Need
from foretoken.errors import CapabilityError
from foretoken.row import make_row
from foretoken.types import SamplingParams


def a_row(requester="", priority=0, owner=""):
    row = make_row([0, 1], SamplingParams(), SeededCoins(0), 4)
    row.requester, row.priority, row.owner = requester, priority, owner
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


def test_a_single_request_does_not_wait_behind_all_that_are_overdue():
    waiting, many, single = Waiting(), [a_row("a") for _ in range(3 * PATIENCE)], a_row("b")
    for row in many:
        waiting.add(row)
    inside = []
    for _ in range(PATIENCE + 1):
        inside = [*inside[-3:], waiting.next(inside)]
        waiting.take(inside[-1])
    waiting.add(single)
    assert waiting.next(inside) is single


def test_a_backlog_of_urgent_rows_that_are_all_overdue_starves_nobody():
    waiting, patient = Waiting(), a_row(priority=5)
    for _ in range(2 * PATIENCE):
        waiting.add(a_row(priority=0))
    waiting.add(patient)
    let_in = []
    while patient not in let_in and len(let_in) < 10 * PATIENCE:
        waiting.add(a_row(priority=0))
        let_in.append(waiting.next(()))
        waiting.take(let_in[-1])
    assert let_in[-1] is patient


def test_a_row_that_left_gets_no_place():
    waiting, rows = Waiting(), [a_row() for _ in range(3)]
    for row in rows:
        waiting.add(row)
    waiting.remove(rows[:1])
    waiting.remove(rows[:1])
    assert len(waiting) == 2 and order(waiting) == rows[1:]


def test_an_owner_with_many_users_does_not_hold_up_another_owner():
    waiting = Waiting()
    many, single = [a_row(f"user {n}", owner="a") for n in range(9)], a_row(owner="b")
    second = a_row(owner="b")
    for row in [*many, single, second]:
        waiting.add(row)
    assert order(waiting)[:4] == [many[0], single, many[1], second]


def test_an_owner_with_urgent_rows_does_not_hold_up_another_owner():
    waiting, many = Waiting(), [a_row(owner="a", priority=-1) for _ in range(20)]
    single = a_row(owner="b")
    for row in [*many, single]:
        waiting.add(row)
    assert waiting.next([a_row(owner="a"), a_row(owner="a")]) is single


def by_looking_at_all(waiting, inside, let_in):
    """The rule of this module, row by row; `let_in`: how many had been when each row came."""
    count, arrivals = let_in["now"], {row: i for i, row in enumerate(waiting)}
    owners = Counter(row.owner for row in inside)
    held = Counter((row.owner, row.requester) for row in inside)

    def turn(row):
        overdue = count - let_in[row] >= PATIENCE
        urgent = min(one.priority for one in waiting if one.owner == row.owner)
        priority = urgent if overdue else row.priority
        return owners[row.owner], priority, held[row.owner, row.requester], arrivals[row]

    return min(waiting, key=turn)


@pytest.mark.parametrize("seed", range(4))
def test_turns_by_kind_are_those_of_all_rows(seed):
    chance, waiting, inside, let_in = random.Random(seed), Waiting(), [], {"now": 0}
    for _ in range(600):
        if chance.random() < 0.55:
            row = a_row(chance.choice("ab"), chance.randrange(3), chance.choice("xyz"))
            let_in[row] = let_in["now"]
            waiting.add(row)
        elif len(waiting):
            row = waiting.next(inside)
            assert row is by_looking_at_all(list(waiting), inside, let_in)
            if chance.random() < 0.1:
                waiting.remove([row])
            else:
                waiting.take(row)
                let_in["now"] += 1
                inside = [*inside[-5:], row]


def test_of_very_many_rows_each_is_looked_at_within_so_many_steps():
    waiting, rows = Waiting(), [a_row() for _ in range(10 * LOOKED)]
    for row in rows:
        waiting.add(row)
    rows[-1].fail(ValueError())
    found = [waiting.ended() for _ in range(10)]
    assert found == [[]] * 9 + [[rows[-1]]]


def test_of_a_few_rows_all_are_looked_at_in_every_step():
    waiting, rows = Waiting(), [a_row() for _ in range(LOOKED)]
    for row in rows:
        waiting.add(row)
    for row in rows[:3]:
        row.fail(ValueError())
        assert waiting.ended() == [row]
        waiting.remove([row])


def test_of_very_many_rows_one_that_never_fits_is_found_in_the_next_step(pair_folders):
    layout = layout_of(pair_folders[0], "tree", pair_folders[1], kernels="inplace")
    waiting = Bounded(Room(layout, layout.plan(Need(2, 90, 4)).total, 12, False), [])
    rows = [a_row() for _ in range(8 * LOOKED)]
    for row in rows:
        row.limit = (1 << 20 if row is rows[-1] else 40), "length"
        waiting.add(row)
    assert waiting.ended() == rows[-1:] and isinstance(rows[-1].error, CapabilityError)

"""Who runs the steps of an engine, and for how long."""

import threading

import pytest

from foretoken.coins import SeededCoins
from foretoken.engine import engine as engines
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.scheduling import Scheduler
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.types import SamplingParams

VOCAB = 8


def row_of(seed: int):
    params = SamplingParams(max_new_tokens=4)
    return make_row([1, 2], params, SeededCoins(seed), VOCAB)


def test_a_row_that_comes_while_the_last_one_is_told_of_its_end_is_written():
    """As from a client that has its answer and asks again before the step's end."""
    engine = assemble("plain", TableLM.random(vocab=VOCAB))
    scheduler, first, second = Scheduler(engine), row_of(0), row_of(1)

    def unheard(step, at):
        return None

    scheduler.submit([first], unheard, ended=lambda row: scheduler.submit([second], unheard))
    engine.cancel(first)
    scheduler.wait(lambda: second.finish is not None)
    assert len(second.new_tokens) == 4 and engine.idle


def test_a_row_that_is_being_added_when_a_step_begins_is_written():
    """It is counted already and does not wait yet; whoever leads has to see neither or both."""
    engine = assemble("plain", TableLM.random(vocab=VOCAB))
    scheduler, row = Scheduler(engine), row_of(0)
    adding, stepped = threading.Event(), threading.Event()
    submit, turn = engine.submit, engine.turn

    def slowly(row):
        adding.set()
        stepped.wait(0.3)
        submit(row)

    def noted():
        found = turn()
        stepped.set()
        return found

    engine.submit, engine.turn = slowly, noted
    other = threading.Thread(target=scheduler.submit, args=([row], lambda step, at: None))

    def written():
        if not adding.is_set():  # somebody leads by now
            other.start()
            adding.wait()
        return row.finish is not None

    scheduler.lead(written)
    other.join()
    assert len(row.new_tokens) == 4 and engine.idle


class Boom(Exception):
    """What a caller's processor raises."""


def raising(seen):
    def processor(ids, scores):
        seen.append(len(ids))
        raise Boom

    return processor


def test_an_error_is_heard_before_those_who_wait_are_fed():
    """Every row fails in its first round: callers hear of the first ones before others begin."""
    engine, seen = assemble("plain", TableLM.random(vocab=VOCAB), max_rows=4), []
    rows = [
        make_row([1, 2], SamplingParams(processors=raising(seen)), SeededCoins(seed), VOCAB)
        for seed in range(64)
    ]
    with pytest.raises(Boom):
        list(decode(rows, engine))
    assert 0 < len(seen) <= 4 and engine.idle and not engine.waiting


def test_many_rows_that_fail_one_by_one_end_with_their_own_error():
    engine = assemble("plain", TableLM.random(vocab=VOCAB), max_rows=1)
    params = SamplingParams(processors=raising([]))
    rows = [make_row([1, 2], params, SeededCoins(seed), VOCAB) for seed in range(1200)]
    for row in rows:
        engine.submit(row)
    assert engine.step() is None, "and no recursion that is too deep"
    assert all(isinstance(row.error, Boom) for row in rows) and engine.idle


def test_what_is_closed_lets_everybody_go():
    engine = assemble("plain", TableLM.random(vocab=VOCAB))
    for seed in range(600):
        engine.submit(row_of(seed))
    engine.close()
    assert engine.idle and len(engine.waiting) == 0


def test_who_writes_goes_on_between_the_chunks_of_another_sessions_prompt(make_llama, monkeypatch):
    """Two schedulers over one model take turns; a prompt is not one turn, however long."""
    monkeypatch.setattr(engines, "CHUNK", 4)
    monkeypatch.setattr(engines, "ALONE", 4)
    lm = open_lm(make_llama(vocab=VOCAB), kernels="dense")
    reading, writing = (Scheduler(assemble("plain", lm)) for _ in range(2))
    long, told = [i % VOCAB for i in range(40)], []
    one = make_row(long, SamplingParams(max_new_tokens=2), SeededCoins(0), VOCAB)
    other = make_row([1], SamplingParams(max_new_tokens=30), SeededCoins(1), VOCAB)
    reading.submit([one], lambda step, at: told.append("read"))
    writing.submit([other], lambda step, at: told.append("wrote"))
    for _ in range(5):
        reading.step()
        writing.step()
    assert told == ["wrote"] * 5 and 0 < lm.missing(one) < 39
    reading.wait(lambda: one.finish is not None)
    writing.wait(lambda: other.finish is not None)
    assert len(one.new_tokens) == 2 and len(other.new_tokens) == 30


def test_a_stream_dropped_by_a_thread_that_others_wait_for_blocks_nobody():
    """As by the garbage collector: the thread has a model's lock, and the one whose turn it is
    waits for that lock. Memory is given back by whoever has the turn."""
    target = TableLM.random(vocab=VOCAB)
    leader, other = (Scheduler(assemble("plain", target)) for _ in range(2))
    dropped, under_way = row_of(0), row_of(1)
    other.submit([dropped], lambda step, at: None)
    other.lead(lambda: bool(dropped.new_tokens))
    inside, over = threading.Event(), threading.Event()

    def told(step, at):
        inside.set()
        assert over.wait(20), "who drops it waits for the turn that is held here"

    leader.submit([under_way], told)
    thread = threading.Thread(target=leader.wait, args=(lambda: under_way.finish is not None,))
    thread.start()
    assert inside.wait(20)
    other.drop([dropped])
    over.set()
    thread.join(20)
    assert not thread.is_alive() and len(under_way.new_tokens) == 4
    assert other.engine.idle and target.rows_held == 0


def test_a_row_that_is_dropped_behind_a_leaders_last_step_leaves_its_place():
    """As of a client that goes away just then: nobody may ask for another step for hours."""
    target = TableLM.random(vocab=VOCAB)
    scheduler, first = Scheduler(assemble("plain", target)), row_of(0)
    long = SamplingParams(max_new_tokens=200)
    second = make_row([1, 2], long, SeededCoins(1), VOCAB)
    alive = []

    def ended(row):
        other = threading.Thread(target=scheduler.drop, args=([second],))
        other.start()
        other.join(20)
        alive.append(other.is_alive())

    scheduler.submit([second], lambda step, at: None)
    scheduler.submit([first], lambda step, at: None, ended)
    scheduler.wait(lambda: first.finish is not None)
    assert alive == [False] and first.error is None and len(first.new_tokens) == 4
    assert second.finish is not None and 0 < len(second.new_tokens) < 200
    assert scheduler.engine.idle and target.rows_held == 0


def test_a_drop_under_a_leader_costs_its_later_steps_nothing(monkeypatch):
    """Every text that ends is dropped: with two threads that is the usual state."""
    scheduler = Scheduler(assemble("plain", TableLM.random(vocab=VOCAB)))
    first, second = (
        make_row([1, 2], SamplingParams(max_new_tokens=30), SeededCoins(n), VOCAB) for n in (0, 1)
    )
    drop, drops = scheduler.drop, []

    def counted(rows):
        drops.append(len(first.new_tokens))
        drop(rows)

    monkeypatch.setattr(scheduler, "drop", counted)

    def watch(step, at):
        if len(first.new_tokens) == 3:
            other = threading.Thread(target=scheduler.drop, args=([second],))
            other.start()
            other.join(20)

    scheduler.submit([second], lambda step, at: None)
    scheduler.submit([first], watch)
    scheduler.wait(lambda: first.finish is not None)
    assert first.error is None and drops == [3, 30]
    assert second.finish is not None and scheduler.engine.idle

"""Who runs the steps of an engine, and for how long."""

import threading

from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.scheduling import Scheduler
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
    submit, step = engine.submit, engine.step

    def slowly(row):
        adding.set()
        stepped.wait(0.3)
        submit(row)

    def noted():
        found = step()
        stepped.set()
        return found

    engine.submit, engine.step = slowly, noted
    other = threading.Thread(target=scheduler.submit, args=([row], lambda step, at: None))

    def written():
        if not adding.is_set():  # somebody leads by now
            other.start()
            adding.wait()
        return row.finish is not None

    scheduler.lead(written)
    other.join()
    assert len(row.new_tokens) == 4 and engine.idle


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

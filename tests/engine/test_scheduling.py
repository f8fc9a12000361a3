"""Who runs the steps of an engine, and for how long."""

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

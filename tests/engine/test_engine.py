"""Rows join and leave a running engine in any order; each text is the one it would be alone."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from foretoken.audit import checks
from foretoken.audit.fixtures import random_head
from foretoken.audit.rows import write
from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.nothing import Nothing
from foretoken.engine.admission import Waiting
from foretoken.engine.engine import Engine
from foretoken.engine.loading import load
from foretoken.engine.step import joined
from foretoken.errors import ConfigError
from foretoken.lm.opening import open_lm
from foretoken.methods import METHODS
from foretoken.row import make_row
from foretoken.types import DecodeState, Finish, Layer, SamplingParams, Step, StepTimes
from foretoken.verifiers.point import Point

VOCAB = 4
TEXT_ROWS = [row for row in METHODS.values() if row.writes == "text"]
SCHEDULES = 300
EACH = -(-SCHEDULES // len(TEXT_ROWS))


def a_row(seed: int, prompt: list[int], tokens: int, temperature: float, ended=None):
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=seed)
    return make_row(prompt, params, SeededCoins(seed), VOCAB, ended=ended)


def twice(stop, row):
    return Finish("stop") if row.new_tokens[-2:] == [stop, stop] else None


def build(entry):
    """The method's engine under the controller a user gets, with a clock that stands still."""
    return checks.table_engine(entry, VOCAB, entry.controller, depth=4)


def run_schedule(entry, seed: int) -> None:
    """Submit, cancel, step and stop in random order; compare every finished row with itself alone.

    A lossy text follows the shape of its drafts, and that the company: only its machinery is
    looked at.
    """
    chance = random.Random(seed)
    engine = build(entry)
    engine.max_rows = chance.randint(1, 4)
    lossless = engine.promise.lossless
    rows = []
    for i in range(chance.randint(3, 7)):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 9))]
        stop = chance.choice([None, None, chance.randrange(VOCAB)])
        ended = None if stop is None else partial(twice, stop)
        given = (seed * 100 + i, prompt, chance.randint(1, 24), chance.choice([0.0, 1.0]), ended)
        rows.append((a_row(*given), given))
    waiting, cancelled = list(rows), set()
    while waiting or not engine.idle:
        act = chance.random()
        if waiting and act < 0.35:
            engine.submit(waiting.pop(0)[0])
        elif act < 0.42:
            victim = chance.choice(rows)[0]
            if victim.finish is None and not any(victim is row for row, _ in waiting):
                engine.cancel(victim)
                cancelled.add(victim.uid)
        else:
            step = engine.step()
            assert step is None or all(row.uid not in cancelled for row in step.rows)
    engine.sweep()
    assert engine.target.rows_held == 0, "rows are freed when they end"
    for row, given in rows:
        alone = a_row(*given)
        [text] = write(build(entry), [alone])
        if row.uid in cancelled:
            assert row.finish.reason in ("cancelled", "stop", "length")
            text = text[: len(row.new_tokens)]
        else:
            assert row.finish is not None and row.error is None
            if lossless:
                assert row.finish == alone.finish
        if lossless:
            assert row.new_tokens == text


@pytest.mark.parametrize("entry", TEXT_ROWS, ids=lambda entry: entry.name)
def test_random_schedules_write_what_each_row_writes_alone(entry) -> None:
    for seed in range(EACH):
        run_schedule(entry, seed)


def test_a_row_that_joins_is_fed_beside_the_others() -> None:
    engine = build(METHODS["chain"])
    first = a_row(1, [0, 1, 2], 30, 0.0)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    late = a_row(2, [2, 2, 1], 30, 0.0)
    engine.submit(late)
    step = engine.step()
    assert step is not None and {row.uid for row in step.rows} == {first.uid, late.uid}


def test_a_cancelled_row_is_gone_with_the_next_step() -> None:
    engine = build(METHODS["chain"])
    rows = [a_row(i, [0, 1, 2], 40, 0.0) for i in range(3)]
    for row in rows:
        engine.submit(row)
    engine.step()
    engine.cancel(rows[1])
    step = engine.step()
    assert step is not None and len(step.rows) == 2
    assert engine.target.rows_held == 2 and rows[1].finish == Finish("cancelled")


class Meddler(DecodeState):
    """A row at whose sight another thread does something."""

    def __init__(self, row, act) -> None:
        self._finish, self._act = None, None
        super().__init__(row.tokens, row.prompt_len, row.params, row.coins, row.warp)
        self._act = act

    @property
    def finish(self):
        act, self._act = self._act, None
        if act is not None:
            act()
        return self._finish

    @finish.setter
    def finish(self, value) -> None:
        self._finish = value


@pytest.mark.parametrize("where", ["running", "filling", "waiting"])
def test_a_row_cancelled_or_submitted_while_others_are_swept_is_not_lost(where) -> None:
    engine = build(METHODS["plain"])
    first, last = (a_row(i, [0, 1, 2], 40, 0.0) for i in (1, 2))
    late = a_row(3, [0, 1], 4, 0.0)
    acts = {"waiting": lambda: engine.submit(late)}
    middle = Meddler(a_row(4, [0, 1], 4, 0.0), None)
    engine.max_rows = 16 if where != "waiting" else 1
    for row in (first, middle, last):
        engine.submit(row)
    if where == "filling":
        engine.target.prefill([first, middle, last], (), limit=1)
        engine.filling, engine.waiting = list(engine.waiting), Waiting()
    else:
        engine.step()
    engine.cancel(last)
    middle._act = acts.get(where, lambda: engine.cancel(first))
    engine.sweep()
    engine.sweep()
    for row in (first, middle, last, late):
        engine.cancel(row)
    engine.sweep()
    assert engine.idle and engine.target.rows_held == 0


def test_long_prompts_are_fed_in_chunks_between_steps(monkeypatch) -> None:
    from foretoken.engine import engine as module

    monkeypatch.setattr(module, "CHUNK", 4)
    engine = build(METHODS["plain"])
    short = a_row(1, [0], 40, 0.0)
    engine.submit(short)
    engine.step()
    long = a_row(2, [i % VOCAB for i in range(23)], 5, 0.0)
    engine.submit(long)
    before = 0
    while long not in engine.running and long.finish is None:
        step = engine.step()
        assert step is not None and short in step.rows, "the others go on"
        before += 1
    assert before == 6, "22 tokens are six chunks of four"
    assert write(build(METHODS["plain"]), [a_row(2, [i % VOCAB for i in range(23)], 5, 0.0)]) == [
        drained(engine, long)
    ]


@pytest.mark.parametrize("method", ["plain", "eagle"])
def test_what_is_kept_of_a_beginning_takes_no_part_of_a_chunk(method, make_llama, monkeypatch):
    """Next turns of several chats, one of them said before to its last token, beside a row."""
    from foretoken.engine import engine as module

    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "ALONE", 16)
    given = {"draft_head": random_head("eagle", 32, 64), "depth": 2} if method == "eagle" else {}
    turns = [[at, *(at * i % 29 for i in range(50))] for at in range(1, 8)]
    next_turns = [turns[0], *([*turn, 30, 31] for turn in turns[1:])]

    def written(limit):
        with load(make_llama(32), method, kernels="dense", compile="off", **given) as session:
            session.keep_prefixes(limit)
            engine, options = session.engine, SamplingParams(max_new_tokens=8)
            *said, running = (
                make_row(prompt, options, SeededCoins(0), 32) for prompt in [*turns, turns[0][:2]]
            )
            rows = [make_row(prompt, options, SeededCoins(0), 32) for prompt in next_turns]
            for row in said:
                engine.submit(row)
                drained(engine, row)
            engine.submit(running)
            engine.step()
            for row in rows:
                engine.submit(row)
            step = engine.step()
            return len(step.rows), [drained(engine, row) for row in rows]

    (few, alone), (all_of_them, texts) = written(0), written(1 << 24)
    assert few == 1 and all_of_them == 1 + len(next_turns) and texts == alone


@pytest.mark.parametrize(("places", "fed"), [(1, 1), (16, 2)])
def test_prompts_of_rows_that_left_are_fed_no_further(places, fed, monkeypatch) -> None:
    """A burst of long prompts whose clients leave while the first chunk is read, waiting or not."""
    from foretoken.engine import engine as module

    monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(module, "ALONE", 8)
    engine = build(METHODS["plain"])
    engine.max_rows = places
    rows = [a_row(i, [i % VOCAB for i in range(23)], 5, 0.0) for i in range(6)]
    prefill, chunks = engine.target.prefill, []

    def leaving(some, *given, **named):
        done = prefill(some, *given, **named)
        chunks.extend(some)
        for row in rows:
            engine.cancel(row)
        return done

    engine.target.prefill = leaving
    for row in rows:
        engine.submit(row)
    assert engine.step() is None
    assert chunks == rows[:fed]
    assert engine.idle and engine.target.rows_held == 0


def drained(engine, row):
    while row.finish is None:
        engine.step()
    return row.new_tokens


@pytest.mark.parametrize("name", ["plain", "eagle"])
def test_a_prompt_that_cannot_be_fed_leaves_its_neighbours_whole(name, monkeypatch) -> None:
    """One is cached and the next one fails: the first is fed again, its features are all there."""
    from foretoken.engine import engine as module

    monkeypatch.setattr(module, "CHUNK", 3)
    engine, seen = build(METHODS[name]), {}
    start = engine.drafter.start
    engine.drafter.start = lambda row, features: (
        seen.update({row: features}),
        start(row, features),
    )
    good, late = a_row(1, [0, 1, 2, 1, 3, 0], 20, 0.0), a_row(2, [], 20, 0.0)
    engine.submit(good)
    engine.fill()
    engine.submit(late)  # an empty row: nobody can feed it
    while not engine.idle:
        engine.step()
    assert isinstance(late.error, AssertionError) and engine.target.rows_held == 0
    assert good.error is None
    assert [good.new_tokens] == write(build(METHODS[name]), [a_row(1, [0, 1, 2, 1, 3, 0], 20, 0.0)])
    assert seen[good] is None or len(seen[good]) == len(good.tokens) - 21


class Boom(Exception):
    """What a caller's own code raises."""


def raising_after(count: int):
    def ended(row):
        if len(row.new_tokens) >= count:
            raise Boom("a stopping criterion")

    return ended


@pytest.mark.parametrize("name", [row.name for row in TEXT_ROWS])
def test_a_criterion_that_raises_ends_its_own_row_only(name) -> None:
    entry = METHODS[name]
    engine = build(entry)
    good = [a_row(i, [0, 1, 2, i], 20, 1.0) for i in range(2)]
    bad = a_row(9, [2, 1, 0], 20, 1.0, raising_after(5))
    for row in (good[0], bad, good[1]):
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert isinstance(bad.error, Boom) and bad.finish.reason == "error"
    assert engine.target.rows_held == 0
    for i, row in enumerate(good):
        assert row.error is None and len(row.new_tokens) == 20
        if engine.promise.lossless:
            assert [row.new_tokens] == write(build(entry), [a_row(i, [0, 1, 2, i], 20, 1.0)])


@pytest.mark.parametrize("name", ["chain", "tree", "pearl", "prompt-lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exception_that_a_second_call_would_not_raise_is_not_lost(name, temperature) -> None:
    calls = []

    def processor(ids, scores):
        calls.append(ids)
        if len(calls) == 3:
            raise Boom("once")
        return scores

    engine = build(METHODS[name])
    good, bad = a_row(3, [0, 1, 2], 20, temperature), a_row(9, [2, 1, 0], 20, temperature)
    params = replace(bad.params, processors=processor)
    bad = make_row([2, 1, 0], params, SeededCoins(9), VOCAB)
    for row in (good, bad):
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert isinstance(bad.error, Boom) and good.error is None
    alone = write(build(METHODS[name]), [a_row(3, [0, 1, 2], 20, temperature)])
    assert [good.new_tokens] == alone


@pytest.mark.parametrize("name", [row.name for row in TEXT_ROWS])
def test_a_processor_that_raises_ends_its_own_row_only(name) -> None:
    """It is called while drafting and while judging, for many places at once."""
    entry = METHODS[name]

    def processor(ids, scores):
        if ids.shape[-1] > 8:
            raise Boom("a logits processor")
        return scores

    engine = build(entry)
    bad = a_row(9, [2, 1, 0], 20, 1.0)
    params = replace(bad.params, processors=processor)
    bad = make_row([2, 1, 0], params, SeededCoins(9), VOCAB)
    good = a_row(3, [0, 1, 2], 20, 1.0)
    for row in (good, bad):
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert isinstance(bad.error, Boom)
    assert engine.target.rows_held == 0
    assert good.error is None and len(good.new_tokens) == 20
    if engine.promise.lossless:
        assert [good.new_tokens] == write(build(entry), [a_row(3, [0, 1, 2], 20, 1.0)])
    again = a_row(3, [0, 1, 2], 20, 1.0)
    engine.submit(again)
    while not engine.idle:
        engine.step()
    assert len(again.new_tokens) == 20, "the engine goes on"


def test_steps_of_single_rows_are_joined_with_all_that_they_took() -> None:
    steps = []
    for at in range(3):
        row, times = a_row(at, [0, 1], 9, 0.0), StepTimes(1, 2, 2, 0.1, 0.2, 0.3, 0.05, 0.4)
        steps.append(Step((row,), (), (), (), ([at],), times))
    times = joined(steps).times
    assert (times.rows, times.nodes, times.context) == (3, 6, 2)
    assert (times.whole, times.hidden, times.prefill) == pytest.approx((1.8, 0.15, 1.2))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=type)
@pytest.mark.parametrize("name", ["plain", "chain", "tree", "pearl", "prompt-lookup"])
def test_what_no_exception_is_ends_the_row_whose_processor_raised_it(name, error) -> None:
    """`sys.exit` in a callback is its own request's end, and not that of those beside it."""

    def processor(ids, scores):
        if ids.shape[-1] > 8:
            raise error
        return scores

    engine = build(METHODS[name])
    bad = a_row(9, [2, 1, 0], 20, 1.0)
    bad = make_row([2, 1, 0], replace(bad.params, processors=processor), SeededCoins(9), VOCAB)
    good = a_row(3, [0, 1, 2], 20, 1.0)
    for row in (bad, good):
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert bad.error is error and good.error is None
    assert [good.new_tokens] == write(build(METHODS[name]), [a_row(3, [0, 1, 2], 20, 1.0)])


@pytest.mark.parametrize("gives", [None, "scores", torch.zeros(1, 3)], ids=["none", "text", "few"])
def test_a_processor_that_gives_no_scores_is_told_so(gives) -> None:
    engine = build(METHODS["chain"])
    row = a_row(9, [2, 1, 0], 20, 1.0)
    given = replace(row.params, processors=lambda ids, scores: gives)
    row = make_row([2, 1, 0], given, SeededCoins(9), VOCAB)
    engine.submit(row)
    while not engine.idle:
        engine.step()
    assert isinstance(row.error, ConfigError) and "processors gave" in str(row.error)


@pytest.mark.parametrize("name", ["plain", "chain", "rsd-c", "prompt-lookup"])
def test_who_goes_on_after_an_interrupt_writes_the_same_text(name) -> None:
    """Ctrl-C in the thread that runs the steps; the rows of others are decoded on."""
    engine = build(METHODS[name])
    judge, calls = engine.verifier.verify, []

    def interrupted(*given):
        verdicts = judge(*given)
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return verdicts

    engine.verifier.verify = interrupted
    rows = [a_row(i, [0, 1, 2, i], 20, 1.0) for i in range(3)]
    for row in rows:
        engine.submit(row)
    with pytest.raises(KeyboardInterrupt):
        while not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    for i, row in enumerate(rows):
        assert [row.new_tokens] == write(build(METHODS[name]), [a_row(i, [0, 1, 2, i], 20, 1.0)])


def test_rows_have_their_places_while_their_prompts_are_fed() -> None:
    """Whoever looks from another thread just then sees no idle engine, and nobody twice."""
    engine, seen = build(METHODS["chain"]), []

    def looking(whole):
        def called(*given, **named):
            seen.append((len(engine.inside), engine.idle))
            return whole(*given, **named)

        return called

    engine.target.prefill = looking(engine.target.prefill)
    engine.drafter.start = looking(engine.drafter.start)
    for i in range(3):
        engine.submit(a_row(i, [0, 1, 2, i], 20, 1.0))
    engine.step()
    assert len(seen) == 4 and set(seen) == {(3, False)}


@pytest.mark.parametrize("where", ["target.prefill", "drafter.start"])
def test_a_prompt_that_was_being_fed_at_an_interrupt_is_fed_anew(where) -> None:
    engine = build(METHODS["chain"])
    part, name = where.split(".")
    part = getattr(engine, part)
    whole, calls = getattr(part, name), []

    def interrupted(*given, **named):
        done = whole(*given, **named)
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return done

    setattr(part, name, interrupted)
    rows = [a_row(i, [0, 1, 2, i], 20, 1.0) for i in range(2)]
    for row in rows:
        engine.submit(row)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while not engine.idle:
        engine.step()
    for i, row in enumerate(rows):
        alone = a_row(i, [0, 1, 2, i], 20, 1.0)
        assert [row.new_tokens] == write(build(METHODS["chain"]), [alone])


def test_a_drafter_that_cannot_let_go_of_a_row_lets_go_of_the_others() -> None:
    engine = build(METHODS["chain"])
    rows = [a_row(i, [0, 1, 2], 40, 0.0) for i in range(3)]
    for row in rows:
        engine.submit(row)
    engine.step()
    finish, left = engine.drafter.finish, []

    def breaks(row):
        left.append(row)
        if row is rows[0]:
            raise ZeroDivisionError("it stays")
        finish(row)

    engine.drafter.finish = breaks
    for row in rows:
        engine.cancel(row)
    with pytest.raises(ZeroDivisionError):
        engine.sweep()
    assert left == rows and engine.target.rows_held == 0 and engine.idle
    assert all(not row.private for row in rows)


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_a_row_that_was_committed_before_a_commit_failed_does_not_go_on(error) -> None:
    """Its cache is ahead of its text: whatever it wrote next would follow from another text."""
    engine = build(METHODS["plain"])
    rows = [a_row(i, [0, 1, 2, 1], 12, 0.0) for i in range(3)]
    alone = write(build(METHODS["plain"]), [a_row(2, [0, 1, 2, 1], 12, 0.0)])
    for row in rows:
        engine.submit(row)
    engine.step()
    commit = engine.target.commit

    def half(some, paths):
        if len(some) < 3:
            commit(some, paths)
            return
        commit(some[:1], paths[:1])
        raise error

    engine.target.commit = half
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.target.commit = commit
    while not engine.idle:
        engine.step()
    assert rows[0].error is error and rows[1].error is rows[2].error is None
    assert rows[2].new_tokens == alone[0]


def test_what_fails_where_a_row_starts_is_its_own_affair(make_llama):
    """Its tapped states, say, for which there was no memory: others are written."""

    class Strict(Nothing):
        traits = replace(Nothing.traits, taps=(Layer(0),))

    lm = open_lm(make_llama(61), kernels="dense")
    engine = Engine(lm, Strict(), Point(), Fixed())
    good, bad = (
        make_row([5, 9, 2], SamplingParams(max_new_tokens=4, temperature=0.0), SeededCoins(0), 61)
        for _ in range(2)
    )
    for row in (bad, good):
        engine.submit(row)
    bad.private[engine] = [torch.zeros(1, 2, 3)]
    while not engine.idle:
        engine.step()
    assert isinstance(bad.error, RuntimeError) and good.error is None
    assert len(good.new_tokens) == 4 and lm.rows_held == 0

"""Many callers at once: threads, asyncio tasks and streams on sessions that share their models."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import foretoken
from foretoken.engine import admission
from foretoken.engine.scheduling import Scheduler
from foretoken.errors import ConfigError

TEXTS = ("the cat is in the ", "a", "on and on and on and on", "one two three four", "é è")


class Broken(Exception):
    """What a user's own code raises."""


def breaking(ids, scores):
    raise Broken("from a processor")


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """In double precision, so that no rounding of a larger batch can turn a token."""
    return tuple(copy.deepcopy(model).double() for model in tiny_pair)


@pytest.fixture(scope="module")
def chain(pair, byte_tokenizer):
    target, draft = pair
    with foretoken.load(
        target, method="chain", draft=draft, tokenizer=byte_tokenizer, kernels="dense", depth=5
    ) as session:
        yield session


@pytest.fixture(scope="module")
def lookups(pair, byte_tokenizer):
    """A second session over the very same target."""
    with foretoken.load(
        pair[0], method="prompt-lookup", tokenizer=byte_tokenizer, kernels="dense", depth=5
    ) as session:
        yield session


def requests(count: int, seed: int) -> list[tuple[str, dict]]:
    """Prompts with options, greedy and sampled, short and long."""
    dice = random.Random(seed)
    return [
        (
            dice.choice(TEXTS)[: dice.randrange(1, 30)],
            {
                "max_new_tokens": dice.randrange(1, 12),
                "temperature": dice.choice((0.0, 0.0, 0.8, 1.0)),
                "seed": dice.randrange(50),
            },
        )
        for _ in range(count)
    ]


def alone(session, asked) -> list[list[int]]:
    known: dict[str, list[int]] = {}
    for prompt, options in asked:
        key = repr((prompt, sorted(options.items())))
        if key not in known:
            known[key] = session.generate(prompt, **options).tokens
    return [known[repr((prompt, sorted(options.items())))] for prompt, options in asked]


def in_threads(calls, workers: int) -> list:
    """What each call returned or raised, all of them on `workers` threads."""
    start = threading.Barrier(workers)

    def run(call):
        try:
            return call()
        except Broken as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: start.wait(timeout=60), range(workers)))
        return list(pool.map(run, calls))


def test_eight_threads_on_one_session_get_their_own_texts(chain) -> None:
    """Some break, some stream, some leave a stream early."""
    asked = requests(200, seed=0)
    wanted = alone(chain, asked)

    def call(i):
        prompt, options = asked[i]
        if i % 20 == 7:
            return lambda: chain.generate(prompt, **{**options, "processors": breaking})
        if i % 10 == 3:
            return lambda: [t for piece in chain.stream(prompt, **options) for t in piece.tokens]
        if i % 20 == 9:
            return lambda: left_early(chain.stream(prompt, **options))
        return lambda: chain.generate(prompt, **options).tokens

    got = in_threads([call(i) for i in range(len(asked))], workers=8)
    for i, (text, right) in enumerate(zip(got, wanted, strict=True)):
        if i % 20 == 7:
            assert isinstance(text, Broken)
        elif i % 20 == 9:
            assert text == right[: len(text)] and text
        else:
            assert text == right, f"request {i}: {asked[i]}"
    assert chain.engine.idle and chain.target.rows_held == chain.draft.rows_held == 0


def test_a_stream_that_others_write_is_told_its_last_step(chain, monkeypatch) -> None:
    """A row has ended before its reader is told so: who asks in between waits for the rest."""
    tell, prompts = Scheduler.tell, ["the cat is", "a dog was", "they will"]

    def late(self, row, step, at):
        time.sleep(0.004)
        tell(self, row, step, at)

    wanted = [chain.generate(prompt, 9, temperature=0.0).tokens for prompt in prompts]
    monkeypatch.setattr(Scheduler, "tell", late)
    read = lambda prompt: [t for p in chain.stream(prompt, 9) for t in p.tokens]  # noqa: E731
    calls = [lambda: chain.generate("once upon a time", 120).tokens]
    calls += [lambda prompt=prompt: read(prompt) for prompt in prompts * 12]
    assert in_threads(calls, workers=4)[1:] == wanted * 12


def left_early(stream) -> list[int]:
    first = next(stream).tokens
    stream.close()
    return first


def test_three_threads_on_two_sessions_over_one_model(chain, lookups) -> None:
    asked = requests(150, seed=1)
    wanted = alone(chain, asked)
    calls = [
        lambda session=(chain, lookups)[i % 2], prompt=prompt, options=options: (
            session.generate(prompt, **options).tokens
        )
        for i, (prompt, options) in enumerate(asked)
    ]
    greedy = [i for i, (_, options) in enumerate(asked) if options["temperature"] == 0.0]
    other = alone(lookups, asked)
    got = in_threads(calls, workers=3)
    assert got == [(wanted, other)[i % 2][i] for i in range(len(asked))]
    assert all(wanted[i] == other[i] for i in greedy)
    assert chain.target.rows_held == lookups.target.rows_held == 0


def test_gathered_tasks_join_one_batch(chain) -> None:
    asked = requests(150, seed=2)
    wanted = alone(chain, asked)
    widths = []
    chain.engine.listeners.append(lambda step: widths.append(len(step.rows)))

    async def all_of_them():
        tasks = [chain.agenerate(prompt, **options) for prompt, options in asked]
        return await asyncio.gather(*tasks)

    try:
        got = asyncio.run(all_of_them())
    finally:
        chain.engine.listeners.clear()
    assert [result.tokens for result in got] == wanted
    assert max(widths) > 4, "they took turns"


def test_a_cancelled_task_ends_its_rows(chain) -> None:
    async def give_up():
        task = asyncio.create_task(chain.agenerate(TEXTS[0], max_new_tokens=400))
        while chain.engine.idle:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await chain.agenerate(TEXTS[1], max_new_tokens=4)

    assert len(asyncio.run(give_up()).tokens) == 4
    assert chain.engine.idle


def test_draft_and_target_of_one_configuration_leave_it_as_it_was(pair, byte_tokenizer) -> None:
    """Both models run at once, and switch the attention of one shared configuration."""
    target, draft = (copy.deepcopy(model) for model in pair)
    draft.config = target.config
    for module in draft.modules():
        if hasattr(module, "config"):
            module.config = target.config
    before = target.config._attn_implementation
    with foretoken.load(
        target, method="pearl", draft=draft, tokenizer=byte_tokenizer, kernels="dense",
        overlap="threads",
    ) as session:  # fmt: skip
        calls = [lambda text=text: session.generate(text, 20).tokens for text in TEXTS * 2]
        assert in_threads(calls, workers=4) == [call() for call in calls]
    assert target.config._attn_implementation == before


@pytest.mark.parametrize("method", ["chain", "pearl"])
@pytest.mark.parametrize("which", ["itself", "a sibling", "another over its model"])
def test_a_text_asked_for_inside_a_step_is_refused_and_does_not_wait_for_itself(
    chain, lookups, which, method
) -> None:
    spec = chain if method == "chain" else chain.using(method, controller="fixed")
    asked = {"itself": spec, "a sibling": chain.using("plain"), "another over its model": lookups}

    def asking(ids, scores):
        asked[which].generate(TEXTS[1], 2)
        return scores

    done: list = []

    def run() -> None:
        try:
            spec.generate(TEXTS[0], 4, processors=asking)
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "it waits for itself"
    assert isinstance(done[0], ConfigError) and "inside a step" in str(done[0])
    assert chain.generate(TEXTS[1], 4).tokens
    assert chain.target.rows_held == lookups.target.rows_held == 0


def test_closing_a_session_under_others_tells_them(pair, byte_tokenizer) -> None:
    target, draft = (copy.deepcopy(model) for model in pair)
    session = foretoken.load(target, "chain", draft, byte_tokenizer, kernels="dense", depth=5)
    streams = [session.stream(TEXTS[0], 200), session.using("plain").stream(TEXTS[0], 200)]
    for stream in streams:
        next(stream)
    told: list = []

    def write() -> None:
        try:
            session.generate(TEXTS[0], 400)
        except ConfigError as error:
            told.append(str(error))

    threads = [threading.Thread(target=write, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6000):
        if len(session.engine.running) == 3:
            break
        time.sleep(0.01)
    session.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(told) == 2 and all("closed" in one for one in told)
    for stream in streams:
        with pytest.raises(ConfigError, match="closed"):
            list(stream)
    assert session.target.rows_held == 0


def test_a_model_set_to_training_under_a_stream_stops_it(pair) -> None:
    target = copy.deepcopy(pair[0])
    with foretoken.load(target, "plain", kernels="dense") as session:
        wanted = session.generate([1, 2, 3], 9).tokens
        stream = session.stream([1, 2, 3], 9)
        got = next(stream).tokens
        target.train()
        with pytest.raises(ConfigError, match="training mode"):
            list(stream)
        target.eval()
        assert wanted[: len(got)] == got
        assert session.generate([1, 2, 3], 9).tokens == wanted


@pytest.mark.parametrize("forward", [1, 3, 6])
def test_a_stream_collected_in_the_middle_of_a_forward_changes_no_text(chain, forward) -> None:
    """In a reference cycle, so that the garbage collector decides when its row is forgotten."""
    beside = chain.using("prompt-lookup")
    wanted = [result.tokens for result in chain.generate(list(TEXTS[:4]), 12)]
    streams = [beside.stream(TEXTS[2], 50) for _ in range(3)]
    for stream in streams:
        next(stream)
        stream.itself = stream
    del stream
    seen: list = []

    def collect(module, given, output) -> None:
        seen.append(module)
        if len(seen) == forward:
            streams.clear()
            gc.collect()

    hook = chain.target.model.model.layers[0].register_forward_hook(collect)
    try:
        got = [result.tokens for result in chain.generate(list(TEXTS[:4]), 12)]
    finally:
        hook.remove()
    assert got == wanted
    assert beside.engine.idle and chain.target.rows_held == 0


def test_a_stream_collected_while_rows_are_put_in_line_blocks_nobody(chain, monkeypatch) -> None:
    """The collector runs where something is made, also under the lock of those that wait."""
    stream = chain.stream(TEXTS[0], 50)
    next(stream)
    stream.itself = stream
    kept, since, found = [stream], admission.Since, []
    del stream

    def collecting(*counts):
        kept.clear()
        gc.collect()
        return since(*counts)

    monkeypatch.setattr(admission, "Since", collecting)
    write = threading.Thread(target=lambda: found.append(chain.generate(TEXTS[1], 4)), daemon=True)
    write.start()
    write.join(timeout=60)
    assert found and len(found[0].tokens) == 4, "it waits for itself"
    assert chain.engine.idle and chain.target.rows_held == 0


def test_a_step_is_told_to_others_where_what_comes_behind_it_raises(chain) -> None:
    wanted = chain.generate(TEXTS[1], 9).text
    ours, theirs = chain.stream(TEXTS[0], 50), chain.stream(TEXTS[1], 9)
    said = [next(theirs).text]
    next(ours)

    def raises(step):
        if len(step.rows) == 2:
            chain.engine.listeners.remove(raises)
            raise Broken("from a listener")

    chain.engine.listeners.append(raises)
    with pytest.raises(Broken):
        list(ours)
    said += [piece.text for piece in theirs]
    assert "".join(said) == wanted
    assert chain.engine.made is None and chain.engine.idle and chain.target.rows_held == 0


def test_a_row_on_its_way_into_the_batch_is_missed_by_nobody(chain, monkeypatch) -> None:
    engine, seen = chain.engine, []
    take, add = engine.waiting.take, engine.alike.add

    def taking(row):
        take(row)
        seen.append(engine.idle)

    def failing(row, filling):
        monkeypatch.setattr(engine.alike, "add", add)
        raise Broken("on its way")

    monkeypatch.setattr(engine.waiting, "take", taking)
    chain.generate(TEXTS[0], 3)
    assert seen == [False]
    chain.keep_prefixes(1 << 20)
    try:
        monkeypatch.setattr(engine.alike, "add", failing)
        with pytest.raises(Broken):
            chain.generate(TEXTS[3], 3)
        assert engine.alike.add == add and engine.idle
        assert len(chain.generate(TEXTS[3], 3).tokens) == 3
    finally:
        chain.keep_prefixes(0)


def test_tasks_that_matter_more_go_first_however_many_wait(pair, byte_tokenizer) -> None:
    """Far more of them than the batch has places."""
    with foretoken.load(
        pair[0], "plain", tokenizer=byte_tokenizer, kernels="dense", compile="off", max_rows=2
    ) as session:
        ended, verify = [], session.engine.verifier.verify

        def slowly(*given):
            time.sleep(0.02)  # so that all of them wait before many have ended
            return verify(*given)

        session.engine.verifier.verify = slowly

        async def one(name, **options):
            await session.agenerate(TEXTS[1], 12, ignore_eos=True, **options)
            ended.append(name)

        async def all_of_them():
            slow = [asyncio.create_task(one("later", priority=10)) for _ in range(40)]
            while len(session.engine.waiting) < 30:
                await asyncio.sleep(0.001)
            await asyncio.gather(*slow, one("now", priority=0))

        asyncio.run(all_of_them())
        assert len(ended) == 41 and ended.index("now") < 15

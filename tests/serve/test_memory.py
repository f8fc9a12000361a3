"""A server with a budget of memory: what is too large is refused with numbers, others go on."""

import threading

import httpx
import pytest
from live_server import wait_for

from foretoken.engine.memory.layout import layout_of
from foretoken.engine.memory.plan import Need
from foretoken.errors import CapabilityError

LARGE = {"prompt": "the cat is in the ", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
FITTING = {**LARGE, "max_tokens": 113}  # 126 with its prompt


@pytest.fixture(scope="module")
def tight(make_session, running, tiny_pair):
    """A server whose memory holds two texts of 126 tokens; a text is a byte each here."""
    layout = layout_of(
        tiny_pair[0], "chain", tiny_pair[1], kernels="dense", dtype=tiny_pair[0].dtype
    )
    budget = layout.plan(Need(2, 126, 2)).total
    with (
        make_session("chain", controller="fixed", depth=2, memory_budget=budget) as session,
        running(session, prefix_cache=1 << 29) as server,
    ):
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_too_large_for_memory_is_refused_with_numbers_while_others_go_on(
    tight, stream
) -> None:
    wanted = tight.session.generate(LARGE["prompt"], 113, temperature=0.0, ignore_eos=True).text
    told, asked = [], threading.Barrier(5)

    def ask():
        asked.wait()
        found = tight.post("/v1/completions", json=FITTING)
        told.append(found.json()["choices"][0]["text"])

    others = [threading.Thread(target=ask) for _ in range(4)]
    for other in others:
        other.start()
    asked.wait()
    refused = tight.post("/v1/completions", json={**LARGE, "stream": stream})
    for other in others:
        other.join()
    assert refused.status_code == 400 and refused.headers["content-type"] == "application/json"
    found = refused.json()["error"]
    assert found["type"] == "invalid_request_error" and found["param"] == "max_tokens"
    assert found["code"] == "memory_budget_exceeded"
    for number in ("13 prompt tokens", "480 new ones", "MiB", "at most"):
        assert number in found["message"]
    assert told == [wanted] * 4 and tight.session.engine.idle
    wait_for(lambda: tight.service.places == 0)  # given back behind an answer's last byte


def test_the_most_that_a_refusal_names_is_taken(tight) -> None:
    said = tight.post("/v1/completions", json=LARGE).json()["error"]["message"]
    most = int(said.partition("ask for at most ")[2].split()[0])
    told = tight.post("/v1/completions", json={**LARGE, "max_tokens": most}).json()
    assert told["usage"]["completion_tokens"] == most
    over = tight.post("/v1/completions", json={**LARGE, "max_tokens": most + 1})
    assert over.status_code == 400


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_that_names_no_length_has_what_memory_holds(tight, temperature) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    told = tight.post("/v1/chat/completions", json={**asked, "temperature": temperature})
    assert told.status_code == 200, told.text
    assert told.json()["choices"][0]["finish_reason"] == "length"
    assert told.json()["usage"]["total_tokens"] <= tight.session.engine.waiting.room.longest()


@pytest.mark.parametrize("rows", [1, 4])
def test_chats_that_name_no_length_are_written_together_with_guesses(
    make_session, running, tiny_pair, rows
) -> None:
    """Of all that memory holds each would be alone with it, and without any guess."""
    layout = layout_of(
        tiny_pair[0], "chain", tiny_pair[1], kernels="dense", dtype=tiny_pair[0].dtype
    )
    budget = layout.plan(Need(rows, 400, 4, sampled=True)).total
    fields = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    steps = []
    with (
        make_session(
            "chain", controller="fixed", depth=4, memory_budget=budget, max_rows=rows
        ) as session,
        running(session) as server,
    ):
        session.engine.listeners.append(steps.append)
        told, asked = [], threading.Barrier(4)

        def ask():
            asked.wait()
            told.append(server.post("/v1/chat/completions", json=fields).json())

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        usual = session.engine.waiting.usual
        assert 256 < usual < session.engine.waiting.longest
        assert [one["usage"]["total_tokens"] for one in told] == [usual] * 4
        assert usual >= 400
    assert max(len(step.rows) for step in steps) == rows
    assert max(len(draft.tree) - 1 for step in steps for draft in step.drafts) == 4


def test_who_waits_for_memory_can_leave_and_nobody_waits_for_ever(tight) -> None:
    """Twenty texts of which two fit together; some of their clients leave while they wait."""
    engine, done, most = tight.session.engine, [], []

    def look(step):
        most.append(len(step.rows))

    def ask(number):
        fields = {**FITTING, "user": f"u{number % 3}", "stream": True}
        with httpx.stream("POST", f"{tight.url}/v1/completions", json=fields, timeout=60) as got:
            if number % 4 == 3:
                next(got.iter_bytes())
                return
            done.append(got.read().count(b"data: [DONE]"))

    engine.listeners.append(look)
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    engine.listeners.remove(look)
    assert done == [1] * 15 and max(most) == 2


def test_what_is_kept_of_texts_has_what_is_left_alone(tight) -> None:
    waiting = tight.session.engine.waiting
    for length in (20, 60, 113):
        asked = {**FITTING, "max_tokens": length}
        assert tight.post("/v1/completions", json=asked).status_code == 200
        granted = waiting.granted
        taken = waiting.room.takes(granted.rows, granted.context, granted.nodes)
        held = sum(prefixes.held for prefixes in waiting.wishes)
        assert held <= max(waiting.room.left - taken, 0)
    assert sum(waiting.wishes.values()) > 1 << 28, "as much was wanted"


def test_a_budget_that_holds_no_text_is_refused_before_a_server_is_there(make_session) -> None:
    with pytest.raises(CapabilityError, match="memory budget") as refused:
        make_session("chain", memory_budget="300KiB")
    assert "memory_budget=" in refused.value.do


def test_behind_a_server_as_much_is_kept_of_texts_as_before(make_session, running) -> None:
    """As much as was wanted, whatever memory allowed of it; nothing where nothing was kept."""

    def limits():
        kept = [lm.prefixes for lm in session.models]
        return [None if prefixes is None else prefixes.limit for prefixes in kept]

    with make_session("chain", controller="fixed", depth=4) as session:
        for wanted in (0, 1 << 24):
            session.keep_prefixes(wanted)
            before = limits()
            for prefixes in [lm.prefixes for lm in session.models if wanted]:
                prefixes.allow(1 << 12)
            with running(session, prefix_cache=1 << 20) as server:
                told = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert told.status_code == 200
                assert sum(limits()) <= 1 << 20
            assert limits() == before == [wanted // 2 or None] * 2

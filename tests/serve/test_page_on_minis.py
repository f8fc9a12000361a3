"""The page before the real server, with the shipped models."""

import threading
import time
from contextlib import contextmanager

import pytest

import foretoken

pytest.importorskip("selenium", reason="the extra `browser` is not installed")
serving = pytest.importorskip(
    "foretoken.serve.running", reason="the extra `serve` is not installed", exc_type=ImportError
)

from visitor import Visitor, headless  # noqa: E402

from foretoken.serve import Settings, app  # noqa: E402

pytestmark = pytest.mark.slow


@contextmanager
def running(session, **settings):
    """A server around a session on a port that is free: it, and its address."""
    server = serving.Server(app(session, Settings(model_name="minis", **settings)))
    with serving.listen("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        try:
            yield server, serving.address_of(socket)
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served():
    options = {"kernels": "dense", "compile": "off", "controller": "fixed", "depth": 4}
    with (
        foretoken.load("text-target", "tree", "text-draft", **options) as session,
        running(session) as server,
    ):
        yield server


@pytest.fixture
def visitor(served):
    with headless() as browser:
        guest = Visitor(browser, served[1])
        guest.size(1200, 800)
        yield guest
        assert guest.complaints() == []


def test_an_answer_with_guesses_is_the_one_without(visitor):
    """Token by token in colour, and the same letters as plain decoding writes."""
    visitor.ask("Good morning, I am Carl.")
    guessed = visitor.text(".answer .text")
    assert len(visitor.texts(".answer .guessed")) > 5
    assert "tree, lossless" in visitor.text("#method")
    assert float(visitor.text("#length")) > 1.2 and visitor.text("#acceptance").endswith("%")
    assert visitor.js("return document.querySelectorAll('#tree .kept').length") > 0
    assert "Estimated by the server" in visitor.text("#saves")

    visitor.click("fresh")
    visitor.click("speculate")
    visitor.ask("Good morning, I am Carl.")
    assert visitor.text(".answer .text") == guessed
    assert visitor.texts(".answer .guessed") == [] and visitor.text("#acceptance") == "\u2013"


def test_a_stopped_answer_gives_its_place_back(visitor, served):
    service = served[0].service
    visitor.js("document.getElementById('cap').value = 4000")
    visitor.js("document.getElementById('temperature').value = 1.5")
    visitor.send("Count for ever.")
    visitor.until("return document.querySelectorAll('.answer .t').length > 3")
    assert service.places == 1
    visitor.click("stop")
    ends = time.monotonic() + 5
    while service.places and time.monotonic() < ends:
        time.sleep(0.01)
    assert service.places == 0


def test_a_server_that_writes_little_answers_the_first_message():
    with (
        foretoken.load("text-target", "plain", kernels="dense", compile="off") as session,
        running(session, max_tokens_limit=32) as (_, url),
        headless() as browser,
    ):
        guest = Visitor(browser, url)
        for chats in (True, False):  # the second message is continued, as of a model without chats
            guest.js("chat.template = arguments[0]", chats)
            guest.ask("Good morning, I am Carl.")
            assert guest.texts(".notice.wrong") == []
            assert 0 < guest.js("return chat.turns.at(-1).counted") <= 32
        assert guest.js("return chat.turns.length") == 2
        guest.js("document.getElementById('cap').value = 3")
        guest.ask("And who are you?")
        assert 0 < guest.js("return chat.turns.at(-1).counted") <= 3

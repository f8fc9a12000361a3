"""What reading a text is known to take."""

import pytest

from foretoken.drafters.parts import unread as reading
from foretoken.drafters.parts.unread import LONG, SURPRISE, Unread

VOCAB = 8


@pytest.fixture
def clock(monkeypatch):
    """Seconds that go by while a text is fed, set by the test."""
    now = [0.0]
    monkeypatch.setattr(reading, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def texts(clock, row):
    """Reads a text of 100 tokens that waits, in so many seconds, some of them reused."""
    waiting = Unread(lambda one: 100)

    def read(seconds, reused=0):
        one = row([1] * 101, VOCAB)
        waiting.add(one)

        def feed(rows):
            clock[0] += seconds
            if reused:
                rows[0].reused["draft"] = reused

        waiting.read([one], feed)
        return waiting.pace

    texts = read
    texts.waiting = waiting
    return texts


def test_a_pause_of_the_machine_does_not_make_texts_dear(texts):
    assert texts(1.0) == pytest.approx(0.01)
    assert texts(500.0) == pytest.approx(0.01 + 0.2 * (SURPRISE - 1.0) * 0.01)
    for _ in range(8):
        texts(1.0)
    assert texts.waiting.pace == pytest.approx(0.01, rel=0.01)


def test_a_first_reading_that_took_too_long_is_soon_forgotten(texts):
    texts(200.0)
    for _ in range(16):
        texts(1.0)
    assert texts.waiting.pace == pytest.approx(0.01, rel=0.02)


def test_tokens_taken_over_from_an_earlier_text_take_no_time(texts):
    texts(1.0)
    assert texts(0.25, reused=75) == pytest.approx(0.01)
    assert texts(0.0, reused=100) == pytest.approx(0.01), "nothing was fed"


def test_a_text_that_fell_far_behind_takes_its_time_again(texts, row):
    texts(1.0)
    missing = {"near": LONG - 1, "far": LONG}
    for name, count in missing.items():
        texts.waiting.missing = lambda one, count=count: count
        took = texts.waiting.to_read(row([1], VOCAB))
        assert took == pytest.approx(0.01 * count if name == "far" else 0.0)

"""What is told of a run that takes hours: a bar on a terminal, lines in a log."""

import pytest

from foretoken.training import bar as telling
from foretoken.training.bar import bar, tracked


@pytest.fixture
def clock(monkeypatch):
    """The time that lines see, in seconds; no variable says that stderr is a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    now = [0.0]
    monkeypatch.setattr(telling, "monotonic", lambda: now[0])
    return now


def test_a_log_hears_of_a_run_every_minute_while_it_runs(clock, capsys):
    with bar("eagle3", 200, show=True) as advance:
        assert capsys.readouterr().err == "eagle3: 200\n"
        for step in range(1, 131):
            clock[0] += 1.0
            advance(step, 0.5, 1234.0)
        told = capsys.readouterr().err.splitlines()
        assert told == [f"eagle3: {n}/200, loss 0.500, 1,234 tokens/s" for n in (60, 120)]
    assert capsys.readouterr().err == "eagle3: 130/200, loss 0.500, 1,234 tokens/s\n"


def test_a_log_hears_of_the_pieces_that_are_done(clock, capsys):
    for _ in tracked("abc", "collecting, train", 3, show=True):
        clock[0] += 40.0
    told = capsys.readouterr().err.splitlines()
    assert told == ["collecting, train: 3", "collecting, train: 2/3", "collecting, train: 3/3"]


def test_nothing_is_told_of_no_pieces_or_where_nobody_asked(clock, capsys):
    assert list(tracked("", "collecting, train", 0, show=True)) == []
    assert list(tracked("ab", "collecting, train", 2, show=False)) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_a_dumb_terminal_which_draws_no_bar_gets_lines(clock, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with bar("eagle3", 200, show=True):
        assert capsys.readouterr().err == "eagle3: 200\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with bar("eagle3", 200, show=True) as advance:
        advance(1, 0.5, 1234.0)
    assert "1/200" in capsys.readouterr().err

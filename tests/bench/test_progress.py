"""Signs of life on the error stream."""

from foretoken.bench.progress import shown


def test_where_there_is_no_terminal_every_stage_is_a_line(capsys) -> None:
    with shown(quiet=False) as bar:
        bar.begin("preparing", 2)
        bar.say("preparing chain[depth=3]")
        bar.advance()
        bar.begin("measuring", 40)
        bar.advance()
    told = capsys.readouterr()
    assert told.err.splitlines() == ["preparing: 2", "measuring: 40"] and told.out == ""


def test_on_a_terminal_it_is_a_bar_that_names_the_row(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with shown(quiet=False) as bar:
        bar.begin("preparing", 2)
        bar.say("preparing chain[depth=3]")
    assert "chain[depth=3]" in capsys.readouterr().err


def test_a_dumb_terminal_which_draws_no_bar_gets_lines(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with shown(quiet=False) as bar:
        bar.begin("preparing", 2)
        assert capsys.readouterr().err == "preparing: 2\n"


def test_quiet_is_silent(capsys) -> None:
    with shown(quiet=True) as bar:
        bar.begin("preparing", 2)
        bar.advance()
    assert capsys.readouterr().err == ""

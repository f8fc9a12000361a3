"""Marks of where a token came from: colours on a terminal, signs everywhere else."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from transformers import GenerationConfig
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.cli.colour import ACCEPTED, CORRECTED, OWN, legend, marked, paint, signs
from foretoken.cli.write import write_beams
from foretoken.engine.loading import load
from foretoken.engine.results import Piece
from foretoken.engine.text import RowText

runner = CliRunner()


def screen(encoding="utf-8", **options):
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding), highlight=False, **options)


def brush():
    return RowText(lambda tokens: "".join("abcdef"[t] for t in tokens))


def plain(parts):
    return "".join(part.text for part in parts)


def written(out):
    """The bytes on a screen, without what only colours them."""
    out.file.flush()
    return re.sub(rb"\x1b\[[\d;]*m", b"", out.file.buffer.getvalue()).decode()


COLOURED = {"force_terminal": True, "color_system": "truecolor", "no_color": False}


def test_accepted_and_corrected_tokens_are_coloured_differently():
    around = signs(screen(**COLOURED))
    parts = marked(brush(), Piece("abc", [0, 1, 2], 2, True), frozenset({5}), around)
    assert plain(parts) == "abc"
    assert [str(part.style) for part in parts] == [ACCEPTED.style, CORRECTED.style]
    assert plain(marked(brush(), Piece("", [5], 0, False), frozenset({5}), around)) == ""


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (screen(), "\u2039ab\u203a\u00abc\u00bb"),
        (screen(**{**COLOURED, "no_color": True}), "\u2039ab\u203a\u00abc\u00bb"),
        (screen("ascii"), "[ab]{c}"),
    ],
    ids=["pipe", "NO_COLOR", "ascii"],
)
def test_signs_tell_the_same_where_there_is_no_colour(out, told):
    text = marked(brush(), Piece("abc", [0, 1, 2], 2, True), frozenset(), signs(out))
    assert plain(text) == told
    own = marked(brush(), Piece("c", [2], 0, False), frozenset(), signs(out))
    assert plain(own) == "c"
    before, after = signs(out)(CORRECTED)
    assert f"{before}{CORRECTED.meaning}{after}" in legend("chain", out).plain


def test_colours_differ_for_the_colour_blind_and_in_grey():
    assert len({ACCEPTED.style, CORRECTED.style, OWN.style}) == 3
    assert "bold" in CORRECTED.style and "red" not in CORRECTED.style + ACCEPTED.style
    assert "green" not in ACCEPTED.style


def test_without_its_signs_the_shown_text_is_the_text(pair_folders):
    target, draft = map(str, pair_folders)
    how = ["generate", "the cat is in the ", "--target", target, "--draft", draft]
    how += ["--set", "kernels=dense", "--set", "depth=5", "--max-new-tokens", "30"]
    first, shown = runner.invoke(app, [*how, "--show"]).stdout.split("\n", 1)
    plain = runner.invoke(app, how).stdout
    assert "guessed and accepted" in first and "corrected" in first
    assert shown != plain
    assert re.sub("[\u2039\u203a\u00ab\u00bb]", "", shown) == plain


def test_what_is_shown_ends_at_the_stops_of_the_generation_config(pair_folders):
    target, draft = pair_folders
    with load(target, "chain", draft, kernels="dense") as session:
        asked = {"max_new_tokens": 30, "temperature": 0.0}
        whole = session.generate("the cat is in the ", **asked).text
    config = GenerationConfig(stop_strings=[whole[10:12]])
    with load(target, "chain", draft, kernels="dense", generation_config=config) as session:
        out = screen()
        told = paint(session, "the cat is in the ", asked, out, show=True).text
    assert len(told) < len(whole)
    assert re.sub("[\u2039\u203a\u00ab\u00bb]", "", written(out)) == f"{told}\n"


@pytest.mark.parametrize("show", [False, True])
@pytest.mark.parametrize("options", [{}, COLOURED], ids=["pipe", "terminal"])
def test_a_text_is_written_as_it_is(pair_folders, options, show):
    """Tabs, control characters, long lines and what rich would take for emoji or markup."""
    target, draft = pair_folders
    text = "a\tb x[:end:2]\r\n\t:100:\f[bold]" + 100 * "z"
    asked = {"max_new_tokens": 200, "prediction": text, "guided": {"choice": [text]}}
    with load(target, "chain", draft, kernels="dense") as session:
        out = screen(**options)
        assert paint(session, "the cat", asked, out, show).text == text
        assert re.sub("[\u2039\u203a\u00ab\u00bb]", "", written(out)) == f"{text}\n"


def test_beams_are_written_as_they_are(pair_folders, capsys):
    target, draft = pair_folders
    with load(target, "dsbd", draft, kernels="dense", num_beams=2) as session:
        [tab] = session.tokenizer("\t")["input_ids"]
        asked = {"max_new_tokens": 3, "temperature": 1.0, "logit_bias": {tab: 500.0}}
        write_beams(session, "the cat", asked, show=False, json_=False)
    assert capsys.readouterr().out == "\t\t\t\n"


def test_what_is_shown_goes_on_where_stop_texts_are_held_back(pair_folders):
    target, draft = pair_folders
    with load(target, "chain", draft, kernels="dense") as session:
        bias = dict.fromkeys(session.tokenizer("xyz")["input_ids"], 50.0)
        sampling = {"max_new_tokens": 40, "logit_bias": bias, "seed": 1, "temperature": 1.0}
        sampling |= {"stop": ["x", "y"], "min_new_tokens": 12}
        out = screen()
        told = paint(session, "the cat", sampling, out, show=True).text
        out.file.seek(0)
        assert re.sub("[\u2039\u203a\u00ab\u00bb]", "", out.file.read()).strip() == told
        assert len(told) >= 12 and "x" in told


def test_a_character_that_the_output_lacks_is_an_escape_and_no_end_of_the_text():
    code = (
        "from rich.segment import Segment\n"
        "from foretoken.cli.colour import consoles, write\n"
        "from foretoken.cli.errors import escape_what_is_lacking\n"
        "escape_what_is_lacking()\n"
        "write(consoles()[0], Segment('caf\\u00e9 goes on\\n'))"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=120)
    assert ran.stdout == b"caf\\xe9 goes on\n", ran.stderr.decode()

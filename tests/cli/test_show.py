"""Marks of where a token came from: colours on a terminal, signs everywhere else."""

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.cli.colour import ACCEPTED, CORRECTED, OWN, legend, marked, paint, signs
from foretoken.engine.loading import load
from foretoken.engine.session import Piece
from foretoken.engine.text import RowText

runner = CliRunner()


def screen(encoding="utf-8", **options):
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding), highlight=False, **options)


def brush():
    return RowText(lambda tokens: "".join("abcdef"[t] for t in tokens))


COLOURED = {"force_terminal": True, "color_system": "truecolor", "no_color": False}


def test_accepted_and_corrected_tokens_are_coloured_differently():
    around = signs(screen(**COLOURED))
    text = marked(brush(), Piece("abc", [0, 1, 2], 2, True), frozenset({5}), around)
    assert text.plain == "abc"
    assert [span.style for span in text.spans] == [ACCEPTED.style, CORRECTED.style]
    assert marked(brush(), Piece("", [5], 0, False), frozenset({5}), around).plain == ""


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
    assert text.plain == told
    own = marked(brush(), Piece("c", [2], 0, False), frozenset(), signs(out))
    assert own.plain == "c"
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

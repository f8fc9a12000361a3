"""What a reader sees: tables without empty columns, honest words, pictures for both themes."""

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foretoken.bench import plots, svg, words
from foretoken.bench.journal import Cell
from foretoken.bench.metrics import summarise
from foretoken.bench.report import markdown, write_reports

SAVED = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def results():
    """A bench of many rows, as it was measured."""
    return json.loads((SAVED / "stage_c.json").read_text())


def ratio(value: float, low: float, high: float) -> dict:
    return {"value": value, "interval": (low, high)}


def test_a_ratio_whose_interval_holds_one_is_not_distinguishable() -> None:
    assert words.times(ratio(1.02, 0.97, 1.06)) == "1.02\u00d7 [0.97, 1.06] not distinguishable"
    assert words.times(ratio(1.2, 1.0, 1.4)).endswith(words.SAME), "at its edge, too"
    assert words.SAME not in words.times(ratio(1.2, 1.01, 1.4))
    assert words.SAME not in words.times({"value": 1.0, "interval": None}), "nothing is known"
    assert words.times(ratio(1.0, 1.0, 1.0)) == "1.00\u00d7", "a row over itself"


def test_the_fastest_peer_is_beaten_with_an_interval() -> None:
    def cell(row: str, prompt: int, seconds: float) -> Cell:
        return Cell(
            row=row, prompt=str(prompt), family="f", repetition=0, prompt_tokens=3,
            tokens=[1] * 10, seconds=seconds,
        )  # fmt: skip

    near = [cell("plain", n, 1.0 + 0.2 * (n % 3)) for n in range(9)]
    near += [cell("hf:plain", n, 1.4 - 0.2 * (n % 3)) for n in range(9)]
    found = summarise(near, ["plain", "hf:plain"])
    assert found["over_peer"]["interval"] is not None
    assert words.same(found["over_peer"])
    text = words.summary(found)
    assert "the fastest peer, hf:plain (not distinguishable)" in text


def test_no_column_of_a_table_is_empty(results) -> None:
    columns, cells = words.table(results)
    assert "over hf:plain" not in columns and "texts" not in columns and "over plain" in columns
    for column in columns:
        assert any(row[column] != words.MISSING for row in cells.values()), column
    head = next(line for line in markdown(results, {}).splitlines() if line.startswith("| row"))
    assert "hf:" not in head


def test_a_failed_row_has_its_line_and_its_reason(results, tmp_path) -> None:
    results["rows"]["tree"] = {
        "method": "tree", "peer": False, "lossless": True, "failed": "no | room", "cells": 0,
    }  # fmt: skip
    files = write_reports(results, tmp_path)
    assert "**tree** failed: no | room" in files["markdown"].read_text()
    assert re.search(r'>tree<.*?<td class="why"[^>]*>no \| room', files["html"].read_text())


def test_a_row_that_failed_on_the_way_is_in_no_picture_of_speeds(results) -> None:
    results["rows"]["auto"]["failed"] = "no room left"
    drawn = {name: picture.inline() for name, picture in plots.draw(results).items()}
    shown = {name for name, inline in drawn.items() if ">auto<" in inline}
    assert shown == {"acceptance", "steps", "shares"}, "what it guessed is told as it was"
    assert "auto (failed on the way)" in markdown(results, {})


def test_where_end_tokens_are_ignored_the_report_says_so(results, tmp_path) -> None:
    assert "end tokens" not in words.facts(results)["sampling"]
    results["setting"]["ignore_eos"] = True
    assert "temperature 0.0, end tokens ignored, at most" in words.facts(results)["sampling"]
    files = write_reports(results, tmp_path)
    for name in ("markdown", "html"):
        assert "end tokens ignored" in files[name].read_text()


def test_rows_are_dots_from_the_fastest_to_the_slowest(results) -> None:
    picture = plots.draw(results)["speedup"].inline()
    values = [float(v) for v in re.findall(r">([\d.]+)\u00d7", picture)]
    assert values == sorted(values, reverse=True) and len(values) == len(results["rows"])
    assert picture.count('class="ink" cx') >= len(values) and "<rect" not in picture


def test_a_row_that_cannot_be_told_from_plain_is_hollow(results) -> None:
    assert 'class="hollow"' not in plots.draw(results)["speedup"].inline()
    results["rows"]["auto"]["speedup"]["plain"] |= {"value": 1.1, "interval": [0.9, 1.3]}
    drawn = plots.draw(results)["speedup"].inline()
    assert drawn.count('class="hollow"') == 1 and "not distinguishable" in drawn


def test_a_row_has_its_groups_colour_in_every_picture(results) -> None:
    for name, picture in plots.draw(results).items():
        if name not in ("scoring", "shares"):
            root = ElementTree.fromstring(f"<all>{picture.inline()}</all>")
            groups = {g.get("class") for g in root.iter("g") if g.find("circle") is not None}
            assert {"look-up", "draft-model", "self-speculation", "lossy"} <= groups, name


def test_many_rows_by_families_are_a_heat_map(results) -> None:
    drawn = plots.draw(results)["families"].inline()
    rows = len(results["rows"]) - 1  # plain is what all are held against
    assert drawn.count("<rect") == rows * len(results["families"])
    for family in results["families"]:
        assert f">{family}<" in drawn
    single = copy.deepcopy(results)
    single["families"] = single["families"][:1]
    assert "families" not in plots.draw(single), "one family says what the first picture says"


def test_a_long_name_beside_a_heat_map_loses_neither_options_nor_its_lossy() -> None:
    assert plots.wrapped("tree (lossy)") == ["tree (lossy)"]
    assert plots.wrapped("mcsd-target-init (lossy)") == ["mcsd-target-init", "(lossy)"]
    assert plots.wrapped("hf:prompt-lookup") == ["hf:prompt-lookup"]
    told = plots.wrapped("rest[datastore=store,controller=cost_model]")
    assert told == ["rest", "[datastore=store,", "controller=cost_model]"]


@pytest.mark.parametrize("name", ["stage_a", "stage_c"])
def test_words_of_a_picture_stay_inside_it(name: str) -> None:
    """Letters of 12 units are at most 7.6 wide; the page shows pictures no wider than WIDTH."""
    results = json.loads((SAVED / f"{name}.json").read_text())
    for picture in plots.draw(results).values():
        for mark in ElementTree.fromstring(f"<all>{picture.inline()}</all>").iter("text"):
            if mark.get("transform"):
                continue
            x, y, said = float(mark.get("x")), float(mark.get("y")), mark.text or ""
            small = {"small": 0.92, "title": 1.25}.get((mark.get("class") or "").split(" ")[0], 1.0)
            wide = small * 5.9 * len(said)
            start = {"middle": x - wide / 2, "end": x - wide}.get(mark.get("text-anchor"), x)
            assert start > -8 and start + wide < svg.WIDTH + 8, (picture.title, said)
            assert 0 < y < picture.height, (picture.title, said)


def test_page_and_pictures_follow_the_readers_theme(results, tmp_path) -> None:
    files = write_reports(results, tmp_path)
    for name, path in files.items():
        text = path.read_text()
        if name in ("json", "markdown"):
            continue
        assert "prefers-color-scheme: dark" in text, name
        used = set(re.findall(r"var\((--[\w-]+)\)", text))
        light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in halves(text))
        assert used <= light == dark, name
        inside = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
        assert not re.search(r"#[0-9a-f]{6}\b", inside), f"{name}: a colour outside the theme"


def halves(text: str) -> tuple[str, str]:
    """The light and the dark values of the style sheet."""
    start = text.index(":root")
    middle = text.index("@media (prefers-color-scheme: dark)")
    return text[start:middle], text[middle : text.index("}\n}", middle)]


def test_the_page_is_one_file_that_fits_a_telephone(results, tmp_path) -> None:
    page = write_reports(results, tmp_path)["html"].read_text()
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert not re.search(r"(?:src|href)\s*=", page)
    assert 'name="viewport"' in page and "@media (max-width: 760px)" in page
    assert page.count("data-name=") >= len(results["rows"]), "cells name their columns there"

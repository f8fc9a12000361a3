"""Disks that are full or take no files, and machines without psutil."""

import builtins
import importlib
import json
import resource
import sys
from contextlib import contextmanager

import pytest

from foretoken.bench import environment, memory, words
from foretoken.bench.files import replace, writable
from foretoken.bench.journal import Cell, Journal, open_journal, read_journal
from foretoken.bench.report import write_reports
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import single
from foretoken.errors import ConfigError


@contextmanager
def full_disk(room: int):
    """No file grows beyond `room` bytes: what a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_refused_before_any_model_is_read(tmp_path) -> None:
    asked = BenchConfig(target="no/such/model", methods="plain", out=tmp_path / "a" / "b")
    with full_disk(1000), pytest.raises(ConfigError, match="nothing can be written there"):
        run_bench(asked, [single("a", id="a", family="a")])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_files_is_left_as_it_was(tmp_path) -> None:
    (tmp_path / "mine").write_text("mine")
    writable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "report.md"
    replace(path, "the old one")
    with full_disk(1000), pytest.raises(ConfigError, match="nothing can be written there"):
        replace(path, "the new one " * 1000)
    assert path.read_text() == "the old one"
    assert [found.name for found in tmp_path.iterdir()] == ["report.md"]


def test_a_disk_that_fills_up_on_the_way_keeps_the_finished_cells(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.note("row", "plain", "first")
    with full_disk(100), pytest.raises(ConfigError, match="--resume"):
        journal.note("row", "plain", "x" * 1000)


def test_a_finished_bench_that_has_grown_is_not_finished_until_its_end(tmp_path) -> None:
    """Else the same command without --resume would erase what an interrupted one left."""
    path, asked = tmp_path / "journal.jsonl", {"target": "x"}
    open_journal(path, asked, resume=False).finish()
    grown = open_journal(path, asked, resume=True)
    assert grown.finished
    grown.add(Cell(row="plain", prompt="p", family="f", repetition=1, prompt_tokens=1, tokens=[1],
                   seconds=1.0))  # fmt: skip
    assert not grown.finished and not read_journal(path)[1].finished
    with pytest.raises(ConfigError, match="--resume"):
        open_journal(path, asked, resume=False)
    grown.finish()
    assert read_journal(path)[1].finished and not open_journal(path, asked, resume=False).cells


@pytest.fixture
def without_psutil(monkeypatch):
    real = builtins.__import__

    def refusing(name, *rest):
        if name == "psutil":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    monkeypatch.setattr(builtins, "__import__", refusing)
    importlib.reload(memory)
    yield
    monkeypatch.undo()
    importlib.reload(memory)


def test_without_psutil_memory_is_left_out_and_one_line_says_why(
    without_psutil, pair_folders, tmp_path, capsys
) -> None:
    asked = BenchConfig(
        target=pair_folders[0], methods="plain", out=tmp_path, repetitions=1, max_new_tokens=4,
        scoring_nodes=(1, 2),
    )  # fmt: skip
    results = run_bench(asked, [single("the pen", id="a", family="qa")])
    assert results["rows"]["plain"]["peak_rss"] is None
    assert sum("psutil" in line for line in capsys.readouterr().err.splitlines()) == 1
    columns, _ = words.table(results)
    assert "peak MiB" not in columns and "tokens/s" in columns
    table = (tmp_path / "report.md").read_text()
    assert "peak MiB" not in table and "psutil is not installed" in table
    assert "psutil is not installed" in (tmp_path / "report.html").read_text()


def test_a_busy_machine_is_warned_about_on_terminal_and_report(
    pair_folders, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(environment, "load", lambda: (99.5, 1.0, 1.0))
    asked = BenchConfig(
        target=pair_folders[0], methods="plain", out=tmp_path, repetitions=1, max_new_tokens=4,
        scoring_nodes=(1, 2),
    )  # fmt: skip
    results = run_bench(asked, [single("the pen", id="a", family="qa")])
    assert "load 99.5" in capsys.readouterr().err and "load 99.5" in results["warnings"][0]
    for name in ("report.md", "report.html"):
        assert "load 99.5" in (tmp_path / name).read_text()
    quiet = {"load_average": [0.5], "cores": 2}
    assert (
        environment.busy(quiet) is None and environment.busy({**quiet, "load_average": []}) is None
    )


def test_reports_that_find_no_room_leave_the_old_ones(pair_folders, tmp_path) -> None:
    asked = BenchConfig(
        target=pair_folders[0], methods="plain", out=tmp_path, repetitions=1, max_new_tokens=4,
        scoring_nodes=(1, 2), quiet=True,
    )  # fmt: skip
    results = run_bench(asked, [single("the pen", id="a", family="qa")])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with full_disk(500), pytest.raises(ConfigError):
        write_reports({**results, "title": "another"}, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert json.loads((tmp_path / "results.json").read_text())["title"] == results["title"]

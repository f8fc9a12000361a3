"""Benches that are gone on with elsewhere: cells of two libraries or engines are never mixed."""

import dataclasses

import pytest
import torch

from foretoken.bench import run as bench_run
from foretoken.bench.identity import apart, contents, row_contents
from foretoken.bench.interpreters import Interpreter
from foretoken.bench.journal import Cell, Journal
from foretoken.bench.rows import row_of
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import single
from foretoken.errors import ConfigError

TASKS = [single("the pen and a pin ", id="p", family="qa")]


def test_a_bench_of_another_torch_is_not_gone_on_with(pair_folders, tmp_path, monkeypatch) -> None:
    def asked(resume: bool) -> BenchConfig:
        return BenchConfig(
            target=pair_folders[0], methods="plain", out=tmp_path, repetitions=1,
            max_new_tokens=4, scoring_nodes=(1,), quiet=True, resume=resume,
        )  # fmt: skip

    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.0.1+other")
        run_bench(asked(resume=False), TASKS)
    with pytest.raises(ConfigError, match=r'torch: "2\.0\.1\+other" -> '):
        run_bench(asked(resume=True), TASKS)


def test_cells_of_an_engine_of_another_version_are_named(tmp_path) -> None:
    spec, journal = row_of("vllm:plain", {}), Journal(tmp_path / "journal.jsonl")

    def engines(version: str) -> dict[str, Interpreter]:
        return {"vllm": Interpreter("python", {"vllm": version})}

    assert row_contents(row_of("plain", {}), engines("1")) == {}
    journal.same(spec.label, row_contents(spec, engines("1")))
    journal.same(spec.label, row_contents(spec, engines("2")))  # nothing was written by it
    journal.cells.append(
        Cell(row=spec.label, prompt="p", family="f", repetition=0, prompt_tokens=1, tokens=[1],
             seconds=1.0)
    )  # fmt: skip
    with pytest.raises(ConfigError, match="vllm:plain was begun with another vllm"):
        journal.same(spec.label, row_contents(spec, engines("3")))


def test_what_lies_in_the_home_directory_is_a_rows_content(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").write_text("learnt")
    named = row_of("token-recycling", {"memory": "~/x"})
    found = row_contents(named, {})
    assert found == {"memory": contents(tmp_path / "x")}
    (tmp_path / "x").write_text("learnt more")
    assert row_contents(named, {}) != found
    assert row_contents(row_of("token-recycling", {"memory": "~nobody-here/x"}), {}) == {}


def apart_in(results) -> list[str]:
    return [text for text in results["warnings"] if "another run" in text]


def test_rows_that_were_added_to_a_finished_bench_are_named(pair_folders, tmp_path) -> None:
    asked = BenchConfig(
        target=pair_folders[0], draft=pair_folders[1], methods="plain", out=tmp_path,
        repetitions=1, max_new_tokens=4, scoring_nodes=(1,), quiet=True,
    )  # fmt: skip
    assert not apart_in(run_bench(asked, TASKS))
    grown = dataclasses.replace(asked, methods="plain,chain", resume=True)
    [warning] = apart_in(run_bench(grown, TASKS))
    assert warning.startswith("chain: measured in another run than the reference")
    assert warning in (tmp_path / "report.md").read_text()
    assert apart_in(run_bench(grown, TASKS)) == [warning], "nothing was measured anew"


def test_a_resume_that_finishes_a_bench_names_rows_without_a_run_of_the_reference(
    pair_folders, tmp_path, monkeypatch
) -> None:
    asked = BenchConfig(
        target=pair_folders[0], draft=pair_folders[1], methods="plain,chain,prompt-lookup",
        out=tmp_path, repetitions=1, max_new_tokens=4, scoring_nodes=(1,), quiet=True,
    )  # fmt: skip
    written, measured = [], bench_run.measure_cell

    def stopped(row, *given):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(row.spec.label)
        return measured(row, *given)

    with monkeypatch.context() as patched:
        patched.setattr(bench_run, "measure_cell", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_bench(asked, TASKS)
    assert written == ["plain", "chain"]
    again = dataclasses.replace(asked, resume=True)
    [warning] = apart_in(run_bench(again, TASKS))
    assert warning.startswith("prompt-lookup: ")
    more = run_bench(dataclasses.replace(again, repetitions=2), TASKS)
    assert not apart_in(more), "the second repetition was measured in one run"


def test_a_row_that_shares_a_first_text_alone_is_named(tmp_path) -> None:
    runs = {"plain": [0, 0, 0, 0], "tree": [0, 1, 1, 1]}
    journal = Journal(tmp_path / "cells.jsonl", [
        Cell(row=row, prompt=str(n), family="f", repetition=0, prompt_tokens=1, tokens=[1],
             seconds=1.0, run=run)
        for row, found in runs.items() for n, run in enumerate(found)
    ])  # fmt: skip
    [warning] = apart(journal, ["plain", "tree"])
    assert warning.startswith("tree: ")


def test_cells_of_a_journal_of_before_are_of_one_run(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    old = {"prompt": "p", "family": "f", "repetition": 0, "prompt_tokens": 1, "tokens": [1]}
    for row in ("plain", "chain"):
        journal.take("cell", {**old, "row": row, "seconds": 1.0})
    assert apart(journal, ["plain", "chain"]) == []
    journal.take("cell", {**old, "row": "tree", "seconds": 1.0, "run": 1})
    [warning] = apart(journal, ["plain", "chain", "tree"])
    assert warning.startswith("tree: ")

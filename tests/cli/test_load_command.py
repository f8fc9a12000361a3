"""`foretoken load` as it is typed: what it prints, what it refuses, how Ctrl-C ends it."""

import json
import signal
import subprocess
import sys
import time

import pytest
from small_server import serving
from typer.testing import CliRunner

from foretoken.cli import app

runner = CliRunner()


def run(*arguments, **more):
    return runner.invoke(app, ["load", *(str(a) for a in arguments)], **more)


def test_a_load_test_prints_tables_and_writes_reports(tmp_path) -> None:
    with serving(first=0.01, each=0.001) as server:
        ran = run(
            server.url, "--concurrency", "1,2", "--requests", 12, "--max-tokens", 5,
            "--slo-ttft", 500, "--ignore-eos", "--out", tmp_path, "--names", "mine",
        )  # fmt: skip
        assert ran.exit_code == 0, ran.output
        assert all(one["ignore_eos"] and one["max_tokens"] == 5 for one in server.asked)
    assert "| concurrency 2 | mine |" in ran.stdout and "page.html" in ran.stdout
    assert "Steady part:" in ran.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"load.json", "load.md", "page.html"}


def test_json_is_one_document_and_prompts_may_come_from_a_file(tmp_path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one", "category": "x"}\n{"turns": ["two"], "category": "y"}\n')
    with serving(first=0.002, each=0.001, key="k") as server:
        ran = run(
            server.url, "--rate", 100, "--requests", 10, "--prompts", file, "--json",
            "--out", tmp_path / "out", env={"FORETOKEN_API_KEY": "k"},
        )  # fmt: skip
        said = {one["messages"][0]["content"] for one in server.asked}
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["levels"][0]["label"] == "rate 100/s" and said == {"one", "two"}
    assert found["prompts"]["families"] == ["x", "y"] and found["prompts"]["repeated"]
    assert any("came again" in text for text in found["warnings"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["http://192.168.1.7:8000"], "pass --allow-remote if that server is yours"),
        (["http://localhost:1", "--concurrency", "1", "--rate", "2"], "of one kind"),
        (["http://localhost:1", "--concurrency", "x"], "--concurrency 1,4,16"),
        (["http://localhost:1", "--rate", "0"], "--rate 0.5,1,2"),
        (["http://localhost:1", "--concurrency", "inf"], "a load of inf"),
        (["http://localhost:1", "--rate", "2", "--think", "1"], "--think 1 was passed with --rate"),
        (["http://localhost:1", "--day", "2", "--think", "1"], "with --day"),
        (["http://localhost:1", "--slo-ttft", "0"], "targets are above 0"),
        (["http://localhost:1", "--endpoint", "other"], "--endpoint chat"),
        (["http://localhost:1"], "start the server"),
        ([], "URL"),
    ],
)
def test_mistakes_are_told_in_three_parts(arguments, told, tmp_path) -> None:
    ran = run(*arguments, "--out", tmp_path / "out")
    assert ran.exit_code == 2 and "what to do" in ran.stderr
    assert told in " ".join(ran.stderr.split())
    assert not (tmp_path / "out" / "load.json").exists()


def test_a_server_that_answers_nothing_ends_with_status_one(tmp_path) -> None:
    with serving(first=0.001, each=0.0, fault=lambda n: "500" if n > 2 else None) as server:
        ran = run(server.url, "--concurrency", 2, "--requests", 6, "--out", tmp_path)
    assert ran.exit_code == 1 and "answered nothing" in ran.stdout
    assert "6 http 500 " in ran.stdout


def test_ctrl_c_leaves_a_report_of_what_was_done(tmp_path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n')
    with serving(first=0.02, each=0.004) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "foretoken", "load", server.url, "--concurrency", "2,4",
             "--seconds", "60", "--prompts", str(file), "--out", str(tmp_path), "--names", "s"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until = time.monotonic() + 60
        while len(server.asked) < 15 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    found = json.loads((tmp_path / "load.json").read_text())
    row = found["levels"][0]["servers"]["s"]
    assert found["interrupted"] and row["answered"] >= 8 and row["unfinished"] == 2
    assert row["ttft"]["p50"]["value"] > 0.02 and "interrupted" in stderr and "| s |" in stdout

"""`foretoken minis get` and `list`: models that are fetched, told before they are here and then."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken import shipped
from foretoken.cli import app, logs
from foretoken.cli.measure import audit_progress
from foretoken.cli.minis import arrival
from foretoken.minis import recipes

NAME = "smollm2-135m"
runner = CliRunner()


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty folder of fetched models."""
    monkeypatch.setenv("FORETOKEN_MODELS", str(tmp_path))
    return tmp_path


def put(models) -> None:
    """A folder that looks whole."""
    (models / NAME).mkdir()
    (models / NAME / "model.safetensors").write_bytes(b"weights")
    record = {"files": {"model.safetensors": {"bytes": 7}}}
    (models / NAME / shipped.RECORD).write_text(json.dumps(record))


def listed() -> dict:
    rows = json.loads(runner.invoke(app, ["minis", "list", "--json"]).stdout)
    return next(row for row in rows if row["name"] == NAME)


def test_the_list_names_what_can_be_fetched_and_how(models, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert listed()["bytes"] == 0 and listed()["fetched"]
    assert f"foretoken minis get {NAME}" in runner.invoke(app, ["minis", "list"]).stdout
    put(models)
    assert listed()["bytes"] == 7 and listed()["folder"] == str(models / NAME)


@pytest.mark.parametrize(
    "command",
    [["generate", "hi", "--target", NAME], ["chat", "--target", NAME], ["bench", "--target", NAME]],
)
def test_commands_name_the_way_to_a_model_that_is_not_here(models, command) -> None:
    ran = runner.invoke(app, command)
    assert ran.exit_code == 2 and f"run `foretoken minis get {NAME}`" in ran.stderr
    assert "Traceback" not in ran.output


def test_what_is_here_is_told_without_loading_anything(models) -> None:
    put(models)
    code = (
        "import sys; from foretoken.cli import app\n"
        f"try: app(['minis', 'get', '{NAME}'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(models / NAME)


def test_an_unknown_model_is_refused_with_the_known_ones(models) -> None:
    ran = runner.invoke(app, ["minis", "get", "smollm3"])
    assert ran.exit_code == 2 and f"did you mean {NAME}" in ran.stderr


def test_an_unknown_home_directory_is_told_with_the_way_out(monkeypatch) -> None:
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    for name in ("FORETOKEN_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    ran = runner.invoke(app, ["minis", "list"])
    assert ran.exit_code == 2 and "set XDG_CACHE_HOME" in " ".join(ran.stderr.split())


def test_a_dumb_terminal_which_draws_nothing_gets_lines(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    logs.configure(0, quiet=False)
    with arrival(hush=False) as told:
        told("fetching", 1, 2)
        assert capsys.readouterr().err == "fetching ...\n"
    with logs.stage("loading"):
        assert capsys.readouterr().err == "loading ...\n"
    with logs.status("reading", hush=False):
        assert capsys.readouterr().err.endswith("reading ...\n")
    assert callable(audit_progress()), "a line for each kind of check, in place of a bar"


def test_a_mini_is_trained_in_silence_where_that_was_asked_for(monkeypatch, tmp_path) -> None:
    shown = []
    monkeypatch.setattr(recipes, "train", lambda *_, progress, **__: shown.append(progress))
    for flags in ([], ["-q"]):
        ran = runner.invoke(app, ["minis", "train", "tiny", "--out", str(tmp_path), *flags])
        assert ran.exit_code == 0, ran.output
    assert shown == [True, False]

"""`foretoken generate` with a grammar, and with a text that is expected."""

import json
import re

import pytest
from typer.testing import CliRunner

from foretoken.cli import app

PROMPT = "the cat is in the "


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def models(pair_folders):
    target, draft = pair_folders
    how = ["--set", "kernels=dense", "--set", "controller=fixed"]
    return ["--target", target, "--draft", draft, *how]


def test_a_schema_from_a_file_and_a_regular_expression(models, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"enum": ["red", "green"]}))
    ran = run("generate", PROMPT, *models, "--guided-json", file)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) in ("red", "green")
    ran = run("generate", PROMPT, *models, "--guided-regex", "[0-9]{3}x", "--json")
    assert re.fullmatch("[0-9]{3}x", json.loads(ran.stdout)["text"])


def test_a_prediction_from_a_file_changes_the_steps_and_not_the_text(models, tmp_path):
    file = tmp_path / "expected.txt"
    flags = [*models, "--max-new-tokens", 30, "--json"]
    alone = json.loads(run("generate", PROMPT, *flags).stdout)
    file.write_text(alone["text"])
    found = json.loads(run("generate", PROMPT, *flags, "--prediction", file).stdout)
    assert found["tokens"] == alone["tokens"]
    assert found["stats"]["accepted_prediction"] > 0 == alone["stats"]["accepted_prediction"]


def test_what_cannot_be_used_is_refused(models, tmp_path):
    file = tmp_path / "schema.json"
    ran = run("generate", "x", "--guided-json", file)
    assert ran.exit_code == 2 and "a JSON schema from" in ran.stderr
    file.write_text("{no")
    ran = run("generate", "x", *models, "--guided-json", file)
    assert ran.exit_code == 2 and "no JSON" in ran.stderr
    ran = run("generate", "x", *models, "--guided-json", file, "--guided-regex", "a")
    assert ran.exit_code == 2 and "json and regex" in ran.stderr

"""`foretoken eval` is lm-eval's command line with one more model in it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.cli.errors import missing_extra


@pytest.fixture
def evaluate(monkeypatch, task_folder):
    """Runs the command on the local tasks."""
    monkeypatch.setattr(sys, "argv", ["foretoken"])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the command sets it

    def run(*arguments: object):
        local = ["--tasks", "local_written", "--include_path", task_folder, "--limit", 2]
        return CliRunner().invoke(app, [str(one) for one in ("eval", *arguments, *local)])

    return run


@pytest.mark.slow  # lm-eval's command line looks through all the tasks it brings
def test_a_task_is_evaluated_and_its_results_are_written(lm_eval, evaluate, pair_folders, tmp_path):
    target, draft = pair_folders
    arguments = f"target={target},draft={draft},method=chain,depth=2,dtype=float32"
    ran = evaluate("--model", "foretoken", "--model_args", arguments, "--gen_kwargs",
                   "max_gen_toks=4", "--output_path", tmp_path, "--batch_size", 2)  # fmt: skip
    assert ran.exit_code == 0, (ran.output, ran.exception)
    assert "local_written" in ran.stdout and "exact_match" in ran.stdout
    [written] = tmp_path.rglob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert config["model"] == "foretoken" and config["foretoken_method"] == "chain"
    assert config["model_args"]["depth"] == 2 and config["foretoken_tokens"] == 8


@pytest.mark.slow
def test_a_mistake_is_told_in_three_parts(lm_eval, evaluate, pair_folders):
    target = pair_folders[0]
    ran = evaluate("--model", "foretoken", "--model_args", f"target={target},method=chian")
    assert ran.exit_code == 2 and "did you mean chain" in " ".join(ran.stderr.split())


def test_its_help_says_whose_options_it_takes() -> None:
    ran = CliRunner().invoke(app, ["eval", "--help"])
    assert ran.exit_code == 0 and "lm-eval run --help" in " ".join(ran.stdout.split())


@pytest.mark.parametrize("module", ["lm_eval", "accelerate", "lm_eval.models"])
def test_without_lm_eval_the_extra_is_named(module) -> None:
    error = missing_extra(ModuleNotFoundError(name=module), "foretoken eval")
    assert error is not None and "foretoken[eval]" in error.do

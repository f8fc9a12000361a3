"""`foretoken plan`: memory before the first token, for people and programs."""

import json

import pytest
from typer.testing import CliRunner

from foretoken.cli import app
from foretoken.lm.draft_vocabulary import write

runner = CliRunner()


def told(folders, *options):
    """The document of a plan for a pair."""
    given = ["plan", "--target", str(folders[0]), "--draft", str(folders[1]), *options, "--json"]
    done = runner.invoke(app, given)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_document_holds_the_plan_and_what_fits(pair_folders):
    found = told(pair_folders, "--method", "tree", "--rows", "3", "--budget", "64MiB")
    assert found["total"] == found["weights"] + found["generation"]
    sizes = {"rows": 3, "context": 512, "nodes": 64, "depth": 10}
    assert found["need"] == {**sizes, "sampled": False}
    drawn = told(pair_folders, "--method", "chain", "--rows", "3", "--sampled")
    greedy = told(pair_folders, "--method", "chain", "--rows", "3")
    assert drawn["need"] == {**greedy["need"], "sampled": True}
    names = [{part["name"] for part in one["parts"]} for one in (drawn, greedy)]
    assert names[0] - names[1] == {"target's laws", "draft's laws"}
    held = found["budget"]
    assert held["bytes"] == 64 << 20 and held["fits"] == (found["total"] <= 64 << 20)
    assert held["largest"]["rows"] >= 3 if held["fits"] else held["largest"]["rows"] < 3
    assert held["without_second_copies"]["context"] >= held["largest"]["context"]


def test_what_a_session_takes_may_be_set_and_counts(pair_folders, tmp_path):
    whole = told(pair_folders, "--method", "tree")
    found = told(
        pair_folders, "--method", "tree", "--set", "controller=fixed", "--set", "depth=2",
        "--set", "nodes=5", "--set", "kernels=inplace", "--set", "exact_bits=true",
    )  # fmt: skip
    assert (found["need"]["depth"], found["need"]["nodes"]) == (2, 5)
    assert found == told(
        pair_folders, "--method", "tree", "--set", "depth=2", "--set", "nodes=5",
        "--kernels", "inplace",
    )  # fmt: skip
    assert found["weights"] < whole["weights"]
    write(tmp_path / "words.json", range(20), 265)
    few = told(
        pair_folders, "--method", "tree", "--set", f"draft_vocabulary={tmp_path / 'words.json'}"
    )
    assert few["total"] < whole["total"]


def test_without_a_method_it_is_the_one_that_load_takes(pair_folders):
    assert told(pair_folders)["method"] == "auto-draft"
    assert told(pair_folders, "--set", "controller=confidence")["method"] == "chain"
    assert told(pair_folders, "--method", "plain")["draft"] is None


def test_the_table_names_every_part(pair_folders, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    given = ["--target", str(pair_folders[0]), "--method", "plain", "--budget", "1GiB"]
    done = runner.invoke(app, ["plan", *given])
    assert done.exit_code == 0, done.output
    for name in ("weights", "target's cache", "second copies", "generation", "in 1.00 GiB: fits"):
        assert name in done.output


def test_speed_by_memory_is_printed_from_measured_costs(pair_folders):
    options = ("--method", "tree", "--measure", "--acceptance", "0.8,0.1", "--budget", "1GiB")
    found = told(pair_folders, *options)["frontier"]
    assert found["points"][0]["nodes"] == 1
    assert found["best"]["score"] == max(p["score"] for p in found["points"]) or (
        found["best"]["nodes"] == 1
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "lots"), "budget='lots'"),
        (("--method", "dsbd"), "dsbd"),
        (("--acceptance", "0.9,0.9", "--measure"), "--acceptance"),
        (("--method", "no-such"), "no-such"),
        (("--set", "nodse=64"), "did you mean nodes"),
        (("--set", "controller=fixd"), "did you mean fixed"),
        (("--method", "medusa"), "without its draft_head"),
        (("--method", "rest"), "without its datastore"),
        (("--set", "draft_vocabulary=none.json"), "there is no such file"),
        (("--set", "kernels=fast"), "kernels='fast'"),
        (("--kernels", "inplace", "--set", "kernels=dense"), "--set kernels=dense"),
        (("--set", "max_rows=4"), "pass --rows"),
        (("--acceptance", "0.5"), "--measure"),
        (("--context", "513"), "positions for 512 tokens"),
    ],
)
def test_mistakes_are_told_in_three_parts(options, said, pair_folders):
    given = ["plan", "--target", str(pair_folders[0]), "--draft", str(pair_folders[1]), *options]
    done = runner.invoke(app, given)
    assert done.exit_code == 2 and said in done.output and "what to do" in done.output


def test_a_context_beyond_the_targets_positions_is_not_planned():
    given = ["--target", "text-target", "--budget", "8GiB", "--context"]
    assert runner.invoke(app, ["plan", *given, "8192", "--json"]).exit_code == 0
    done = runner.invoke(app, ["plan", *given, "100000"])
    assert done.exit_code == 2
    assert "--context 100000" in done.output and "8192" in done.output

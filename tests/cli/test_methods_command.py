"""`foretoken methods`: a line per method, and every option of one with its meaning."""

import inspect
import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, GPTJConfig
from typer.testing import CliRunner

import foretoken
from foretoken.cli import app
from foretoken.cli.catalogue import options_of, parts_of, sheet, table
from foretoken.cli.options import setting
from foretoken.config_comments import meanings
from foretoken.engine.assemble import config_fields
from foretoken.engine.promise import promise_of_row
from foretoken.methods import CONTROLLERS, METHODS, VERIFIERS, resolve

runner = CliRunner()


def test_every_method_is_one_line_of_eighty_columns():
    lines = table(80).split("\n")
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2 : 2 + len(METHODS)]] == list(METHODS)
    laws = {line.split()[0]: line.split()[1] for line in lines[2 : 2 + len(METHODS)]}
    assert {name for name, law in laws.items() if law == "lossy"} == {
        name for name, row in METHODS.items() if not promise_of_row(row).lossless
    }
    wide = table(200)
    assert all(row.summary in wide for row in METHODS.values())


@pytest.mark.parametrize("name", ["specdec++", "mcsd-dynamic"])
def test_a_method_whose_controller_has_a_head_says_that_it_needs_one(name):
    shown = sheet(METHODS[name], 80)
    assert "head=FOLDER" in shown and f"--method {name} --set head=" in shown
    [line] = [line for line in table(80).split("\n") if line.startswith(f"{name} ")]
    assert line.split()[2] == "both"


def test_every_option_of_every_part_has_a_comment_that_says_what_it_means():
    own = (place for row in METHODS.values() for place in (row.drafter, row.model) if ":" in place)
    parts = [*VERIFIERS.values(), *CONTROLLERS.values(), *own]
    bare = [
        f"{place} {name}"
        for place in dict.fromkeys(parts)
        for name, meaning in meanings(resolve(place).Config).items()
        if not meaning
    ]
    assert bare == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_lists_every_option_it_takes(name):
    row = METHODS[name]
    listed = {one.name for one in options_of(row)}
    defaults = [(one.name, one.default) for one in options_of(row)]
    for option, taken in config_fields(name).items():
        assert (option, taken.default) in defaults
    for owner in parts_of(row).values():
        assert listed >= set(inspect.signature(owner.Config).parameters)
    told = sheet(row, 80)
    assert all(f"  {option}: " in told for option in listed)
    assert str(promise_of_row(row)) in " ".join(told.split())


def test_options_are_told_as_a_document_too():
    found = json.loads(runner.invoke(app, ["methods", "mcsd", "--json"]).stdout)
    shape = next(one for one in found["options"] if one["name"] == "k")
    assert shape["type"] == "shape | None" and "children of every node" in shape["meaning"]
    assert shape["python"] == "k=(2, 4, 4)" and shape["shell"] == "--set k=2,4,4"
    ran = runner.invoke(app, ["methods", "mcds"])
    assert ran.exit_code == 2 and "did you mean mcsd" in ran.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["chain", "--model", "text-draft"], "chain and --model were passed together"),
        (["chain", "--markdown"], "chain and --markdown were passed together"),
        (["--model", "text-draft", "--markdown"], "--model and --markdown were passed together"),
        (["--markdown", "--json"], "--markdown and --json were passed together"),
        (["--dtype", "float32"], "without --model"),
    ],
)
def test_what_would_be_ignored_is_refused(flags, said):
    ran = runner.invoke(app, ["methods", *flags])
    assert ran.exit_code == 2 and said in ran.output, ran.output


def test_meanings_stand_behind_a_field_above_it_or_inside_it():
    found = meanings(resolve(METHODS["suffix"].drafter).Config)
    assert found["max_match"].startswith("longest suffix told apart")
    assert (
        found["remember"].startswith("tokens of earlier answers")
        and "answered" in found["remember"]
    )
    inside = meanings(resolve(METHODS["specee"].drafter).Config)
    assert inside["sure_above"].startswith("of a predictor")
    inherited = meanings(resolve(METHODS["dsbd"].drafter).Config)
    assert inherited["samples"].startswith("M: draws per layer")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2x4x4", (2, 4, 4)),
        ("2,4,4", (2, 4, 4)),
        ("3,", (3,)),
        ("prompt-lookup,suffix", ("prompt-lookup", "suffix")),
        ("4", 4),
        ("true", True),
        ("./a,b/store", ("./a", "b/store")),
        ("./store", "./store"),
    ],
)
def test_values_are_spelt_like_this_in_a_shell(text, value):
    assert setting(text) == value


def test_a_shape_works_in_both_spellings(pair_folders):
    target, draft = map(str, pair_folders)
    how = ["generate", "the cat is", "--target", target, "--draft", draft, "--method", "mcsd"]
    how += ["--set", "kernels=dense", "--max-new-tokens", "6", "--json", "--set"]
    found = [json.loads(runner.invoke(app, [*how, k]).stdout) for k in ("k=2x1", "k=2,1")]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["stats"]["drafted"] == found[1]["stats"]["drafted"] > 0


def test_the_public_names_are_shown_and_cost_nothing():
    code = (
        "import sys, foretoken; names = dir(foretoken)\n"
        "assert set(foretoken.__all__) <= set(names)\n"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
    assert "foretoken.load(" in foretoken.__doc__
    assert all(getattr(foretoken, name) is not None for name in foretoken.__all__)


def test_type_checkers_see_the_names_that_are_imported_on_first_use():
    import ast
    from pathlib import Path

    source = Path(foretoken.__file__)
    assert (source.parent / "py.typed").is_file()
    block = next(node for node in ast.parse(source.read_text()).body if isinstance(node, ast.If))
    seen = {one.names[0].name: one.module for one in block.body if isinstance(one, ast.ImportFrom)}
    assert seen == foretoken._HOMES
    assert set(foretoken.__all__) == {*seen, "__version__"}


def test_shipped_models_have_names_in_python_too():
    spec = foretoken.load("text-target", draft="text-draft", kernels="dense")
    assert spec.method == "auto-draft" and spec.tokenizer is not None
    assert len(spec.generate("Once", 4).tokens) == 4


def test_a_folder_named_like_a_shipped_model_is_written_as_a_path(tmp_path, monkeypatch):
    from foretoken import shipped
    from foretoken.lm.load import locate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text-draft").mkdir()
    assert locate("text-draft", "model") == shipped.path("text-draft")
    assert locate("./text-draft", "model").resolve() == tmp_path / "text-draft"


def test_a_model_says_what_it_allows_and_how_it_runs():
    found = json.loads(runner.invoke(app, ["methods", "--model", "text-draft", "--json"]).stdout)
    assert found["captured"] and found["drafts"] == "trees" and found["batches"] == "ragged"
    assert found["kernels"]
    said = runner.invoke(app, ["methods", "--model", "text-draft"]).stdout
    assert "captured at load" in said and "by rows: 1:" in said


def test_a_model_that_is_not_captured_says_why(tmp_path):
    config = GPTJConfig(vocab_size=40, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = runner.invoke(app, ["methods", "--model", str(tmp_path)]).stdout
    assert "the model's own modules (0 of its 2 layers ask for attention by name)" in said

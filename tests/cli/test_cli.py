"""The command line: what it prints, what it refuses, which flags it has."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

import foretoken
from foretoken.cli import app
from foretoken.cli.catalogue import page
from foretoken.cli.options import to_load
from foretoken.cli.serve import name_of
from foretoken.engine.promise import promise_of_row
from foretoken.heads.table import HEADS
from foretoken.methods import METHODS
from foretoken.training.recipes import RECIPES

ROOT = Path(__file__).parent.parent.parent
PROMPT = "the cat is in the "
runner = CliRunner()


def run(*arguments, **more):
    return runner.invoke(app, [str(a) for a in arguments], **more)


@pytest.fixture
def models(pair_folders):
    target, draft = pair_folders
    return ["--target", target, "--draft", draft, "--set", "kernels=dense"]


@pytest.fixture
def steady(models):
    """Drafts of one size in every step: another load measures other costs."""
    return [*models, "--set", "depth=5"]


def test_generate_writes_the_text_and_a_line_of_statistics(models, steady):
    ran = run("generate", PROMPT, *steady, "--max-new-tokens", 20)
    assert ran.exit_code == 0, ran.output
    plain = run("generate", PROMPT, *models, "--method", "plain", "--max-new-tokens", 20)
    assert ran.stdout == plain.stdout and ran.stdout.strip()
    assert "20 tokens in" in ran.stderr and "guesses accepted" in ran.stderr
    assert "guesses" not in plain.stderr


def test_generate_json_holds_text_tokens_and_statistics(models):
    ran = run("generate", PROMPT, *models, "--max-new-tokens", 9, "--json")
    found = json.loads(ran.stdout)
    assert len(found["tokens"]) == 9 == found["stats"]["tokens"]
    assert found["finish_reason"] == "length" and found["method"] == "auto-draft"
    assert found["text"] and 0 <= found["stats"]["acceptance_rate"] <= 1


def test_sampling_options_reach_the_session(steady, pair_folders):
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    flags = [f for k, v in options.items() for f in ("--" + k.replace("_", "-"), str(v))]
    ran = run("generate", PROMPT, *steady, "--max-new-tokens", 15, *flags, "--json")
    spec = foretoken.load(pair_folders[0], draft=pair_folders[1], kernels="dense", depth=5)
    assert json.loads(ran.stdout)["tokens"] == spec.generate(PROMPT, 15, **options).tokens


def test_options_left_out_follow_the_generation_config(steady, pair_folders, tmp_path):
    target = tmp_path / "sampling"
    shutil.copytree(pair_folders[0], target)
    config = json.loads((target / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.9, "max_new_tokens": 7, "top_k": 20}
    (target / "generation_config.json").write_text(json.dumps(config))
    how = ["generate", PROMPT, "--target", target, *steady[2:], "--json"]

    def tokens(*flags):
        return json.loads(run(*how, *flags).stdout)["tokens"]

    spec = foretoken.load(pair_folders[0], draft=pair_folders[1], kernels="dense", depth=5)
    sampled = {"temperature": 0.9, "top_k": 20, "seed": 3}
    assert tokens("--seed", 3) == spec.generate(PROMPT, 7, **sampled).tokens
    greedy = spec.generate(PROMPT, 12).tokens
    assert tokens("--temperature", 0, "--max-new-tokens", 12) == greedy
    assert tokens("--no-generation-config", "--max-new-tokens", 12) == greedy
    assert tokens("--seed", 3) != greedy[:7]
    told = run(*how[:-1], "--temperature", 0, "--max-new-tokens", 5).stderr
    assert "finish_reason length" in told


def test_settings_reach_the_method(models):
    flags = ["--set", "depth=2", "--set", "controller=fixed", "--max-new-tokens", 12, "--json"]
    ran = run("generate", PROMPT, *models, *flags)
    assert len(json.loads(ran.stdout)["stats"]["acceptance_per_depth"]) == 2


def test_what_a_method_learns_is_kept_in_the_file_its_options_name(models, tmp_path):
    memory = tmp_path / "memory"
    flags = ["--method", "token-recycling", "--set", f"memory={memory}", "--set", "preset=paper"]
    flags += ["--max-new-tokens", 40]
    steps = []
    for _ in range(2):
        ran = run("generate", PROMPT, *models, *flags, "--json")
        assert ran.exit_code == 0, ran.output
        steps.append(json.loads(ran.stdout)["stats"]["target_steps"])
    assert memory.is_file() and steps[1] < steps[0]
    assert run("chat", *models, *flags, input="\n").exit_code == 0


def test_a_prompt_may_come_from_a_file_or_a_pipe(models, tmp_path):
    given = run("generate", PROMPT, *models, "--max-new-tokens", 8).stdout
    (tmp_path / "prompt.txt").write_text(PROMPT)
    flags = [*models, "--max-new-tokens", 8]
    assert run("generate", "--file", tmp_path / "prompt.txt", *flags).stdout == given
    assert run("generate", "-", *flags, input=PROMPT).stdout == given


def test_stop_texts_understand_newlines(models):
    ran = run("generate", PROMPT, *models, "--stop", "\\n", "--stop", "e", "--json")
    found = json.loads(ran.stdout)
    assert "\n" not in found["text"] and "e" not in found["text"]


def test_beams_are_told_with_their_scores(models):
    flags = ["--method", "dsbd", "--set", "num_beams=3", "--temperature", 1, "--seed", 2]
    ran = run("generate", PROMPT, *models, *flags, "--max-new-tokens", 8, "--json")
    found = json.loads(ran.stdout)
    assert found["method"] == "dsbd" and 1 <= len(found["texts"]) <= 3
    assert found["scores"] == sorted(found["scores"], reverse=True)
    told = run("generate", PROMPT, *models, *flags, "--max-new-tokens", 8)
    assert all(f"[{score:.3f}]" in told.stderr for score in found["scores"])
    assert told.stdout.strip() and "beams per token" in told.stderr
    shown = run("generate", PROMPT, *models, *flags, "--show")
    assert shown.exit_code != 0 and "leave --show out" in shown.output
    talk = run("chat", *models, *flags, input="hi\n")
    assert talk.exit_code != 0 and "such as chain" in talk.output


def test_methods_as_json_has_every_row():
    rows = json.loads(run("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(METHODS)


def test_the_methods_page_is_current():
    assert (
        (ROOT / "docs" / "methods.md").read_text() == page() == run("methods", "--markdown").stdout
    )


def test_minis_lists_what_ships():
    rows = json.loads(run("minis", "list", "--json").stdout)
    shipped_names = [row["name"] for row in rows if not row["fetched"]]
    assert shipped_names == [
        "text-target",
        "text-draft",
        "smollm2-135m-draft",
        "smollm2-135m-eagle3",
    ]


def test_version():
    assert run("--version").stdout.strip() == foretoken.__version__


def test_help_is_quick_and_shows_an_example():
    code = (
        "import sys; sys.argv = ['foretoken', '--help']\n"
        "from foretoken.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Example: foretoken generate" in ran.stdout and ran.stdout.endswith("False\n")


COMMANDS = {
    "generate": "target draft method set tuned draft-vocabulary max-new-tokens temperature top-k "
    "top-p min-p repetition-penalty presence-penalty frequency-penalty stop seed show device dtype "
    "exact-bits allow-pickle trust-remote-code no-generation-config json file messages "
    "guided-json guided-regex prediction",
    "chat": "target draft method set tuned draft-vocabulary max-new-tokens temperature top-k top-p "
    "min-p repetition-penalty presence-penalty frequency-penalty seed show device dtype exact-bits "
    "allow-pickle trust-remote-code no-generation-config system",
    "tune": "target prompts drafts datastores heads minutes max-new-tokens temperature seed out "
    "device dtype allow-pickle trust-remote-code json",
    "bench": "target draft draft-vocabulary tuned methods tasks limit repetitions requests "
    "max-new-tokens temperature top-k top-p seed ignore-eos out resume threads llama-python "
    "vllm-python device dtype allow-pickle trust-remote-code json",
    "audit": "methods mutate acceptance target draft draft-vocabulary out json",
    "methods": "markdown model dtype json",
    "datastore build": "out traffic seed target dense dims dtype layer json",
    "datastore add": "traffic seed target json",
    "datastore info": "check json",
    "minis list": "json",
    "minis get": "json",
    "minis train": "out teacher scale fresh",
    "minis widen": "out params dtype seed json",
    "minis evaluate": "draft count seed depth json",
    "vocabulary": "target draft data prompts size out device dtype json",
    "train": "out target draft data text set list fresh device dtype json",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_are_frozen_and_every_help_has_an_example(command):
    """A new flag is a decision: prefer --set, and change this list on purpose."""
    import re

    ran = run(*command.split(), "--help", env={"COLUMNS": "200", "TERM": "dumb"})
    assert ran.exit_code == 0 and "Example: foretoken " + command.split()[0] in ran.stdout
    flags = set(re.findall(r"^\W*--([a-z][a-z-]+)", ran.stdout, re.MULTILINE))
    flags -= {"help", "verbose", "quiet"}  # of every command
    assert flags == set(COMMANDS[command].split())


def refused(ran, *parts):
    """A clean message on stderr, status 2, nothing on stdout."""
    assert ran.exit_code == 2, ran.output
    assert "error: " in ran.stderr and "Traceback" not in ran.output
    assert "possible here:" in ran.stderr and "what to do:" in ran.stderr
    assert ran.stdout == ""
    told = " ".join(ran.stderr.split())
    assert all(part in told for part in parts), told


def test_a_missing_or_empty_model_directory(tmp_path):
    flags = ["--method", "prompt-lookup"]
    refused(run("generate", "x", "--target", tmp_path / "none", *flags), "there is no directory")
    refused(run("generate", "x", "--target", tmp_path, *flags), "is empty")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_method():
    refused(run("generate", "x", "--method", "prompt-lokup"), "did you mean prompt-lookup?")
    refused(run("bench", "--methods", "chian"), "did you mean chain")
    refused(run("audit", "--methods", "tre"), "did you mean tree")


def test_a_method_that_needs_a_draft_without_one(pair_folders):
    ran = run("generate", "x", "--target", pair_folders[0], "--method", "chain")
    refused(ran, "without a draft model")


def test_without_draft_and_method_the_default_looks_guesses_up(pair_folders):
    ran = run("generate", "x", "--target", pair_folders[0], "--max-new-tokens", "8", "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["method"] == "auto"


def test_vocabularies_that_differ(pair_folders, make_llama, tmp_path):
    make_llama(80).save_pretrained(tmp_path / "other")
    flags = ["--target", pair_folders[0], "--draft", tmp_path / "other"]
    refused(run("generate", "x", *flags), "265", "80", "share one vocabulary")


def test_prompts_that_are_empty_or_too_long(models):
    refused(run("generate", "", *models), "is empty")
    refused(run("generate", "-", *models, input=""), "is empty")
    refused(run("generate", "cat " * 400, *models), "context of this model is 512 tokens")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temperature", "-1", "0 (greedy) or more"),
        ("--top-p", "0", "in (0, 1]"),
        ("--top-p", "1.2", "in (0, 1]"),
        ("--max-new-tokens", "0", "1 or more"),
        ("--min-p", "-0.5", "in [0, 1]"),
    ],
)
def test_sampling_values_out_of_range(models, flag, value, message):
    refused(run("generate", "x", *models, flag, value), message)


def test_settings_that_no_part_knows(models):
    refused(run("generate", "x", *models, "--set", "dept=3"), "dept", "depth")
    refused(run("generate", "x", *models, "--set", "depth"), "--set takes key=value")
    refused(run("generate", "x", *models, "--set", "depth=1", "--set", "depth=2"), "twice")
    refused(run("generate", "x", *models, "--set", "depth=-2"), "depth=-2")
    refused(run("generate", "x", *models, "--set", "controller=fixd"), "did you mean fixed?")
    refused(run("generate", "x", *models, "--set", "verifier=blok"), "did you mean block?")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--exact-bits", "--set", "exact_bits=false"], "--exact-bits and --set exact_bits=false"),
        (["--draft-vocabulary", "off", "--set", "draft_vocabulary=x"], "--draft-vocabulary off"),
        (["--json", "--show"], "--show was passed with --json"),
    ],
)
def test_flags_that_contradict_are_refused(models, flags, said):
    ran = run("generate", "x", *models, *flags)
    assert ran.exit_code == 2 and said in " ".join(ran.output.split()), ran.output


def test_a_server_is_refused_what_is_said_twice(models):
    flags = ["--port", 0, "--log-file", "-"]
    for flag, setting in (("--max-rows", "max_rows"), ("--memory-budget", "memory_budget")):
        twice = [flag, 32, "--set", f"{setting}=4"]
        refused(run("serve", *models, *flags, *twice), f"{flag} 32 and --set {setting}=4")
    once = to_load(
        target="t", draft=None, method=None, given=["memory_budget=1GiB"], memory_budget="1GiB",
        exact_bits=False,
    )  # fmt: skip
    assert once["memory_budget"] == "1GiB", "the same, said twice"


def test_a_model_of_a_tuned_file_is_called_by_its_folder(tmp_path):
    found = tmp_path / "mine"
    found.mkdir()
    (found / "tuned.json").write_text("{}")
    assert name_of(None, found) == name_of(None, found / "tuned.json") == "mine"


def test_pickled_weights_are_refused_unless_allowed(tiny_pair, byte_tokenizer, tmp_path):
    folder = tmp_path / "pickled"
    tiny_pair[0].config.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    torch.save(tiny_pair[0].state_dict(), folder / "pytorch_model.bin")
    flags = ["--target", folder, "--method", "prompt-lookup", "--set", "kernels=dense"]
    refused(run("generate", "x", *flags), "pickled weights", "--allow-pickle")
    ran = run("generate", "x", *flags, "--allow-pickle", "--max-new-tokens", 3)
    assert ran.exit_code == 0, ran.output


def test_remote_code_is_off_unless_asked_for(pair_folders, tmp_path):
    import shutil

    folder = tmp_path / "remote"
    shutil.copytree(pair_folders[0], folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "theirs.Config",
        "AutoModelForCausalLM": "theirs.Model",
    }
    config["model_type"] = "something_of_theirs"
    (folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "it ran"
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\n")
    flags = ["--target", folder, "--method", "prompt-lookup"]
    refused(run("generate", "x", *flags), "--trust-remote-code")
    assert not mark.exists()


def test_a_target_that_cannot_score_trees_with_a_tree_method(tmp_path, byte_tokenizer):
    torch.manual_seed(0)
    size = len(byte_tokenizer)
    model = BloomForCausalLM(BloomConfig(vocab_size=size, hidden_size=32, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    flags = ["--target", tmp_path, "--draft", tmp_path, "--set", "kernels=dense"]
    ran = run("generate", "x", *flags, "--method", "tree")
    refused(ran, "trees", "use method chain")
    assert run("generate", "x", *flags, "--max-new-tokens", 3).exit_code == 0


def test_a_broken_line_in_a_task_file(tmp_path, models):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "fine"}\n{"prompt": \n')
    out = tmp_path / "out"
    ran = run("bench", *models[:4], "--tasks", tasks, "--out", out)
    refused(ran, f"{tasks}:2", "is not JSON")
    refused(run("bench", *models[:4], "--tasks", tmp_path / "none.jsonl"), "cannot be read")
    assert not out.exists()


def test_an_output_path_that_cannot_be_written(tmp_path, models):
    (tmp_path / "file").write_text("")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "fine"}\n')
    out = tmp_path / "file" / "out"
    refused(
        run("bench", *models[:4], "--tasks", tasks, "--out", out),
        "nothing can be written there",
        "--out",
    )
    audited = run("audit", "--methods", "plain", "--json", "--out", out / "audit.json")
    assert audited.exit_code == 2
    assert "nothing can be written there" in json.loads(audited.stdout)["error"]["possible"]
    refused(run("minis", "widen", models[1], "--out", out, "--params", "1M"), "file")


def test_sizes_of_minis_are_checked_first(tmp_path):
    refused(
        run("minis", "widen", "text-target", "--out", tmp_path / "x", "--params", "big"), "350M"
    )
    refused(run("minis", "train", "text-trget", "--out", tmp_path / "x"), "text-target")
    assert not (tmp_path / "x").exists()


def test_a_mini_is_judged_without_a_padding_token_and_numbers_are_checked(pair_folders, tmp_path):
    for option in ("--count", "--depth"):
        refused(run("minis", "evaluate", pair_folders[0], option, 0), option)
    folder = tmp_path / "unpadded"
    shutil.copytree(pair_folders[0], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["pad_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    ran = run("minis", "evaluate", folder, "--count", 2, "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["examples_per_family"] == 2


def test_bench_prints_a_table_and_writes_its_files(models, tmp_path):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    tasks.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    flags = ["--methods", "plain,prompt-lookup", "--tasks", tasks, "--out", out]
    ran = run("bench", *models[:2], *flags, "--repetitions", 1, "--max-new-tokens", 8)
    assert ran.exit_code == 0, ran.output
    assert "prompt-lookup" in ran.stdout and "report.html" in ran.stdout
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert set(rows) == {"plain", "prompt-lookup"}


def test_a_bench_with_a_failed_row_says_so_in_its_exit_status(models, tmp_path):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    tasks.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    flags = ["--methods", f"plain,rest[datastore={tmp_path / 'none'}]", "--tasks", tasks]
    ran = run("bench", *models[:2], *flags, "--out", out, "--repetitions", 1, "--max-new-tokens", 8)
    assert ran.exit_code == 1, ran.output
    assert "rest[datastore=none] failed" in " ".join(ran.stdout.replace("**", "").split())
    assert "failed" in (out / "report.html").read_text()
    assert json.loads((out / "results.json").read_text())["rows"]["plain"]["failed"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--methods", ""], "without methods"),
        (["--methods", "chain[dept=4]"], "did you mean depth"),
        (["--methods", "chain[preset=papers]"], "did you mean paper"),
        (["--methods", "auto[preset=paper]"], "has no paper"),
        (["--threads", "0"], "1 or more"),
        (["--repetitions", "0"], "1 or more"),
        (["--methods", "chain", "--target", "no/such/model"], "without a draft model"),
    ],
)
def test_benches_that_cannot_be_are_refused_before_any_work(flags, said, tmp_path):
    refused(run("bench", *flags, "--out", tmp_path / "out"), said)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def tuned(pair_folders, tmp_path_factory):
    """What `foretoken tune` wrote for the tiny target, and how that went."""
    out = tmp_path_factory.mktemp("tuned")
    prompts = out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": PROMPT * n}) + "\n" for n in (1, 2, 3)))
    flags = ["--target", pair_folders[0], "--prompts", prompts, "--minutes", 0.3]
    return run("tune", *flags, "--max-new-tokens", 8, "--out", out / "found"), out / "found"


def test_tune_writes_a_configuration_that_the_other_commands_take(tuned, models, tmp_path):
    ran, found = tuned
    assert ran.exit_code == 0, ran.output
    assert "is the one to use" in ran.stdout or "is the fastest" in ran.stdout
    assert "page.html" in ran.stdout
    written = run("generate", PROMPT, "--tuned", found, "--max-new-tokens", 8, "--json")
    plain = run("generate", PROMPT, *models, "--method", "plain", "--max-new-tokens", 8, "--json")
    assert json.loads(written.stdout)["tokens"] == json.loads(plain.stdout)["tokens"]
    method = json.loads((found / "tuned.json").read_text())["method"]
    assert json.loads(written.stdout)["method"] == method
    assert run("chat", "--tuned", found, input="/exit\n").exit_code == 0

    tasks = found.parent / "prompts.jsonl"
    flags = ["--tuned", found, "--tasks", tasks, "--repetitions", 1, "--max-new-tokens", 8]
    assert run("bench", *flags, "--methods", "plain,suffix", "--out", tmp_path).exit_code == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {"plain", "suffix"} <= set(rows) and method in {row["method"] for row in rows.values()}


def test_options_win_over_the_tuned_file_and_another_target_is_refused(tuned, models):
    found = tuned[1]
    flags = ["--method", "suffix", "--max-new-tokens", 4, "--json"]
    assert json.loads(run("generate", "x", "--tuned", found, *flags).stdout)["method"] == "suffix"
    refused(run("generate", "x", "--tuned", found, "--target", "text-target"), "another one")
    refused(run("bench", "--tuned", found, "--target", "text-target"), "another one")
    refused(run("generate", "x", "--tuned", found / "none.json"), "cannot be read")


def test_tune_refuses_what_it_cannot_use(tmp_path, models):
    refused(run("tune", *models[:2]), "without prompts", "--prompts FILE")
    refused(run("tune", *models[:2], "--prompts", tmp_path / "none.jsonl"), "cannot be read")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(run("tune", *models[:2], "--prompts", tmp_path / "empty.jsonl"), "holds no lines")
    (tmp_path / "one.jsonl").write_text('{"prompt": "fine"}\n')
    flags = ["--prompts", tmp_path / "one.jsonl", "--out", tmp_path / "out"]
    refused(run("tune", *models[:2], *flags, "--minutes", 0), "minutes=0")
    refused(run("tune", *models[:2], *flags, "--datastores", tmp_path), "datastore build")
    assert not (tmp_path / "out").exists()


def test_an_audit_of_no_methods_is_refused():
    refused(run("audit", "--methods", ""), "method")


def test_audit_says_in_its_exit_status_whether_every_row_passed(monkeypatch, tmp_path):
    from foretoken.audit import report

    ran = run("audit", "--methods", "plain", "--json", "--out", tmp_path / "deep" / "audit.json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found == json.loads((tmp_path / "deep" / "audit.json").read_text())
    bad = report.AuditRow("exact law", "plain", report.FAIL, "off by 0.1", {}, 0.1)

    def failed(*given, progress, **options):
        progress("exact law: plain")
        progress("exact law: chain")
        return report.AuditReport((bad,))

    monkeypatch.setattr(report, "run", failed)
    ran = run("audit")
    assert ran.exit_code == 1 and "off by 0.1" in ran.stdout
    assert ran.stderr.count("checking exact law") == 1, "a line for each kind, without a terminal"


def test_audit_measures_acceptance_instead(monkeypatch, models):
    from foretoken.audit import yardstick

    small = yardstick.run
    monkeypatch.setattr(yardstick, "run", lambda *a, **k: small(*a, **{**k, "count": 3}))
    ran = run("audit", "--acceptance", *models[:4], "--json")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["passed"] and "the models', top-k 16" in found["one_candidate"]
    refused(run("audit", "--acceptance", "--mutate"), "one after the other")


@pytest.fixture
def training(models, tmp_path):
    """Flags of a short training run into tmp_path / "head"."""
    data = tmp_path / "passages.txt"
    data.write_text("\n\n".join(f"the cat {n} is in the rain" for n in range(12)))
    flags = [*models[:4], "--data", data, "--out", tmp_path / "head"]
    for option in ("prompts=8", "steps=20", "new_tokens=8"):
        flags += ["--set", option]
    return flags


@pytest.mark.parametrize(
    ("head", "options", "method"),
    [
        ("acceptance", ["calibration=shift"], "specdec++"),
        ("decision", ["model=hard"], "mcsd-dynamic"),
        ("exits", ["hidden=8"], "specee"),
    ],
)
def test_a_trained_head_serves_the_method_it_is_for(
    head, options, method, models, training, tmp_path
):
    flags = [flag for option in options for flag in ("--set", option)]
    ran = run("train", head, *training, *flags)
    assert ran.exit_code == 0, ran.output
    assert "right" in ran.stdout or "brier" in ran.stdout
    option = "predictors" if head == "exits" else "head"
    using = ["--method", method, "--set", f"{option}={tmp_path / 'head'}"]
    texts = [
        json.loads(run("generate", PROMPT, *models, *how, "--max-new-tokens", 20, "--json").stdout)
        for how in (using, ["--method", "plain"])
    ]
    assert texts[0]["tokens"]
    assert texts[0]["tokens"] == texts[1]["tokens"] or not promise_of_row(METHODS[method]).lossless


def test_training_options_are_checked_before_any_work(training, tmp_path):
    refused(run("train", "acceptance", *training, "--set", "stepz=2"), "'stepz'", "mean steps?")
    refused(run("train", "decision", *training, "--set", "mix=0.5"), "'mix'", "its options are")
    refused(run("train", "decision", *training, "--set", "model=firm"), "soft or hard")
    refused(run("train", "exits", *training, "--set", "epochs=many"), "a whole number")
    refused(run("train", "exit", *training), "did you mean exits?")
    refused(run("train", "exits"), "without a folder", "--out DIR")
    assert not (tmp_path / "head").exists()


def test_heads_and_their_options_are_listed():
    for command in (["train"], ["train", "--list"]):
        found = {row["name"] for row in json.loads(run(*command, "--json").stdout)}
        assert found == {*HEADS, *RECIPES}
        assert "specdec++" in run(*command).stdout
    rows = json.loads(run("train", "decision", "--list", "--json").stdout)
    assert {key: value for key, value in rows[4].items() if key != "meaning"} == {
        "name": "steps",
        "type": "a whole number or none",
        "default": None,
    }
    assert "soft or hard" in run("train", "decision", "--list").stdout


def test_specdec_without_a_head_says_how_to_make_one(models):
    ran = run("generate", PROMPT, *models, "--method", "specdec++")
    refused(ran, "without a head", "foretoken train acceptance --out DIR", "head=DIR")


def test_text_is_read_by_the_command_that_makes_data(pair_folders, tmp_path):
    story, out = tmp_path / "story.txt", tmp_path / "texts"
    story.write_text(" ".join(f"the cat {n} is in the rain" for n in range(40)))
    flags = ["--target", pair_folders[0], "--set", "chats=0", "--set", "features=final", "--json"]
    made = run("train", "data", *flags, "--text", story, "--out", out)
    assert made.exit_code == 0, made.output
    notes = json.loads(made.stdout)
    assert notes["text"][0]["source"] == str(story) and notes["features"] == "final"
    draft = ["train", "draft", "--target", pair_folders[0], "--data", out, "--out", tmp_path / "d"]
    refused(run(*draft, "--text", story), "`foretoken train data` reads it")
    refused(run("train", "data", *flags[:4], "--text", tmp_path / "no", "--out", tmp_path / "e"),
            "no such file")  # fmt: skip

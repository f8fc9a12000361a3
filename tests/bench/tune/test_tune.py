"""A whole tuning on tiny models: what it writes, what takes it, what it refuses."""

import json
import logging
import re
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

import foretoken
from foretoken.audit.fixtures import random_head
from foretoken.bench.models import Models
from foretoken.bench.progress import Bar
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import single
from foretoken.bench.tune import race as race_module
from foretoken.bench.tune.candidates import candidates
from foretoken.bench.tune.config import TuneConfig
from foretoken.bench.tune.prompts_in_turn import PromptsInTurn
from foretoken.bench.tune.race import Clock
from foretoken.bench.tune.report import NAMES
from foretoken.bench.tune.run import FLAGS, run_tune
from foretoken.bench.tune.search import Search
from foretoken.bench.warned import unlike_configured
from foretoken.cli.measure import show_results
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.engine.tuned import NAME, read_tuned
from foretoken.errors import CheckpointError, ConfigError

PROMPT = "the cat is in the "


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tasks(count: int = 4):
    return [
        single("the pen and a pin " * (n + 1), id=f"p{n}", family=("qa", "rag")[n % 2])
        for n in range(count)
    ]


def config(target, out, **changes) -> TuneConfig:
    options = {"minutes": 0.5, "max_new_tokens": 12, "quiet": True}
    return TuneConfig(target=str(target), out=out, **{**options, **changes})


@pytest.fixture(scope="module")
def finished(pair_folders, tmp_path_factory):
    """A tuning with a draft."""
    root = tmp_path_factory.mktemp("tune")
    asked = config(pair_folders[0], root / "out", drafts=(str(pair_folders[1]),), minutes=0.8)
    results = run_tune(asked, tasks())
    return results, root / "out"


def test_everything_was_tried_and_one_is_chosen(finished) -> None:
    results, _ = finished
    rows = results["rows"]
    assert {"plain", "auto", "suffix", "chain[draft=draft]", "tree[draft=draft]"} < set(rows)
    assert "tokens_per_second" in rows["plain"] and "tokens_per_second" in rows["auto"]
    chosen = rows[results["chosen"]]
    assert chosen["failed"] is None and chosen["tokens_per_second"] > 0
    assert chosen["same_text"]["equal"] == chosen["same_text"]["of"]
    assert results["rounds"][0]["prompts"] >= 1 and "plain" in results["rounds"][0]["standings"]


def test_the_choice_is_shown_in_a_narrow_terminal(finished, monkeypatch, capsys) -> None:
    """Its tables are as wide as they are; the columns of a bench are others."""
    results, out = finished
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert Console().is_terminal and Console().width == 80
    notes = out / "notes.md"
    notes.write_text("a shopping list")
    show_results(results, [out / name for name in NAMES], as_json=False)
    notes.unlink()
    shown = capsys.readouterr().out
    assert results["chosen"] in shown and "page.html" in shown
    assert "shopping" not in shown, "only what was written is shown"


def test_a_draft_of_another_vocabulary_is_noted_and_left_out(
    pair_folders, make_llama, tmp_path
) -> None:
    make_llama(80).save_pretrained(tmp_path / "stranger")
    asked = config(pair_folders[0], tmp_path)
    models = Models(asked.target)
    prompts = PromptsInTurn(tasks(), models.tokenizer, 8, None)
    search = Search(models, prompts, asked.params, Clock(1e9), Bar())
    specs = candidates((str(pair_folders[1]), str(tmp_path / "stranger")), ())[:10]
    search.specs = {spec.label: spec for spec in specs}
    rows = search.prepared(prompts.first())
    strange = {label for label in search.specs if "stranger" in label}
    assert set(rows) == search.specs.keys() - strange and len(strange) == 4
    assert "chain[draft=draft]" in rows
    for label in strange:
        assert "cannot run" in search.left_out[label] and "80" in search.left_out[label]


def test_what_was_not_measured_says_why(finished) -> None:
    results, out = finished
    text = (out / "report.md").read_text()
    for label, row in results["rows"].items():
        assert ("tokens_per_second" in row) or (row["failed"] and f"- {label}: " in text)


def test_what_training_would_be_worth_is_told_with_its_assumptions(finished) -> None:
    results, out = finished
    assert 0 < results["worth"]["certainty"]["top"] <= 1
    text = (out / "report.md").read_text()
    assert "What training a draft would be worth" in text and "Reckoned, not measured" in text
    assert "an assumption" in text and "acceptance 0.3" in text


def test_the_page_is_self_contained_and_shows_every_round(finished) -> None:
    results, out = finished
    page = (out / "page.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", page) and "http" not in page
    assert page.count("<svg") == len(list((out / "plots").glob("*.svg")))
    for number in range(1, len(results["rounds"]) + 1):
        assert f"Round {number}, " in page and (out / "plots" / f"round-{number}.svg").exists()
    assert "chain[draft=draft]" in page and "Cost of scoring n nodes" in page


def test_results_name_neither_path_nor_machine(finished, pair_folders) -> None:
    _, out = finished
    for name in ("results.json", "report.md", "page.html"):
        text = (out / name).read_text()
        assert str(pair_folders[0].parent) not in text and str(out) not in text


def test_the_file_goes_through_load(finished, pair_folders) -> None:
    results, out = finished
    found = read_tuned(out)
    assert found == read_tuned(out / NAME)
    assert found.target == str(pair_folders[0]) and found.dtype == "float32"
    assert found.told["prompts"]["digest"] == results["prompts"]["digest"]
    assert found.told["measured"]["label"] == results["chosen"]
    assert {"date", "foretoken", "torch"} < found.told["environment"].keys()
    with foretoken.load(tuned=out) as session:
        assert session.method == found.method
        tokens = session.generate(PROMPT, 10).tokens
    with foretoken.load(pair_folders[0], "plain") as plain:
        assert tokens == plain.generate(PROMPT, 10).tokens


@pytest.fixture
def tuned(finished, pair_folders, tmp_path):
    """A file like the one that was written, of a known configuration."""
    found = json.loads((finished[1] / NAME).read_text())
    changes = {"method": "chain", "draft": str(pair_folders[1]), "options": {"depth": 2}}
    (tmp_path / NAME).write_text(json.dumps(found | changes))
    return tmp_path / NAME


def test_options_of_the_file_reach_the_session_and_explicit_ones_win(tuned, pair_folders) -> None:
    def depth(**asked):
        with foretoken.load(tuned=tuned, **asked) as session:
            return session.method, session.engine.controller.budget.depth

    assert depth() == ("chain", 2)
    assert depth(depth=4) == ("chain", 4)
    assert depth(target=pair_folders[0], draft=pair_folders[1]) == ("chain", 2)
    with foretoken.load(tuned=tuned, method="plain") as session:
        assert session.method == "plain" and not hasattr(session.engine.drafter, "model")
    with foretoken.load(tuned=tuned, dtype="bfloat16") as session:
        assert session.engine.target.model.dtype is torch.bfloat16


def test_a_draft_that_the_files_method_cannot_use_takes_its_own_default(
    tuned, pair_folders, caplog
) -> None:
    changes = {"method": "prompt-lookup", "draft": None, "options": {"max_ngram": 2}}
    found = replace(read_tuned(tuned), **changes)
    tuned.write_text(found.to_json())
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        session = foretoken.load(tuned=tuned, draft=pair_folders[1])
    with session:
        assert session.method == "auto-draft" and session.draft is not None
    assert "prompt-lookup and its options are left aside" in caplog.text
    whole = found.completing({"draft_head": "./head", "draft": None})
    assert not {"method", "draft", "max_ngram"} & whole.keys(), "load asks the head for its method"
    headed = replace(found, method="medusa", options={"draft_head": "./mine"})
    whole = headed.completing({"draft_head": "./head"})
    assert (whole["method"], whole["draft_head"]) == ("medusa", "./head")
    caplog.clear()
    assert found.completing({"method": "prompt-lookup", "draft": "x"})["max_ngram"] == 2
    assert caplog.text == "", "a method that was asked for is kept, and its options with it"


def test_sources_and_a_datastore_go_through_the_file(tuned, byte_tokenizer, tmp_path) -> None:
    store = tmp_path / "texts"
    ids = byte_tokenizer(PROMPT * 3)["input_ids"]
    Datastore.build(store, Vocabulary.of(byte_tokenizer.get_vocab()), [ids])
    spec = next(spec for spec in candidates((), (str(store),)) if spec.method == "fused")
    found = replace(read_tuned(tuned), method="fused", draft=None, options=spec.options)
    tuned.write_text(found.to_json())
    with foretoken.load(tuned=tuned) as session:
        assert session.method == "fused" and len(session.engine.drafter.members) == 4
        assert session.generate(PROMPT, 6).tokens


@pytest.mark.slow
def test_a_head_is_raced_and_its_folder_stands_in_the_file(pair_folders, tmp_path) -> None:
    size = AutoConfig.from_pretrained(pair_folders[0])
    head = str(random_head("medusa", size.vocab_size, size.hidden_size))
    asked = config(pair_folders[0], tmp_path / "out", heads=(head,), minutes=0.6)
    results = run_tune(asked, tasks(2))
    row = next(row for row in results["rows"].values() if row["method"] == "medusa")
    assert row["failed"] is None and row["same_text"]["equal"] == row["same_text"]["of"]
    found = read_tuned(tmp_path / "out" / NAME)
    chosen = replace(found, method="medusa", options={"draft_head": head})
    (tmp_path / NAME).write_text(chosen.to_json())
    with foretoken.load(tuned=tmp_path) as session:
        assert session.method == "medusa" and session.generate(PROMPT, 6).tokens


def test_a_loaded_model_is_taken_as_it_is(tuned, tiny_pair, pair_folders) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float64)
    with foretoken.load(model, tuned=tuned, draft=tiny_pair[1].double()) as session:
        assert session.method == "chain" and session.engine.target.model is model
    tiny_pair[1].float()


def test_a_file_for_another_target_is_refused(tuned, make_llama, pair_folders, tmp_path) -> None:
    make_llama(265, num_hidden_layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="tuned for another one") as refused:
        foretoken.load(tmp_path / "other", tuned=tuned)
    assert "3 layers" in str(refused.value) and "2 layers" in str(refused.value)
    words = tmp_path / "words"
    shutil.copytree(pair_folders[0], words)
    names = json.loads((words / "tokenizer.json").read_text())
    vocab = names["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (words / "tokenizer.json").write_text(json.dumps(names))
    with pytest.raises(ConfigError, match="tuned for another one"):
        foretoken.load(words, tuned=tuned)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (None, ConfigError, "cannot be read"),
        ("{", CheckpointError, "no JSON"),
        ("[]", CheckpointError, "no JSON object"),
        ('{"format": 9}', CheckpointError, "format is 9"),
        ('{"format": 1, "method": "chain"}', CheckpointError, "nothing usable about target"),
    ],
)
def test_a_file_that_is_none_is_refused(text, error, said, tmp_path) -> None:
    path = tmp_path / NAME
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=said):
        foretoken.load(tuned=path)


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a target"):
        foretoken.load()


def test_a_bench_takes_rows_with_drafts_of_their_own(pair_folders, tmp_path) -> None:
    small = pair_folders[1]
    asked = BenchConfig(
        target=pair_folders[0], methods=f"plain,chain[draft={small},depth=2]", out=tmp_path,
        repetitions=1, max_new_tokens=8, scoring_nodes=(1, 2), quiet=True,
    )  # fmt: skip
    rows = run_bench(asked, tasks(2))["rows"]
    row = rows["chain[draft=draft,depth=2]"]
    assert row["failed"] is None and row["text"]["equal"] == 2
    assert row["accepted_length"]["emitted_per_forward"] > 1.0
    assert str(small) not in (tmp_path / "results.json").read_text()


@pytest.mark.slow
def test_one_prompt_is_allowed_with_a_warning(pair_folders, tmp_path) -> None:
    results = run_tune(config(pair_folders[0], tmp_path, minutes=0.25), tasks(1))
    assert any("one prompt only" in text for text in results["warnings"])
    assert "one prompt only" in (tmp_path / "page.html").read_text()


def test_too_short_a_time_says_how_long_a_round_takes(pair_folders, tmp_path) -> None:
    with pytest.raises(ConfigError, match="one round takes longer") as refused:
        run_tune(config(pair_folders[0], tmp_path, minutes=0.001), tasks())
    assert "--minutes" in refused.value.do


def test_an_interrupt_writes_the_best_so_far(pair_folders, tmp_path, monkeypatch) -> None:
    real, calls = race_module.Race.prompt, []

    def stop_at_the_third(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(race_module.Race, "prompt", stop_at_the_third)
    results = run_tune(config(pair_folders[0], tmp_path), tasks())
    assert results["minutes"]["interrupted"] and len(calls) == 3
    assert results["rows"]["plain"]["prompts"] == 2
    assert read_tuned(tmp_path).told["measured"]["label"] == results["chosen"]
    assert "best so far" in (tmp_path / "report.md").read_text()


@contextmanager
def full_disk(room: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_refused_before_any_model_is_read(pair_folders, tmp_path) -> None:
    with full_disk(1000), pytest.raises(ConfigError, match="nothing can be written there"):
        run_tune(config(pair_folders[0], tmp_path / "out"), tasks())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafts": ("no/such/draft/here",)}, "no/such/draft"),
        ({"datastores": ("nowhere",)}, "nowhere"),
    ],
)
def test_what_is_not_there_is_refused_before_any_work(pair_folders, tmp_path, changes, said):
    with pytest.raises((ConfigError, CheckpointError), match=said):
        run_tune(config(pair_folders[0], tmp_path / "out", **changes), tasks())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"minutes": 0.0}, {"minutes": float("nan")},
                                     {"max_new_tokens": 0}, {"temperature": -1.0}])  # fmt: skip
def test_values_out_of_range_are_refused(changes, tmp_path) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        config("x", tmp_path, **changes)


def test_options_of_the_generation_config_that_are_not_measured_are_named(make_llama) -> None:
    model = make_llama(40)
    own = model.generation_config
    own.do_sample, own.temperature, own.top_k, own.top_p = True, 0.7, 20, 0.8
    own.repetition_penalty = 1.1
    [warning] = unlike_configured(model, TuneConfig(target="x", temperature=0.7), FLAGS)
    for said in ("top_k 20", "top_p 0.8", "repetition_penalty 1.1", "TuneConfig"):
        assert said in warning
    assert "temperature" not in warning and "min_p" not in warning
    [warning] = unlike_configured(model, TuneConfig(target="x"), FLAGS)
    assert "pass --temperature 0.7;" in warning and "top_p 0.8" in warning
    [warning] = unlike_configured(model, BenchConfig(target=model))
    assert "pass --temperature 0.7 --top-k 20 --top-p 0.8;" in warning
    assert "repetition_penalty cannot be asked for here" in warning

    cuts = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    fitting = TuneConfig(target="x", temperature=0.7, **cuts)
    assert unlike_configured(model, fitting, FLAGS) == []
    params = fitting.params(4, frozenset())
    assert {name: getattr(params, name) for name in cuts} == cuts
    assert cuts.items() <= fitting.writing().items()


def test_greedy_text_follows_the_penalty_of_a_generation_config(make_llama, tmp_path) -> None:
    model = make_llama(40)
    assert unlike_configured(model, TuneConfig(target="x"), FLAGS) == []
    model.generation_config.repetition_penalty = 1.1
    asked = BenchConfig(
        target=model, methods="plain", out=tmp_path, repetitions=1, max_new_tokens=4,
        scoring_nodes=(1, 2), quiet=True,
    )  # fmt: skip
    results = run_bench(asked, [single([5, 6, 7, 8], id="ids", family="raw")])
    [warning] = [text for text in results["warnings"] if "generation config" in text]
    assert "repetition_penalty 1.1" in warning and "top_p" not in warning
    model.generation_config.no_repeat_ngram_size = 3
    penalised = TuneConfig(target="x", repetition_penalty=1.1)
    [warning] = unlike_configured(model, penalised, FLAGS)
    assert "no_repeat_ngram_size cannot be asked for here" in warning
    assert "repetition_penalty" not in warning
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.stop_strings, model.generation_config.min_new_tokens = ["x"], 5
    [warning] = unlike_configured(model, penalised, FLAGS)
    assert "no_repeat_ngram_size, min_new_tokens, stop_strings cannot be asked for" in warning

"""llama.cpp and vLLM as rows: found or absent, asked over pipes, their text; requests at once.

A small script stands in for an engine where only the pipes matter. Tests of the real ones run where
FORETOKEN_LLAMA_PYTHON and FORETOKEN_VLLM_PYTHON name interpreters that have them.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from foretoken import minis
from foretoken.bench import interpreters
from foretoken.bench.interpreters import WORKERS, Worker, find
from foretoken.bench.journal import read_journal
from foretoken.bench.other_engines import gguf_path
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import from_examples, single
from foretoken.errors import CapabilityError, ConfigError
from foretoken.minis.tasks import examples

SCRIPT = """
import os, sys
sys.path.insert(0, {workers!r})
import wire

if sys.argv[1:] == ["--probe"]:
    print('{{"counter": "7"}}')
    sys.exit()

class Engine:
    def open(self, **asked):
        if asked["form"] == "ngram":
            raise wire.Refused("look-up was asked for.", "counting only.", "do not ask.")
        self.asked = asked

    def write(self, prompts, max_new_tokens, **asked):
        print("an engine may print what it likes")
        if asked["seed"] == 13:
            os._exit(3)
        if asked["seed"] == 14:
            raise ValueError("first line\\nsecond line")
        tokens = [[p[-1] % 7 + n for n in range(c)] for p, c in zip(prompts, max_new_tokens)]
        return {{"tokens": tokens, "seconds": 0.5, "memory": os.getpid(), "asked": self.asked}}

engine = Engine()
wire.serve({{"open": engine.open, "write": engine.write}})
"""
PAIR = minis.path("text-target"), minis.path("text-draft")
ASKED = {"eos": [1], "temperature": 0, "top_k": 0, "top_p": 1.0, "seed": 0}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """vLLM's place taken by a script that counts upwards."""
    script = tmp_path / "counting.py"
    script.write_text(SCRIPT.format(workers=str(WORKERS)))
    engine = replace(interpreters.ENGINES["vllm"], script=str(script))
    monkeypatch.setitem(interpreters.ENGINES, "vllm", engine)
    monkeypatch.delenv(engine.variable, raising=False)
    return engine


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter that finds no installed package at all."""
    path = tmp_path / "bare-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path


def config(folders, out, **changes) -> BenchConfig:
    options = {
        "methods": "plain,vllm:plain", "repetitions": 1, "max_new_tokens": 10, "tuning_prompts": 1,
        "tuning_tokens": 4, "scoring_nodes": (1, 2), "quiet": True,
    }  # fmt: skip
    return BenchConfig(target=folders[0], draft=folders[1], out=out, **{**options, **changes})


def tasks(count=3):
    return [single("the pen and a pin " * (n + 1), id=f"p{n}", family="qa") for n in range(count)]


def opened(worker, form="plain"):
    worker.ask("open", form=form)
    return worker


def test_rows_of_an_absent_package_are_left_out_with_one_line(
    pair_folders, tmp_path, bare_python, capsys
) -> None:
    asked = config(
        pair_folders, tmp_path / "out", methods="plain,llama:plain,llama:lookup", quiet=False,
        llama_python=bare_python,
    )  # fmt: skip
    results = run_bench(asked, tasks(1))
    assert list(results["rows"]) == ["plain"] and not results["rows"]["plain"]["failed"]
    (line,) = (text for text in results["warnings"] if "left out" in text)
    assert "llama:plain, llama:lookup" in line and "pip install llama-cpp-python gguf" in line
    assert "--llama-python" in line and "FORETOKEN_LLAMA_PYTHON" in line
    assert str(tmp_path) not in line, "results travel without paths"
    told = capsys.readouterr().err
    assert told.count(line) == 1 and "Traceback" not in told
    assert line in (tmp_path / "out" / "report.md").read_text()


def test_a_bench_of_absent_rows_alone_is_refused(pair_folders, tmp_path, bare_python) -> None:
    asked = config(pair_folders, tmp_path / "out", methods="llama:plain", llama_python=bare_python)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        run_bench(asked, tasks(1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["missing", "no Python"])
def test_a_named_interpreter_that_is_none_is_refused(kind, tmp_path) -> None:
    path = tmp_path / "python"
    if kind == "no Python":
        path.write_text("#!/bin/sh\necho hello\n")
        path.chmod(0o755)
    asked = config(("no/model", "no/draft"), tmp_path / "out", vllm_python=path)
    with pytest.raises(ConfigError, match="--vllm-python"):
        run_bench(asked, tasks(1))


def test_the_environment_names_an_interpreter_and_the_option_wins(
    counting, bare_python, monkeypatch
) -> None:
    assert find("vllm").python == sys.executable
    monkeypatch.setenv(counting.variable, str(bare_python))
    assert find("vllm").python == str(bare_python)
    found = find("vllm", sys.executable)
    assert found.python == sys.executable and found.versions == {"counter": "7"}


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("vllm:plane", "did you mean .*vllm:plain"),
        ("llama:lookup[tokens=3]", "num_pred_tokens"),
        ("vllm:draft", "without a draft model"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_name(methods, said, tmp_path) -> None:
    asked = {"target": "no/such/model", "out": tmp_path / "out", "methods": methods}
    with pytest.raises(ConfigError, match=said):
        run_bench(BenchConfig(**asked), tasks(1))


def test_a_row_in_another_interpreter_is_a_row_like_any_other(
    counting, pair_folders, tmp_path
) -> None:
    results = run_bench(config(pair_folders, tmp_path / "out"), tasks())
    row = results["rows"]["vllm:plain"]
    assert row["failed"] is None and row["cells"] == 3 and row["peer"]
    assert row["tokens_per_second"]["value"] == pytest.approx(10 / 0.5), "the worker's own clock"
    with pytest.raises(ProcessLookupError):  # what it told as its memory: nobody is left behind
        os.kill(row["peak_rss"], 0)
    assert row["text"] == {
        "equal": 0, "of": 3, "first_difference": {"p0": 0, "p1": 0, "p2": 0},
    }  # fmt: skip
    assert "fastest of 2 tried" in results["notes"]["vllm:plain"]
    assert "other engines: counter 7" in (tmp_path / "out" / "report.md").read_text()
    assert results["best"]["peer"] == "vllm:plain"


def test_a_worker_answers_whatever_its_engine_prints(counting) -> None:
    worker = opened(Worker("vllm", sys.executable, 1))
    found = worker.ask("write", prompts=[[5], [6]], max_new_tokens=[2, 3], **ASKED)
    assert found["tokens"] == [[5, 6], [6, 7, 8]]
    worker.close()


def test_a_refusal_keeps_its_three_parts(counting) -> None:
    worker = Worker("vllm", sys.executable, 1)
    with pytest.raises(CapabilityError) as caught:
        opened(worker, "ngram")
    assert caught.value.possible == "counting only."
    worker.close()


@pytest.mark.parametrize(("seed", "said"), [(13, "status 3"), (14, "second line")])
def test_a_worker_that_dies_is_told_in_one_line(counting, seed, said) -> None:
    worker = opened(Worker("vllm", sys.executable, 1))
    with pytest.raises(RuntimeError, match=said) as caught:
        worker.ask("write", prompts=[[5]], max_new_tokens=[2], **{**ASKED, "seed": seed})
    assert "\n" not in str(caught.value)
    worker.close()


def test_a_row_whose_worker_dies_fails_and_the_others_go_on(
    counting, pair_folders, tmp_path
) -> None:
    asked = config(pair_folders, tmp_path / "out", seed=13)
    rows = run_bench(asked, tasks(1))["rows"]
    assert "status 3" in rows["vllm:plain"]["failed"] and rows["plain"]["failed"] is None


def test_workers_need_no_package_of_ours() -> None:
    for path in WORKERS.glob("*.py"):
        assert "foretoken" not in path.read_text(), path.name


def test_requests_at_once_write_what_each_writes_alone(pair_folders, tmp_path) -> None:
    methods = "plain,chain[depth=3],prompt-lookup"
    run_bench(config(pair_folders, tmp_path / "one", methods=methods), tasks())
    results = run_bench(
        config(pair_folders, tmp_path / "two", methods=methods, requests=2), tasks()
    )
    alone = read_journal(tmp_path / "one" / "journal.jsonl")[1].cells
    both = read_journal(tmp_path / "two" / "journal.jsonl")[1].cells
    for row in results["rows"]:
        one = {cell.prompt: cell.tokens for cell in alone if cell.row == row}
        two = {cell.prompt: cell.tokens for cell in both if cell.row == row}
        assert two == {"p0 + 1": one["p0"] + one["p1"], "p2": one["p2"]}, row
    chain = results["rows"]["chain[depth=3]"]
    assert chain["accepted_length"]["emitted_per_forward"] > 1.0, "of one request, not of all"
    assert results["rows"]["plain"]["accepted_length"]["emitted_per_forward"] == 1.0
    assert "2 requests at once" in (tmp_path / "two" / "report.md").read_text()


def test_another_engine_gets_the_requests_at_once_too(counting, pair_folders, tmp_path) -> None:
    results = run_bench(config(pair_folders, tmp_path / "out", requests=3), tasks())
    row = results["rows"]["vllm:plain"]
    assert row["cells"] == 1 and row["tokens_per_second"]["value"] == pytest.approx(30 / 0.5)


def test_rows_of_one_text_are_refused_several_requests(pair_folders, tmp_path) -> None:
    for name in ("hf:plain", "llama:plain", "beam-sampling"):
        asked = config(pair_folders, tmp_path / "out", methods=f"plain,{name}", requests=2)
        with pytest.raises(ConfigError, match=f"{name} was asked for with 2 requests"):
            run_bench(asked, tasks(1))


def test_other_weights_are_another_gguf_file(pair_folders, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, draft = (gguf_path(folder, "float32") for folder in pair_folders)
    assert target != draft and target == gguf_path(pair_folders[0], "float32")
    assert gguf_path(pair_folders[0], "bfloat16") not in (target, draft)
    assert target.is_relative_to(tmp_path)


# The real engines, where they are.


def real(name: str):
    """The interpreter of an engine; the test is skipped where there is none."""
    if not os.environ.get(interpreters.ENGINES[name].variable):
        pytest.skip(f"{interpreters.ENGINES[name].variable} names no interpreter")
    found = find(name)
    if not found.versions:
        pytest.skip(f"no {name} in that interpreter")
    return found


def lively(kind, **changes):
    """Random weights whose greedy text does not loop at once, biases and norms too."""
    torch.manual_seed(1)
    model = kind(kind.config_class(**TINY, **changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name or "norm" in name:
                weight += 0.3 * torch.randn(weight.shape)
        model.lm_head.weight *= 3.0
    return model


TINY = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, {}),
    "tied and biased": (LlamaForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3 positions": (LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
}


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_writes_plains_text_for_every_family_that_is_written(
    name, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = real("llama")
    kind, changes = MODELS[name]
    asked = BenchConfig(
        target=lively(kind, **changes), methods="plain,llama:plain,llama:lookup",
        out=tmp_path / "out", repetitions=1, max_new_tokens=24, tuning_prompts=1, tuning_tokens=4,
        quiet=True, scoring_nodes=(1, 2), llama_python=found.python,
    )  # fmt: skip
    texts = {str(k): [(7 * n + k) % 300 for n in range(90)] for k in (1, 2)}
    prompts = [single(ids, id=name, family="ids") for name, ids in texts.items()]
    results = run_bench(asked, prompts)
    rows, notes = results["rows"], results["notes"]
    for row in ("llama:plain", "llama:lookup"):
        assert rows[row]["failed"] is None
        assert rows[row]["text"]["equal"] == rows[row]["text"]["of"] == 2, row
    assert "flash_attn=False" in notes["llama:plain"], "which rounds to half precision"


def test_llama_cpp_drafts_ends_and_samples_as_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = real("llama")
    methods = "plain,chain[depth=4],llama:draft[num_pred_tokens=4,p_min=0],llama:plain,llama:lookup"
    asked = config(
        PAIR, tmp_path / "out", methods=methods, llama_python=found.python, max_new_tokens=60
    )
    questions = from_examples(examples("question answering", "test", 3, 0))
    rows = run_bench(asked, questions)["rows"]
    drafts = (rows[name] for name in ("llama:draft[num_pred_tokens=4,p_min=0]", "chain[depth=4]"))
    theirs, ours = (row["accepted_length"]["acceptance_rate"] for row in drafts)
    assert theirs == pytest.approx(ours, abs=0.1) and ours > 0.5, "the same draft, as often right"
    assert rows["llama:plain"]["accepted_length"]["emitted_per_forward"] == 1.0
    cells = read_journal(tmp_path / "out" / "journal.jsonl")[1].cells
    wanted = {cell.prompt: cell.tokens for cell in cells if cell.row == "plain"}
    assert any(len(tokens) < 60 for tokens in wanted.values()), "no text met the end token"
    assert all(cell.tokens == wanted[cell.prompt] for cell in cells)
    drawn = replace(asked, temperature=1.0, top_k=20, top_p=0.9, out=tmp_path / "drawn")
    rows = run_bench(replace(drawn, repetitions=2), questions[:1])["rows"]
    assert [row["failed"] for row in rows.values()] == [None] * 5
    cells = read_journal(tmp_path / "drawn" / "journal.jsonl")[1].cells
    texts = [cell.tokens for cell in cells if cell.row == "llama:plain"]
    assert texts[0] != texts[1], "another repetition, another seed"


def test_a_family_that_no_gguf_is_written_for_is_refused_by_name(tmp_path, monkeypatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = real("llama")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)).eval()
    asked = BenchConfig(
        target=model, methods="plain,llama:plain", out=tmp_path / "out", repetitions=1,
        max_new_tokens=4, quiet=True, scoring_nodes=(1, 2), llama_python=found.python,
    )  # fmt: skip
    rows = run_bench(asked, [single([5, 6, 7], id="ids", family="ids")])["rows"]
    assert "GPT2LMHeadModel in a llama:* row" in rows["llama:plain"]["failed"]
    assert "LlamaForCausalLM" in rows["llama:plain"]["failed"]
    assert rows["plain"]["failed"] is None and not list(tmp_path.rglob("*.gguf*"))


@pytest.mark.slow
def test_vllm_writes_plains_text_alone_and_together(tmp_path) -> None:
    found = real("vllm")
    methods = "plain,vllm:plain[enforce_eager=true],vllm:ngram[enforce_eager=true]"
    for requests in (1, 3):
        asked = config(
            PAIR, tmp_path / str(requests), methods=methods, requests=requests,
            vllm_python=found.python, max_new_tokens=24,
        )  # fmt: skip
        rows = run_bench(asked, tasks())["rows"]
        for row in rows.values():
            assert row["failed"] is None
            assert row["text"]["equal"] == row["text"]["of"] == -(-3 // requests)


def test_the_gguf_file_holds_the_rounded_weights(pair_folders, tmp_path) -> None:
    gguf = pytest.importorskip("gguf")
    sys.path.insert(0, str(WORKERS))
    try:
        import gguf_file
    finally:
        sys.path.remove(str(WORKERS))
    path = tmp_path / "model.gguf"
    gguf_file.write(Path(pair_folders[0]), path, "bfloat16")
    read = gguf.GGUFReader(path)
    kinds = {tensor.tensor_type.name for tensor in read.tensors if len(tensor.shape) > 1}
    assert kinds == {"BF16"}
    model = LlamaForCausalLM.from_pretrained(pair_folders[0], dtype=torch.bfloat16)
    norm = next(t for t in read.tensors if t.name == "output_norm.weight")
    assert norm.data.tolist() == model.model.norm.weight.float().tolist()
    settings = json.loads((pair_folders[0] / "config.json").read_text())
    for change in ({"architectures": ["OPTForCausalLM"]}, {"hidden_act": "gelu"}):
        with pytest.raises(gguf_file.Refused):
            gguf_file.check({**settings, **change}, "float32")

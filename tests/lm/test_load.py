"""Models from directories; bad ones end in an error that says what to do."""

import errno
import json
import shutil
import socket
import threading
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from foretoken.errors import CapabilityError, CheckpointError, ConfigError, ForetokenError
from foretoken.lm import load
from foretoken.lm.load import load_model, load_tokenizer, quiet
from foretoken.lm.unreadable import explain


@pytest.fixture(scope="module")
def good(make_tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "good"
    make_tiny("llama").save_pretrained(path)
    return path


@pytest.fixture
def copied(good, tmp_path):
    """A copy to break."""
    return shutil.copytree(good, tmp_path / "model")


def refused(source, error, *words, **options):
    with pytest.raises(error) as caught:
        load_model(source, **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert caught.value.possible and caught.value.do


def test_a_directory_becomes_a_model_in_eval_mode(good, make_tiny, capfd):
    model = load_model(good)
    assert not model.training and model.dtype == torch.float32
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, make_tiny("llama")(ids).logits)
    assert load_model(str(good), dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(good, dtype=torch.float64, device="cpu").dtype == torch.float64
    assert capfd.readouterr() == ("", "")  # no bars, no warnings


def test_half_precision_weights_are_widened_on_a_cpu(make_tiny, tmp_path):
    make_tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32
    assert load_model(tmp_path, device="cpu", dtype="auto").dtype == torch.bfloat16


def test_gemma2_is_loaded_with_attention_that_knows_its_soft_cap(make_tiny, tmp_path):
    make_tiny("gemma2").save_pretrained(tmp_path)
    assert load_model(tmp_path).config._attn_implementation == "eager"


def test_a_loaded_model_is_used_as_it_is(make_tiny):
    model = make_tiny("llama")
    assert load_model(model) is model
    assert load_model(model, device="cpu", dtype="float32") is model
    refused(model, ConfigError, "bfloat16", "used as it is", dtype="bfloat16")
    refused(model, ConfigError, "device_map=", "used as it is", device_map={"": "cpu"})
    refused(model, ConfigError, "device='gpu'", "devices of this machine", device="gpu")


class Adapted(torch.nn.Module):
    """A model inside another module, as one with an adapter is."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model


def test_a_module_around_a_model_is_refused_with_the_way_to_the_model(make_tiny):
    model = make_tiny("llama")
    compiled = torch.nn.Module()
    compiled._orig_mod = model  # as torch.compile keeps it
    told = "Adapted was passed as model", "get_base_model()", "merge_and_unload()"
    refused(Adapted(model), ConfigError, *told)
    refused(compiled, ConfigError, "pass its _orig_mod")
    refused(torch.nn.Linear(2, 2), ConfigError, "the transformers model inside it")


def test_missing_directories_name_their_neighbours(good):
    refused(good.parent / "goood", CheckpointError, "there is no directory", "good")
    refused("./nowhere/at/all", CheckpointError, "there is no directory")
    refused(good / "config.json", CheckpointError, "is a file", str(good))
    refused(7, ConfigError, "int was passed as model")
    refused("~nobody-here/x", CheckpointError, "~nobody-here/x", "no home directory")


def test_directories_without_a_model(tmp_path, copied):
    refused(tmp_path / "model" / "..", CheckpointError, "has no config.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", CheckpointError, "is empty")
    (copied / "model.safetensors").unlink()
    refused(copied, CheckpointError, "has no weights")


def test_an_adapter_alone_names_the_model_that_it_belongs_to(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    named = '{"base_model_name_or_path": "owner/base"}'
    for said, base in ((named, "owner/base"), ("[", "another model")):
        (tmp_path / "adapter_config.json").write_text(said)
        words = f"an adapter of {base}", "merge_and_unload", "load_adapter"
        refused(tmp_path, CheckpointError, *words)


def test_pickled_weights_are_refused_unless_allowed(copied):
    model = load_model(copied)
    torch.save(model.state_dict(), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    refused(copied, CheckpointError, "pytorch_model.bin", "--allow-pickle")
    again = load_model(copied, allow_pickle=True)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_broken_files(copied):
    (copied / "model.safetensors").write_bytes(b"not a tensor")
    refused(copied, CheckpointError, "cannot be read")
    (copied / "config.json").write_text('{"model_type": "llama",')
    refused(copied, CheckpointError, "config.json is no JSON")
    (copied / "config.json").write_text('{"model_type": "zork"}')
    refused(copied, CapabilityError, "zork", "cannot build")


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_encoder_decoders_are_refused_before_a_weight_is_read(kind, copied):
    """A decoder could be read from some of these, and would write without what was encoded."""
    (copied / "config.json").write_text(json.dumps({"model_type": kind}))
    refused(copied, CapabilityError, f"{kind} is an encoder-decoder model")


def test_models_of_images_and_text_are_told_their_own_class(copied):
    (copied / "config.json").write_text('{"model_type": "llava"}')
    refused(copied, CapabilityError, "llava", "AutoModelForImageTextToText", "pass the model")
    with pytest.raises(CapabilityError) as told:
        load_model(copied)
    assert "newer" not in str(told.value)


def test_a_checkpoint_that_lacks_weights_is_refused(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    refused(copied, CheckpointError, "lacks", "model.layers.4")


def test_remote_code_is_off_unless_asked_for(copied):
    (copied / "config.json").write_text(
        '{"model_type": "zork",'
        ' "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}'
    )
    (copied / "code.py").write_text("raise SystemExit('this code ran')")
    refused(copied, CheckpointError, "--trust-remote-code")


def test_an_unreachable_hub_is_told_at_once(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(load, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(load, "getproxies", dict)
    refused("nobody/no-such-model", CheckpointError, "local hub cache", "cannot be reached")


@pytest.fixture
def asked(monkeypatch):
    """Places at which the hub is looked for: none of them is there."""
    found = []

    def unreachable(place, **_):
        found.append(place)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(load, "getproxies", dict)
    monkeypatch.setattr(load, "HF_HUB_OFFLINE", False)
    return found


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("http://mirror", ("mirror", 80)),
        ("https://mirror/path", ("mirror", 443)),
        ("http://mirror:8080", ("mirror", 8080)),
    ],
)
def test_the_hub_is_looked_for_at_its_endpoint(endpoint, place, asked, monkeypatch):
    monkeypatch.setattr(load, "ENDPOINT", endpoint)
    monkeypatch.setattr(load, "getproxies", lambda: {"no": "localhost"})  # NO_PROXY alone
    refused("nobody/no-such-model", CheckpointError, "mirror cannot be reached")
    assert asked == [place]


def test_behind_a_proxy_the_hub_is_not_looked_for(asked, monkeypatch):
    for proxy in ("http", "https", "all"):
        monkeypatch.setattr(load, "getproxies", lambda proxy=proxy: {proxy: "http://proxy:3128"})
        load.check_reachable("nobody/no-such-model", {"trust_remote_code": False})
    assert asked == []


def test_an_endpoint_without_a_host_is_named(asked, monkeypatch):
    monkeypatch.setattr(load, "ENDPOINT", "mirror.local/hub")
    refused("nobody/no-such-model", CheckpointError, "HF_ENDPOINT", "'mirror.local/hub'")
    assert asked == []


def test_a_hub_that_is_switched_off_is_not_called_unreachable(asked, monkeypatch):
    monkeypatch.setattr(load, "HF_HUB_OFFLINE", True)
    words = "HF_HUB_OFFLINE is set, so the hub is not asked", "unset it, or pass a directory"
    refused("nobody/no-such-model", CheckpointError, "local hub cache", *words)
    assert asked == []


def test_devices_and_types_that_do_not_exist(good):
    refused(good, ConfigError, "'abacus'", device="abacus")
    refused(good, ConfigError, "int3", "float32", dtype="int3")
    if not torch.cuda.is_available():
        refused(good, ConfigError, "devices of this machine: cpu", device="cuda")


def test_tokenizers(good, copied, byte_tokenizer):
    assert load_tokenizer(good) is None
    assert load_tokenizer(good, byte_tokenizer) is byte_tokenizer
    byte_tokenizer.save_pretrained(copied)
    found = load_tokenizer(copied)
    assert found.get_vocab() == byte_tokenizer.get_vocab()
    assert load_tokenizer(load_model(copied)).get_vocab() == byte_tokenizer.get_vocab()
    assert load_tokenizer(good, copied).get_vocab() == byte_tokenizer.get_vocab()
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        load_tokenizer(copied, good)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(copied)


@pytest.fixture
def with_code(copied, byte_tokenizer, monkeypatch, tmp_path):
    """A model of a common kind whose tokenizer brings code; where the hub's modules are kept."""
    byte_tokenizer.save_pretrained(copied)
    path = copied / "tokenizer_config.json"
    brought = {"auto_map": {"AutoTokenizer": ["words.Words", None]}, "tokenizer_class": "Words"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **brought}))
    (copied / "words.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Words(PreTrainedTokenizerFast):\n    brought = True\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    return copied


def test_code_of_a_tokenizer_is_run_when_asked_for_and_nobody_is_asked(with_code, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    assert load_tokenizer(with_code, None, True).brought
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_tokenizer(with_code)


def test_a_model_of_the_hub_finds_its_tokenizer_in_the_local_cache(
    make_tiny, byte_tokenizer, monkeypatch, tmp_path
):
    asked = []

    def cached(name, **options):
        asked.append((name, options["local_files_only"]))
        if name == "owner/small":
            return byte_tokenizer
        raise OSError("not in the cache")

    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", cached)
    model = make_tiny("llama")
    for name, found in (("owner/small", byte_tokenizer), ("owner/none", None), ("/no/where", None)):
        monkeypatch.setattr(model.config, "_name_or_path", name)
        assert load_tokenizer(model) is found
    assert asked == [("owner/small", True), ("owner/none", True)]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("You are trying to access a gated repo."), "hf auth login"),
        (OSError("x is not a local folder and is not a valid model identifier"), "check the name"),
        (ImportError("This needs the package zork"), "install it"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "smaller dtype"),
        (OSError(28, "No space left on device"), "make room"),
        (OSError(errno.EROFS, "Read-only file system"), "HF_HOME to a folder"),
        (OSError(errno.EACCES, "Permission denied"), "HF_HOME to a folder"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "HF_HOME to a folder"),
        (OSError("PermissionError at /x when downloading owner/name."), "HF_HOME to a folder"),
        (OSError("x has no file named model.safetensors"), "--allow-pickle"),
    ],
)
def test_what_went_wrong_on_the_hub_is_told_with_its_own_way_out(error, words):
    options = {"trust_remote_code": False, "use_safetensors": True}
    with pytest.raises(ForetokenError) as told:
        explain("owner/name", error, options)
    assert words in told.value.do
    assert ("pickle" in told.value.do) == ("safetensors" in str(error))


class ProxyError(Exception):
    """As a client of the hub raises it."""


def test_what_failed_on_the_way_to_the_hub_is_told():
    error = OSError("We couldn't connect to the hub to load the files.")
    error.__cause__ = LookupError("not in the local cache")
    error.__cause__.__cause__ = ProxyError("502 Bad Gateway\nfrom the proxy")
    options = {"trust_remote_code": False}
    with pytest.raises(CheckpointError, match="hub: 502 Bad Gateway") as told:
        explain("owner/name", error, options)
    assert "HTTPS_PROXY" in told.value.do
    with pytest.raises(CheckpointError, match="couldn't connect"):
        explain(Path("owner/name"), error, options)


def test_an_answer_of_the_hub_is_no_failure_of_the_way():
    refusal = type("HTTPStatusError", (Exception,), {"__module__": "httpx"})("403 Forbidden")
    error = OSError("There was a specific connection error")
    error.__cause__ = refusal
    with pytest.raises(CheckpointError, match="a specific connection error"):
        explain("owner/name", error, {"trust_remote_code": False})


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(good, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(good, ConfigError, "cuda:3", "cpu, cuda:0", device="cuda:3")


def test_a_model_without_room_on_its_device_says_so(good, monkeypatch):
    def full(self, place):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14 GiB")

    monkeypatch.setattr(LlamaForCausalLM, "to", full)
    refused(good, CapabilityError, "does not fit", "14 GiB", "smaller dtype")
    ways = "memory_budget='2GiB' in Python", "--set memory_budget=2GiB", "--memory-budget for"
    refused(good, CapabilityError, *ways)


def test_two_threads_that_read_models_leave_the_process_as_it_was():
    before = list(warnings.filters), logging.get_verbosity(), logging.is_progress_bar_enabled()
    inside, over = threading.Event(), threading.Event()

    def first():
        with quiet():
            inside.set()
            over.wait(0.3)  # the second one comes in the middle, if it can

    def second():
        inside.wait(5)
        with quiet():
            over.set()

    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    after = list(warnings.filters), logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert after == before


def test_a_loaded_model_on_another_gpu_than_asked_for_is_refused(make_tiny, monkeypatch):
    model = make_tiny("llama")
    monkeypatch.setattr(type(model), "device", torch.device("cuda:0"))
    assert load_model(model, device="cuda") is load_model(model, device="cuda:0") is model
    with pytest.raises(ConfigError, match="cuda:1"):
        load_model(model, device="cuda:1")

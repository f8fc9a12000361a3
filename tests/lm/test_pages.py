"""A loaded model's weights in large pages: the same model for everyone who holds it."""

import copy
import mmap
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foretoken.lm.load import load_model
from foretoken.lm.runtime.pages import LARGE_BYTES, into_large_pages

ADVICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE = hasattr(mmap, "MADV_HUGEPAGE")


@pytest.fixture
def saved(tmp_path):
    """A directory with a model of some large pages, whose head is its embedding."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=9000, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def same_weights(one, other):
    pairs = list(zip(one.state_dict().items(), other.state_dict().items(), strict=True))
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stay_what_they_are(saved, dtype, tmp_path):
    """Values, ties, storages of their own, and what is saved, copied and written to."""
    model = load_model(saved, dtype=dtype)
    kind = getattr(torch, dtype)
    as_read = AutoModelForCausalLM.from_pretrained(saved, dtype=kind)
    assert same_weights(model, as_read)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in model.parameters())
    model.save_pretrained(tmp_path / "again")
    assert same_weights(load_model(tmp_path / "again", dtype=dtype), as_read)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert same_weights(copied, as_read) and not same_weights(model, as_read)


@pytest.mark.skipif(not LARGE, reason="a system without large pages")
def test_they_lie_end_to_end_from_the_first_large_page_on(saved):
    model = load_model(saved, dtype="float32")
    places = sorted(w.data_ptr() for w in model.parameters())
    assert places[0] % LARGE_BYTES == 0
    whole = sum(w.nbytes for w in model.parameters())
    last = max(w.data_ptr() + w.nbytes for w in model.parameters())
    assert last - places[0] <= whole + 64 * len(places)
    if ADVICE.exists() and "[never]" not in ADVICE.read_text():
        assert large_bytes_at(places[0]) > 0  # all of them, where memory is not in small pieces


def large_bytes_at(place):
    """Bytes in large pages of the mapping around an address, by the system's own count."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no mapping holds this address")


def test_small_models_and_weights_that_lie_otherwise_stay_where_they_are():
    small = torch.nn.Linear(8, 8)
    place = small.weight.data_ptr()
    into_large_pages(small)
    assert small.weight.data_ptr() == place
    turned = torch.nn.Linear(2048, 1024)
    turned.weight.data = torch.randn(2048, 1024).t()
    place = turned.weight.data_ptr()
    into_large_pages(turned)
    assert turned.weight.data_ptr() == place and not turned.weight.is_contiguous()

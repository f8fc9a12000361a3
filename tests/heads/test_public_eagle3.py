"""EAGLE-3 heads in the folders that are published, written here name by name."""

import copy
import json

import pytest
import torch
from test_public import (
    BASE,
    EPS,
    HEADS,
    INNER,
    PROMPT,
    SHARED,
    SIZE,
    VOCAB,
    WIDTH,
    attended,
    drawn,
    mlp,
    rms,
    row_of,
    write,
)

import foretoken
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.lm.opening import open_lm
from foretoken.types import Embedding, Layer

LAYERS = 8  # of the target
FEW = 37  # outputs of the head
SCORED = [(5 * i + 2) % VOCAB for i in range(FEW)]  # the target's token of each
VERIFIER = {"name_or_path": "some/verifier", "architectures": ["LlamaForCausalLM"]}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
PROMPTS = [PROMPT, PROMPT[:1], PROMPT[3:9]]
METHODS = ("eagle3", "eagle3-chain", "eagle3-hybrid", "auto-eagle3")
TREE = [([5, 9], [0, 0]), ([2, 7, 40], [1, 1, 2]), ([9, 5], [3, 5])]  # levels below the root


def shapes(layer, outputs, own_embedding=False, bias=False):
    found = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}hidden_norm.weight": (WIDTH,),
        f"{layer}self_attn.q_proj.weight": (HEADS * SIZE, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (SHARED * SIZE, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (SHARED * SIZE, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (outputs, WIDTH),
    }
    if own_embedding:
        found["embed_tokens.weight"] = (VOCAB, WIDTH)
    if bias:
        found |= {f"{layer}self_attn.q_proj.bias": (HEADS * SIZE,),
                  f"{layer}self_attn.k_proj.bias": (SHARED * SIZE,),
                  f"{layer}self_attn.v_proj.bias": (SHARED * SIZE,)}  # fmt: skip
    return found


def tensors_of(layer, outputs=FEW, **others):
    found = drawn(shapes(layer, outputs, **others))
    for name in found:
        if "norm" in name:
            found[name] = 1 + found[name]
    if outputs != VOCAB:
        found["d2t"] = torch.tensor(SCORED) - torch.arange(FEW)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        found["t2d"][SCORED] = True
    return found


def llama(**changes):
    return {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": SHARED, "num_hidden_layers": 1,
        "rms_norm_eps": EPS, "rope_theta": BASE, "vocab_size": VOCAB, "hidden_act": "silu",
    } | changes  # fmt: skip


def native(outputs=FEW, own_embedding=False, bias=False, **changes):
    """What a repository of EAGLE-3's authors holds."""
    config = llama(architectures=["LlamaForCausalLM"], draft_vocab_size=outputs, **changes)
    return config, tensors_of("midlayer.", outputs, own_embedding=own_embedding, bias=bias)


def speculators(outputs=FEW, own_embedding=False, **changes):
    """What a `speculators` directory holds."""
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0", "draft_vocab_size": outputs, "target_hidden_size": None,
        "transformer_layer_config": llama(head_dim=SIZE),
        "speculators_config": {"algorithm": "eagle3", "verifier": VERIFIER}, **changes,
    }  # fmt: skip
    return config, tensors_of("layers.0.", outputs, own_embedding=own_embedding)


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(VOCAB, seed=3, num_hidden_layers=LAYERS)


def states_of(target, tokens, places=(2, LAYERS // 2, LAYERS - 3)):
    """The target's states at tokens, behind so many layers each, side by side.

    Of a copy: who asks a model for its states leaves hooks in it, and what is hooked is traced
    anew at every load.
    """
    found = copy.deepcopy(target)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([found[place][0] for place in places], -1)


def made(tensors, layer, tokens, states, embedding, normed):
    """What the head makes of tokens and the states before each of them (arXiv 2503.01840)."""
    embedded = rms(embedding[torch.tensor(tokens)], tensors[f"{layer}input_layernorm.weight"])
    heard = rms(states, tensors[f"{layer}hidden_norm.weight"])
    x = heard if normed else states
    x = x + attended(torch.cat([embedded, heard], -1), tensors, layer)
    return x + mlp(rms(x, tensors[f"{layer}post_attention_layernorm.weight"]), tensors, layer)


class Reference:
    """Laws along branches of a draft behind a text, each from the text's beginning."""

    def __init__(self, tensors, layer, normed, target, tokens, places):
        self.tensors, self.layer, self.normed = tensors, layer, normed
        self.embedding = tensors.get("embed_tokens.weight", target.model.embed_tokens.weight)
        self.tokens = tokens
        self.true = states_of(target, tokens, places)[:-1] @ tensors["fc.weight"].T
        self.ids = torch.tensor(SCORED) if "d2t" in tensors else torch.arange(VOCAB)

    def after(self, branch):
        """Logits of all tokens behind a branch below the text's last token."""
        tokens, states = self.tokens[1:], self.true
        for token in (*branch, None):
            out = made(self.tensors, self.layer, tokens, states, self.embedding, self.normed)[-1:]
            states, tokens = torch.cat([states, out]), [*tokens, token]
        few = rms(out[0], self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self.ids, few)


def laws(reader, row):
    """Logits of every node of TREE under the row's root, by the branch that leads there."""
    [score] = reader.grow([row], [[row.tokens[-1]]], [[-1]])
    found, branches = {(): score.logits[0]}, [()]
    for tokens, parents in TREE:
        [score] = reader.grow([row], [tokens], [parents])
        new = [(*branches[parent], token) for token, parent in zip(tokens, parents, strict=True)]
        found |= dict(zip(new, score.logits, strict=True))
        branches += new
    return found


def same(found, reference):
    for branch, logits in found.items():
        torch.testing.assert_close(logits, reference.after(branch), atol=1e-5, rtol=1e-5)


CASES = [
    pytest.param(native, {}, False, None, id="native"),
    pytest.param(native, {"own_embedding": True}, False, None, id="own-embedding"),
    pytest.param(native, {"outputs": VOCAB, "bias": True}, False, None, id="all-tokens-bias"),
    pytest.param(native, {"norm_before_residual": True}, True, None, id="native-normed"),
    pytest.param(native, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
                 False, (1, 4, 7), id="native-places"),
    pytest.param(speculators, {}, True, None, id="speculators"),
    pytest.param(speculators, {"norm_before_residual": False, "own_embedding": True,
                               "eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
                 False, (1, 4, 6), id="speculators-unnormed-places"),
]  # fmt: skip


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(("layout", "changes", "normed", "places"), CASES)
@torch.no_grad()
def test_it_says_what_the_published_equations_do(
    layout, changes, normed, places, file, target, tmp_path
):
    config, tensors = layout(**changes)
    layer = "midlayer." if layout is native else "layers.0."
    places = places or (2, LAYERS // 2, LAYERS - 3)
    lm = open_lm(target, kernels="dense")
    where = write(tmp_path, config, tensors, file)
    reader = StateReader(lm, "eagle3", StateReader.Config(draft_head=where))
    text = [*PROMPT, 5, 2, 30]  # two accepted, then another one

    row = row_of(PROMPT)
    [features] = lm.prefill([row], reader.taps)
    assert reader.open(row, features)
    same(laws(reader, row), Reference(tensors, layer, normed, target, PROMPT, places))
    row.tokens += text[len(PROMPT) :]
    verdict = states_of(target, text, places)[len(PROMPT) - 1 : -1]
    reader.keep([row], [[1, 3]], [verdict.unflatten(-1, (len(places), -1))])
    same(laws(reader, row), Reference(tensors, layer, normed, target, text, places))
    reader.close(row)
    assert reader.decoder.rows_held == 0
    lm.close()


@pytest.mark.parametrize("layout", [native, speculators])
@pytest.mark.parametrize("method", [*METHODS, None])
def test_a_published_folder_drafts_for_its_target(layout, method, target, tmp_path):
    where = write(tmp_path, *layout(), "model.safetensors")
    with foretoken.load(target, method="plain", kernels="dense") as plain:
        wanted = [plain.generate(prompt, 16).tokens for prompt in PROMPTS]
    sampled = {"max_new_tokens": 12, "temperature": 1.0}
    options = {"draft_head": where, "kernels": "dense", "controller": "fixed", "depth": 3}
    with foretoken.load(target, method=method, **options) as session:
        found = session.generate(PROMPTS, 16)
        assert [one.tokens for one in found] == wanted
        assert sum(one.stats.drafted for one in found) > 0
        together = session.generate(PROMPTS, seed=[1, 2, 3], **sampled)
        alone = [session.generate(p, seed=i + 1, **sampled) for i, p in enumerate(PROMPTS)]
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert all(one.lossless for one in together)


def test_a_head_drawn_out_of_the_target_is_accepted(target, tmp_path):
    """A head whose output is the target's own guess from one state: drafts are no noise."""
    config, tensors = native(outputs=VOCAB, eagle_aux_hidden_state_layer_ids=[LAYERS] * 3)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, 2 * WIDTH)], -1)
    tensors["norm.weight"] = target.model.norm.weight.detach().clone()
    tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    where = write(tmp_path, config, tensors)
    lm = open_lm(target, kernels="dense")
    reader = StateReader(lm, "eagle3", StateReader.Config(draft_head=where))
    row = row_of(PROMPT)
    [features] = lm.prefill([row], reader.taps)
    assert reader.open(row, features)
    [score] = reader.grow([row], [[PROMPT[-1]]], [[-1]])
    with torch.no_grad():
        said = target(torch.tensor([PROMPT[:-1]])).logits[0, -1]  # from the state before the root
    # the head's norm is as published, with its own epsilon
    assert score.logits[0].argmax() == said.argmax()
    reader.close(row)
    lm.close()


def test_places_follow_the_depth_of_the_target(tmp_path):
    head, card = store.load(write(tmp_path / "a", *native()), "eagle3")
    assert (card.kind, card.hidden_size, card.vocab_size) == ("eagle3-wide", WIDTH, VOCAB)
    assert head.reads_of(32) == (Layer(1), Layer(15), Layer(28))
    assert head.reads_of(6) == (Layer(1), Layer(2), Layer(2))
    named = native(eagle_aux_hidden_state_layer_ids=[0, 2, 6])
    head = store.load(write(tmp_path / "b", *named), "eagle3")[0]
    assert head.reads_of(6) == head.reads_of(32) == (Embedding(), Layer(1), Layer(5))


def test_what_does_not_fit_is_named(target, make_llama, tmp_path):
    where = write(tmp_path / "head", *native())
    named = native(eagle_aux_hidden_state_layer_ids=[1, 4, LAYERS + 1])
    deep = write(tmp_path / "deep", *named)
    for head, model, error, what in (
        (where, make_llama(VOCAB, hidden_size=32, num_hidden_layers=8), ConfigError, "hidden size"),
        (where, make_llama(VOCAB + 1, num_hidden_layers=8), ConfigError, "vocabulary"),
        (where, make_llama(VOCAB, num_hidden_layers=3), CapabilityError, "target of 3 layers"),
        (deep, target, CapabilityError, f"the output of layer {LAYERS}"),
    ):
        with pytest.raises(error, match=what) as caught:
            foretoken.load(model, method="eagle3", draft_head=head, kernels="dense")
        assert "foretoken train eagle3`" in str(caught.value)
    with pytest.raises(CheckpointError, match="of the kind 'eagle3-wide'"):
        foretoken.load(target, method="eagle2", draft_head=where, kernels="dense")


def test_a_head_of_speculators_knows_its_target(tmp_path):
    notes = store.card_of(write(tmp_path / "a", *speculators())).notes
    assert notes["of"] == "some/verifier"
    other = speculators(speculators_config=None)
    assert store.card_of(write(tmp_path / "b", *other)).notes["of"] == ""
    other = native(base_model_name_or_path="some/model")
    assert store.card_of(write(tmp_path / "c", *other)).notes["of"] == "some/model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_that_nobody_reads_take_no_memory(dtype, tmp_path):
    head, _ = store.load(write(tmp_path, *native()), "eagle3")
    decoder = head.to(dtype).decoder(64).to(dtype)
    table = decoder.get_input_embeddings().weight
    assert table.shape == (FEW, 2 * WIDTH) and table.dtype == dtype
    assert table.untyped_storage().nbytes() == (FEW + 2 * WIDTH) * table.element_size()
    assert len(table.float().unique(dim=0)) == FEW, "they differ: a model is probed with them"
    assert decoder.config.vocab_size == FEW and decoder.lm_head.weight.shape == (FEW, WIDTH)


@pytest.mark.parametrize("layout", [native, speculators])
@pytest.mark.parametrize("lost", [*shapes("", FEW), "d2t"])
def test_a_missing_tensor_is_named(layout, lost, tmp_path):
    config, tensors = layout()
    [name] = [name for name in tensors if name.split("0.")[-1].removeprefix("midlayer.") == lost]
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks the tensor {name}"):
        store.load(write(tmp_path, config, tensors), "eagle3")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"num_hidden_layers": 2}, "more layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": 32}, "32 wide"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 30}, "outside of 0 to 30"),
        ({"intermediate_size": INNER + 2}, "weights and options differ"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"return_hidden_post_norm": True}}, "return_hidden_post_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "weights|32 wide|wide and reads"),
        ({"eagle_aux_hidden_state_layer_ids": ["first"]}, "layers of the target are needed"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, told, tmp_path):
    config, tensors = native()
    with pytest.raises(CheckpointError, match=told):
        store.load(write(tmp_path, config | changes, tensors), "eagle3")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"d2t": torch.zeros(FEW - 1, dtype=torch.long)}, "no list of"),
        ({"d2t": torch.zeros(FEW)}, "no list of"),
        ({"d2t": -torch.arange(FEW)}, "tokens twice"),
        ({"d2t": torch.full((FEW,), VOCAB)}, "outside of"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(SIZE)}, "q_norm.weight, which no"),
        ({"midlayer.self_attn.o_proj.bias": torch.ones(WIDTH)}, "o_proj.bias, which no"),
        ({"fc.weight": torch.ones(WIDTH, 10)}, "not for 3 states"),
    ],
)
def test_tensors_that_cannot_be_are_refused(changed, told, tmp_path):
    config, tensors = native()
    with pytest.raises(CheckpointError, match=told):
        store.load(write(tmp_path, config, tensors | changed), "eagle3")


def test_weights_in_several_files_and_inside_of_a_model_are_read(tmp_path):
    config, tensors = speculators()
    whole, _ = store.load(write(tmp_path / "whole", config, tensors), "eagle3")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        inside = {f"model.{name}": tensors[name].contiguous() for name in held}
        write(tmp_path / "parts", config, inside, file)
    index = {f"model.{name}": file for file, held in parts.items() for name in held}
    place = tmp_path / "parts" / "model.safetensors.index.json"
    place.write_text(json.dumps({"weight_map": index}))
    found, _ = store.load(tmp_path / "parts", "eagle3")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, found.state_dict()[name]), name
    (tmp_path / "parts" / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors cannot be read"):
        store.load(tmp_path / "parts", "eagle3")
    for broken in ("{", '{"weight_map": {"a": "../elsewhere.safetensors"}}', "[]"):
        place.write_text(broken)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            store.load(tmp_path / "parts", "eagle3")


def test_a_window_that_is_not_kept_to_is_told(tmp_path, caplog):
    config, tensors = native()
    window = {"sliding_window": 64}
    for changes, told in (
        (window, True), ({"sliding_window": None}, False),
        ({**window, "use_sliding_window": False}, False),
    ):  # fmt: skip
        caplog.clear()
        store.load(write(tmp_path, config | changes, tensors), "eagle3")
        assert ("the last 64 tokens" in caplog.text) == told


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_file_that_was_cut_short_is_told(file, tmp_path):
    where = write(tmp_path, *native(), file)
    whole = (where / file).read_bytes()
    (where / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read|no file of tensors"):
        store.load(where, "eagle3")


def test_another_kind_of_speculator_is_refused(tmp_path):
    config, tensors = speculators(speculators_model_type="peagle")
    with pytest.raises(CheckpointError, match="layout is none of"):
        store.load(write(tmp_path, config, tensors), "eagle3")

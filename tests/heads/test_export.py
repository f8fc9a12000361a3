"""Heads written as their authors publish them: name by name what the readers' tests write."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from test_public import PROMPT, VOCAB, WIDTH, eagle, eagle_states, medusa, write
from test_public_eagle3 import LLAMA3, native, speculators
from torch.nn import functional as F
from typer.testing import CliRunner

import foretoken
from foretoken.cli.commands import app
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.heads.eagle import Eagle
from foretoken.heads.export import Base, export
from foretoken.heads.medusa import Medusa
from tests.lm.families import tiny


def exported(folder):
    [file] = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(file)


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(VOCAB, seed=3)


@pytest.mark.parametrize(
    ("layout", "made"),
    [
        ("eagle", eagle()),
        ("eagle", eagle(bias=False, attention_bias=True)),
        ("medusa", medusa()),
        ("eagle3", native()),
        ("eagle3", native(VOCAB, own_embedding=True, bias=True)),
        ("eagle3", native(rope_scaling=LLAMA3)),
        ("speculators", speculators()),
    ],
)
def test_what_was_published_comes_out_as_it_was(layout, made, tmp_path):
    config, tensors = made
    to = export(write(tmp_path / "published", config, tensors), tmp_path / "again", layout)
    again, found = exported(to)
    kept = {name for name in tensors if layout != "eagle" or name != "embed_tokens.weight"}
    assert set(found) == kept  # EAGLE's copy of the target's embeddings comes with a target alone
    for name in kept:
        torch.testing.assert_close(found[name], tensors[name], atol=0, rtol=0)
    flat = {**again, **again.get("transformer_layer_config", {})}
    wanted = {**config, **config.get("transformer_layer_config", {})}
    for name in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
                 "num_key_value_heads", "rms_norm_eps", "rope_theta", "draft_vocab_size",
                 "medusa_num_heads", "medusa_num_layers", "norm_before_residual"):  # fmt: skip
        if name in wanted:
            assert flat[name] == wanted[name], name
    if layout == "eagle":  # EAGLE's own name for biases that its output map has not
        assert again["qkv_bias"] == any("q_proj.bias" in name for name in tensors)
        assert again["attention_bias"] is False and "embedding_scale" not in again
    assert store.card_of(to).options == store.card_of(tmp_path / "published").options


@pytest.mark.parametrize(
    ("layout", "made"),
    [("eagle", eagle()), ("medusa", medusa()), ("eagle3", native()),
     ("speculators", speculators())],
)  # fmt: skip
def test_numbers_are_stored_as_the_published_ones_are(layout, made, tmp_path):
    config, tensors = made
    half = {n: part.bfloat16() if part.is_floating_point() else part for n, part in tensors.items()}
    again, found = exported(export(write(tmp_path / "a", config, half), tmp_path / "b", layout))
    assert again["torch_dtype"] == "bfloat16" and found
    for name, part in found.items():
        torch.testing.assert_close(part, half[name], atol=0, rtol=0)


def test_numbers_of_several_kinds_lose_nothing(tmp_path):
    config, tensors = native()
    several = tensors | {"lm_head.weight": tensors["lm_head.weight"].bfloat16()}
    folder = write(tmp_path / "published", config, several)
    again, found = exported(export(folder, tmp_path / "again", "eagle3"))
    assert again["torch_dtype"] == "float32"
    for name, part in found.items():
        torch.testing.assert_close(part, several[name].to(part.dtype), atol=0, rtol=0)


@pytest.mark.parametrize(("made", "layout"), [(native, "speculators"), (speculators, "eagle3")])
def test_eagle3_goes_from_one_layout_to_the_other(made, layout, target, tmp_path):
    first = write(tmp_path / "first", *made())
    second = export(first, tmp_path / "second", layout, Base("some/target"))
    said = []
    for folder in (first, second, export(second, tmp_path / "third", made_layout(made))):
        head, _ = store.load(folder, "eagle3-wide")
        said.append(dict(head.state_dict()))
    for other in said[1:]:
        torch.testing.assert_close(other, said[0], atol=0, rtol=0)


def test_a_speculators_folder_names_its_target(target, tmp_path):
    nameless = write(tmp_path / "nameless", *native())
    with pytest.raises(ConfigError, match="names its target") as caught:
        export(nameless, tmp_path / "out", "speculators")
    assert "--target" in str(caught.value) and not (tmp_path / "out").exists()
    deep = Base.of(target, "some/target")
    config, _ = exported(export(nameless, tmp_path / "out", "speculators", deep))
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    named = write(tmp_path / "named", *speculators())
    config, _ = exported(export(named, tmp_path / "again", "speculators"))
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some/verifier", "architectures": []}
    config, _ = exported(export(named, tmp_path / "other", "eagle3"))
    assert config["base_model_name_or_path"] == "some/verifier"


def test_places_are_told_in_the_counting_of_either_engine(tmp_path):
    name, read = "eagle_aux_hidden_state_layer_ids", []
    first = write(tmp_path / "first", *native(**{name: [1, 4, 6]}))
    config, tensors = exported(export(first, tmp_path / "both", "eagle3"))
    assert config[name] == [1, 4, 6], "behind so many layers"
    assert config["eagle_config"] == {"use_aux_hidden_state": True, name: [0, 3, 5]}
    for left_out in ((), (name,), ("eagle_config",)):
        part = {key: value for key, value in config.items() if key not in left_out}
        where = write(tmp_path / f"without{len(read)}", part, tensors, "model.safetensors")
        read.append(store.card_of(where).options["taps"])
    assert read == [(1, 4, 6)] * 3
    for taps in ([0, 2, 6], []):  # the embeddings are no layer's output; nothing said
        where = write(tmp_path / "other", *native(**{name: taps}))
        config, _ = exported(export(where, tmp_path / f"out{len(taps)}", "eagle3"))
        assert "eagle_config" not in config and config.get(name, []) == taps


def made_layout(made):
    return "eagle3" if made is native else "speculators"


@pytest.mark.parametrize("named", [True, False])
@torch.no_grad()
def test_a_head_of_ours_computes_the_published_equations(named, target, tmp_path):
    torch.manual_seed(5)
    head = Eagle(Eagle.Config(
        hidden_size=WIDTH, vocab_size=VOCAB, heads=4, kv_heads=2, size=16, inner=24, base=5000.0,
        eps=1e-3, join_bias=False, begins=1,
    ))  # fmt: skip
    folder = store.save(tmp_path / "head", "eagle", head, {})
    base = Base.of(target, "some/target") if named else None
    config, tensors = exported(export(folder, tmp_path / "out", "eagle", base))
    embedding = target.model.embed_tokens.weight
    if named:
        torch.testing.assert_close(tensors["embed_tokens.weight"], embedding)
        assert config["base_model_name_or_path"] == "some/target"
        assert config["max_position_embeddings"] == target.config.max_position_embeddings
    states = torch.randn(len(PROMPT) - 1, WIDTH)
    wanted = eagle_states(tensors, PROMPT[1:], states, embedding)
    before = torch.cat([torch.zeros(1, WIDTH), states])
    found = head(torch.tensor([PROMPT]), before[None], lambda ids: embedding[ids])[0, 1:]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_that_the_target_enlarges_are_left_to_fc(tmp_path):
    """Gemma's enter its first layer sqrt(H) times as large, and others read them as they are."""
    gemma = tiny("gemma2", vocab_size=VOCAB)
    torch.manual_seed(5)
    head = Eagle(Eagle.Config(hidden_size=WIDTH, vocab_size=VOCAB, heads=4, begins=1))
    first = store.save(tmp_path / "head", "eagle", head, {})
    second = export(first, tmp_path / "second", "eagle", Base.of(gemma, "some/gemma"))
    third = export(second, tmp_path / "third", "eagle")  # the target is not named again
    ids, states = torch.tensor(PROMPT), torch.randn(len(PROMPT), WIDTH)
    wanted = head.entering(ids, states, gemma.get_input_embeddings())
    rows = exported(second)[1]["embed_tokens.weight"][ids]
    for folder in (second, third):
        config, tensors = exported(folder)
        assert config["embedding_scale"] == WIDTH**0.5
        joined = torch.cat([rows, states], -1)
        found = F.linear(joined, tensors["fc.weight"], tensors["fc.bias"])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        again, _ = store.load(folder, "eagle")
        torch.testing.assert_close(dict(again.state_dict()), dict(head.state_dict()))
    config["embedding_scale"] = "large"
    (third / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="embedding_scale"):
        store.load(third, "eagle")


def test_an_exported_head_drafts_as_the_one_it_was(target, tmp_path):
    torch.manual_seed(7)
    shape = {"hidden_size": WIDTH, "vocab_size": VOCAB}
    for kind, head, method in (
        ("eagle", Eagle(Eagle.Config(**shape, heads=4, begins=1, join_bias=False)), "eagle2"),
        ("medusa", Medusa(Medusa.Config(**shape, depth=3)), "medusa"),
    ):
        first = store.save(tmp_path / kind, kind, head, {})
        said = []
        for folder in (first, export(first, tmp_path / f"{kind}-out", kind)):
            options = {"draft_head": folder, "kernels": "dense", "controller": "fixed"}
            with foretoken.load(target, method=method, **options) as session:
                result = session.generate(PROMPT, 40)
                said.append((result.tokens, result.stats.drafted, result.stats.accepted))
        assert said[0] == said[1] and said[0][1] > 0


def test_what_a_layout_cannot_say_is_refused(tmp_path):
    shape = {"hidden_size": WIDTH, "vocab_size": VOCAB}
    heads = {
        "reads first": ("eagle", Eagle(Eagle.Config(**shape)), "eagle", "first token"),
        "few": ("medusa", Medusa(Medusa.Config(**shape, tokens=9)), "medusa", "9 tokens alone"),
        "other": ("medusa", Medusa(Medusa.Config(**shape)), "speculators", "write it as medusa"),
    }
    for name, (kind, head, layout, told) in heads.items():
        folder = store.save(tmp_path / name, kind, head, {})
        with pytest.raises(ConfigError, match=told):
            export(folder, tmp_path / "out", layout)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="no published layout"):
        export("smollm2-135m-eagle3", tmp_path / "out", "eagle3")
    with pytest.raises(ConfigError, match="did you mean eagle3"):
        export(tmp_path / "few", tmp_path / "out", "eagel3")
    wide = Base("wide", embeddings=torch.zeros(VOCAB, WIDTH + 1))
    with pytest.raises(ConfigError, match="hidden size"):
        export(tmp_path / "few", tmp_path / "out", "medusa", wide)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    head = Medusa(Medusa.Config(hidden_size=WIDTH, vocab_size=VOCAB))
    folder = store.save(tmp_path / "head", "medusa", head, {})
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="something is there already"):
        export(folder, taken, "medusa")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(folder, tmp_path / "file" / "below", "medusa")

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="no space left"):
        patch.setattr(os, "replace", full)
        export(folder, tmp_path / "new", "medusa")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "head", "taken"]
    (tmp_path / "empty").mkdir()
    assert export(folder, tmp_path / "empty", "medusa") == tmp_path / "empty"


def test_commands_show_and_export(tmp_path):
    run = CliRunner().invoke
    shown = run(app, ["heads", "show", "smollm2-135m-eagle3", "--json"])
    found = json.loads(shown.stdout)
    assert found["kind"] == "eagle3" and found["parameters"] > 5e6 and found["layouts"] == []
    table = run(app, ["heads", "show", "smollm2-135m-eagle3"])
    assert table.exit_code == 0 and "auto-eagle3" in table.stdout
    where = write(tmp_path / "published", *native(base_model_name_or_path="some/target"))
    done = run(app, ["heads", "export", str(where), "--to", str(tmp_path / "out"),
                     "--layout", "speculators", "--json"])  # fmt: skip
    assert json.loads(done.stdout)["bytes"].keys() == {"config.json", "model.safetensors"}
    again = run(app, ["heads", "export", str(where), "--to", str(tmp_path / "out"),
                      "--layout", "speculators"])  # fmt: skip
    assert again.exit_code != 0 and "already" in again.stderr

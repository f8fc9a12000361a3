"""Predictors of early leaving: labels that are true, and training that beats knowing nothing."""

from pathlib import Path

import pytest
import torch

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError
from foretoken.heads import store
from foretoken.lm.opening import open_lm
from foretoken.lm.views.early_exit_scoring import Leave
from foretoken.training.capture import collect
from foretoken.training.captures.layers import LayerPredictions
from foretoken.training.config import configured
from foretoken.training.heads import run_training
from foretoken.training.objectives.exits import ExitTraining, everywhere, frequent, settled
from foretoken.trees.build import root

VOCAB, LAYERS = 61, 4
PROMPTS = [[(7 * i * i + 3 * i + seed) % VOCAB for i in range(5)] for seed in range(12)]


@pytest.fixture
def session(make_llama):
    """A target whose early layers often say what it will, and a draft that is the same model."""
    model = make_llama(VOCAB, seed=1, num_hidden_layers=LAYERS)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.4
            layer.mlp.down_proj.weight *= 0.4
    target = open_lm(model, kernels="dense")
    draft = open_lm(model, name="draft", kernels="dense")
    return Session(assemble("chain", target, draft, depth=3), method="chain", draft=draft)


def test_labels_and_features_are_those_of_the_layers(session, tmp_path: Path):
    plan = LayerPredictions.of(ExitTraining(new_tokens=6))
    files = collect(session, PROMPTS[:2], plan, tmp_path, "train", show=False)
    found = files.take(torch.arange(12))
    assert found["scores"].shape == (12, LAYERS - 1, 4)
    assert found["labels"].shape == (12, LAYERS - 1)
    text = [*PROMPTS[0], *found["input_ids"][:6].tolist()]
    hidden = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: hidden.append(output[0]))
        for layer in session.target.model.model.layers
    ]
    logits = session.target.model(torch.tensor([text[:-1]]), use_cache=False).logits[0, -6:]
    for hook in hooks:
        hook.remove()
    assert logits.argmax(-1).tolist() == text[-6:]
    for layer in range(LAYERS - 1):
        normed = session.target.model.model.norm(hidden[layer][-6:])
        logits_here = session.target.model.lm_head(normed)
        said = logits_here.argmax(-1)
        for row, scores in zip(logits_here, found["scores"][:6, layer], strict=True):
            assert (scores[:, None] - row).abs().amin(1).max() < 1e-4
        assert found["labels"][:6, layer].tolist() == (said == logits.argmax(-1)).tolist()


def test_trained_predictors_know_more_than_the_larger_class(session, tmp_path: Path):
    config = ExitTraining(prompts=10, new_tokens=40, hidden=32, steps=150, rate=3e-3)
    splits = {"train": PROMPTS[:10], "valid": PROMPTS[10:]}
    found = run_training(
        session, "exits", lambda split, _: splits[split], config, tmp_path, show=False
    )
    layers = found["figures"].values()
    assert sum(row["right"] - row["larger_class"] for row in layers) > 0.05
    head, card = store.load(tmp_path, "exits")
    assert [row["always_asked"] == 1.0 for row in layers] == [i in head.often for i in range(3)]
    assert head.layers == (0, 1, 2) and 1 <= len(head.often) <= 2
    assert card.vocab_size == VOCAB and card.notes["tokens"]["train"] == 400
    features = torch.randn(3, 12)
    with torch.no_grad():
        expected = head(1, features).sigmoid().tolist()
    assert head.sure(1, features) == pytest.approx(expected)


def test_a_change_is_read_since_the_layer_that_the_schedule_asked_before(tmp_path: Path):
    """As `Leave` reads it while decoding, layer by layer."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 5, 4, generator=generator)
    asked = torch.rand(64, 5, generator=generator) < 0.5
    seen: dict[int, torch.Tensor] = {}

    class Noting(torch.nn.Module):
        layers = (0, 1, 2, 3, 4)

        def forward(self, layer, features):
            seen[layer] = features
            return features[:, 0]

    everywhere(Noting(), scores, asked)
    for token in range(64):
        layers = asked[token].nonzero().flatten().tolist()

        def judge(layer, features, token=token):
            torch.testing.assert_close(seen[layer][token], features[0])
            return [False]

        wish = Leave(torch.zeros(1, 4), frozenset(layers), judge, root(1))
        for layer in layers:
            wish.asks(layer, scores[token, None, layer], lambda: [0])


def test_exits_are_where_all_later_layers_agree():
    labels = torch.tensor([[0, 1, 1.0], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
    assert settled(labels).tolist() == [1, 2, 3, 0]
    assert frequent(torch.tensor([1, 1, 4, 4, 4, 4, 0, 3, 3]), 4) == (1, 3)


def test_a_head_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="exits"):
        store.load(tmp_path, "exits")


def test_epochs_that_are_passed_stand_in_place_of_the_usual_steps():
    assert configured(ExitTraining, {}, "exits").steps == 600
    assert configured(ExitTraining, {"epochs": 10}, "exits").steps is None
    assert configured(ExitTraining, {"epochs": 10, "steps": 7}, "exits").steps == 7

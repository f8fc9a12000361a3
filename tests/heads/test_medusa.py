"""Medusa's heads: how they start, what they learn, and which token each of them guesses."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GraniteConfig, GraniteForCausalLM

import foretoken
from foretoken.audit.rows import seeded_rows
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.heads import store
from foretoken.heads.medusa import FADING, Medusa
from foretoken.lm.table import TableLM
from foretoken.training.objectives.guessing import Ends, ParallelObjective, ParallelTraining
from foretoken.types import SamplingParams

SIZES = {"hidden_size": 6, "vocab_size": 11}


def texts(ids, states, weights=None):
    ids = torch.tensor(ids)
    weights = torch.ones(ids.shape) if weights is None else torch.tensor(weights)
    return {"input_ids": ids, "hidden": states, "weights": weights}


def test_a_fresh_head_says_what_the_targets_output_layer_says():
    torch.manual_seed(0)
    head = Medusa(Medusa.Config(**SIZES, depth=3, blocks=2))
    output, states = torch.randn(11, 6), torch.randn(4, 6)
    head.start_from(output)
    said = head(states)
    assert said.shape == (4, 3, 11)
    for depth in range(3):
        assert torch.allclose(said[:, depth], states @ output.T, atol=1e-6)
    blocks = [head.heads[d][i].linear.weight for d in range(3) for i in range(2)]
    assert len({weight.data_ptr() for weight in blocks}) == 6, "no depth shares another's weights"


def test_it_starts_from_a_real_models_output_layer(make_llama):
    model = make_llama(61)
    with foretoken.load(model, method="plain", kernels="packed") as session:
        ends = Ends(session.target)
        states = torch.randn(5, 64)
        assert torch.allclose(ends.unembed(states), session.target.unembed(states), atol=1e-5)
        head = Medusa(Medusa.Config(hidden_size=64, vocab_size=61))
        head.start_from(ends.weight)
    wanted = F.linear(states, model.lm_head.weight)
    assert torch.allclose(head(states)[:, 0], wanted, atol=1e-5)


def test_it_starts_from_logits_that_a_target_scales():
    """Granite divides its logits: a head of the bare layer would be far too sure."""
    sizes = {"hidden_size": 32, "vocab_size": 61}
    model = GraniteForCausalLM(GraniteConfig(
        **sizes, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        logits_scaling=8.0, tie_word_embeddings=False,
    ))  # fmt: skip
    with foretoken.load(model, method="plain", kernels="dense", compile="off") as session:
        objective = ParallelObjective(ParallelTraining(), None)
        head = Medusa(Medusa.Config(**sizes, **objective.shape(session)))
        objective.begin(head, session)
        states = torch.randn(5, 32)
        assert torch.allclose(head(states)[:, 0], session.target.unembed(states), atol=1e-5)


class EveryToken:
    places = torch.arange(8)  # of every token an output


def test_depth_d_learns_the_token_d_plus_one_behind_the_next():
    head = Medusa(Medusa.Config(hidden_size=8, vocab_size=8, depth=2))
    for depth, one in enumerate(head.heads):  # state i is one-hot at i: token i + 2 + depth is said
        one[-1].weight.data = 50.0 * torch.eye(8).roll(depth + 2, 0)
    loss, right = head.learn(texts([list(range(8))], torch.eye(8)[None]), EveryToken)
    assert float(loss.detach()) < 1e-6 and right == {"depth_1": 1.0, "depth_2": 1.0}
    loss, right = head.learn(texts([list(range(8))], torch.eye(8).roll(1, 0)[None]), EveryToken)
    assert float(loss.detach()) > 10.0 and right == {"depth_1": 0.0, "depth_2": 0.0}


def test_deeper_losses_fade_and_prompts_and_padding_do_not_count():
    torch.manual_seed(0)
    head = Medusa(Medusa.Config(hidden_size=4, vocab_size=5, depth=2))
    ids, states = [[1, 2, 3, 4, 0, 1, 2]], torch.randn(1, 7, 4)
    loss, _ = head.learn(texts(ids, states, [[0.0, 0, 0, 0, 1, 1, 0]]), EveryToken)
    said = head(states[0])
    wanted = F.cross_entropy(said[2:4, 0], torch.tensor([0, 1]))
    wanted = wanted + FADING * F.cross_entropy(said[1:3, 1], torch.tensor([0, 1]))
    assert torch.allclose(loss, wanted)
    nothing, right = head.learn(texts(ids, states, [[0.0] * 7]), EveryToken)
    assert float(nothing.detach()) == 0.0 and right["depth_1"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_heads_that_know_the_rule_are_always_right(seed, tmp_path):
    """Each token of this target names the next, and its state names the token itself."""
    vocab = 7
    after = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    target = TableLM(30.0 * F.one_hot(after, vocab).double())
    head = Medusa(Medusa.Config(hidden_size=vocab, vocab_size=vocab, depth=3))
    place = after
    for one in head.heads:
        one[-1].weight.data = F.one_hot(place, vocab).float().T.contiguous()
        place = after[place]
    store.save(tmp_path, "medusa", head, {})
    engine = assemble("medusa", target, draft_head=str(tmp_path), depth=3, nodes=3)

    steps = list(
        decode(seeded_rows([[0, int(after[0])]], SamplingParams(max_new_tokens=40), vocab), engine)
    )
    assert [len(step.verdicts[0].path) for step in steps] == [3] * 10

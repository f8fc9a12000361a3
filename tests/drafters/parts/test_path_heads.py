"""Hydra's heads as a draft model: what they say before training, and that they read the path."""

import pytest
import torch

from foretoken.drafters.parts.path_heads import PathHeads
from foretoken.heads import store
from foretoken.heads.hydra import Hydra
from foretoken.lm.table import TableLM
from foretoken.types import FinalNorm

VOCAB = 7


@pytest.fixture
def target():
    return TableLM.random(VOCAB, seed=4)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Hydra(Hydra.Config(hidden_size=VOCAB, vocab_size=VOCAB, depth=3)).requires_grad_(False)


def disturbed(head):
    for weight in head.parameters():
        weight += 0.5 * torch.randn_like(weight)
    return head


class Ends:
    """A table's states are its logits."""

    places = torch.arange(VOCAB)  # every token has an output

    def __init__(self, target):
        self.target = target

    def embed(self, tokens):
        return self.target.embed(tokens.flatten().tolist()).view(*tokens.shape, -1).float()

    def unembed(self, states):
        return states


def test_an_untrained_head_says_what_the_outputs_make_of_the_state(head):
    state, path = torch.randn(2, VOCAB), torch.randn(2, 2, VOCAB)
    assert torch.equal(head(state, path), state)


def test_every_token_of_the_path_is_read(head):
    disturbed(head)
    state, path = torch.randn(1, VOCAB), torch.randn(1, 3, VOCAB)
    said = head(state, path)
    for place in range(3):
        other = path.clone()
        other[:, place] += 1.0
        assert not torch.allclose(said, head(state, other))
    assert not torch.allclose(said, head(state, path.flip(1))), "and its place"


def test_a_step_of_training_is_what_a_draft_computes(head, target, row, tmp_path):
    """The share of right guesses that training counts, counted from the drafts' own laws."""
    disturbed(head)
    where = store.save(tmp_path / "head", "hydra", head, {})
    model = PathHeads(target, "hydra", PathHeads.Config(draft_head=where))
    text = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    states = torch.stack([target.after(text[0, : i + 1].tolist()) for i in range(12)]).float()
    batch = {"input_ids": text, "hidden": states[None], "weights": torch.ones(1, 12)}
    _, right = head.learn(batch, Ends(target))
    hits = torch.zeros(3)
    for root in range(1, 12):
        one = row(text[0, : root + 1].tolist(), VOCAB)
        [features] = target.prefill([one], (FinalNorm(),))
        assert model.open(one, features)
        for depth in range(min(3, 11 - root)):
            new = text[0, root + depth].item()
            [score] = model.grow([one], [[new]], [[depth - 1]])
            hits[depth] += score.logits[0].argmax() == text[0, root + depth + 1]
        target.free([one])
    counted = [right[f"depth_{depth + 1}"] * (10 - depth) for depth in range(3)]
    assert torch.allclose(hits, torch.stack(counted), atol=1e-4)

"""FSPAD's head: what it adds to EAGLE's, and what its halves learn."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from foretoken.heads import eagle
from foretoken.heads.eagle import Eagle
from foretoken.heads.fspad import Fspad
from foretoken.lm.opening import open_lm

WIDTH = 32


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Fspad(Eagle.Config(hidden_size=WIDTH, vocab_size=WIDTH, heads=2, inner=64))


def embed(tokens):
    return F.one_hot(tokens, WIDTH).float()


def disturbed(head):
    with torch.no_grad():
        for weight in (head.down.weight, head.predict.down.weight):
            weight += torch.randn_like(weight)
    return head


def test_it_begins_as_eagles_head(head):
    other = Eagle(head.config)
    other.load_state_dict(head.state_dict(), strict=False)
    tokens, before = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, WIDTH)
    assert torch.equal(head(tokens, before, embed), other(tokens, before, embed))
    guessed = torch.randn(2, WIDTH)
    assert torch.equal(head.saying(guessed), guessed)


def ends_of(table):
    return SimpleNamespace(embed=embed, unembed=lambda x: x @ table.T, places=torch.arange(WIDTH))


def test_states_teach_nothing_to_the_half_that_predicts(head):
    """What laws teach is the difference of both losses to that of states alone."""
    disturbed(head)
    torch.manual_seed(1)
    ends = ends_of(torch.randn(WIDTH, WIDTH))
    texts = {
        "input_ids": torch.tensor([[3, 1, 4, 1, 5]]), "hidden": torch.randn(1, 5, WIDTH),
        "weights": torch.ones(1, 5),
    }  # fmt: skip
    parts = {"goes on": head.layer.down, "predicts": head.predict.down}

    def slopes(law):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eagle, "LAW", law)
            head.zero_grad()
            head.learn(texts, ends)[0].backward()
        return {name: part.weight.grad.clone() for name, part in parts.items()}

    states, both = slopes(0.0), slopes(1.0)
    assert states["goes on"].abs().sum() > 0 == states["predicts"].abs().sum()
    assert both["predicts"].abs().sum() > 0  # of laws alone
    assert (both["goes on"] - states["goes on"]).abs().max() > 1e-4  # of both


def test_losses_fall_for_as_long_as_it_learns(head):
    """Where laws took what the first MLP adds for a constant, both grew without an end."""
    torch.manual_seed(1)
    ends = ends_of(3.0 * torch.randn(WIDTH, WIDTH))
    weights = [one for one in head.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=5e-3), []
    for _ in range(200):
        texts = {
            "input_ids": torch.randint(WIDTH, (8, 24)), "hidden": torch.randn(8, 24, WIDTH),
            "weights": torch.ones(8, 24),
        }  # fmt: skip
        optimizer.zero_grad()
        loss, _ = head.learn(texts, ends)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses[100:]) < 0.5 * losses[0], losses[::20]


def test_its_decoder_goes_on_with_one_half_and_says_the_other(head):
    from foretoken.audit.rows import seeded_rows
    from foretoken.types import Layer, SamplingParams

    disturbed(head).eval().requires_grad_(False)
    tokens, before = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, WIDTH)
    guessed = head(tokens, before, embed)[0]
    lm = open_lm(head.decoder(64), name="draft")
    [row] = seeded_rows([[3, 1, 4]], SamplingParams(), WIDTH)
    with torch.inference_mode():
        lm.supply(row, head.entering(tokens[0], before[0], embed))
        lm.prefill([row])
        [score] = lm.grow([row], [[4]], [[-1]], (head.goes_on, Layer(-1)))
    assert torch.allclose(score.hidden[0, 0], guessed[-1], atol=1e-4)
    assert torch.allclose(score.hidden[0, 1], head.saying(guessed[-1]), atol=1e-4)

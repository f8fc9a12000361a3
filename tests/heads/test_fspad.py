"""FSPAD's head: what it adds to EAGLE's, and that its halves learn apart."""

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


def test_laws_and_states_have_halves_of_their_own(head):
    """What laws teach is the difference of both losses to that of states alone."""
    disturbed(head)
    torch.manual_seed(1)
    table = torch.randn(WIDTH, WIDTH)
    ends = SimpleNamespace(embed=embed, unembed=lambda x: x @ table.T, places=torch.arange(WIDTH))
    texts = {
        "input_ids": torch.tensor([[3, 1, 4, 1, 5]]), "hidden": torch.randn(1, 5, WIDTH),
        "weights": torch.ones(1, 5),
    }  # fmt: skip
    first, second = head.layer, head.predict
    parts = {"first": first.down, "second": second.down, "shared": first.joined}

    def slopes(law):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eagle, "LAW", law)
            head.zero_grad()
            head.learn(texts, ends)[0].backward()
        return {name: part.weight.grad.clone() for name, part in parts.items()}

    states, both = slopes(0.0), slopes(1.0)
    assert torch.allclose(states["first"], both["first"], atol=1e-6)  # of states alone
    assert states["first"].abs().sum() > 0 == states["second"].abs().sum()
    assert both["second"].abs().sum() > 0  # of laws alone
    assert (both["shared"] - states["shared"]).abs().max() > 1e-4  # of both


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

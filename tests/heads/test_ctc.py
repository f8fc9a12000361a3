"""CTC-drafter's head: which places of texts it learns from."""

import pytest
import torch

from foretoken.heads.block import Block
from foretoken.heads.ctc import CtcBlock
from foretoken.lm.table import TableLM
from foretoken.training.objectives.guessing import Ends

VOCAB, LENGTH, FRAMES = 8, 14, 8  # so that four tokens are learnt at a place
WRITTEN = range(4, 10)  # what counts of a text
WHOLE, CUT, PADDED = 4, 7, 9  # places with all four tokens, with two and with none of them


@pytest.fixture
def head():
    torch.manual_seed(1)
    return CtcBlock(Block.Config(hidden_size=VOCAB, vocab_size=VOCAB, depth=FRAMES))


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(2)
    weights = torch.zeros(1, LENGTH)
    weights[:, WRITTEN] = 1.0
    return {
        "input_ids": torch.arange(LENGTH)[None] % VOCAB,
        "hidden": torch.randn(1, LENGTH, 2 * VOCAB, generator=generator),
        "weights": weights,
    }


def loss_at(head, texts, places, scored=None):
    ends = Ends(TableLM.random(VOCAB, seed=3), scored)
    return head.learn(texts, ends, torch.tensor([places]))[0]


def test_a_place_whose_text_is_cut_short_teaches_nothing(head, texts):
    whole = loss_at(head, texts, [WHOLE])
    assert whole.item() > 0
    for cut in (CUT, PADDED, LENGTH - 1):
        torch.testing.assert_close(loss_at(head, texts, [WHOLE, cut]), whole)


def test_a_token_that_is_not_scored_cuts_a_place_short(head, texts):
    scored = torch.tensor([token for token in range(VOCAB) if token != 6])  # the second behind 4
    whole = loss_at(head, texts, [0], scored)
    assert whole.item() == 0.0, "what stands there does not count"
    texts["weights"][:] = 1.0
    first = loss_at(head, texts, [0], scored)
    assert first.item() > 0
    torch.testing.assert_close(loss_at(head, texts, [0, WHOLE], scored), first)


def test_texts_without_a_whole_place_move_nothing(head, texts):
    loss = loss_at(head, texts, [CUT, PADDED])
    loss.backward()
    assert loss.item() == 0.0
    moved = [weight.grad.abs().max() for weight in head.parameters() if weight.grad is not None]
    assert moved and not any(float(part) for part in moved)

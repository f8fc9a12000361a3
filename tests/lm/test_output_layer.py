"""An output layer that a model's owner puts in another's place is followed by whoever reads it."""

from __future__ import annotations

import random

import pytest
import torch
from families import tiny
from play import closeness, point, random_tree, row_of
from torch import nn

from foretoken.errors import CapabilityError
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.kernels import choosing
from foretoken.lm.kernels.linears import DENSE, PACKED, can_pack
from foretoken.lm.opening import open_lm
from foretoken.lm.views.early_exit_scoring import Readout
from foretoken.lm.views.few_unembedded import FewUnembedded
from foretoken.types import FinalNorm

ROWS = [3, 5, 40, 41]


class Adapted(nn.Module):
    """A layer with something beside it, as adapters wrap one."""

    def __init__(self, base, beside=0.5):
        super().__init__()
        self.base, self.beside = base, beside

    @property
    def weight(self):
        return self.base.weight

    def forward(self, states):
        return self.base(states) + self.beside * states[..., :1]


def other(head):
    """A linear layer of other weights."""
    made = nn.Linear(head.in_features, head.out_features, bias=False)
    with torch.no_grad():
        made.weight.copy_(head.weight.roll(7, 0) * 1.5)
    return made


@pytest.fixture(params=["llama", "granite"])  # the latter divides its logits
def lm(request):
    with open_lm(tiny(request.param), kernels="dense", compile="off") as opened:
        yield opened


def said(lm):
    """States behind the last norm, and the model's logits of them."""
    row = row_of([5, 8, 13])
    lm.prefill([row])
    tree = random_tree(random.Random(3), 13, 6)
    [score] = lm.score([row], [point(tree)], (FinalNorm(),))
    lm.free([row])
    return score.hidden[:, 0], score.logits


@pytest.mark.parametrize("put", [other, Adapted])
def test_logits_of_states_are_those_of_the_layer_that_is_there(lm, put):
    few = FewUnembedded(lm, OutputRows.of_tokens(ROWS, lm.vocab_size))
    read = Readout(lm)
    before = said(lm)[1]
    for _ in range(2):
        states, logits = said(lm)
        assert closeness(lm.unembed(states), logits) < 2e-5
        found = few.unembed(states)
        assert closeness(found[:, ROWS], logits[:, ROWS]) < 2e-5
        assert found.isfinite().sum() == found.shape[0] * len(ROWS)
        with torch.inference_mode():
            assert read.best(states) == logits.argmax(-1).tolist()
            weight = lm.model.get_output_embeddings().weight
            right = weight[logits.topk(2).indices] @ states[..., None]
            assert torch.allclose(read.some(states, logits.topk(2).indices), right[..., 0])
        lm.model.set_output_embeddings(put(lm.model.get_output_embeddings()))
        lm.refresh()
    assert closeness(said(lm)[1], before) > 0.1


def test_few_rows_are_read_again_once_a_linear_layer_is_back(lm):
    few = FewUnembedded(lm, OutputRows.of_tokens(ROWS, lm.vocab_size))
    first = lm.model.get_output_embeddings()
    for layer in (Adapted(first), other(first), first):
        lm.model.set_output_embeddings(layer)
        states, logits = said(lm)
        assert closeness(few.unembed(states)[:, ROWS], logits[:, ROWS]) < 2e-5
        assert (few.followed() is None) == isinstance(layer, Adapted)


def test_the_layer_is_looked_at_once(lm, monkeypatch):
    states, _ = said(lm)
    lm.unembed(states)
    monkeypatch.setattr(lm.model, "forward", lambda **_: pytest.fail("looked at again"))
    lm.unembed(states)


def scaled(logits):
    return logits * 3.0


def masked(logits):
    return logits.index_fill(-1, torch.arange(5), torch.finfo(logits.dtype).min)


@pytest.mark.parametrize("behind", [scaled, masked])
def test_a_layer_with_more_behind_it_is_refused_when_it_comes(lm, behind):
    states, _ = said(lm)
    lm.unembed(states)
    forward = lm.model.forward

    def more(**given):
        output = forward(**given)
        output.logits = behind(output.logits)
        return output

    lm.model.set_output_embeddings(other(lm.model.get_output_embeddings()))
    lm.model.forward = more
    with pytest.raises(CapabilityError, match="does more"):
        lm.unembed(states)


@pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")
def test_rows_can_be_read_where_other_weights_are_kept_packed_alone(monkeypatch):
    """kernels='lean' frees dense weights, here by a table made up, but never the output layer's."""
    table = {rows: {DENSE: 9.0, PACKED: 1.0} for rows in choosing.JUDGED}
    monkeypatch.setattr(choosing, "_measured", {})
    monkeypatch.setattr(choosing, "measure", lambda *_: table)
    with open_lm(tiny("llama"), kernels="lean", compile="off") as lm:
        freed = [product.module for product in choosing.installed(lm.model) if product.freed]
        assert freed and lm.model.lm_head not in freed
        states, logits = said(lm)
        few = FewUnembedded(lm, OutputRows.of_tokens(range(40), lm.vocab_size))
        assert closeness(few.unembed(states)[:, :40], lm.unembed(states)[:, :40]) < 2e-5
        with torch.inference_mode():
            two = logits.topk(2)
            assert closeness(Readout(lm).some(states, two.indices), two.values) < 2e-5

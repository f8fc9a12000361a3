"""Weights that change under a loaded model: its texts are those of the model as it is now."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_calls import greedy_text
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import foretoken
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lm.kernels.choosing import installed
from foretoken.lm.kernels.linears import LISTED, ONEDNN, TRANSPOSED, can_pack

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")
PROMPT = [5, 9, 2, 41, 9, 2]
VOCAB = 97
MATRICES = (nn.Linear, Conv1D)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=128,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(params=["llama", "gpt2"])
def model(request, make_llama):
    made = make_llama(VOCAB, attention_bias=True) if request.param == "llama" else gpt2()
    with torch.no_grad():  # zeros at first, and a bias that is not seen cannot be missed
        for module in matrices(made):
            if module.bias is not None:
                module.bias.normal_(generator=torch.Generator().manual_seed(4))
    return made


def matrices(model):
    return [module for module in model.modules() if type(module) in MATRICES]


def delta(weight, seed=1):
    return 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))


def copied(model):
    for module in matrices(model):
        module.weight.data.copy_(module.weight.data + delta(module.weight))


def merged(model):
    for module in matrices(model):
        module.weight.data += delta(module.weight)


def data_replaced(model):
    for module in matrices(model):
        module.weight.data = module.weight.data + delta(module.weight)


def parameter_replaced(model):
    for module in matrices(model):
        module.weight = nn.Parameter(module.weight.data + delta(module.weight))


def in_place(model):
    with torch.no_grad():
        for module in matrices(model):
            module.weight.add_(delta(module.weight))


def state_loaded(model):
    state = {name: value + delta(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()


def biases_written(model):
    for module in matrices(model):
        if module.bias is not None:
            module.bias.data += 5 * delta(module.bias)


def biases_replaced(model):
    for module in matrices(model):
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias.data + 5 * delta(module.bias))


CHANGES = [
    copied, merged, data_replaced, parameter_replaced, in_place, state_loaded, stepped,
    biases_written, biases_replaced,
]  # fmt: skip


def plain_text(model, count=16):
    return greedy_text(model, PROMPT, count)


def text(session, count=16):
    return session.generate(PROMPT, count).tokens


def opened(model, kernels):
    """A session whose products use packed copies, views of the dense weights, or packed alone."""
    session = foretoken.load(model, "prompt-lookup", kernels="packed")
    for product in installed(model):
        if kernels == "views":
            half = (LISTED + 1) // 2
            product.kernels = [ONEDNN] * half + [TRANSPOSED] * (LISTED + 1 - half)
            product.many, product.packed = TRANSPOSED, None
    return session


@pytest.mark.parametrize("kernels", ["packed", pytest.param("views", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_text_follows_every_kind_of_change(model, change, kernels):
    with opened(model, kernels) as session:
        before = plain_text(model)
        assert text(session) == before
        change(model)
        after = plain_text(copy.deepcopy(model))
        assert plain_text(model) == after != before  # transformers is not misled by our kernels
        assert session.target.refresh() > 0
        assert text(session) == after
        assert session.target.refresh() == 0
        assert len(list(installed(model))) == len(matrices(model))


def test_a_tied_head_follows_its_embedding(make_llama):
    model = make_llama(VOCAB, tie_word_embeddings=True)
    with opened(model, "packed") as session:
        before = text(session)
        model.model.embed_tokens.weight.data += delta(model.lm_head.weight)
        assert session.target.refresh() == 1  # one weight, in two modules
        assert text(session) == plain_text(model) != before


def test_a_write_that_no_sample_sees_is_found_by_the_full_look(model):
    with opened(model, "packed") as session:
        head = model.lm_head
        before = text(session)
        mark = session.target.borrowing.watch.marks[id(head), "weight"]
        kept = torch.from_numpy(mark.samples).clone()
        head.weight.data.mul_(-1.0)
        torch.from_numpy(mark.samples).copy_(kept)
        assert session.target.refresh() == 0
        assert session.target.refresh(full=True) == 1
        assert text(session) == plain_text(model) != before
        assert session.target.refresh(full=True) == 0


def lean(model):
    """A session over packed weights alone, whatever this machine measures."""
    session = foretoken.load(model, "prompt-lookup", kernels="packed")
    for product in installed(model):
        if product.module is not model.lm_head:
            product.free()
    session.target.refresh()
    return session


@pytest.mark.parametrize("change", [data_replaced, parameter_replaced], ids=lambda c: c.__name__)
def test_freed_weights_that_are_replaced_are_packed_and_freed_again(model, change):
    with torch.no_grad():
        values = [delta(module.weight, 7) for module in matrices(model)]
    with lean(model) as session:
        before = text(session)
        for module, value in zip(matrices(model), values, strict=True):
            if change is data_replaced:
                module.weight.data = value.clone()
            else:
                module.weight = nn.Parameter(value.clone())
        assert session.target.refresh() == len(values)
        after = text(session)
        freed = [p.module for p in installed(model) if p.freed]
        assert len(freed) == len(values) - 1
        assert all(module.weight.untyped_storage().nbytes() < 64 for module in freed)
    assert all(torch.equal(m.weight, v) for m, v in zip(matrices(model), values, strict=True))
    assert after == plain_text(model) != before


@pytest.mark.parametrize(
    "write", [copied, merged, in_place, state_loaded], ids=lambda c: c.__name__
)
def test_freed_weights_refuse_to_be_written_in_place(model, write):
    with lean(model) as session:
        before = text(session)
        with pytest.raises((RuntimeError, foretoken.errors.CapabilityError)):
            write(model)
        assert text(session) == before


def test_a_weight_given_to_a_freed_module_survives_closing(model):
    session = lean(model)
    module = matrices(model)[0]
    value = delta(module.weight, 7)
    module.weight.data = value.clone()
    session.close()
    assert torch.equal(module.weight, value)


def test_an_optimizer_keeps_its_parameters_over_freeing(model):
    parameters = list(model.parameters())
    frozen = parameters[-1].requires_grad_(False)
    lean(model).close()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not frozen.requires_grad and parameters[0].requires_grad


def test_two_sessions_over_one_model_both_follow(model):
    first, second = opened(model, "packed"), opened(model, "packed")
    merged(model)
    after = plain_text(model)
    for session in (first, second):
        assert session.target.refresh() == len(matrices(model))
        assert text(session) == after
    first.close()
    data_replaced(model)
    assert second.target.refresh() == len(matrices(model))
    assert text(second) == plain_text(model)
    second.close()


def test_another_size_or_type_is_refused(make_llama):
    model = make_llama(VOCAB)
    session = opened(model, "packed")
    model.double()
    with pytest.raises(ConfigError, match="load the changed model"):
        session.target.refresh()
    session.close()
    with opened(make_llama(VOCAB), "packed") as session:
        session.target.model.resize_token_embeddings(VOCAB + 5)
        with pytest.raises(ConfigError, match="load the changed model"):
            session.target.refresh()


def test_captured_graphs_go_when_a_weight_moves_and_stay_when_it_is_written(make_llama):
    from foretoken.lm.kernels.graphs import Graphs

    model = make_llama(VOCAB)

    def again(run):
        output = run().clone()
        return lambda: output.copy_(run())

    with foretoken.load(model, "prompt-lookup", kernels="dense") as session:
        lm = session.target
        lm.graphs = Graphs(lm, capture=again)
        text(session)
        assert lm.graphs.made
        merged(model)
        assert lm.refresh() == len(matrices(model)) and lm.graphs.made
        model.model.norm.weight.data = model.model.norm.weight.data.clone()
        assert lm.refresh() == 1 and not lm.graphs.made
        assert text(session) == plain_text(model) and lm.graphs.made
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
        assert lm.refresh() == 0 and not lm.graphs.made
        text(session)
        model.lm_head = nn.Linear(64, VOCAB, bias=False).eval()
        assert lm.refresh() == 1 and not lm.graphs.made
        assert text(session) == plain_text(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_told_when_opened(model, bad):
    modes = [module.__dict__.get("forward") for module in model.modules()]
    weight = matrices(model)[0].weight
    with torch.no_grad():
        weight.fill_(bad)
    with pytest.raises(CheckpointError, match="NaN or infinity") as told:
        foretoken.load(model, "prompt-lookup", kernels="packed")
    assert "possible here" in str(told.value) and "what to do" in str(told.value)
    assert modes == [module.__dict__.get("forward") for module in model.modules()]


def test_one_bad_number_is_told_where_the_probe_meets_it(model):
    with torch.no_grad():
        matrices(model)[1].weight[3, 1] = float("nan")
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        foretoken.load(model, "prompt-lookup", kernels="dense")


def test_a_bad_row_that_no_probe_meets_is_told(make_llama):
    model = make_llama(4 * VOCAB)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("inf")
    with pytest.raises(CheckpointError, match="embed_tokens"):
        foretoken.load(model, "prompt-lookup", kernels="dense")


def test_finite_weights_whose_sums_overflow_are_told_apart(make_llama):
    model = make_llama(VOCAB)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.fill_(1e38)
    with pytest.raises(foretoken.errors.CapabilityError, match="weights are finite"):
        foretoken.load(model, "prompt-lookup", kernels="dense")


def test_weights_that_become_nan_under_a_session_are_told(model):
    with opened(model, "packed") as session:
        matrices(model)[0].weight.data.fill_(float("nan"))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="NaN or infinity"):
                session.target.refresh()


@pytest.mark.parametrize("kernels", ["packed", "views"])
@pytest.mark.parametrize("change", [merged, data_replaced])
def test_a_session_over_a_model_that_changed_under_another_reads_it_as_it_is(
    model, change, kernels
):
    """Nobody has looked since: the first session's copies are of the weights before."""
    with opened(model, kernels) as first:
        text(first)
        change(model)
        with foretoken.load(model, "prompt-lookup", kernels="packed") as second:
            wanted = plain_text(copy.deepcopy(model))
            assert text(second) == wanted and text(first) == wanted


@pytest.mark.parametrize("which", ["head", "embedding"])
def test_a_head_that_is_no_longer_its_embedding_is_followed(make_llama, which):
    """The captured graph reads a weight of two places at one of them."""
    model = make_llama(VOCAB, tie_word_embeddings=True)
    with foretoken.load(model, "prompt-lookup", kernels="dense") as session:
        assert session.target.lean is not None
        text(session)
        module = model.lm_head if which == "head" else model.model.embed_tokens
        module.weight = nn.Parameter(module.weight.data + delta(module.weight))
        assert text(session) == plain_text(copy.deepcopy(model))

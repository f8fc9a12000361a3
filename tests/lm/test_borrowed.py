"""One model, several borrowers: shared while it is held, given back as it was by the last."""

from __future__ import annotations

import gc
import weakref
from threading import Thread

import pytest
import torch
from families import tiny
from play import point, row_of
from torch import nn

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.kernels import borrowed, choosing
from foretoken.lm.kernels.linears import BLOCKS, DENSE, ONEDNN, PACKED, can_pack
from foretoken.lm.opening import open_lm
from foretoken.lm.views.early_exit_scoring import Leave
from foretoken.lm.views.wrapping import early_exit_scoring, early_exits, skipped_layers
from foretoken.trees.build import root

PACKS = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")


def trained(family="llama"):
    """A model in training mode, but for a part that its owner has frozen."""
    model = tiny(family).train()
    model.model.layers[1].eval()
    return model


def bytes_copied(lm):
    """Of all copies of weights that are held for a model: of the captured one, and in modules."""
    held = [*lm.borrowing.kernels.copies, *choosing.installed(lm.model)]
    return sum(product.nbytes() for product in set(held) if product.packed is not None)


def state(model):
    return (
        [module.training for module in model.modules()],
        [sorted(module.__dict__) for module in model.modules()],
        [parameter.data_ptr() for parameter in model.parameters()],
    )


@PACKS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kernels", ["packed", "dense"])
def test_the_last_to_close_restores_what_the_first_found(order, kernels):
    model = trained()
    before = state(model)
    both = [open_lm(model, kernels=kernels) for _ in range(2)]
    one, other = (both[i] for i in order)
    held = [module.__dict__.get("forward") for module in model.modules()]
    one.close()
    assert not any(module.training for module in model.modules())
    assert [module.__dict__.get("forward") for module in model.modules()] == held
    other.check_usable()
    other.prefill([row_of([1, 2, 3])])
    other.close()
    assert state(model) == before


def test_closing_twice_gives_back_once():
    model = trained()
    one, other = open_lm(model, kernels="dense"), open_lm(model, kernels="dense")
    one.close()
    one.close()
    other.check_usable()
    other.close()
    assert model.training


def test_a_closed_model_refuses():
    lm = open_lm(tiny("llama"), kernels="dense")
    assert not lm.closed
    lm.check_usable()
    lm.close()
    assert lm.closed and lm.refresh() == 0
    with pytest.raises(ConfigError, match="closed") as told:
        lm.check_usable()
    assert "possible here" in str(told.value) and "what to do" in str(told.value)


@pytest.mark.parametrize("part", ["", "model.layers.1.mlp"])
def test_training_mode_set_after_loading_is_refused_until_it_is_taken_back(part):
    model = tiny("llama")
    with open_lm(model, kernels="dense") as lm:
        model.get_submodule(part).train()
        with pytest.raises(ConfigError, match=part or "training mode"):
            lm.check_usable()
        model.eval()
        lm.check_usable()


def test_training_mode_set_after_loading_is_left_to_the_owner():
    model = tiny("llama")
    with open_lm(model, kernels="dense"):
        model.train()
    assert all(module.training for module in model.modules())


def test_modules_that_never_leave_training_mode_are_no_reason_to_refuse():
    class Restless(nn.Identity):
        def train(self, mode=True):
            return super().train(True)

    model = tiny("llama")
    model.model.layers[0].extra = Restless()
    before = state(model)
    with open_lm(model, kernels="dense") as lm:
        lm.check_usable()
    assert state(model) == before


@PACKS
def test_auto_shares_what_is_there_and_other_kernels_are_refused():
    model = tiny("llama")
    before = state(model)
    with open_lm(model, kernels="packed") as lm:
        products = list(choosing.installed(model))
        assert open_lm(model, kernels="auto").kernels is lm.kernels
        for asked in ({"kernels": "dense"}, {"kernels": "lean"}, {"exact_bits": True}):
            with pytest.raises(ConfigError, match="this very model"):
                open_lm(model, **asked)
        assert list(choosing.installed(model)) == products
        lm.prefill([row_of([1, 2, 3])])
    assert state(model) == before
    open_lm(model, kernels="dense").close()  # nobody holds it now


@PACKS
def test_a_borrower_that_is_dropped_gives_the_model_back():
    model = trained()
    before = state(model)
    lm = open_lm(model, kernels="packed")
    assert state(model) != before
    del lm
    gc.collect()
    assert state(model) == before
    gone = weakref.ref(model)
    kept = open_lm(model, kernels="packed")
    del model, kept
    gc.collect()
    assert gone() is None


@PACKS
def test_a_refused_model_is_left_as_it_was():
    model = trained("gemma2")  # whose soft caps exact_bits refuses
    before = state(model)
    with pytest.raises(CapabilityError):
        open_lm(model, exact_bits=True)
    with pytest.raises(ConfigError):
        open_lm(model, kernels="quick")
    assert state(model) == before


@PACKS
def test_kernels_that_were_there_before_come_back():
    model = tiny("llama")
    choosing.choose_kernels(model, "packed")
    before = [module.__dict__.get("forward") for module in model.modules()]
    open_lm(model, kernels="packed").close()
    assert [module.__dict__.get("forward") for module in model.modules()] == before
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        changed = model(ids).logits.clone()
        choosing.restore(model)
        torch.testing.assert_close(changed, model(ids).logits, atol=1e-3, rtol=1e-3)


@PACKS
def test_a_forward_wrapped_while_kernels_are_in_place_outlives_them():
    model = tiny("llama")
    module = model.model.layers[0].mlp.up_proj
    ids = torch.tensor([[1, 2, 3]])
    with open_lm(model, kernels="packed"):
        inner = module.forward
        module.forward = lambda x: inner(x)  # as offloading hooks do
    assert list(choosing.installed(model)) == []
    with torch.inference_mode():
        module.weight.data.mul_(2)
        wrapped = model(ids).logits.clone()
        del module.forward
        assert torch.equal(wrapped, model(ids).logits)


@PACKS
def test_a_model_may_be_given_back_between_uses():
    model = trained()
    before = state(model)
    lm = open_lm(model, kernels="packed")
    products = list(choosing.installed(model))
    for _ in range(2):
        lm.borrowing.give_back()
        assert state(model) == before
        lm.borrowing.take()
        assert list(choosing.installed(model)) == products and not model.training
    lm.borrowing.give_back()
    with open_lm(model, kernels="dense"), pytest.raises(ConfigError, match="this very model"):
        lm.borrowing.take()
    assert state(model) == before


def test_threads_that_open_and_close_leave_no_trace():
    model = trained()
    before = state(model)
    errors = []

    def work():
        try:
            for _ in range(12):
                borrowing = borrowed.Borrowing(model, "target")
                borrowing.install("dense")
                borrowing.check_usable()
                borrowing.refresh(False)
                borrowing.close()
        except ConfigError as error:
            errors.append(error)

    threads = [Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and state(model) == before


@PACKS
@pytest.mark.parametrize("view", [early_exits, skipped_layers, early_exit_scoring])
def test_a_view_holds_no_copies_of_weights_beside_those_of_its_target(view, monkeypatch):
    """Parts of a captured model run on the capture; copies in its modules would be read by none."""
    told = {rows: {DENSE: 2.0, PACKED: 1.0} for rows in (1, 64)}  # so every weight is copied
    monkeypatch.setattr(choosing, "measure", lambda *_: told)
    monkeypatch.setattr(choosing, "_measured", {})
    model = tiny("llama")
    with open_lm(model) as lm:
        before = bytes_copied(lm)
        seen = view(lm)
        row = row_of([1, 2, 3, 4])
        seen.prefill([row])
        if view is early_exits:
            seen.draft([row], [(4, 5)], [(-1, 0)], [2])
        elif view is skipped_layers:
            seen.draft([row], [(4, 5)], [(-1, 0)], frozenset({1}))
        else:
            wish = Leave(torch.tensor([[1, 2]]), frozenset({1}), lambda *_: [True], root(4))
            seen.leave(row, wish)
            seen.score([row], [point(root(4))])
        seen.read_out(torch.ones(2, seen.hidden_size))
        linear = sum(m.weight.nbytes for m in model.modules() if type(m) is nn.Linear)
        assert bytes_copied(lm) == before == linear


@PACKS
def test_memory_stays_spared_when_a_capture_is_given_up(monkeypatch):
    """A budget was told of the kernels that were there; a hook then has others chosen."""
    told = {rows: {DENSE: 2.0, ONEDNN: 1.0} for rows in (1, 64)}
    monkeypatch.setattr(choosing, "measure", lambda *_: told)
    monkeypatch.setattr(choosing, "_measured", {})
    model = tiny("llama")
    with open_lm(model) as lm:
        assert lm.lean is not None
        lm.borrowing.kernels.spare_memory()
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        lm.refresh()
        assert lm.lean is None
        products = lm.borrowing.kernels.products
        assert products and all(product.many == BLOCKS for product in products)

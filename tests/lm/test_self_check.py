"""Behaviour that sets in with a text's length: found at load where the configuration names it, and
while writing where it does not."""

from itertools import pairwise

import pytest
import torch
import transformers as hf
from families import COMMON, tiny

from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.lengths import check_ahead
from foretoken.errors import CapabilityError, WrongLogits
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.probe import difference, late_lengths
from foretoken.lm.runtime.rounding import allowed
from foretoken.lm.runtime.self_check import compare_with_fresh
from foretoken.lm.table import TableLM
from foretoken.lm.views.realigned import realigned
from foretoken.row import make_row
from foretoken.types import SamplingParams


class LateTurn(hf.LlamaForCausalLM):
    """A model whose logits, beyond some length of its own, depend on the tokens of the call."""

    turn = 100

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if max(seen, input_ids.shape[1]) > self.turn:
            output.logits = output.logits + output.logits.roll(1, -1) * input_ids.shape[1]
        return output


class Shifted(hf.LlamaForCausalLM):
    """A model whose logits are all off by as much as they differ, by the tokens of the call."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + 0.5 * output.logits.std() * (input_ids.shape[1] % 3)
        return output


class Masked(hf.LlamaForCausalLM):
    """A model that never says some tokens, as Chameleon those of images."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        least = torch.finfo(output.logits.dtype).min
        output.logits = output.logits.index_fill(-1, torch.arange(5), least)
        return output


def late(**config):
    torch.manual_seed(0)
    return LateTurn(hf.LlamaConfig(**COMMON | config)).eval()


def write(lm, tokens):
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    row = make_row([3, 4, 5], params, SeededCoins(0), lm.vocab_size)
    for _ in decode([row], assemble("plain", lm)):
        pass
    return row


def test_a_turn_that_no_configuration_names_stops_the_text():
    lm = open_lm(late(), kernels="dense")
    assert lm.verified == 32
    with pytest.raises(CapabilityError, match=r"off by .* up to 65 tokens they were right") as told:
        write(lm, 400)
    assert "after 131 tokens" in told.value.asked
    assert lm.rows_held == 0


def test_what_all_logits_are_off_by_is_no_error():
    """No law knows it, and rounding in bfloat16 makes much of it."""
    torch.manual_seed(0)
    lm = open_lm(Shifted(hf.LlamaConfig(**COMMON)).eval(), kernels="dense")
    assert len(write(lm, 150).tokens) == 153
    assert lm.verified == 131


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masked_logits_hide_no_error_of_the_others(dtype):
    torch.manual_seed(0)
    right = torch.randn(8, 50).to(dtype)
    right[:, :5] = torch.finfo(dtype).min
    wrong, seen = right.clone(), right.clone()
    wrong[:, 5:] = torch.randn(8, 45)
    seen[:, 4] = 0.0  # masked in one alone
    assert difference(right, right) == 0
    assert difference(wrong, right) > allowed(dtype)
    assert difference(seen, right) > allowed(dtype) and difference(right, seen) > allowed(dtype)


@torch.inference_mode()
def test_wrong_logits_beside_masked_ones_stop_a_text():
    torch.manual_seed(0)
    model, tokens = Masked(hf.LlamaConfig(**COMMON)).eval(), [3, 4, 5]
    right = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    compare_with_fresh(model, tokens, right, 0)
    wrong = right.clone()
    wrong[5:] = right[5:].roll(1)
    with pytest.raises(WrongLogits, match="off by"):
        compare_with_fresh(model, tokens, wrong, 0)


def test_a_turn_that_the_configuration_names_is_found_at_load():
    with pytest.raises(CapabilityError, match="llama cannot be decoded"):
        open_lm(late(keep_window_size=100), kernels="dense")


def test_doges_window_is_found_at_load():
    """Its attention keeps the best so many keys; between equal ones a cache chooses otherwise."""
    torch.manual_seed(0)
    model = hf.DogeForCausalLM(hf.DogeConfig(**COMMON, keep_window_size=40)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(".A"):  # zero as in a new model: all keys are equally good
                weight.copy_(0.3 * torch.randn(weight.shape) + (weight.dim() == 1))
    with pytest.raises(CapabilityError, match="doge cannot be decoded"):
        open_lm(model, kernels="dense")


def test_a_length_is_checked_once_per_model():
    model = tiny("llama")
    lm = open_lm(model, kernels="dense")
    write(lm, 150)
    assert lm.verified == open_lm(model, kernels="dense").verified == 131
    lm.self_check = None  # a second check would call it
    write(lm, 150)


def test_windows_and_switches_are_read_from_a_configuration():
    config = {
        "sliding_window": 512,
        "window_size": None,
        "use_window": True,
        "hidden_size": 64,
        "attention_chunk_size": 128,
        "rope_parameters": {"full": {"original_max_position_embeddings": 40, "factor": 8}},
    }
    assert late_lengths(config) == [40, 128, 512]


def test_a_server_checks_lengths_before_there_are_texts(caplog):
    sound = open_lm(tiny("llama"), kernels="dense")
    engine = assemble("plain", sound)
    check_ahead(engine, last=200)
    assert sound.verified == 200 and sound.rows_held == 0 and not caplog.records
    turning = open_lm(late(), kernels="dense")
    check_ahead(assemble("plain", turning), last=200)
    assert turning.verified == 32 and turning.rows_held == 0  # texts of 65 tokens are right
    assert "texts of 128 tokens are likely to be refused" in caplog.text


def test_a_slow_model_is_checked_less_far():
    lm = open_lm(tiny("llama"), kernels="dense")
    check_ahead(assemble("plain", lm), seconds=0.0)
    assert lm.verified == 128


def test_a_check_for_which_there_is_no_memory_ends_no_text_and_is_not_tried_at_each_step(
    caplog, monkeypatch
):
    lm, tried = open_lm(tiny("llama"), kernels="dense"), []

    def full(row):
        tried.append(len(row.tokens))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lm, "self_check", full)
    with caplog.at_level("WARNING"):
        assert len(write(lm, 150).tokens) == 153
    assert "could not be checked" in caplog.text
    assert all(later > 2 * sooner for sooner, later in pairwise(tried)), tried


def test_a_check_that_a_budget_does_not_afford_is_left_out_and_told(caplog, monkeypatch):
    lm = open_lm(tiny("llama"), kernels="dense")
    engine = assemble("plain", lm)
    monkeypatch.setattr(engine.waiting, "affords_check", lambda *_, **__: False)
    monkeypatch.setattr(lm, "self_check", lambda row: pytest.fail("checked all the same"))
    row = make_row([3, 4, 5], SamplingParams(max_new_tokens=150), SeededCoins(0), lm.vocab_size)
    with caplog.at_level("WARNING"):
        for _ in decode([row], engine):
            pass
    assert row.finish.reason == "length" and row.error is None
    assert "could not be checked: its budget has no room" in caplog.text
    assert lm.verified == 32 and engine.checks.unverified > 64


@pytest.mark.parametrize("who", ["the owner", "another session", "nobody"])
@pytest.mark.parametrize("view", [lambda lm: lm, realigned])
def test_a_text_whose_weights_changed_under_way_is_not_checked_and_not_kept(view, who):
    """Whoever looked since: the check looks itself."""
    model = tiny("llama")
    lm = open_lm(model, kernels="dense")
    target = view(lm)
    row = make_row([3, 4, 5], SamplingParams(max_new_tokens=150), SeededCoins(0), lm.vocab_size)
    for at, _ in enumerate(decode([row], assemble("plain", target))):
        if at == 20:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.5)
            if who == "the owner":
                lm.refresh()
            elif who == "another session":
                open_lm(model, kernels="dense").refresh()
            lm.keep_prefixes(1 << 20)
    assert row.finish.reason == "length" and row.error is None
    assert len(lm.prefixes) == 0
    write(lm, 150)  # others are, with the weights of now
    assert lm.verified > 32


class Noting(TableLM):
    """A table that says at which lengths it was checked."""

    def self_check(self, row):
        self.checked.append(len(row.tokens))
        self.verified = max(self.verified, len(row.tokens))


def test_nobody_waits_for_the_check_of_a_text_much_longer_than_all_that_were_checked(caplog):
    """Others are checked meanwhile, and it once it is alone."""
    target = Noting.random(4)
    target.verified, target.checked = 80, []
    engine = assemble("plain", target, max_rows=2)
    short, long = (
        make_row(prompt, SamplingParams(max_new_tokens=count), SeededCoins(0), 4)
        for prompt, count in (([1, 2] * 50, 80), ([1, 2] * 32 * 80, 300))
    )
    for row in (short, long):
        engine.submit(row)
    beside, together = [], 0
    with caplog.at_level("WARNING"):
        while short.finish is None:
            beside, together = list(target.checked), together + (long in engine.running)
            engine.step()
    assert together > 50 and beside == [161], "more than twice as long as what was checked"
    assert long.finish is None and target.checked == [161, len(long.tokens)]
    assert caplog.text.count("is put off beside others") == 1
    engine.close()

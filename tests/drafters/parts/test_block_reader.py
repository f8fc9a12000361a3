"""DFlash's and DSpark's head: what a block sees, and that it drafts as it was trained."""

import random

import pytest
import torch

from foretoken.drafters.parts.block_reader import BlockReader
from foretoken.heads import block, store
from foretoken.heads.block import Block
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.training.objectives.blocks import anchors
from foretoken.types import FinalNorm

VOCAB, WIDTH, DEPTH = 37, 64, 3


@pytest.fixture
def target(make_llama):
    return open_lm(make_llama(VOCAB, seed=2))


def made(rank=0, taps=(0, 1)):
    torch.manual_seed(0)
    config = Block.Config(
        hidden_size=WIDTH, vocab_size=VOCAB, taps=taps, depth=DEPTH, layers=2, rank=rank
    )
    return Block(config).eval().requires_grad_(False)


def reader(target, head, tmp_path, kind="dflash"):
    where = store.save(tmp_path / "head", kind, head, {})
    return BlockReader(target, kind, BlockReader.Config(draft_head=where))


def opened(model, target, row, ids):
    one = row(ids, VOCAB)
    [features] = target.prefill([one], model.taps)
    assert model.open(one, features)
    target.free([one])
    return one


def slots(head, states, anchor, at, sees):
    positions = torch.arange(states.shape[1]).expand(len(states), -1)
    return head(anchor, at, sees, head.remember(states, positions))


def test_a_block_sees_the_text_before_it_and_itself_alone():
    head = made()
    states, anchors = torch.randn(1, 6, 2, WIDTH), torch.randn(1, 2, WIDTH)
    at = torch.tensor([[2, 5]])
    sees = torch.arange(6) < at[..., None]
    together = slots(head, states, anchors, at, sees)
    for i, place in enumerate((2, 5)):
        alone = slots(
            head, states[:, :place], anchors[:, i : i + 1], at[:, i : i + 1],
            torch.ones(1, 1, place, dtype=torch.bool),
        )  # fmt: skip
        assert torch.allclose(together[:, i : i + 1], alone, atol=1e-5)
    states[:, 2:] += 1.0
    later = slots(head, states, anchors, at, sees)
    assert torch.allclose(later[:, 0], together[:, 0], atol=1e-6), "nothing from the anchor on"
    assert not torch.allclose(later[:, 1], together[:, 1], atol=1e-3)


def test_every_slot_is_a_guess_of_its_own():
    said = slots(
        made(), torch.randn(1, 4, 2, WIDTH), torch.randn(1, 1, WIDTH), torch.tensor([[4]]),
        torch.ones(1, 1, 4, dtype=torch.bool),
    )[0, 0]  # fmt: skip
    assert not torch.allclose(said[1], said[2], atol=1e-3)


def test_a_text_followed_is_a_text_taken_in_whole(target, row, tmp_path):
    model = reader(target, made(), tmp_path)
    grown = opened(model, target, row, [3, 1, 4, 1, 5])
    whole = [*grown.tokens, 9, 2, 6]
    fresh = opened(model, target, row, whole)
    [states] = target.prefill([row(whole, VOCAB)], model.taps)
    grown.tokens += [9, 2, 6]
    model.keep([grown], [None], [states[4:6]])
    model.keep([grown], [None], [states[6:7]])
    one, other = model.grow([grown, fresh], [[6], [6]], [[-1], [-1]])
    assert torch.allclose(one.logits, other.logits, atol=1e-5)


def test_rows_of_different_lengths_share_a_pass_and_levels_need_none(
    target, row, tmp_path, monkeypatch
):
    model = reader(target, made(), tmp_path)
    calls = []
    forward = block.Block.forward
    monkeypatch.setattr(block.Block, "forward", lambda *a: calls.append(1) or forward(*a))
    texts = ([3], [1, 2, 0, 3], [0, 4, 4, 1, 2, 3, 1])
    rows = [opened(model, target, row, text) for text in texts]
    roots = model.grow(rows, [[one.tokens[-1]] for one in rows], [[-1]] * 3)
    below = model.grow(rows, [[1, 3], [2], [4]], [[0, 0], [0], [0]])
    assert len(calls) == 1
    assert torch.equal(below[0].logits[0], below[0].logits[1]), "slots do not know each other"
    for i, text in enumerate(texts):
        alone = opened(model, target, row, text)
        [said] = model.grow([alone], [[text[-1]]], [[-1]])
        assert torch.allclose(said.logits, roots[i].logits, atol=1e-5)


def test_a_correction_knows_the_token_before_and_is_nothing_at_first(target, row, tmp_path):
    head = made(rank=8)
    plain = reader(target, head, tmp_path, "dspark")
    one = opened(plain, target, row, [3, 1, 4])
    plain.grow([one], [[4]], [[-1]])
    [level] = plain.grow([one], [[1, 3]], [[0, 0]])
    assert torch.equal(level.logits[0], level.logits[1])
    head.after.weight += torch.randn_like(head.after.weight)
    other = reader(target, head, tmp_path, "dspark")
    again = opened(other, target, row, [3, 1, 4])
    other.grow([again], [[4]], [[-1]])
    [corrected] = other.grow([again], [[1, 3]], [[0, 0]])
    ids = torch.tensor([1, 3])
    expected = level.logits + head.after(head.before(ids))
    assert torch.allclose(corrected.logits, expected, atol=1e-5)


def test_a_step_of_training_is_what_a_draft_computes(target, row, tmp_path):
    """Its figures for one block are those of the draft that begins there."""
    head = made(rank=8)
    head.after.weight += torch.randn_like(head.after.weight)
    model = reader(target, head, tmp_path, "dspark")
    ids = [(5 * i * i + 1) % VOCAB for i in range(12)]
    one = row([*ids, 0], VOCAB)
    [states] = target.prefill([one], (*model.taps, FinalNorm()))

    class Ends:
        scored, places = None, torch.arange(VOCAB)  # every token has an output

        def embed(self, tokens):
            return target.embed(tokens.flatten().tolist()).view(*tokens.shape, -1)

        def unembed(self, hidden):
            return target.unembed(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    batch = {
        "input_ids": torch.tensor([ids]),
        "hidden": states.flatten(1)[None],
        "weights": torch.ones(1, 12),
    }
    for root in (2, 5):
        with torch.inference_mode():
            _, right = head.learn(batch, Ends(), torch.tensor([[root]]))
        drafted = opened(model, target, row, ids[: root + 1])
        for depth in range(DEPTH):
            [score] = model.grow([drafted], [[ids[root + depth]]], [[depth - 1]])
            hit = score.logits[0].argmax() == ids[root + depth + 1]
            assert right[f"depth_{depth + 1}"] == hit


def test_anchors_stand_where_something_is_learnt_behind_them():
    weights = torch.tensor([[0.0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    found = anchors(weights, random.Random(1))
    assert set(found[0].tolist()) == {1, 2} and set(found[1].tolist()) == {0}


def test_a_tables_states_do_as_well(row, tmp_path):
    table = TableLM.random(5, seed=1)
    config = Block.Config(hidden_size=5, vocab_size=5, depth=2)
    where = store.save(tmp_path / "head", "dflash", Block(config), {})
    model = BlockReader(table, "dflash", BlockReader.Config(draft_head=where))
    one = row([1, 2, 3], 5)
    [features] = table.prefill([one], model.taps)
    assert model.open(one, features)
    [score] = model.grow([one], [[3]], [[-1]])
    assert score.logits.shape == (1, 5) and model.deepest == 2


def test_a_row_with_a_seed_is_guessed_alone(target, row, tmp_path):
    """In a padded batch its laws would round otherwise, and its coins might fall otherwise."""
    model = reader(target, made(), tmp_path)
    long = opened(model, target, row, list(range(30)))
    one, other = (row([5, 6, 7], VOCAB, temperature=1.0, seed=4) for _ in range(2))
    for each in (one, other):
        [features] = target.prefill([each], model.taps)
        assert model.open(each, features)
    [alone] = model.grow([one], [[7]], [[-1]])
    [_, beside] = model.grow([long, other], [[29], [7]], [[-1], [-1]])
    assert torch.equal(alone.logits, beside.logits)

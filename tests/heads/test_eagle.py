"""EAGLE's head: what it is shown, what it learns, and the tree it drafts."""

import pytest
import torch
from torch.nn import functional as F

from foretoken.audit.fixtures import random_head
from foretoken.audit.rows import seeded_rows
from foretoken.engine.assemble import assemble
from foretoken.heads.eagle import LAW, Eagle
from foretoken.lm.table import TableLM
from foretoken.methods.heads import EAGLE_TREE
from foretoken.trees.templates import Template
from foretoken.types import SamplingParams

VOCAB = 6


class TableEnds:
    """A table's states are its logits."""

    places = torch.arange(VOCAB)  # every token has an output

    def embed(self, tokens):
        return F.one_hot(tokens, VOCAB).float()

    def unembed(self, states):
        return states


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Eagle(Eagle.Config(hidden_size=VOCAB, vocab_size=VOCAB, inner=8))


def texts(count=2, length=5):
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(VOCAB, (count, length), generator=generator),
        "hidden": torch.randn(count, length, VOCAB, generator=generator),
        "weights": torch.ones(count, length),
    }


def guessed(head, batch, before):
    return head(batch["input_ids"], before, TableEnds().embed)


def test_it_reads_the_state_before_each_token_and_guesses_the_one_at_it(head):
    batch = texts()
    before = torch.cat([torch.zeros(2, 1, VOCAB), batch["hidden"][:, :-1]], 1)
    said, true = guessed(head, batch, before)[:, :-1], batch["hidden"][:, :-1]
    entropy = -(true.softmax(-1) * said.log_softmax(-1)).sum(-1).mean()
    loss, right = head.learn(batch, TableEnds())
    assert torch.allclose(loss, F.smooth_l1_loss(said, true) + LAW * entropy, atol=1e-6)
    hits = (said.argmax(-1) == batch["input_ids"][:, 1:]).float().mean()
    assert torch.allclose(right["right"], hits)


def test_disturbed_states_are_read_and_true_ones_are_learnt(head):
    batch = texts()
    loss, _ = head.learn(batch, TableEnds())
    same, _ = head.learn({**batch, "read": batch["hidden"].clone()}, TableEnds())
    other, _ = head.learn({**batch, "read": batch["hidden"] + 1.0}, TableEnds())
    assert torch.equal(loss, same) and not torch.allclose(loss, other)


def test_prompts_and_padding_do_not_count(head):
    batch = texts()
    batch["weights"] = torch.tensor([[0.0, 0, 1, 1, 0]] * 2)
    loss, _ = head.learn(batch, TableEnds())
    batch["hidden"][:, 3:] += 1.0  # after the last state from which a counted token was said
    later, _ = head.learn(batch, TableEnds())
    assert torch.equal(loss, later)
    batch["hidden"][:, 1] += 1.0
    assert not torch.allclose(loss, head.learn(batch, TableEnds())[0])


def test_the_chosen_token_changes_the_guess(head):
    batch = texts()
    before = torch.zeros(2, 5, VOCAB)
    other = {**batch, "input_ids": (batch["input_ids"] + 1) % VOCAB}
    assert not torch.allclose(guessed(head, batch, before), guessed(head, other, before))


def test_the_draft_is_the_papers_tree():
    assert len(EAGLE_TREE) == len(set(EAGLE_TREE)) == 25
    assert Template(EAGLE_TREE).depth == 5
    assert {path[:-1] for path in EAGLE_TREE} <= {(), *EAGLE_TREE}, "closed upwards"
    target = TableLM.random(VOCAB, seed=2, scale=0.5)
    engine = assemble(
        "eagle", target, draft_head=random_head("eagle", VOCAB, VOCAB), preset="paper"
    )
    [row] = seeded_rows([[1, 2, 3]], SamplingParams(max_new_tokens=50), VOCAB)
    engine.submit(row)
    step = engine.step()
    by_depth = [0] * 6
    for depth in step.drafts[0].tree.depths():
        by_depth[depth] += 1
    assert by_depth == [1, 4, 8, 8, 3, 2]
    engine.close()

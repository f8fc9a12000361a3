"""Prompts fed in batches and in chunks, embeddings and the output head: those of the model."""

import random

import pytest
import torch
from families import FURTHER, REQUIRED
from play import closeness, fresh_tree, point, random_tokens, random_tree, row_of

from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import cached
from foretoken.lm.table import TableLM
from foretoken.types import FinalNorm, Layer

CLOSE = 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "bloom", "phi3_longrope"])
@pytest.mark.parametrize("limit", [None, 7])
def test_prompts_side_by_side_and_in_chunks_leave_the_same_cache(
    family, limit, make_tiny, monkeypatch
):
    """The last features are those of a forward over the whole prompt, however it was cut."""
    monkeypatch.setattr(cached, "CHUNK", 24)
    monkeypatch.setattr(cached, "NARROW", 8)
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    rows = [row_of(random_tokens(dice, count)) for count in (1, 45, 30, 33)]
    assert [lm.missing(row) for row in rows] == [0, 44, 29, 32]
    shown = [torch.zeros(0, 2, 64) for _ in rows]
    waiting = rows
    while waiting:
        fed = lm.prefill(waiting, (Layer(0), FinalNorm()), limit=limit, last=5)
        for row, states in zip(waiting, fed, strict=True):
            at = rows.index(row)
            assert len(states) <= 5
            shown[at] = torch.cat([shown[at], states])[-5:]
        waiting = [row for row in rows if lm.missing(row)]
    for row, states in zip(rows, shown, strict=True):
        alone = open_lm(model, kernels="dense")
        [right] = alone.prefill([row_of(row.tokens)], (Layer(0), FinalNorm()))
        assert states.shape == right[-5:].shape
        if len(right) and family != "phi3_longrope":
            assert closeness(states, right[-5:]) < CLOSE
    if lm.plan.tree and family != "phi3_longrope":
        trees = [random_tree(dice, row.tokens[-1], 5) for row in rows]
        for row, tree, score in zip(
            rows, trees, lm.score(rows, [point(t) for t in trees]), strict=True
        ):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE


def test_a_table_takes_prompts_in_chunks_too():
    table = TableLM.random(4)
    rows = [row_of([0, 1, 2, 3, 1]), row_of([2, 2])]
    first = table.prefill(rows, (FinalNorm(),), limit=2)
    assert [len(states) for states in first] == [2, 1]
    assert [table.missing(row) for row in rows] == [2, 0]
    [rest] = table.prefill(rows[:1], (FinalNorm(),), last=1)
    assert torch.equal(rest[0, 0], table.after([0, 1, 2, 3]))
    assert table.cached(rows[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("family", [*REQUIRED, *FURTHER])
def test_embeddings_and_the_head_are_the_models_own(family, make_tiny):
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    row = row_of([5, 8, 13, 21])
    lm.prefill([row])
    [score] = lm.score(
        [row], [point(random_tree(random.Random(0), 21, 5))], (FinalNorm(), Layer(-1))
    )
    assert closeness(lm.unembed(score.hidden[:, 0]), score.logits) < CLOSE
    assert closeness(lm.read_out(score.hidden[:, 1]), score.logits) < CLOSE
    with torch.inference_mode():
        right = model.get_input_embeddings()(torch.tensor(row.tokens))
    assert torch.equal(lm.embed(row.tokens), right)


def test_a_tables_embeddings_are_its_tokens():
    table = TableLM.random(4)
    assert table.embed([2, 0]).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert torch.equal(table.unembed(table.after([1])[None])[0], table.after([1]))

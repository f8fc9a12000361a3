"""Forests in a cache: fed, pruned and fed again, they say what fresh forwards say."""

from __future__ import annotations

import random

import pytest
from play import closeness, fresh, random_tokens, row_of

from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.branches import feed, prune
from foretoken.lm.table import TableLM
from foretoken.trees.forest import Beam, BeamRow

FAMILIES = ("llama", "llama_one_kv", "gemma2", "mistral", "gpt2", "gptj", "phi3_longrope")
CLOSE = 2e-5


def play(lm, truth, prompts, seed, rounds=8) -> int:
    """Grow and prune random forests of several rows; every fed node is compared."""
    dice = random.Random(seed)
    rows = [BeamRow(row_of(prompt), 3) for prompt in prompts]
    for row in rows:
        lm.prefill([row.state])
    compared = 0
    for _ in range(rounds):
        drafts = []
        for row in rows:  # random texts of one length below the beams
            ends = [beam.node for beam in row.beams]
            for _ in range(dice.randrange(1, 4)):
                ends = [
                    row.forest.child(dice.choice(ends), dice.randrange(min(4, lm.vocab_size)))
                    for _ in range(3)
                ]
            drafts.append(sorted(set(ends)))
        wanted = [
            sorted({beam.node for beam in row.beams} | {*draft[:1]})
            for row, draft in zip(rows, drafts, strict=True)
        ]
        held = [row.columns for row in rows]
        states, forests = [row.state for row in rows], [row.forest for row in rows]
        logits = feed(lm, states, forests, held, wanted)
        for row, nodes, said in zip(rows, wanted, logits, strict=True):
            for node, one in zip(nodes, said, strict=True):
                right = truth([*row.state.tokens, *row.forest.text(node)])
                assert closeness(one, right) < CLOSE
                compared += 1
        cuts = [
            row.settle([Beam(node, 0.0, 0.0) for node in dice.sample(draft, len(draft))])
            if dice.random() < 0.7
            else row.settle([Beam(draft[0], 0.0, 0.0)])
            for row, draft in zip(rows, drafts, strict=True)
        ]
        prune(lm, states, held, cuts)
    lm.free([row.state for row in rows])
    return compared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_cache_says_what_fresh_forwards_say(make_tiny, family) -> None:
    """Windows count from pruned positions, scaled positions cross their switch at 40 tokens."""
    model = make_tiny(family)
    dice = random.Random(family)
    prompts = [random_tokens(dice, count) for count in (30, 1, 9)]
    with open_lm(model, kernels="dense") as lm:
        assert play(lm, lambda tokens: fresh(model, tokens)[-1], prompts, family) > 20


def test_a_table_that_is_pruned_wrongly_says_so() -> None:
    lm = TableLM.random(5)
    assert play(lm, lm.after, [[1, 2, 3], [4]], 0, rounds=20) > 40
    row = row_of([1, 2])
    lm.prefill([row])
    lm.grow([row], [[2, 3, 4, 1]], [[-1, 0, 0, 1]])
    for kept, settled in (([0, 3], 0), ([0, 1, 2], 2), ([1], 0), ([1, 0], 0)):
        with pytest.raises(AssertionError):
            lm.prune([row], [kept], [settled])

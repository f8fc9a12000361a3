"""Greedy text through the cache is the text of `generate`, token for token, on every family."""

import copy
import random
from typing import Any

import pytest
import torch
from families import CHAINS, FURTHER, REQUIRED, SCALED, slowly
from play import random_tokens

from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine, decode
from foretoken.lm.opening import open_lm
from foretoken.trees.build import chain, from_paths
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, Shape, Traits
from foretoken.verifiers.point import Point
from foretoken.warp import Warp


class Knowing(RowDrafter):
    """Drafts from the known text with mistakes: right, wrong and half-right paths, by chance."""

    def __init__(self, texts: dict[int, list[int]], trees: bool, seed: int) -> None:
        self.texts, self.trees, self.dice = texts, trees, random.Random(seed)
        self.traits = Traits(shape=Shape.TREE if trees else Shape.CHAIN)

    def propose_one(self, row, budget):
        right = self.texts[row.uid][len(row.tokens) :][: budget.depth]
        paths = [self.spoiled(right) for _ in range(3 if self.trees else 1)]
        root = row.tokens[-1]
        tree = from_paths(root, paths) if self.trees else chain(root, paths[0])
        return Draft(tree, Draw.POINT)

    def spoiled(self, right: list[int]) -> list[int]:
        """The right path up to a random depth, then noise of random length."""
        good = self.dice.randrange(len(right) + 1)
        return right[:good] + random_tokens(self.dice, self.dice.randrange(3))


def truth(model, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        ids = torch.tensor([prompt])
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
    return ids[0].tolist()


def greedy_row(prompt: list[int], count: int) -> DecodeState:
    params = SamplingParams(max_new_tokens=count)
    warp = Warp(params, len(prompt), 97)
    return DecodeState(list(prompt), len(prompt), params, SeededCoins(0), warp)


@pytest.mark.parametrize("family", [*REQUIRED, *slowly([*SCALED, *FURTHER, *CHAINS])])
def test_greedy_text_equals_generate(family, make_tiny):
    """Windows of 8 and a longrope switch at 40 lie well inside the text."""
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    prompts = [random_tokens(dice, count) for count in (1, 30, 7)]
    counts = (80, 80, 30)
    texts = [truth(model, *asked) for asked in zip(prompts, counts, strict=True)]
    rows = [greedy_row(*asked) for asked in zip(prompts, counts, strict=True)]
    trees = lm.caps.tree == "mask"
    drafter = Knowing({r.uid: t for r, t in zip(rows, texts, strict=True)}, trees, seed=2)
    drafter.trees = trees
    steps = list(decode(rows, Engine(lm, drafter, Point(), Fixed()), max_rows=2))
    assert [row.tokens for row in rows] == texts
    assert len(steps) < 80  # guesses were accepted: the first two rows take 80 steps without
    assert lm.rows_held == 0


def shaken(model: Any) -> Any:
    """A draft that agrees with `model` often, not always."""
    draft, noise = copy.deepcopy(model), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=noise)
    return draft


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", REQUIRED)
def test_long_greedy_text_equals_generate(family, make_tiny, count=2000):
    """2,000 tokens after prompts of 1 to 300, by every method, alone and in a ragged batch."""
    dice = random.Random(family)
    model = make_tiny(family)
    lengths = [1, 300, *(dice.randrange(1, 301) for _ in range(14))]
    prompts = [random_tokens(dice, length) for length in lengths]
    texts = [truth(model, prompt, count) for prompt in prompts]
    target = open_lm(model, kernels="dense")
    draft = open_lm(shaken(model), name="draft", kernels="dense")
    for method in ("chain", "tree", "prompt-lookup"):
        helper = None if method == "prompt-lookup" else draft
        engine = assemble(method, target, helper, controller="fixed")
        for some in ([0], [1], range(16)):
            rows = [greedy_row(prompts[i], count) for i in some]
            steps = sum(1 for _ in decode(rows, engine, max_rows=16))
            assert [row.tokens for row in rows] == [texts[i] for i in some], method
            assert steps < count  # something was accepted

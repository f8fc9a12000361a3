"""A draft left early where it is sure: the text is the target's own, whatever the thresholds."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import foretoken
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.draft_exits import NAME, Exits
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.training.online.draft import OnlineDraft

DRAFTED = ("chain", "tree", "pearl", "mcsd", "rsd-c", "rsd-s", "spectr")
VOCAB = 80
PROMPTS = [[5, 9, 2, 41, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
EXITS = Exits((1, 2, 3), (0.6, 0.6))


@pytest.fixture(scope="module")
def targets(make_llama):
    """A target, and another one that is like it."""
    one = make_llama(VOCAB, num_hidden_layers=3)
    return one, stirred(one, 1)


@pytest.fixture(scope="module")
def folder(targets, tmp_path_factory):
    where = tmp_path_factory.mktemp("sorted")
    stirred(targets[0], 2).save_pretrained(where)
    (where / NAME).write_text(EXITS.text())
    return where


def stirred(model, seed):
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return found


def session(target, method, draft, **options):
    return foretoken.load(target, method, draft, kernels="dense", depth=3, **options)


@pytest.mark.parametrize("method", DRAFTED)
def test_greedy_text_is_the_targets_with_any_thresholds(targets, folder, method):
    rng, left, accepted = random.Random(method), set(), 0
    with foretoken.load(targets[0], "plain", kernels="dense") as plain:
        texts = [result.tokens for result in plain.generate(PROMPTS, 24)]
    for few in (None, list(range(0, VOCAB, 2))):
        asked = tuple(rng.uniform(0.4, 0.9) for _ in range(2))
        with session(
            targets[0], method, folder, draft_thresholds=asked, draft_vocabulary=few
        ) as fast:
            together = fast.generate(PROMPTS, 24)
            assert [result.tokens for result in together] == texts
            assert fast.generate(PROMPTS[0], 24).tokens == texts[0]
            accepted += sum(result.stats.accepted for result in together)
            left |= set(fast.draft.left)
    assert len(left) == 3  # exits were taken, and passed
    assert accepted > 0


@pytest.mark.parametrize("method", DRAFTED)
def test_sampled_text_is_what_a_row_writes_alone(targets, folder, method):
    with session(targets[0], method, folder, draft_thresholds=0.5) as fast:
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
        together = fast.generate(PROMPTS, 16, **options)
        for i, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
            assert fast.generate(prompt, 16, **{**options, "seed": 3 + i}).tokens == text.tokens
        assert len(fast.draft.left) > 1


@pytest.mark.parametrize(("thresholds", "layers"), [((0.0, 0.5), 1), ((2.0, 0.0), 2), (2.0, 3)])
@pytest.mark.parametrize("method", ["chain", "tree", "rsd-s"])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_at_the_ends_of_the_thresholds_it_drafts_as_its_part(
    targets, folder, tmp_path, thresholds, layers, method, temperature
):
    """The same drafts, candidate by candidate, as an ordinary draft of so many layers."""
    part = copy.deepcopy(stirred(targets[0], 2))
    part.model.layers = part.model.layers[:layers]
    part.config.num_hidden_layers = layers
    part.save_pretrained(tmp_path)
    seen = []
    for draft, options in ((tmp_path, {}), (folder, {"draft_thresholds": thresholds})):
        with session(targets[0], method, draft, **options) as fast:
            rows = fast.rows(PROMPTS, 16, temperature=temperature, seed=[1, 2, 3])
            told = []
            fast.decode(rows, lambda step, at, told=told: told.append(step.drafts[at].tree))
            seen.append((told, [row.tokens for row in rows]))
    assert seen[0] == seen[1]


def test_one_draft_serves_two_targets(targets, folder):
    for target in targets:
        with foretoken.load(target, "plain", kernels="dense") as plain:
            texts = [result.tokens for result in plain.generate(PROMPTS, 24)]
        with session(target, "chain", folder) as fast:
            found = fast.generate(PROMPTS, 24)
        assert [result.tokens for result in found] == texts
        assert sum(result.stats.accepted for result in found) > 5


def test_the_folder_says_how_and_the_caller_may_say_otherwise(targets, folder, make_llama):
    with session(targets[0], "chain", folder) as fast:
        assert isinstance(fast.draft, SortedExits)
        assert fast.draft.exits == EXITS
    with session(targets[0], "chain", folder, draft_thresholds="off") as fast:
        assert not isinstance(fast.draft, SortedExits)
    with pytest.raises(ConfigError, match="takes 2 of them"):
        session(targets[0], "chain", folder, draft_thresholds=(0.5,) * 3)
    with pytest.raises(ConfigError, match="one exit"):
        session(targets[0], "chain", targets[1], draft_thresholds=0.5)


def test_a_draft_that_is_left_at_its_exits_does_not_learn_while_it_serves(targets, folder):
    with session(targets[0], "chain", folder) as fast:
        with pytest.raises(CapabilityError, match="draft_thresholds=off"):
            OnlineDraft(fast)
        assert fast.generate(PROMPTS[0], 8).stats.drafted > 0
    with (
        session(targets[0], "chain", folder, draft_thresholds="off") as whole,
        OnlineDraft(whole) as online,
    ):
        assert online.steps == 0

"""The size of a draft vocabulary follows from what was measured."""

from __future__ import annotations

import pytest
import torch

from foretoken.lm.table import TableLM
from foretoken.training.reduced_vocabulary import (
    Text,
    costs_between,
    guesses,
    parted,
    quality,
    ranked,
    sizes_to_try,
    worth,
)


def test_ids_that_must_be_there_come_first_then_the_frequent_then_the_rest():
    texts = [Text([9, 9, 5, 5, 5, 2], 2), Text([2, 7], 0)]
    assert ranked(texts, [8, 40], 10) == [8, 5, 2, 7, 0, 1, 3, 4, 6, 9]


def test_sizes_are_powers_of_two_and_all():
    assert sizes_to_try(4096, 10) == [512, 1024, 2048, 4096]
    assert sizes_to_try(5000, 700) == [1024, 2048, 4096, 5000]
    assert sizes_to_try(300, 3) == [300]


def test_guesses_are_the_drafts_own_laws_after_the_text():
    table = TableLM.random(7, seed=3)
    texts = [Text([1, 2, 3, 4, 5], 2), Text([6, 6], 0)]
    logits, said = guesses(table, texts)
    assert said.tolist() == [3, 4, 5, 6]
    expected = [table.after(before) for before in ([1, 2], [1, 2, 3], [1, 2, 3, 4], [6])]
    assert torch.allclose(logits, torch.stack(expected).float())


def test_quality_counts_what_can_be_guessed_and_what_is():
    logits = torch.eye(4)[[0, 1, 2, 3]]
    said = torch.tensor([0, 1, 3, 3])
    assert quality(logits, said, range(4)) == (1.0, 0.75)
    assert quality(logits, said, [0, 1]) == (0.5, 0.5)


def test_a_cheap_draft_goes_deeper_and_a_poor_one_is_not_worth_it():
    target = {n: 10.0 + 0.1 * n for n in range(1, 10)}
    cheap = {depth: 0.1 * depth for depth in (1, 2, 3, 4, 6, 8)}
    dear = {depth: 4.0 * depth for depth in (1, 2, 3, 4, 6, 8)}
    assert worth(0.8, target, cheap)[0] > worth(0.8, target, dear)[0]
    assert worth(0.0, target, dear) == (0, pytest.approx(1 / 10.1))
    assert worth(0.8, target, cheap)[1] > worth(0.7, target, cheap)[1]


def test_costs_between_measured_sizes_lie_on_the_line():
    assert costs_between({1: 1.0, 3: 2.0}, [1, 2, 3, 9]) == {1: 1.0, 2: 1.5, 3: 2.0, 9: 2.0}


@pytest.mark.parametrize("count", [2, 5, 25])
def test_texts_to_judge_by_are_not_counted(count):
    texts = [Text([i], 0) for i in range(count)]
    counted, held_out = parted(texts)
    assert len(counted) + len(held_out) == count and counted and held_out
    assert not {t.tokens[0] for t in counted} & {t.tokens[0] for t in held_out}

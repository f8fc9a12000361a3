"""The candidates of the greedy multi-draft rule: the best of q, and what is left to draw from."""

from __future__ import annotations

import pytest
import torch

from foretoken.trees.mixed import best_and_rest, sampled_and_fixed

Q = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)


def test_the_best_are_fixed_and_the_rest_is_a_law() -> None:
    best, rest = best_and_rest(Q, 2)
    assert best == [1, 3]
    torch.testing.assert_close(rest, torch.tensor([1 / 3, 0.0, 2 / 3, 0.0], dtype=torch.float64))
    assert Q[1] == 0.4, "the law handed in is left as it was"


def test_one_candidate_is_an_ordinary_draw() -> None:
    best, rest = best_and_rest(Q, 0)
    assert best == [] and torch.equal(rest, Q)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_a_law_that_runs_out_leaves_nothing_to_draw(count: int) -> None:
    best, rest = best_and_rest(torch.tensor([0.0, 0.7, 0.0, 0.3]), count)
    assert best == [1, 3], "impossible tokens are no candidates"
    assert float(rest.sum()) == 0.0


def test_the_stored_law_says_which_child_was_drawn() -> None:
    _, rest = best_and_rest(Q, 2)
    tokens = (0, 1, 3, 2)
    assert sampled_and_fixed(tokens, [1, 2, 3], rest) == (3, [1, 2])
    assert sampled_and_fixed(tokens, [1, 2], rest) == (None, [1, 2])
    with pytest.raises(AssertionError):
        sampled_and_fixed(tokens, [1, 2, 3], Q)

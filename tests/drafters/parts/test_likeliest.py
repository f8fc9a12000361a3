"""Found in blocks or in one search: the same tokens."""

import pytest
import torch

from foretoken.drafters.parts.likeliest import BLOCK, MANY, likeliest


@pytest.mark.parametrize("vocab", [20, BLOCK * MANY * 8, BLOCK * MANY * 8 + 3, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_tokens_are_found_in_blocks(vocab, dtype):
    torch.manual_seed(0)
    scores = torch.randn(5, vocab, dtype=dtype)
    scores[0, -8:] = 9.0 + torch.arange(8, dtype=dtype)  # behind the last whole block
    scores[1, :8] = 9.0 - torch.arange(8, dtype=dtype)  # all in one
    values, ids = likeliest(scores, 8)
    expected, places = scores.topk(8)
    assert torch.equal(values, expected) and torch.equal(ids, places)


def test_rows_of_a_larger_tensor_and_equal_scores_are_no_trouble():
    scores = torch.zeros(3, 50_000).bfloat16()[:, 100:-7]
    values, ids = likeliest(scores, 8)
    assert set(values.flatten().tolist()) == {0.0}
    assert all(len(set(row)) == 8 for row in ids.tolist())

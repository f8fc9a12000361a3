"""Found in blocks or in one search: the same tokens."""

import pytest
import torch

from foretoken.drafters.parts.likeliest import BLOCK, MANY, followers, likeliest


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [40, 5000])
def test_followers_have_their_share_among_themselves(dtype, vocab):
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)).to(dtype)
    ids, shares = followers(scores, 5)
    values, wanted = scores.topk(5)
    assert torch.equal(scores.gather(1, torch.tensor(ids)), values)
    softmax = values.float().softmax(-1)
    torch.testing.assert_close(torch.tensor(shares), softmax, rtol=1e-5, atol=1e-7)
    assert ids == wanted.tolist() or dtype is torch.bfloat16, "equals may come in any order"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_follows_where_nothing_is_finite(dtype):
    scores = torch.full((3, 600), -float("inf"), dtype=dtype)
    scores[1, 7] = 0.0
    scores[2, 9] = float("inf")
    ids, shares = followers(scores, 3)
    assert shares == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert ids[1][0] == 7

"""The likeliest columns of rows of logits: those of torch's softmax and topk, wherever they lie."""

from __future__ import annotations

import pytest
import torch

from foretoken.native import library as module
from foretoken.native.best_columns import MOST, best_columns, first_columns, largest_columns
from foretoken.native.library import NARROW, Library, library

in_c = pytest.mark.skipif(not isinstance(library(), Library), reason="no operations in C here")
TYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [12, NARROW, NARROW + 129, 5000])
@pytest.mark.parametrize(("rows", "count", "temperature"), [(1, 8, 1.0), (5, 12, 0.7), (3, 1, 2.0)])
def test_they_are_those_of_softmax_and_topk(dtype, width, rows, count, temperature):
    torch.manual_seed(width + rows)
    logits = (4 * torch.randn(rows, width + 7)).to(dtype)[:, :width]  # rows lie apart
    ids, chances = best_columns(logits, count, temperature)
    law = (logits.double() / temperature).softmax(-1)
    best = law.topk(count).values
    torch.testing.assert_close(torch.tensor(chances).double(), best, rtol=1e-4, atol=1e-7)
    found = law.gather(1, torch.tensor(ids))  # equal logits may come in any order
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-7)
    assert all(len(set(row)) == count for row in ids)


@pytest.mark.parametrize("width", [12, 4096])
def test_columns_are_told_by_their_names(width):
    logits = torch.arange(width).float()[None]
    names = 3 * torch.arange(width)
    ids, _ = best_columns(logits, 4, names=names)
    assert ids == [[3 * (width - 1 - i) for i in range(4)]]


def test_the_first_of_equals_comes_first():
    logits = torch.zeros(1, 2 * NARROW)
    logits[0, [300, 40, 7]] = 1.0
    ids, _ = best_columns(logits, 5)
    assert ids == [[7, 40, 300, 0, 1]]


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf")])
def test_nothing_is_likely_where_there_is_no_law(dtype, odd):
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 3] = odd
    _, (sound, none) = best_columns(logits, 3)
    assert all(chance > 0 for chance in sound)
    assert not any(chance > 0 for chance in none)
    _, [forbidden] = best_columns(torch.full((1, 1000), -float("inf"), dtype=dtype), 3)
    assert not any(chance > 0 for chance in forbidden)


def test_what_cannot_be_had_in_c_is_left_to_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "operation", lambda *what: asked.append(what))
    turned = torch.randn(1000, 2).t()  # columns lie apart
    for logits, count in ((torch.randn(2, 1000), MOST + 1), (turned, 3), (torch.randn(2, 9), 3)):
        best_columns(logits, count)
    assert asked == [("law", torch.float32)], "of more columns than are kept, torch takes the best"
    ids, _ = best_columns(torch.randn(2, 1000), 3)
    assert asked and len(ids) == 2


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("width", [NARROW, NARROW + 77, 49152])
def test_the_first_of_the_largest_is_that_of_argmax(dtype, width):
    logits = torch.randn(5, width + 3, generator=torch.Generator().manual_seed(width))
    logits = logits.to(dtype)[:, :width]
    logits[1, width - 1] = logits[1].max() + 1  # the last of all
    logits[2] -= 100  # none above zero
    logits[3, [200, 31, width - 2]] = 50.0  # equals
    logits[4] = -float("inf")
    logits[0, 3], logits[0, 7] = -float("inf"), float("inf")  # their sum is no number
    found = first_columns(logits)
    if found is None:
        pytest.skip("no operations in C here")
    assert found == [row.argmax().item() for row in logits[:4].double()] + [0]
    assert found[3] == 31


@pytest.mark.parametrize("place", [0, 100, 299])
@pytest.mark.parametrize("odd", [float("nan"), -float("nan")])
def test_no_column_is_the_largest_where_a_number_is_none(place, odd):
    for dtype in TYPES[:2]:
        logits = torch.zeros(2, 300, dtype=dtype)
        logits[1, place] = odd
        found = first_columns(logits)
        assert found in (None, [0, -1])


@in_c
@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize(("rows", "width", "count"), [(1, NARROW, 8), (5, 4099, 3), (3, 49152, 64)])
def test_the_largest_are_those_of_topk(dtype, rows, width, count):
    logits = torch.randn(rows, width + 5, generator=torch.Generator().manual_seed(width))
    logits = logits.to(dtype)[:, 2 : width + 2]
    ids, values = largest_columns(logits, count)
    wanted = logits.float().topk(count).values
    assert torch.equal(torch.tensor(values), wanted)
    assert torch.equal(logits.float().gather(1, torch.tensor(ids)), wanted)
    assert all(len(set(row)) == count for row in ids)


@in_c
@pytest.mark.parametrize("dtype", TYPES[:2])
def test_what_is_no_number_hides_no_other_one(dtype):
    """One that stands in the same lane of a register, where blocks may be passed over."""
    logits = torch.linspace(0, 0.2, 1024).flip(0).to(dtype)[None]
    for at in range(256, 320, 16):
        logits[0, at] = float("nan")
        logits[0, at + 16] = 100.0
        assert largest_columns(logits, 3)[0][0][0] == at + 16
        logits[0, at + 16] = 0.0


@in_c
def test_where_few_are_numbers_the_others_have_no_column():
    logits = torch.full((2, NARROW), float("nan"))
    logits[1, [9, 4]] = torch.tensor([1.0, 2.0])
    ids, values = largest_columns(logits, 3)
    assert ids == [[-1, -1, -1], [4, 9, -1]]
    assert values[1] == [2.0, 1.0, -float("inf")]


@in_c
def test_the_largest_of_what_c_cannot_read_are_not_told():
    wide = torch.randn(2, 1000)
    assert largest_columns(wide.double(), 3) is None
    assert largest_columns(wide, MOST + 1) is None
    assert largest_columns(torch.randn(1000, 2).t(), 3) is None

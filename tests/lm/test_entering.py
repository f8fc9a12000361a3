"""What enters a head's decoder, in one call in C: what its modules and its table say."""

from threading import Thread

import pytest
import torch
from torch import nn

from foretoken.lm.kernels.choosing import take_native
from foretoken.lm.kernels.entering import Entering
from foretoken.native.library import operation

READS, WIDTH, VOCAB = 192, 96, 50

pytestmark = pytest.mark.skipif(
    operation("segment", torch.float32) is None, reason="no compiler for operations in C"
)


class Fusing(nn.Module):
    """A map, a norm and a map of random weights, their products in C as those of a head are."""

    def __init__(self, dtype, width=WIDTH, reads=READS):
        super().__init__()
        torch.manual_seed(3)
        self.fuse = nn.Linear(reads, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.join = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.norm.weight)
        self.table = torch.randn(VOCAB, width, dtype=dtype)
        self.to(dtype)
        take_native(self)

    def one_call(self):
        return Entering.of(self.fuse, self.norm, self.join, self.table)

    @torch.inference_mode()
    def forward(self, states, tokens):
        made = self.join(self.norm(self.fuse(states.flatten(1))))
        return nn.functional.embedding(torch.tensor(tokens), self.table) + made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 7, Entering.most])
def test_it_is_bit_for_bit_what_the_modules_say(dtype, count):
    of = Fusing(dtype)
    states = torch.randn(count, 3, READS // 3, dtype=dtype)
    tokens = torch.randint(VOCAB, (count,)).tolist()
    entering = of.one_call()
    assert entering.takes(states)
    with torch.inference_mode():
        assert torch.equal(entering(states, tokens), of(states, tokens))


def test_states_that_do_not_lie_side_by_side_are_read_as_they_are():
    of = Fusing(torch.float32)
    states = torch.randn(3, READS // 3, 5).transpose(0, 2)
    with torch.inference_mode():
        assert torch.equal(of.one_call()(states, [1, 2, 3, 4, 5]), of(states, [1, 2, 3, 4, 5]))


def test_what_it_gave_stays_as_it_was():
    """The next call makes numbers of its own."""
    of = Fusing(torch.float32)
    entering = of.one_call()
    first = entering(torch.ones(2, READS), [0, 1])
    kept = first.clone()
    entering(torch.zeros(2, READS), [2, 3])
    assert torch.equal(first, kept)


def test_what_it_cannot_read_is_left_to_the_modules():
    assert Fusing(torch.float32, width=40).one_call() is None
    assert Fusing(torch.float64).one_call() is None
    of = Fusing(torch.bfloat16)
    assert Entering.of(of.fuse, of.norm, of.join, of.table.float()) is None
    entering = of.one_call()
    assert not entering.takes(torch.zeros(Entering.most + 1, READS, dtype=torch.bfloat16))
    assert not entering.takes(torch.zeros(0, READS, dtype=torch.bfloat16))
    assert not entering.takes(torch.zeros(2, READS))


def test_a_token_without_a_row_is_refused():
    entering = Fusing(torch.float32).one_call()
    for token in (VOCAB, -1):
        with pytest.raises(IndexError, match="not all below 50"):
            entering(torch.zeros(2, READS), [0, token])


def test_every_thread_may_have_its_own():
    """One for each drafter, over the same modules."""
    of = Fusing(torch.float32)
    states, tokens = torch.randn(6, READS), [5, 4, 3, 2, 1, 0]
    right, found = of(states, tokens), []

    def ask():
        own = of.one_call()
        found.extend(own(states, tokens) for _ in range(50))

    threads = [Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100 and all(torch.equal(one, right) for one in found)

"""What all tests of training stand on."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny products are slower on several threads, and round otherwise: texts would differ that a
    target draws, and what is learned of them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

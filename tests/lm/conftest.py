import pytest
import torch
from families import tiny


@pytest.fixture(scope="session")
def make_tiny():
    """Makes random tiny models by family: `make_tiny("qwen3", seed=1)`."""
    return tiny


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products are slower on several threads, and equal ones should round alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Sessions over the tiny pair, and servers around them."""

import copy
import sys
from pathlib import Path

import pytest
from live_server import DENSE, running

import foretoken

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # requests of every kind


@pytest.fixture(scope="session")
def chatty(byte_tokenizer):
    """The tokenizer with a chat template."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def make_session(tiny_pair, chatty):
    """Makes sessions over the tiny pair: `make_session(method, **options)`."""

    def make(method="chain", **options):
        target, draft = tiny_pair
        return foretoken.load(target, method, draft, chatty, **{**DENSE, **options})

    return make


@pytest.fixture(scope="session")
def served(make_session):
    """One server for all tests that only ask it for texts."""
    with make_session("chain", controller="fixed", depth=4) as session, running(session) as server:
        yield server


@pytest.fixture(name="running", scope="session")
def running_fixture():
    """Runs servers: `with running(session, **settings) as server`."""
    return running

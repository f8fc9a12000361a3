"""Memory that nothing uses any more goes back to the system once a server is idle."""

import os
import subprocess
import sys
from time import monotonic

import psutil
import pytest
import torch
from live_server import wait_for

from foretoken.lm.runtime.heap import c_library, give_back
from foretoken.serve import engine_thread

BLOCK, MANY = 64 * 1024, 2000  # too small to be mapped one by one; 125 MiB in all


def resident() -> int:
    return psutil.Process().memory_info().rss


def holes() -> tuple[list[torch.Tensor], int]:
    """Free pages between blocks that are held: these, and what was resident when all were. A server
    that rests meanwhile may have given pages back by the time that this returns."""
    found = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(MANY)]
    return found[:: MANY // 20], resident()


@pytest.mark.skipif(c_library() is None, reason="not glibc")
def test_free_pages_between_held_ones_are_given_back() -> None:
    kept, before = holes()
    give_back()
    assert before - resident() > 0.8 * BLOCK * MANY and len(kept) == 20


@pytest.mark.skipif(c_library() is None, reason="not glibc")
def test_a_server_without_work_gives_back_once(make_session, running, monkeypatch) -> None:
    monkeypatch.setattr(engine_thread, "AFTER", 0.05)
    with make_session("chain", controller="fixed") as session, running(session) as server:
        ask = {"prompt": "a", "max_tokens": 2}
        assert server.post("/v1/completions", json=ask).status_code == 200
        kept, before = holes()
        assert server.post("/v1/completions", json=ask).status_code == 200
        wait_for(lambda: before - resident() > 0.8 * BLOCK * MANY)
        assert server.post("/v1/completions", json=ask).status_code == 200 and len(kept) == 20


@pytest.mark.skipif(c_library() is None, reason="not glibc")
def test_a_server_that_never_rests_gives_back_now_and_then(
    make_session, running, monkeypatch
) -> None:
    monkeypatch.setattr(engine_thread, "BUSY", 0.05)
    with make_session("chain", controller="fixed") as session, running(session) as server:
        ask = {"prompt": "a", "max_tokens": 2}
        kept, before = holes()
        until = monotonic() + 10.0
        while before - resident() < 0.8 * BLOCK * MANY:  # never without work for AFTER seconds
            assert monotonic() < until
            assert server.post("/v1/completions", json=ask).status_code == 200
        assert len(kept) == 20


MANY_SIZES = """
import sys, psutil, torch
from foretoken.lm.runtime.heap import keep_few_products
if sys.argv[1] == "few":
    keep_few_products()
weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(96, 64), 16)
multiply = torch.ops.mkldnn._linear_pointwise.default
def met(sizes):
    for size in sizes:
        multiply(torch.ones(1, size, 64), weight, None, "none", [], "")
    return psutil.Process().memory_info().rss
before = met(range(100, 400))
print(met(range(400, 1000)) - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_products_of_many_sizes_are_not_all_kept() -> None:
    grown = {}
    free = {key: value for key, value in os.environ.items() if "CACHE_CAPACITY" not in key}
    for how in ("few", "all"):
        done = subprocess.run(
            [sys.executable, "-c", MANY_SIZES, how],
            env=free, capture_output=True, text=True, check=True,
        )  # fmt: skip
        grown[how] = int(done.stdout)
    assert grown["few"] < 0.3 * grown["all"], grown

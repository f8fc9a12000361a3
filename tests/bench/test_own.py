"""Our methods as rows: which part of their seconds is booked as what."""

import time

import pytest

from foretoken.bench.own import OwnRow
from foretoken.bench.rows import row_of
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.nothing import Nothing
from foretoken.engine.engine import CHUNK, Engine
from foretoken.lm.table import TableLM
from foretoken.types import SamplingParams
from foretoken.verifiers.point import Point

NAP = 0.02


@pytest.mark.parametrize("count", [1, 6])
def test_all_forwards_that_read_prompts_are_booked_as_such(count, monkeypatch) -> None:
    """Prompts of a chunk each do not all fit into one forward."""
    target, slept = TableLM.random(8), []
    read = target.prefill

    def slow(rows, *given, **options):
        slept.append(NAP if options["limit"] else 0.0)
        time.sleep(slept[-1])
        return read(rows, *given, **options)

    monkeypatch.setattr(target, "prefill", slow)
    row = OwnRow(row_of("plain", {}), Engine(target, Nothing(), Point(), Fixed(Fixed.Config())))
    params = SamplingParams(max_new_tokens=3, temperature=0.0)
    found = row.write_together([[1, 2] * (CHUNK // 2)] * count, [params] * count)
    assert len([nap for nap in slept if nap]) == (1 if count == 1 else 3)
    assert sum(slept) <= found.prefill < found.seconds - found.target

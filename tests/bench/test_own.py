"""Our methods as rows: which part of their seconds is booked as what, and how they are asked."""

import time

import pytest

from foretoken.bench import run as bench_run
from foretoken.bench.journal import Cell, cell_of
from foretoken.bench.metrics import row_record
from foretoken.bench.own import OwnRow, request
from foretoken.bench.rows import row_of
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import single
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.priced_chain import PricedChain
from foretoken.drafters.nothing import Nothing
from foretoken.engine.engine import CHUNK, Engine
from foretoken.lm.table import TableLM
from foretoken.types import SamplingParams
from foretoken.verifiers.point import Point

NAP = 0.02


def plain_row(target: TableLM) -> OwnRow:
    return OwnRow(row_of("plain", {}), Engine(target, Nothing(), Point(), Fixed(Fixed.Config())))


def bench(folders, out, methods: str, **changes: object) -> BenchConfig:
    return BenchConfig(
        target=folders[0], draft=folders[1], methods=methods, out=out,
        max_new_tokens=8, scoring_nodes=(1, 2), quiet=True, **changes,
    )  # fmt: skip


def tasks(count: int):
    return [single("the pen and a pin " * (n + 1), id=f"p{n}", family="qa") for n in range(count)]


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
    row = plain_row(target)
    params = SamplingParams(max_new_tokens=3, temperature=0.0)
    found = row.write_together([[1, 2] * (CHUNK // 2)] * count, [params] * count)
    assert len([nap for nap in slept if nap]) == (1 if count == 1 else 3)
    assert sum(slept) <= found.prefill < found.seconds - found.target


def test_a_seed_gives_the_same_draws_without_a_promise_to_repeat_them() -> None:
    """Rows that promise it do without the clock and each other, unlike those of most users."""
    engine = plain_row(TableLM.random(8)).engine
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    assert request([1], params, engine).repeatable is False
    texts = [plain_row(TableLM.random(8)).write([1], params).tokens for _ in range(2)]
    assert texts[0] == texts[1]


def test_sampled_rows_learn_from_one_prompt_to_the_next(
    pair_folders, tmp_path, monkeypatch
) -> None:
    known, opened = [], PricedChain.opened

    def noting(drafter, row):
        state = opened(drafter, row)
        known.append((drafter, state.experience))
        return state

    monkeypatch.setattr(PricedChain, "opened", noting)
    asked = bench(pair_folders, tmp_path, "chain", temperature=1.0, repetitions=1)
    assert run_bench(asked, tasks(2))["rows"]["chain"]["failed"] is None
    last = known[-1][0]
    _, *others = experiences = [found for drafter, found in known if drafter is last]
    assert others and all(found is experiences[0] for found in others)


def test_batches_are_measured_before_anything_is_timed(pair_folders, tmp_path, monkeypatch) -> None:
    inside, priced = [], []
    price, measured = Engine.price, bench_run.measure_cell

    def noting(engine, rows):
        priced.append(bool(inside))
        price(engine, rows)

    def timed(*given):
        inside.append(True)
        cell = measured(*given)
        inside.clear()
        return cell

    monkeypatch.setattr(Engine, "price", noting)
    monkeypatch.setattr(bench_run, "measure_cell", timed)
    asked = bench(pair_folders, tmp_path, "suffix", requests=3, repetitions=2)
    assert run_bench(asked, tasks(3))["rows"]["suffix"]["failed"] is None
    assert priced and not any(priced)


@pytest.fixture
def four() -> Cell:
    """A cell of four equal texts, of a target that takes a nap in every step's commit."""
    target = TableLM.random(8)
    commit = target.commit

    def slow(*given):
        time.sleep(NAP)
        return commit(*given)

    target.commit = slow
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    outcome = plain_row(target).write_together([[1, 2]] * 4, [params] * 4)
    return cell_of(outcome, row="plain", prompt="p + 3", family="qa", repetition=0, prompt_tokens=8)


def test_what_texts_written_at_once_wait_for_is_counted_once_a_step(four) -> None:
    found = row_record("plain", {"plain": [four]}, None, True)
    assert 1000 * NAP <= found["overhead_ms"] < 2000 * NAP
    assert found["accepted_length"]["with_prefill_token"] == pytest.approx(24 / 20)
    assert found["accepted_length"]["mean_over_requests"] == pytest.approx(1.0)


def test_texts_written_at_once_are_compared_one_by_one(four) -> None:
    other = [*four.tokens[:-2], 9, 9]
    changed = Cell(**{name: getattr(four, name) for name in Cell.__slots__} | {"tokens": other})
    found = row_record("chain", {"plain": [four], "chain": [changed]}, None, True)["text"]
    assert (found["equal"], found["of"]) == (3, 4)
    assert found["first_difference"] == {"p + 3, text 4": 3}

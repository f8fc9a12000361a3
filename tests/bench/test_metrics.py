"""The arithmetic of the table, on cells made by hand."""

import pytest

from foretoken.bench.intervals import interval, median_interval, ratio_interval
from foretoken.bench.journal import Cell
from foretoken.bench.metrics import first_difference, row_record, summarise


def cell(row: str, prompt: str, seconds: float, tokens: list[int], **more: object) -> Cell:
    more = {"family": "qa", "repetition": 0, "prompt_tokens": 5, **more}
    return Cell(row=row, prompt=prompt, seconds=seconds, tokens=tokens, **more)  # type: ignore[arg-type]


def plain(prompt: str, seconds: float = 2.0, **more: object) -> Cell:
    """Ten tokens, ten steps of 0.18 s after a prompt of 0.1 s, 0.01 s overhead each."""
    return cell(
        "plain", prompt, seconds, list(range(10)), prefill=0.1, draft=0.0,
        target=seconds - 0.2, steps=[[0, 0, 0, 1]] * 10, forwards=10, **more,
    )  # fmt: skip


def chain(prompt: str, seconds: float = 1.0, **more: object) -> Cell:
    """Ten tokens in four steps: all three guesses, one, two, one guess stand."""
    steps = [[3, 3, 3, 4], [3, 3, 1, 2], [3, 3, 2, 3], [2, 2, 1, 1]]
    more = {"tokens": list(range(10)), **more}
    return cell(
        "chain", prompt, seconds, prefill=0.1, draft=0.2, target=0.6, steps=steps, forwards=4,
        **more,
    )  # fmt: skip  # type: ignore[arg-type]


def record(cells: list[Cell], row: str = "chain", greedy: bool = True) -> dict:
    return summarise(cells, [row], greedy=greedy)["rows"][row]


def test_speeds_are_medians_and_speedups_ratios_of_medians() -> None:
    cells = [plain(p, s) for p, s in (("a", 2.0), ("b", 4.0), ("c", 5.0))]
    cells += [chain(p, s) for p, s in (("a", 1.0), ("b", 1.0), ("c", 5.0))]
    found = record(cells)
    assert found["tokens_per_second"]["value"] == pytest.approx(10.0)
    over = found["speedup"]["plain"]
    assert over["value"] == pytest.approx(10.0 / 2.5)
    assert over["median_of_ratios"] == pytest.approx(2.0)  # each prompt against itself
    assert over["total"] == pytest.approx((30 / 7) / (30 / 11))
    low, high = over["interval"]
    assert low <= over["value"] <= high


def test_repetitions_of_a_prompt_count_as_one_by_their_median() -> None:
    cells = [chain("a", s, repetition=n) for n, s in enumerate((1.0, 2.0, 100.0))]
    assert record(cells)["tokens_per_second"]["value"] == pytest.approx(5.0)


def test_only_prompts_that_both_rows_finished_are_compared() -> None:
    cells = [plain("a", 2.0), plain("b", 1.0), chain("a", 1.0), chain("c", 0.1)]
    over = record(cells)["speedup"]["plain"]
    assert over["prompts"] == 1 and over["value"] == pytest.approx(2.0)
    assert over["interval"] is None  # one prompt has no spread


def test_accepted_lengths_by_every_definition() -> None:
    found = record([chain("a"), chain("b")])["accepted_length"]
    assert found["emitted_per_forward"] == pytest.approx(10 / 4)
    assert found["accepted_without_bonus"] == pytest.approx(7 / 4)
    assert found["with_prefill_token"] == pytest.approx(11 / 4)
    assert found["mean_over_requests"] == pytest.approx(10 / 4)
    assert found["acceptance_rate"] == pytest.approx(7 / 11)


def test_histogram_and_acceptance_by_depth() -> None:
    found = record([chain("a")])
    assert found["histogram"]["emitted_per_step"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    assert found["histogram"]["accepted_per_step"] == {"1": 2, "2": 1, "3": 1}
    # Depth 2 was reached by all four and stood in two; depth 3 was drafted and reached by two.
    assert found["acceptance"]["conditional"] == pytest.approx([1.0, 0.5, 0.5])
    assert found["acceptance"]["joint"] == pytest.approx([1.0, 0.5, 0.25])


def test_shares_overhead_and_conversion() -> None:
    found = record([plain("a", 2.0), chain("a", 1.0)])
    assert found["shares"] == pytest.approx(
        {"prompt": 0.1, "draft": 0.2, "target": 0.6, "other": 0.1}
    )
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["overhead_ms"] == pytest.approx(25.0)  # 0.1 s over four steps
    assert found["conversion"] == pytest.approx(2.0 / 2.5)


def test_efficiency_is_what_the_loop_leaves_of_the_implied_speedup() -> None:
    found = record([plain("a", 2.0), chain("a", 1.0)])
    plain_step = 1.9 / 10
    implied = 2.5 * plain_step / ((0.2 + 0.6) / 4)
    assert found["implied_speedup"] == pytest.approx(implied)
    assert found["efficiency"] == pytest.approx((10 / 0.9) / (10 / 1.9) / implied)
    assert found["efficiency_whole"] == pytest.approx(2.0 / implied)


def test_text_is_compared_token_by_token_at_temperature_zero_only() -> None:
    cells = [plain("a"), plain("b"), chain("a"), chain("b", tokens=[0, 1, 9, 3])]
    found = record(cells)["text"]
    assert (found["equal"], found["of"]) == (1, 2)
    assert found["first_difference"] == {"b": 2}
    assert record(cells, greedy=False)["text"] is None
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_accuracy_counts_checkable_answers_only() -> None:
    cells = [chain("a", correct=True), chain("b", correct=False), chain("c")]
    assert record(cells)["accuracy"] == {"value": 0.5, "of": 2}
    assert record([chain("c")])["accuracy"] is None


def test_a_failed_row_stays_and_says_why() -> None:
    rows = summarise([plain("a")], ["plain", "tree", "chain"], failed={"tree": "no room"})["rows"]
    assert list(rows) == ["plain", "tree", "chain"]
    assert rows["tree"]["failed"] == "no room" and "tokens_per_second" not in rows["tree"]
    assert rows["chain"]["failed"] == "no cell was finished"
    assert rows["plain"]["failed"] is None


def test_a_row_that_failed_on_the_way_keeps_its_finished_cells() -> None:
    found = row_record("chain", {"chain": [chain("a")]}, "OutOfMemoryError: 3 GiB", True)
    assert found["failed"].startswith("OutOfMemory") and found["cells"] == 1


def test_the_best_rows_are_the_fastest_that_did_not_fail() -> None:
    cells = [plain("a", 2.0), chain("a", 0.5), cell("hf:plain", "a", 3.0, [1])]
    best = summarise(cells, ["plain", "chain", "hf:plain"], failed={"chain": "broke"})["best"]
    assert best == {"ours": "plain", "peer": "hf:plain"}


def test_families_are_reported_apart() -> None:
    cells = [plain("a"), plain("b", family="rag"), chain("a", 1.0), chain("b", 0.5, family="rag")]
    found = record(cells)["families"]
    assert found["qa"]["speedup"]["value"] == pytest.approx(2.0)
    assert found["rag"]["speedup"]["value"] == pytest.approx(4.0)


def test_intervals_cover_the_middle_and_repeat_themselves() -> None:
    values = [float(n) for n in range(40)]
    middle, span = median_interval(values)
    assert middle == pytest.approx(19.5) and span is not None
    assert 8 < span[0] < 17 and 22 < span[1] < 31
    assert median_interval(values) == (middle, span)


def test_paired_ratios_are_narrower_than_their_parts() -> None:
    base = [float(n) for n in range(1, 41)]
    value, span = ratio_interval([2 * b for b in base], base)
    assert value == pytest.approx(2.0) and span == pytest.approx((2.0, 2.0))
    assert interval(lambda at: 1.0, 2) is None

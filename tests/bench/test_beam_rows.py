"""Methods that write several scored texts, as rows beside those that write one."""

import pytest

from foretoken.bench import words
from foretoken.bench.journal import Cell
from foretoken.bench.metrics import summarise
from foretoken.bench.models import Models
from foretoken.bench.rows import parse_methods
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import single
from foretoken.types import SamplingParams

HOT = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3)
ROWS = "plain,beam-sampling[num_beams=3],dsbd[num_beams=3,depth=2]"


@pytest.fixture(scope="module")
def models(pair_folders):
    return Models(*pair_folders)


def test_the_best_texts_tokens_are_counted_and_every_layer_is_a_guess(models) -> None:
    base, spec = (models.row(found) for found in parse_methods(ROWS)[1:])
    prompt = models.tokenizer("the cat is in the ")["input_ids"]
    for row in (base, spec):
        found = row.write(prompt, HOT)
        assert 0 < len(found.tokens) <= 10 and 1 <= found.texts <= 3
        assert found.score is not None and found.score < 0
        grown = sum(step[3] for step in found.steps)
        assert grown == 10 >= len(found.tokens) and found.forwards == len(found.steps)
        assert all(0 <= stood <= depth for _, depth, stood, _ in found.steps)
        assert 0 <= found.prefill < found.seconds and "3 scored texts" in row.note
    assert len(spec.write(prompt, HOT).steps) < len(base.write(prompt, HOT).steps) == 10


def test_it_is_what_the_session_writes(models, pair_folders) -> None:
    import foretoken

    prompt = models.tokenizer("the cat is in the ")["input_ids"]
    row = models.row(parse_methods(ROWS)[2])
    with foretoken.load(pair_folders[0], "dsbd", pair_folders[1], num_beams=3, depth=2) as session:
        said = session.generate(prompt, 10, temperature=1.0, seed=3)
    found = row.write(
        prompt, SamplingParams(max_new_tokens=10, temperature=1.0, seed=3, eos=models.eos)
    )
    assert found.tokens == said.tokens and found.score == pytest.approx(said.scores[0])


def test_a_bench_of_beams_compares_like_with_like_and_says_what_is_counted(
    pair_folders, tmp_path
) -> None:
    asked = BenchConfig(
        target=pair_folders[0], draft=pair_folders[1], methods=f"{ROWS},dsbd[num_beams=2]",
        out=tmp_path, repetitions=1, max_new_tokens=8, temperature=1.0, scoring_nodes=(1, 2),
        quiet=True,
    )  # fmt: skip
    results = run_bench(asked, [single("the pen", id="a", family="qa")])
    rows = results["rows"]
    assert [row["failed"] for row in rows.values()] == [None] * 4
    assert set(rows["dsbd[num_beams=3,depth=2]"]["speedup"]) == {"plain", "beam-sampling"}
    assert set(rows["dsbd[num_beams=2]"]["speedup"]) == {"plain"}, "no beam sampling of its width"
    assert "beam-sampling" not in rows["plain"]["speedup"] and rows["plain"]["beams"] is None
    assert results["best"]["ours"] == "plain", "one text for less is not the fastest of ours"
    columns, cells = words.table(results)
    assert {"over beam-sampling", "texts", "best score"} <= set(columns)
    assert cells["plain"]["texts"] == words.MISSING
    for name in ("report.md", "report.html"):
        assert "tokens of the best text" in (tmp_path / name).read_text()


def test_at_temperature_zero_beams_write_plains_text(pair_folders, tmp_path) -> None:
    asked = BenchConfig(
        target=pair_folders[0], draft=pair_folders[1], methods=ROWS, out=tmp_path,
        repetitions=1, max_new_tokens=8, scoring_nodes=(1, 2), quiet=True,
    )  # fmt: skip
    rows = run_bench(asked, [single("the pen", id="a", family="qa")])["rows"]
    assert all(row["text"]["equal"] == 1 for row in rows.values())


def test_speed_is_the_best_texts_tokens_over_the_seconds_of_all() -> None:
    def cell(row: str, tokens: int, seconds: float, texts: int | None) -> Cell:
        return Cell(
            row=row, prompt="p", family="f", repetition=0, prompt_tokens=3,
            tokens=[1] * tokens, seconds=seconds, texts=texts, score=texts and -1.5,
        )  # fmt: skip

    cells = [
        cell("plain", 10, 1.0, None),
        cell("beam-sampling", 10, 4.0, 8),
        cell("dsbd", 6, 1.5, 7),
    ]
    rows = summarise(cells, ["plain", "beam-sampling", "dsbd"])["rows"]
    assert rows["dsbd"]["tokens_per_second"]["value"] == pytest.approx(4.0)
    assert rows["dsbd"]["speedup"]["beam-sampling"]["value"] == pytest.approx(4.0 / 2.5)
    assert rows["dsbd"]["beams"] == {"texts": 7, "score": -1.5}

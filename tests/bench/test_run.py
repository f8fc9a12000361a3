"""A whole bench on tiny models: every row, resume, failures, reports."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import minis
from foretoken.bench import plots
from foretoken.bench import run as bench_run
from foretoken.bench.journal import read_journal
from foretoken.bench.metrics import _fastest as fastest_row
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task, single
from foretoken.errors import ConfigError

ROWS = "plain,chain[depth=3],tree,prompt-lookup,hf:plain,hf:assisted,hf:prompt-lookup"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tasks(count: int = 3) -> list[Task]:
    return [
        single("the pen and a pin " * (n + 1), id=f"p{n}", family=("qa", "rag")[n % 2],
               check=lambda text: len(text) > 3)
        for n in range(count)
    ]  # fmt: skip


def config(folders: tuple[Path, Path], out: Path, **changes: object) -> BenchConfig:
    options = {
        "methods": "plain,chain[depth=3],hf:plain",
        "repetitions": 1,
        "max_new_tokens": 12,
        "tuning_prompts": 1,
        "tuning_tokens": 4,
        "scoring_nodes": (1, 4),
        "quiet": True,
    }
    return BenchConfig(target=folders[0], draft=folders[1], out=out, **{**options, **changes})


@pytest.fixture(scope="module")
def finished(pair_folders, tmp_path_factory):
    """One bench with every kind of row but the compiled one, which takes minutes."""
    out = tmp_path_factory.mktemp("bench")
    results = run_bench(config(pair_folders, out, methods=ROWS, repetitions=2), tasks())
    return results, out


def test_every_row_writes_plains_text(finished) -> None:
    results, _ = finished
    assert [row["failed"] for row in results["rows"].values()] == [None] * 7
    for label, row in results["rows"].items():
        assert row["cells"] == 6, label
        assert (row["text"]["equal"], row["text"]["of"]) == (3, 3), label


def test_the_record_of_a_row_is_whole(finished) -> None:
    row = finished[0]["rows"]["chain[depth=3]"]
    assert row["accepted_length"]["emitted_per_forward"] > 1.0
    assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert 0.2 < row["efficiency"] <= 1.0
    assert row["overhead_ms"] > 0 and row["peak_rss"] > 1e7
    assert row["accuracy"]["of"] == 6 and set(row["families"]) == {"qa", "rag"}
    assert len(row["acceptance"]["conditional"]) == 3
    emitted = row["histogram"]["emitted_per_step"]
    assert sum(int(n) * count for n, count in emitted.items()) == 3 * 2 * 12


def test_the_assisted_peer_really_drafts_and_says_with_which_setting(finished) -> None:
    results, _ = finished
    assert results["rows"]["hf:assisted"]["accepted_length"]["emitted_per_forward"] > 1.0
    assert "tokens=" in results["notes"]["hf:assisted"]
    assert "fastest of 7 tried" in results["notes"]["hf:assisted"]


def test_results_name_neither_machine_nor_path(finished, pair_folders) -> None:
    import platform

    _, out = finished
    for name in ("results.json", "report.md", "report.html", "journal.jsonl"):
        text = (out / name).read_text()
        assert str(pair_folders[0].parent) not in text and str(out) not in text
        if platform.node() and len(platform.node()) > 3:
            assert platform.node() not in text


def test_the_page_is_self_contained(finished) -> None:
    _, out = finished
    page = (out / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page and "@import" not in page and "url(" not in page
    assert page.count("<svg") == len(list((out / "plots").glob("*.svg"))) >= 5
    for label in ("chain[depth=3]", "hf:assisted", "How to read this"):
        assert label in page


def test_pictures_and_table_are_written(finished) -> None:
    results, out = finished
    for path in (out / "plots").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg"), path
        assert "prefers-color-scheme: dark" in path.read_text(), path
    table = (out / "report.md").read_text()
    assert all(f"| {label} |" in table for label in results["rows"])
    assert json.loads((out / "results.json").read_text())["rows"].keys() == results["rows"].keys()


def test_a_lossy_row_says_so_in_every_picture(finished) -> None:
    results = copy.deepcopy(finished[0])
    results["rows"]["tree"]["lossless"] = False
    for name, picture in plots.draw(results).items():
        names = re.findall(r">(tree[^<]*)<", picture.inline())
        assert names == (["tree (lossy)"] if name != "scoring" else []), name


def test_scoring_costs_are_in_the_results(finished) -> None:
    scoring = finished[0]["scoring"]
    assert scoring["nodes"] == [1, 4] and scoring["ratio"][0] == 1.0
    assert all(ms > 0 for ms in scoring["ms"])


def test_an_interrupted_bench_keeps_its_cells_and_goes_on(
    pair_folders, tmp_path, monkeypatch, capsys
) -> None:
    asked = config(pair_folders, tmp_path)
    real, calls = bench_run.measure_cell, []

    def stop_at_the_fifth(*given):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(bench_run, "measure_cell", stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        run_bench(asked, tasks())
    assert "--resume" in capsys.readouterr().err
    first = read_journal(tmp_path / "journal.jsonl")[1].cells
    assert len(first) == 4

    with pytest.raises(ConfigError, match="4 finished cells"):  # never overwritten by accident
        run_bench(asked, tasks())
    with pytest.raises(ConfigError, match="max_new_tokens: 12 -> 9"):  # nor mixed with another
        run_bench(config(pair_folders, tmp_path, max_new_tokens=9, resume=True), tasks())

    with (tmp_path / "journal.jsonl").open("a") as file:  # a kill in the middle of a line
        file.write('{"kind": "cell", "row": "pl')
    calls.clear()
    monkeypatch.setattr(bench_run, "measure_cell", lambda *g: (calls.append(g), real(*g))[1])
    results = run_bench(config(pair_folders, tmp_path, resume=True), tasks())
    assert len(calls) == 9 - 4
    assert [row["cells"] for row in results["rows"].values()] == [3, 3, 3]
    cells = read_journal(tmp_path / "journal.jsonl")[1].cells
    assert [c.seconds for c in cells[:4]] == [c.seconds for c in first]


def test_a_broken_line_in_the_journal_is_named(tmp_path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "header", "asked": {}}\nnonsense\n{"kind": "finished"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_journal(path)


def test_a_row_that_cannot_be_built_is_shown_as_failed(pair_folders, tmp_path) -> None:
    asked = config(pair_folders, tmp_path, methods="plain,rest[datastore=nowhere]")
    results = run_bench(asked, tasks(1))
    assert "no such folder" in results["rows"]["rest[datastore=nowhere]"]["failed"]
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "no such folder" in text and "failed" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "plain,chain[dept=4]"}, "depth"),
        ({"methods": "plain,hf:assisted[tokens=4]"}, "num_assistant_tokens"),
        ({"methods": ""}, "without methods"),
        ({"threads": 0}, "threads"),
        ({"temperature": -1.0}, "temperature"),
        ({"draft": None, "methods": "plain,chain"}, "without a draft model"),
        ({"draft": None, "methods": "hf:assisted"}, "without a draft model"),
    ],
)
def test_what_cannot_run_is_refused_before_any_model_is_read(changes, said, tmp_path) -> None:
    asked = {"target": "no/such/model", "draft": "no/such/draft", "out": tmp_path / "out"}
    with pytest.raises(ConfigError, match=said):
        run_bench(BenchConfig(**{**asked, **changes}), tasks(1))
    assert not (tmp_path / "out").exists()


def test_a_row_that_breaks_on_the_way_is_kept_with_its_reason(
    pair_folders, tmp_path, monkeypatch
) -> None:
    real = bench_run.measure_cell

    def out_of_memory(row, prompt, *rest):
        if row.spec.label == "hf:plain" and prompt.id == "p1":
            raise torch.OutOfMemoryError("tried to allocate 3.00 GiB")
        return real(row, prompt, *rest)

    monkeypatch.setattr(bench_run, "measure_cell", out_of_memory)
    results = run_bench(config(pair_folders, tmp_path), tasks())
    row = results["rows"]["hf:plain"]
    assert "3.00 GiB" in row["failed"] and "p1" in row["failed"] and row["cells"] == 1
    assert results["rows"]["plain"]["cells"] == 3


def test_loaded_models_and_token_ids_do_as_well(tiny_pair, tmp_path) -> None:
    ids = [single([5, 6, 7, 8], id="ids", family="raw")]
    asked = BenchConfig(
        target=tiny_pair[0], draft=tiny_pair[1], methods="plain,tree", out=tmp_path,
        repetitions=1, max_new_tokens=8, scoring_nodes=(1, 2), quiet=True,
    )  # fmt: skip
    rows = run_bench(asked, ids)["rows"]
    assert rows["tree"]["text"]["equal"] == 1
    assert type(tiny_pair[0].lm_head) is torch.nn.Linear  # our kernels went into a copy


def test_sampled_rows_are_repeated_with_other_seeds(pair_folders, tmp_path) -> None:
    asked = config(
        pair_folders, tmp_path, temperature=1.0, repetitions=2, methods="plain,chain,hf:plain"
    )
    rows = run_bench(asked, tasks(1))["rows"]
    assert all(row["failed"] is None and row["text"] is None for row in rows.values())
    cells = read_journal(tmp_path / "journal.jsonl")[1].cells
    drawn = {tuple(cell.tokens) for cell in cells if cell.row == "plain"}
    assert len(drawn) == 2


def test_no_row_reads_the_answers_of_an_earlier_repetition(tmp_path) -> None:
    """A row that learns from answers would find the whole text the second time."""
    remembering, pair = "suffix[preset=paper]", (minis.path("text-target"), None)
    asked = config(pair, tmp_path, repetitions=2, max_new_tokens=24, methods=remembering)
    rows = run_bench(asked, tasks(2))["rows"]
    assert rows[remembering]["failed"] is None
    cells = read_journal(tmp_path / "journal.jsonl")[1].cells
    for prompt in ("p0", "p1"):
        mine = [cell for cell in cells if (cell.row, cell.prompt) == (remembering, prompt)]
        assert len({tuple(cell.tokens) for cell in mine}) == 1
        assert len({cell.forwards for cell in mine}) == 1


@pytest.mark.slow
def test_a_row_tells_afterwards_what_its_search_took(tmp_path) -> None:
    pair = minis.path("text-target"), minis.path("text-draft")
    asked = config(pair, tmp_path, methods="plain,swift[window=4]", scoring_nodes=(1, 2))
    notes = run_bench(asked, tasks(1))["notes"]
    assert notes["plain"] == "" and "tries" in notes["swift[window=4]"]
    assert notes["swift[window=4]"] in (tmp_path / "report.md").read_text(encoding="utf-8")
    again = run_bench(dataclasses.replace(asked, resume=True), tasks(1))["notes"]
    assert again == notes, "a run that measured nothing new has nothing new to tell"


def test_every_turn_of_a_dialogue_is_timed_after_plains_answers(pair_folders, tmp_path) -> None:
    talk = [Task(id="81", family="writing", turns=("then a hen", "and then", "the end"))]
    rows = run_bench(config(pair_folders, tmp_path, methods="plain,chain"), talk)["rows"]
    assert rows["plain"]["prompts"] == 3
    _, journal = read_journal(tmp_path / "journal.jsonl")
    lengths = [cell.prompt_tokens for cell in journal.cells if cell.row == "plain"]
    assert sorted(lengths) == lengths and set(journal.notes["answer"]) == {
        "81/turn 1",
        "81/turn 2",
    }


def test_prompts_of_one_name_are_told_apart(pair_folders, tmp_path) -> None:
    twins = [single(text, id="same", family="qa") for text in ("then a hen", "in the inn")]
    rows = run_bench(config(pair_folders, tmp_path, methods="plain"), twins)["rows"]
    assert rows["plain"]["prompts"] == rows["plain"]["cells"] == 2


def test_prompts_longer_than_the_context_are_left_out_and_counted(pair_folders, tmp_path) -> None:
    long = single("the " * 600, id="long", family="qa")
    results = run_bench(config(pair_folders, tmp_path, methods="plain"), [*tasks(1), long])
    assert results["setting"]["skipped"] == ["long"]
    assert "1 prompts too long" in (tmp_path / "report.md").read_text()
    with pytest.raises(ConfigError, match="none fits the context"):
        run_bench(config(pair_folders, tmp_path / "other", methods="plain"), [long])


def test_an_unwritable_folder_is_refused_before_any_model_is_read(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="nothing can be written there"):
        run_bench(BenchConfig(target="no/such/model", out=file / "out"), tasks(1))


def test_rows_with_drafts_of_several_vocabularies(pair_folders, tmp_path) -> None:
    words = tmp_path / "words.json"
    words.write_text(json.dumps({"version": 1, "vocab_size": 265, "tokens": list(range(200))}))
    rows = (
        f"plain,chain[depth=3],chain[depth=3,draft_vocabulary=off],tree[draft_vocabulary={words}]"
    )
    options = {"methods": rows, "draft_vocabulary": words}
    results = run_bench(config(pair_folders, tmp_path / "out", **options), tasks(2))
    assert [row["failed"] for row in results["rows"].values()] == [None] * 4
    assert results["setting"]["draft_vocabulary"] == ["200 of 265"]
    for label, row in results["rows"].items():
        assert (row["text"]["equal"], row["text"]["of"]) == (2, 2), label
    words.write_text(words.read_text().replace("[0, ", "["))
    with pytest.raises(ConfigError):  # another list makes other rows: there is nothing to go on
        run_bench(config(pair_folders, tmp_path / "out", resume=True, **options), tasks(2))


def changed_draft(folders: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """The pair with a copy of the draft, whose weights can be written over."""
    return folders[0], Path(shutil.copytree(folders[1], place / "draft"))


@pytest.mark.parametrize("what", ["draft", "named draft", "prompts"])
def test_a_bench_of_other_weights_or_prompts_is_not_gone_on_with(
    what, pair_folders, tmp_path
) -> None:
    """Names stay the same where a draft is trained anew in its folder, or a file is edited."""
    pair = changed_draft(pair_folders, tmp_path)
    methods = f"plain,chain[draft={pair[1]}]" if what == "named draft" else "plain,chain"
    pair = pair_folders if what == "named draft" else pair
    asked = config(pair, tmp_path / "out", methods=methods)
    run_bench(asked, tasks(1))
    given = tasks(1)
    if what == "prompts":
        given = [dataclasses.replace(one, turns=("another pen",)) for one in given]
    else:
        path = tmp_path / "draft" / "model.safetensors"
        weights = {name: -weight for name, weight in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="going on with the bench"):
        run_bench(dataclasses.replace(asked, resume=True), given)


def test_rows_that_had_forgotten_their_texts_when_a_bench_went_on_are_named(
    pair_folders, tmp_path, monkeypatch
) -> None:
    asked = config(pair_folders, tmp_path, methods="plain,suffix")
    written, measured = [], bench_run.measure_cell

    def stopped(row, *given):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(row.spec.label)
        return measured(row, *given)

    monkeypatch.setattr(bench_run, "measure_cell", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_bench(asked, tasks())
    monkeypatch.setattr(bench_run, "measure_cell", measured)
    results = run_bench(dataclasses.replace(asked, resume=True), tasks())
    [warning] = [text for text in results["warnings"] if "interrupted" in text]
    assert warning.startswith("suffix:") and "plain" not in warning
    assert warning in (tmp_path / "report.md").read_text()


def test_a_lossy_row_is_not_called_the_fastest_of_ours() -> None:
    rows = {
        label: {"peer": False, "failed": None, "lossless": lossless, "beams": None,
                "tokens_per_second": {"value": speed}}
        for label, lossless, speed in (("plain", True, 1.0), ("chain", True, 2.0),
                                       ("specee", False, 3.0))
    }  # fmt: skip
    assert fastest_row(rows, peers=False) == "chain"
    assert fastest_row({"specee": rows["specee"]}, peers=False) == "specee"


def test_several_texts_at_once_are_not_held_against_one_forwards_limit(
    pair_folders, tmp_path
) -> None:
    results = run_bench(config(pair_folders, tmp_path, methods="plain", requests=3), tasks())
    assert "over_limit" not in results["rows"]["plain"]
    assert "forward/limit" not in (tmp_path / "report.md").read_text()

"""Task files in everybody's formats, and what is said about files in nobody's."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.bench.prompts import encode
from foretoken.bench.tasks import from_examples, load_file, number_check, single, spread
from foretoken.cli.measure import bench_tasks
from foretoken.errors import ConfigError


def written(folder: Path, *lines: object, name: str = "questions.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_spec_bench_lines_keep_their_turns_and_category(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"question_id": 241, "category": "qa", "turns": ["Who?"]},
    )
    first, second = load_file(path)
    assert (first.id, first.family, first.turns) == ("81", "writing", ("Write.", "Again."))
    assert (second.id, second.family, second.chat) == ("241", "qa", True)


def test_humaneval_prompts_are_continued_as_they_stand(tmp_path: Path) -> None:
    line = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": ""}
    (task,) = load_file(written(tmp_path, line))
    assert (task.id, task.family, task.turns) == ("HumanEval/0", "HumanEval", ("def f():\n",))
    assert not task.chat and task.check is None


def test_gsm8k_answers_can_be_checked(tmp_path: Path) -> None:
    line = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
    (task,) = load_file(written(tmp_path, line))
    assert task.family == "GSM8K" and task.check is not None
    assert task.check("So there are 1042.") and not task.check("So there are 42 of them.")


def test_deepspec_and_plain_prompts_are_known(tmp_path: Path) -> None:
    tasks = load_file(
        written(tmp_path, {"turns": ["One", "Two"]}, {"prompt": "Go on", "output_tokens": 9})
    )
    assert tasks[0].turns == ("One", "Two") and tasks[0].family == "questions"
    assert tasks[1].turns == ("Go on",) and tasks[1].id == "questions:2"


def test_empty_lines_are_no_tasks(tmp_path: Path) -> None:
    assert len(load_file(written(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}))) == 2


def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "fine"}, '{"prompt": "cut')
    with pytest.raises(ConfigError, match=r"questions\.jsonl:2 is not JSON") as caught:
        load_file(path)
    assert "line 2" in caught.value.do


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"text": "x", "label": 3}, "its keys are label, text"),
        ({"question": "x", "answer": "no mark"}, "no `####`"),
        (["a", "list"], "holds a JSON list"),
        ({"turns": []}, "`turns` is no non-empty text"),
        ({"prompt": ""}, "`prompt` is no non-empty text"),
    ],
)
def test_what_fits_no_format_says_what_was_seen(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError, match="1") as caught:
        load_file(written(tmp_path, line))
    assert said in str(caught.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_file(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="holds no lines"):
        load_file(written(tmp_path, ""))


def test_all_is_advised_only_where_it_can_be_passed(tmp_path: Path) -> None:
    """`tune` and `load` take files alone."""
    missing = tmp_path / "nowhere.jsonl"
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_file(missing)
    assert "`all`" not in caught.value.do
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        bench_tasks(str(missing), 0, 0)
    assert "`all` for the six" in caught.value.do


def test_a_limit_sees_every_part_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, *({"prompt": str(n), "id": n} for n in range(100)))
    assert [task.id for task in load_file(path, 4)] == ["0", "25", "50", "75"]
    assert spread([1, 2, 3], 5) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3 + 4 = 7", True),
        ("The answer is 7. I checked 3 times.", True),
        ("#### 7.0", True),
        ("it is -7", False),
        ("seven", False),
        ("7 and then 8", False),
    ],
)
def test_numbers_are_read_from_the_end_or_after_a_mark(text: str, right: bool) -> None:
    assert number_check(" 7 ")(text) is right


def test_examples_of_the_minis_become_tasks() -> None:
    example = SimpleNamespace(prompt="p", family="dialogue", check=lambda text: "yes" in text)
    (task,) = from_examples([example])
    assert (task.id, task.turns, task.chat) == ("dialogue/0", ("p",), False)
    assert task.check is not None and task.check("yes")


def test_a_text_without_a_tokenizer_is_refused_with_ways_that_there_are() -> None:
    with pytest.raises(ConfigError, match="token ids only") as caught:
        encode(single("hello", id="a", family="b"), 0, [], None)
    assert "--tokenizer" not in caught.value.do, "which no command has"
    assert "model's folder" in caught.value.do and "BenchConfig" in caught.value.do
    assert "bench.tasks.single" in caught.value.do
    assert encode(single([3, 1], id="a", family="b"), 0, [], None) == [3, 1]

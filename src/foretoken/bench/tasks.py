"""What a bench writes about: prompts with a family and, where one exists, a check of the answer.

Files are read line by line as JSON; the keys of a line tell its format (Spec-Bench, MT-Bench and
EAGLE `question.jsonl`, HumanEval, GSM8K, DeepSpec's `turns`, and a plain `prompt`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

FORMATS = {
    "Spec-Bench, MT-Bench, DeepSpec": ("turns",),
    "HumanEval": ("task_id", "prompt"),
    "GSM8K": ("question", "answer"),
    "prompts": ("prompt",),
}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to write about. Several turns make a dialogue; each turn is timed on its own."""

    id: str
    family: str
    turns: tuple[Prompt, ...]  # what the user says, oldest first; token ids are taken as they are
    check: Callable[[str], bool] | None = None  # judges the answer to the last turn
    max_new_tokens: int | None = None  # None: the bench's own
    chat: bool = True  # wrap in the tokenizer's chat template, if it has one


def single(
    prompt: Prompt | Sequence[int],
    *,
    id: str,
    family: str,
    check: Callable[[str], bool] | None = None,
    max_new_tokens: int | None = None,
    chat: bool = False,
) -> Task:
    """A task of one turn; its prompt is continued as it stands unless `chat` is set."""
    turn = prompt if isinstance(prompt, str) else tuple(int(token) for token in prompt)
    return Task(
        id=id, family=family, turns=(turn,), check=check, max_new_tokens=max_new_tokens, chat=chat
    )


def from_examples(examples: Iterable[Any]) -> list[Task]:
    """Tasks from objects with `prompt`, `family` and `check(text)`: the minis' examples."""
    return [
        single(
            example.prompt, id=f"{example.family}/{n}", family=example.family, check=example.check
        )
        for n, example in enumerate(examples)
    ]


def load_file(path: str | Path, limit: int | None = None, instead: str = "") -> list[Task]:
    """The tasks of a JSON lines file, at most `limit` of them, spread evenly over the file.

    `instead` is advice for a file that cannot be read, where something else may be passed.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"tasks from {path}.",
            f"the file cannot be read as UTF-8 text ({problem.__class__.__name__}).",
            f"pass a JSON lines file that exists{instead}.",
        ) from problem
    tasks = [
        _task(_parse(line, path, number), path, number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not tasks:
        raise ConfigError(
            f"tasks from {path}.",
            "the file holds no lines.",
            "write one JSON object per line.",
        )
    return spread(tasks, limit)


def spread(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """`limit` tasks at even distances, so that every part of a sorted file is seen."""
    if limit is None or limit >= len(tasks):
        return list(tasks)
    return [tasks[n * len(tasks) // limit] for n in range(limit)]


def _parse(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ConfigError(
            f"tasks from {path}.",
            f"{path}:{number} is not JSON ({problem.msg} at column {problem.colno}).",
            f"mend or delete line {number}; every line must be one JSON object.",
        ) from problem
    if not isinstance(found, dict):
        raise ConfigError(
            f"tasks from {path}.",
            f"{path}:{number} holds a JSON {type(found).__name__}, not an object.",
            f'write line {number} as an object such as {{"prompt": "..."}}.',
        )
    return found


def _task(found: Mapping[str, Any], path: Path, number: int) -> Task:
    """The task a line stands for; the first format whose keys are all there wins."""
    name = path.stem
    if "turns" in found:
        turns = _texts(found["turns"], path, number, "turns")
        return Task(
            id=str(found.get("question_id", f"{name}:{number}")),
            family=str(found.get("category", name)),
            turns=turns,
        )
    if {"task_id", "prompt"} <= found.keys():
        prompt = _texts([found["prompt"]], path, number, "prompt")[0]
        return single(prompt, id=str(found["task_id"]), family="HumanEval")
    if {"question", "answer"} <= found.keys():
        question, answer = _texts([found["question"], found["answer"]], path, number, "question")
        if "####" not in answer:
            raise _unknown(found, path, number, "its answer has no `####` before the result")
        return Task(
            id=str(found.get("id", f"{name}:{number}")),
            family="GSM8K",
            turns=(question,),
            check=number_check(answer.rsplit("####", 1)[1]),
        )
    if "prompt" in found:
        prompt = _texts([found["prompt"]], path, number, "prompt")[0]
        return single(
            prompt,
            id=str(found.get("id", f"{name}:{number}")),
            family=str(found.get("category", found.get("family", name))),
        )
    raise _unknown(found, path, number, f"its keys are {', '.join(sorted(found)) or 'none'}")


def _unknown(found: Mapping[str, Any], path: Path, number: int, why: str) -> ConfigError:
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in FORMATS.items())
    return ConfigError(
        f"tasks from {path}.",
        f"line {number} fits no known format: {why}. Known are {known}.",
        "rename the keys to those of one of these formats.",
    )


def _texts(values: Any, path: Path, number: int, key: str) -> tuple[str, ...]:
    good = isinstance(values, list) and values and all(isinstance(v, str) and v for v in values)
    if not good:
        raise ConfigError(
            f"tasks from {path}.",
            f"{path}:{number}: `{key}` is no non-empty text.",
            f"write line {number} with text under `{key}`.",
        )
    return tuple(values)


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def number_check(result: str) -> Callable[[str], bool]:
    """Whether a text's final number is `result`; after `####` or "answer is" if it says so."""
    wanted = _value(result.strip())

    def check(text: str) -> bool:
        tail = re.split(r"####|[Aa]nswer is", text)[-1]
        found = _NUMBER.findall(tail)
        # After an explicit mark the first number counts, otherwise the last one written.
        return bool(found) and _value(found[0 if tail != text else -1]) == wanted

    return check


def _value(text: str) -> float | None:
    match = _NUMBER.search(text)
    return float(match.group().replace(",", "")) if match else None

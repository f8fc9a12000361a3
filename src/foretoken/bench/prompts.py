"""Tasks made into prompt ids: chat templates, and the earlier turns of a dialogue.

Every row must continue the same prompt, so the answers to a dialogue's earlier turns are written
once, by `plain` at temperature 0, before anything is timed. Each turn is then a prompt of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.bench.journal import Journal
from foretoken.bench.tasks import Prompt, Task
from foretoken.errors import ConfigError

Answer = Callable[[list[int], int], list[int]]  # prompt ids, cap -> new ids of plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPrompt:
    """What every row continues."""

    id: str
    family: str
    ids: tuple[int, ...]
    max_new_tokens: int
    check: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts that every row is asked to continue at once: one cell."""

    prompts: tuple[TimedPrompt, ...]

    @property
    def id(self) -> str:
        more = len(self.prompts) - 1
        return f"{self.prompts[0].id} + {more}" if more else self.prompts[0].id

    @property
    def family(self) -> str:
        families = {prompt.family for prompt in self.prompts}
        return families.pop() if len(families) == 1 else "mixed"


def at_once(prompts: Sequence[TimedPrompt], count: int) -> list[Requests]:
    """Neighbouring prompts, `count` at a time; only the last may be fewer."""
    return [Requests(tuple(prompts[n : n + count])) for n in range(0, len(prompts), count)]


def timed_prompts(
    tasks: Sequence[Task],
    tokenizer: Any,
    journal: Journal,
    answer: Answer,
    *,
    max_new_tokens: int,
    max_length: int | None,
) -> tuple[list[TimedPrompt], list[str]]:
    """Prompts of all turns of all tasks, and the ids of those the context is too short for."""
    prompts: list[TimedPrompt] = []
    skipped: list[str] = []
    answers = journal.notes.setdefault("answer", {})
    taken: Counter[str] = Counter()
    for task in tasks:
        taken[task.id] += 1  # cells are told apart by these names
        unique = task.id if taken[task.id] == 1 else f"{task.id}#{taken[task.id]}"
        cap = task.max_new_tokens or max_new_tokens
        said: list[str] = []
        for turn in range(len(task.turns)):
            last = turn == len(task.turns) - 1
            name = unique if len(task.turns) == 1 else f"{unique}/turn {turn + 1}"
            ids = encode(task, turn, said, tokenizer)
            if max_length is not None and len(ids) + cap > max_length:
                skipped.append(name)
                break
            prompts.append(
                TimedPrompt(
                    id=name,
                    family=task.family,
                    ids=tuple(ids),
                    max_new_tokens=cap,
                    check=task.check if last else None,
                )
            )
            if not last:
                if name not in answers:
                    journal.note("answer", name, answer(ids, cap))
                said.append(tokenizer.decode(answers[name], skip_special_tokens=True))
    if not prompts:
        raise ConfigError(
            f"a bench over {len(tasks)} tasks.",
            f"none fits the context of {max_length} tokens with the tokens to write.",
            "use shorter prompts or a smaller --max-new-tokens.",
        )
    return prompts, skipped


def encode(task: Task, turn: int, said: Sequence[str], tokenizer: Any) -> list[int]:
    """Prompt ids of one turn, after the answers `said` to the earlier ones."""
    text: Prompt = task.turns[turn]
    if isinstance(text, tuple):
        return list(text)
    if tokenizer is None:
        raise ConfigError(
            f"the task {task.id} is a text.",
            "this target came without a tokenizer, so it takes token ids only.",
            "put the tokenizer's files into the model's folder; in Python, BenchConfig takes a "
            "tokenizer, and bench.tasks.single makes tasks of token ids.",
        )
    if task.chat and getattr(tokenizer, "chat_template", None):
        messages = []
        for user, assistant in zip(task.turns, said, strict=False):
            messages += [_message("user", user), _message("assistant", assistant)]
        messages.append(_message("user", text))
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(found, add_special_tokens=False)["input_ids"])
    before = "".join(f"{user}\n{answer}\n" for user, answer in zip(task.turns, said, strict=False))
    return list(tokenizer(before + text)["input_ids"])


def _message(role: str, content: Any) -> dict[str, str]:
    return {"role": role, "content": content}

"""lm-eval with the model `foretoken` beside its own `hf` model: the same answers, and the time.

    python benchmarks/evaluation.py [--batch-sizes 1,8] [--quick]
    python benchmarks/evaluation.py --target smollm2-135m --draft smollm2-135m-draft \
        --tasks spec-bench.jsonl

Three tasks over local data: texts to be written, choices and whole texts to be scored. Each cell
loads its model anew, so nothing is known of an earlier one. Writes benchmarks/results/lm-eval.json
and .md (lm-eval-NAME with --target).
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import gates
import lm_eval
import torch
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from pair import console, main, names, parser, prompts

import foretoken.evaluation.harness  # noqa: F401  makes lm-eval know the model
from foretoken import shipped
from foretoken.bench import environment
from foretoken.bench.tasks import Task, load_file, spread

KINDS = {
    "written": "generate_until",
    "chosen": "loglikelihood",
    "rolling": "loglikelihood_rolling",
}
CHOICES = 4
CLOSE = 1e-4  # between log-likelihoods in float32


def documents(tasks: Sequence[Task], folder: Path) -> Path:
    """A file of prompts, each with choices: beginnings of other prompts."""
    texts = [task.turns[0] for task in tasks]
    lines = [
        {
            "prompt": text,
            "choices": [
                f" {texts[(at + other) % len(texts)][:60]}" for other in range(1, CHOICES + 1)
            ],
        }
        for at, text in enumerate(texts)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def local_tasks(data: Path, tokens: int) -> list[dict[str, Any]]:
    """Tasks of lm-eval over that file."""
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent)},
        "test_split": "test",
    }
    return [
        {
            **shared,
            "task": "written",
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": tokens},
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            **shared,
            "task": "chosen",
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": 0,
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}],
        },
        {
            **shared,
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{prompt}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    ]


def timed(model: Any) -> dict[str, float]:
    """Seconds of each kind of request, once it was answered."""
    seconds: dict[str, float] = {}

    def clocked(kind: str) -> None:
        answer = getattr(model, kind)

        def answering(requests: Any, **options: Any) -> Any:
            began = perf_counter()
            answers = answer(requests, **options)
            seconds[kind] = seconds.get(kind, 0.0) + perf_counter() - began
            return answers

        setattr(model, kind, answering)

    for kind in KINDS.values():
        clocked(kind)
    return seconds


def cell(name: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """One model on all tasks: its answers, and what they took."""
    began = perf_counter()
    model = get_model(name)(**arguments)
    if name == "foretoken":
        model.session.prepare()  # what is measured once, before the first text
    loading = perf_counter() - began
    seconds = timed(model)
    chat = model.tokenizer.chat_template is not None
    found = lm_eval.simple_evaluate(
        model,
        tasks=[dict(task) for task in tasks],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
        verbosity="ERROR",
    )
    samples = found["samples"]
    answers = {
        task["task"]: [one["resps"] for one in sorted(samples[task["task"]], key=place)]
        for task in tasks
    }
    tokens = len(model.tokenizer([one[0][0] for one in answers["written"]]).input_ids)
    told = {"tokens": tokens, "load": loading, "seconds": dict(seconds), "answers": answers}
    if name == "foretoken":
        told |= {key: value for key, value in found["config"].items() if key.startswith(name)}
        model.session.close()
    del model
    gc.collect()
    return told


def place(sample: dict[str, Any]) -> int:
    return int(sample["doc_id"])


def equal_texts(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The share of texts that are the same."""
    pairs = list(zip(found["answers"]["written"], expected["answers"]["written"], strict=True))
    return sum(one == other for one, other in pairs) / len(pairs)


def apart(found: dict[str, Any], expected: dict[str, Any], task: str) -> float:
    """The largest difference of log-likelihoods, of long ones in relation to their size."""
    pairs = zip(numbers(found, task), numbers(expected, task), strict=True)
    return max(abs(one - other) / max(abs(other) / 100.0, 1.0) for one, other in pairs)


def numbers(found: dict[str, Any], task: str) -> list[float]:
    """Log-likelihoods of a task in order."""
    listed: list[float] = []
    for responses in found["answers"][task]:
        for [answer] in responses:
            listed.append(answer[0] if isinstance(answer, list | tuple) else float(answer))
    return listed


def verdicts(cells: dict[str, dict[str, Any]], sizes: Sequence[int]) -> list[gates.Gate]:
    """The same answers as `hf` alone gives, and sooner than it in company of the same size."""
    truth = cells[f"hf, batch {sizes[0]}"]
    found = []
    for size in sizes:
        ours, theirs = cells[f"foretoken, batch {size}"], cells[f"hf, batch {size}"]
        found.append(
            gates.Gate(f"batch {size}: share of equal texts", equal_texts(ours, truth), 1.0)
        )
        for task in ("chosen", "rolling"):
            claim = f"batch {size}: {task}, largest difference over {CLOSE:g}"
            found.append(gates.Gate(claim, apart(ours, truth, task) / CLOSE, 1.0, at_least=False))
        for task, kind in KINDS.items():
            ratio = theirs["seconds"][kind] / ours["seconds"][kind]
            found.append(gates.Gate(f"batch {size}: {task}, over hf", ratio, 1.0, unit="x"))
    kind = KINDS["written"]
    best = {
        name: min(one["seconds"][kind] for label, one in cells.items() if label.startswith(name))
        for name in ("hf", "foretoken")
    }
    ratio = best["hf"] / best["foretoken"]
    found.append(gates.Gate("best batch against best: written, over hf", ratio, 1.0, unit="x"))
    return found


def table(cells: dict[str, dict[str, Any]], truth: dict[str, Any]) -> str:
    """Seconds of every cell, and how it differs from the first."""
    lines = [
        f"| model | load, s | {' | '.join(f'{task}, s' for task in KINDS)} | in all, s "
        "| equal texts | tokens per forward |",
        "|---|" + "---:|" * (len(KINDS) + 4),
    ]
    for label, one in cells.items():
        taken = [one["load"], *(one["seconds"][kind] for kind in KINDS.values())]
        seconds = " | ".join(f"{value:.2f}" for value in (*taken, sum(taken)))
        kept = one.get("foretoken_tokens_per_forward")
        lines.append(
            f"| {label} | {seconds} | {equal_texts(one, truth):.3f} "
            f"| {'-' if kept is None else f'{kept:.2f}'} |"
        )
    return "\n".join(lines) + "\n"


def options(description: str | None) -> argparse.Namespace:
    found = parser(description)
    found.add_argument("--tasks", help="a file of prompts, such as Spec-Bench's question.jsonl")
    found.add_argument("--per-family", type=int, default=4, help="prompts of each family")
    found.add_argument("--limit", type=int, default=24, help="prompts of a file")
    found.add_argument("--tokens", type=int, default=96, help="per text at most")
    found.add_argument("--method", help="of foretoken (default: what a load takes)")
    found.add_argument("--dtype", default="float32")
    found.add_argument("--batch-sizes", default="1,8")
    return found.parse_args()


def run(description: str | None) -> int:
    asked = options(description)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    tokens = 12 if asked.quick else asked.tokens
    if asked.tasks is None:
        chosen = prompts(1, limit=3) if asked.quick else prompts(asked.per_family)
    else:
        chosen = spread(load_file(asked.tasks), 3 if asked.quick else asked.limit)
    target = str(shipped.resolve(asked.target or "text-target"))
    shared = {"dtype": asked.dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    models = {
        "hf": {"pretrained": target, **shared},
        "foretoken": {
            "target": target,
            "draft": asked.draft or (None if asked.target else "text-draft"),
            "method": asked.method,
            **shared,
        },
    }
    sizes = [int(size) for size in asked.batch_sizes.split(",")]
    cells: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory(prefix="foretoken-") as folder:
        tasks = local_tasks(documents(chosen, Path(folder)), tokens)
        for size in sizes:
            for name, arguments in models.items():
                label = f"{name}, batch {size}"
                with console.status(label):
                    cells[label] = cell(name, {**arguments, "batch_size": size}, tasks)
    judged = verdicts(cells, sizes)
    publish(asked, judged, cells, len(chosen), tokens)
    return 0


def publish(
    asked: argparse.Namespace,
    judged: Sequence[gates.Gate],
    cells: dict[str, dict[str, Any]],
    count: int,
    tokens: int,
) -> None:
    """Write the results and show the verdicts."""
    about = (
        f"{names(asked)}. {count} prompts, up to {tokens} tokens each, {CHOICES} choices, "
        f"{asked.dtype}, lm-eval {lm_eval.__version__}."
    )
    document = {
        "environment": environment.describe(),
        "about": about,
        "gates": [gate.to_dict() for gate in judged],
        "cells": cells,
    }
    first = next(iter(cells.values()))
    text = f"# lm-eval\n\n{about}\n\n{gates.markdown(judged)}\n{table(cells, first)}"
    name = "lm-eval" + (f"-{Path(asked.target).name}" if asked.target else "")
    gates.publish(asked.out, name, document, text)
    gates.show(judged, "lm-eval")


if __name__ == "__main__":
    main(run, __doc__)

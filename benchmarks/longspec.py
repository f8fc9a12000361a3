"""What LongSpec's head keeps of a row, how long it takes to draft, and what stands, by context.

    python benchmarks/longspec.py [--head DIR] [--contexts 1000,4000,8000,16000]
    python benchmarks/longspec.py --head DIR --dtype bfloat16 --tasks spec-bench.jsonl

One row of `smollm2-135m` (or --target) grows from context to context; at each, trees of the paper's
shape (levels of 1, 4, 16, 16, 16 nodes fed) are drafted. Random weights cost what trained ones do,
so no head is needed. With questions and a trained head each question is asked behind as many notes
as make it so long, and trees of a fixed size are judged: what stands must not fall with the length.
Writes benchmarks/results/longspec.json and .md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import gates
import torch
from pair import main, parser
from real import tasks

from foretoken.audit.fixtures import folder as scratch
from foretoken.audit.rows import seeded_rows
from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.bench.prompts import encode
from foretoken.bench.tasks import Task
from foretoken.drafters.parts.window_reader import WindowReader
from foretoken.engine.loading import load
from foretoken.heads import store
from foretoken.heads.longspec import LongSpec
from foretoken.shipped import resolve
from foretoken.types import SamplingParams

LEVELS = (1, 4, 16, 16, 16)  # nodes fed: the root, then those that the next level stands on
TREE = {"controller": "fixed", "depth": 4, "nodes": 16}  # in every step, at every length
TOKENS = 64  # of an answer, at most
NEAR, FAR, LEAST = 1000, 8000, 0.9  # of what stands at the first at least so much at the second
BESIDE = 100  # positions of FAR that an answer and the words around notes need


def random_head(target: Any) -> Any:
    """A head in the shape that training gives it."""
    config = target.model.config
    memory = target.layer_cache(target.layers - 1)
    heads = config.num_attention_heads
    shape = LongSpec.Config(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, heads=heads,
        kv_heads=memory.heads, inner=config.intermediate_size, asked=heads * memory.size,
    )  # fmt: skip
    torch.manual_seed(0)
    return store.save(scratch(), "longspec", LongSpec(shape), {"weights": "random"})


def drafted(model: WindowReader, row: Any, rounds: int) -> float:
    """Median milliseconds of a tree, the first one aside: it fills the window."""
    found = []
    for _ in range(rounds + 1):
        began, first = perf_counter(), 0
        for level, count in enumerate(LEVELS):
            tokens = row.tokens[-1:] if level == 0 else list(range(count))
            parents = [-1] if level == 0 else [first + i % LEVELS[level - 1] for i in range(count)]
            model.grow([row], [tokens], [parents])
            first += 0 if level == 0 else LEVELS[level - 1]
        model.keep([row], [[]], [None])
        found.append(1000 * (perf_counter() - began))
    return median(found[1:])


def measure(model: WindowReader, target: Any, contexts: list[int], rounds: int) -> dict[str, Any]:
    """Rows, bytes and milliseconds of drafts by context, and the bytes of the target's cache."""
    ids = [(7919 * i) % target.vocab_size for i in range(max(contexts))]
    [row] = seeded_rows([ids[:1]], SamplingParams(), target.vocab_size)
    assert model.open(row, None)
    found = {}
    for length in contexts:
        row.tokens += ids[len(row.tokens) : length]
        target.prefill([row])
        milliseconds = drafted(model, row, rounds)
        window = row.private[model]
        kept = window.keys.nbytes + window.values.nbytes
        whole = target.layers * target.cache.column_bytes * length
        found[str(length)] = {
            "rows": window.columns, "bytes": kept, "target_bytes": whole,
            "milliseconds": milliseconds,
        }  # fmt: skip
    model.close(row)
    target.free([row])
    return found


@contextmanager
def reaching(name: str, positions: int) -> Iterator[Path]:
    """The model directory, or one like it whose config allows so many positions."""
    folder = Path(str(resolve(name)))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= positions:
        yield folder
        return
    config["max_position_embeddings"] = positions
    with TemporaryDirectory(prefix="foretoken-") as scratched:
        place = Path(scratched)
        for path in folder.resolve().iterdir():
            if path.name != "config.json":
                (place / path.name).symlink_to(path)
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield place


def behind_notes(asked: Task, notes: Sequence[int], length: int, tokenizer: Any) -> list[int]:
    """The question as a chat of about so many tokens, most of them notes before it."""
    question = asked.turns[0]
    room = length - len(encode(asked, 0, (), tokenizer))
    told = f"{tokenizer.decode(notes[: max(room, 0)])}\n\n{question}" if room > 0 else question
    return encode(replace(asked, turns=(told,)), 0, (), tokenizer)


def standing(session: Any, questions: Sequence[Task], contexts: Sequence[int]) -> dict[str, Any]:
    """Tokens a step by context: each question behind the same notes, greedy and at temperature 1.

    Notes are the other questions' own texts; what was read of them is kept between questions.
    """
    tokenizer, found = session.tokenizer, {}
    asked, others = questions[::2], questions[1::2]
    notes = tokenizer("\n\n".join(one.turns[0] for one in others))["input_ids"]
    notes *= 1 + max(contexts) // len(notes)
    session.keep_prefixes(1 << 30)
    for temperature in (0.0, 1.0):
        steps: dict[int, list[tuple[int, int]]] = {}
        for length in contexts:
            for seed, question in enumerate(asked):
                ids = behind_notes(question, notes, length - BESIDE, tokenizer)
                result = session.generate(ids, TOKENS, temperature=temperature, seed=seed)
                steps.setdefault(length, []).append((len(result.tokens), len(result.steps)))
        found[f"{temperature:g}"] = compared(steps)
    return {"questions": len(asked), "notes": len(notes), "by_temperature": found}


def compared(steps: dict[int, list[tuple[int, int]]]) -> dict[str, Any]:
    """Tokens a step at each length, and over those at the first one, with its interval."""

    def rate(length: int, at: Sequence[int]) -> float:
        pairs = [steps[length][i] for i in at]
        return sum(tokens for tokens, _ in pairs) / sum(count for _, count in pairs)

    first, found = min(steps), {}
    for length, pairs in steps.items():
        every = range(len(pairs))

        def over(at: Sequence[int], length: int = length) -> float:
            return rate(length, at) / rate(first, at)

        found[str(length)] = {
            "accepted": rate(length, every), "over_first": over(every),
            "interval": interval(over, len(pairs)),
        }  # fmt: skip
    return found


def table(found: dict[str, Any]) -> str:
    """Rows, bytes and milliseconds by context."""
    lines = ["| context | draft rows | draft MiB | target MiB | ms per tree |", "|---:" * 5 + "|"]
    for length, one in found.items():
        sizes = [f"{one[key] / 2**20:.2f}" for key in ("bytes", "target_bytes")]
        cells = [length, str(one["rows"]), *sizes, f"{one['milliseconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_standing(found: dict[str, Any]) -> str:
    """Tokens a step by context and temperature."""
    lines = [
        f"\n## What stands\n\n{found['questions']} questions, {TOKENS} tokens of each answer, "
        f"trees of {TREE['nodes']} nodes and {TREE['depth']} levels. Tokens a step, and over those "
        "at the shortest context with the interval over questions.\n",
        "| temperature | context | tokens a step | over the shortest |", "|---:|---:|---:|---|",
    ]  # fmt: skip
    for temperature, lengths in found["by_temperature"].items():
        for length, one in lengths.items():
            low, high = one["interval"] or (one["over_first"],) * 2
            cells = [temperature, length, f"{one['accepted']:.2f}"]
            cells.append(f"{one['over_first']:.2f} ({low:.2f} to {high:.2f})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def bounds(found: dict[str, Any], stands: dict[str, Any] | None) -> list[gates.Gate]:
    """A cache that does not grow, and acceptance that does not fall."""
    kept = [one["bytes"] for one in found.values()]
    claims = [
        gates.Gate(
            "the draft's cache, largest over smallest", max(kept) / min(kept), 1.0, at_least=False
        )
    ]  # fmt: skip
    if stands is None:
        return claims
    for temperature, lengths in stands["by_temperature"].items():
        if {str(NEAR), str(FAR)} <= lengths.keys():
            claims.append(
                gates.Gate(
                    f"tokens a step at {FAR} over those at {NEAR}, temperature {temperature}",
                    lengths[str(FAR)]["accepted"] / lengths[str(NEAR)]["accepted"], LEAST,
                )
            )  # fmt: skip
    return claims


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--head", help="folder of a trained head (default: random weights)")
    options.add_argument("--contexts", default="1000,2000,4000,8000", help="lengths to compare")
    options.add_argument("--rounds", type=int, default=20, help="trees at each")
    options.add_argument("--dtype", help="number type (default: the model's own)")
    options.add_argument("--tasks", type=Path, help="questions of Spec-Bench, for a trained head")
    options.add_argument("--per-category", type=int, default=4, help="half of them are notes")
    asked = options.parse_args()
    if asked.tasks and not asked.head:
        options.error("--tasks asks what stands of a trained head's guesses: name it by --head DIR")
    if asked.threads:
        torch.set_num_threads(asked.threads)
    contexts = [100, 200] if asked.quick else sorted(int(n) for n in asked.contexts.split(","))
    name, stands = asked.target or "smollm2-135m", None
    with (
        reaching(name, max(contexts)) as folder,
        load(folder, method="plain", kernels="dense", dtype=asked.dtype) as session,
    ):
        target = session.target
        head = asked.head or random_head(target)
        model = WindowReader(target, "longspec", WindowReader.Config(draft_head=head))
        found = measure(model, target, contexts, 3 if asked.quick else asked.rounds)
    if asked.tasks:
        questions = tasks(asked.tasks, 2 if asked.quick else asked.per_category, 1)
        options = {"draft_head": asked.head, "dtype": asked.dtype, **TREE}
        with load(name, method="longspec", **options) as session:
            longest = session.target.max_length or max(contexts)
            reached = [length for length in contexts if length <= longest]
            stands = standing(session, questions, reached)
    told = f"Target: {name}; {sum(LEVELS)} nodes fed in {len(LEVELS)} levels, one row"
    claims = bounds(found, stands)
    text = f"# LongSpec's draft by context\n\n{told}.\n\n" + table(found)
    text += table_of_standing(stands) if stands else ""
    text += "\n## Bounds\n\n" + gates.markdown(claims)
    document = {
        "environment": environment.describe(), "setting": told, "contexts": found,
        "standing": stands, "gates": [claim.to_dict() for claim in claims],
    }  # fmt: skip
    gates.publish(asked.out, "longspec", document, text)
    gates.show(claims, "LongSpec's draft by context")
    print(text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

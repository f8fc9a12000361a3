"""Peak memory of every row, each in a process of its own.

    python benchmarks/row_memory.py [--params 350M] [--methods plain chain ...]

A bench loads all models of all its rows at once, so the peaks in its table are one number. Here a
fresh process loads what one row needs, measures its costs if its controller asks for them, writes
one text and reports the most memory it ever held, and the most once it was loaded: reading weights
takes more than most methods do. The difference to `plain` is the method's price.
Writes benchmarks/results/row_memory.json and .md (row_memory-NAME with --target).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gates
from pair import main, pair, parser, prompts

from foretoken.bench import environment
from foretoken.bench.memory import Peak, alone, high_water
from foretoken.bench.models import Models
from foretoken.bench.rows import parse_methods
from foretoken.types import SamplingParams

METHODS = ("training-free", "chain", "tree", "mcsd", "rasd", "hf:plain", "hf:assisted")


def written(
    target: str, draft: str, label: str, prompt: str, tokens: int, threads: int
) -> tuple[int, int | None, int | None]:
    """Write a text with one row, in this process; its tokens, and the peaks until all is loaded and
    from then on."""
    import torch

    torch.set_num_threads(threads)
    [spec] = parse_methods([label])
    models = Models(target, draft if spec.needs_draft else None, dtype="float32")
    ids = models.tokenizer(prompt)["input_ids"]
    row = models.row(spec)
    if spec.peer:
        row.tune([[ids]], SamplingParams(max_new_tokens=8), None, lambda _: None)  # type: ignore[union-attr]
    loading = high_water()
    with Peak() as peak:
        text = row.write(ids, SamplingParams(max_new_tokens=tokens, eos=models.eos))
    return len(text.tokens), loading, peak.rss


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", help="size to widen the shipped target to")
    options.add_argument("--methods", nargs="*", default=METHODS, help="rows")
    options.add_argument("--max-new-tokens", type=int, default=64)
    asked = options.parse_args()
    specs = parse_methods(list(asked.methods))
    rows: dict[str, dict[str, Any]] = {}
    with pair(asked.target, asked.draft, asked.params) as models:
        [task, *_] = prompts(1)
        tokens = 8 if asked.quick else asked.max_new_tokens
        for spec in specs:
            given = str(models.target), str(models.draft), spec.label, task.turns[0]
            _, (count, *peaks) = alone(written, *given, tokens, asked.threads or 1)
            whole = None if None in peaks else max(peaks)
            rows[spec.label] = {"peak": whole, "writing": peaks[1], "tokens": count}
    plain = rows.get("plain", {}).get("writing")
    lines = ["| row | peak MiB | once loaded | above plain |", "|---|---:|---:|---:|"]
    for label, row in rows.items():
        peak, loaded = row["peak"], row["writing"]
        cells = ["-" if size is None else f"{size / 2**20:.0f}" for size in (peak, loaded)]
        cells += [f"{(loaded - plain) / 2**20:+.0f}" if plain and loaded else "-"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    told = f"Target: {Path(asked.target or 'text-target').name}"
    told += f", widened to {asked.params}" if asked.params else ""
    if any(spec.needs_draft for spec in specs):
        told += f"; draft: {Path(asked.draft or 'text-draft').name}"
    told += f"; float32, one text of {tokens} new tokens"
    text = f"# Peak memory, a process for every row\n\n{told}.\n\n" + "\n".join(lines) + "\n"
    document = {"environment": environment.describe(), "setting": told, "rows": rows}
    name = "row_memory" + (f"-{Path(asked.target).name}" if asked.target else "")
    gates.publish(asked.out, name, document, text)
    print(text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

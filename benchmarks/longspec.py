"""What LongSpec's head keeps of a row, and how long it takes to draft, by context.

    python benchmarks/longspec.py [--head DIR] [--contexts 1000,2000,4000,8000]

One row of `smollm2-135m` (or --target) grows from context to context; at each, trees of the paper's
shape (levels of 1, 4, 16, 16, 16 nodes fed) are drafted. Random weights cost what trained ones do,
so no head is needed. Writes benchmarks/results/longspec.json and .md.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import gates
import torch
from pair import main, parser

from foretoken.audit.fixtures import folder
from foretoken.audit.rows import seeded_rows
from foretoken.bench import environment
from foretoken.drafters.parts.window_reader import WindowReader
from foretoken.engine.loading import load
from foretoken.heads import store
from foretoken.heads.longspec import LongSpec
from foretoken.types import SamplingParams

LEVELS = (1, 4, 16, 16, 16)  # nodes fed: the root, then those that the next level stands on


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
    return store.save(folder(), "longspec", LongSpec(shape), {"weights": "random"})


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


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--head", help="folder of a trained head (default: random weights)")
    options.add_argument("--contexts", default="1000,2000,4000,8000", help="lengths to compare")
    options.add_argument("--rounds", type=int, default=20, help="trees at each")
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    contexts = [100, 200] if asked.quick else sorted(int(n) for n in asked.contexts.split(","))
    name = asked.target or "smollm2-135m"
    with load(name, method="plain", kernels="dense") as session:
        target = session.target
        head = asked.head or random_head(target)
        model = WindowReader(target, "longspec", WindowReader.Config(draft_head=head))
        found = measure(model, target, contexts, 3 if asked.quick else asked.rounds)
    lines = ["| context | draft rows | draft MiB | target MiB | ms per tree |", "|---:" * 5 + "|"]
    for length, one in found.items():
        sizes = [f"{one[key] / 2**20:.2f}" for key in ("bytes", "target_bytes")]
        cells = [length, str(one["rows"]), *sizes, f"{one['milliseconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    told = f"Target: {name}; {sum(LEVELS)} nodes fed in {len(LEVELS)} levels, one row"
    text = f"# LongSpec's draft by context\n\n{told}.\n\n" + "\n".join(lines) + "\n"
    document = {"environment": environment.describe(), "setting": told, "contexts": found}
    gates.publish(asked.out, "longspec", document, text)
    print(text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Does the cost model ever lose? With a useless draft against plain, with a good one against the
best fixed length.

    python benchmarks/never_slower.py [--quick] [--params 350M]

Writes benchmarks/results/never_slower.json and .md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gates
import torch
from pair import WORK, main, pair, parser, prompts
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.bench import environment
from foretoken.bench.run import BenchConfig, run_bench

LENGTHS = (1, 2, 3, 4, 5, 6, 8)
NODES = (4, 8, 16)


def random_draft(like: Path | str) -> Any:
    """A model of the draft's shape that knows nothing."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like), dtype=torch.float32)


def verdicts(useless: dict[str, Any], good: dict[str, Any]) -> list[gates.Gate]:
    """Never below 0.95 of what it could have done instead."""
    found = [
        gates.Gate(
            f"useless draft: {label} over plain",
            gates.ratio(useless, label, "plain"),
            0.95,
            unit="x",
        )
        for label in useless["rows"]
        if "cost_model" in label
    ]
    for method in ("chain", "tree"):
        fixed = gates.best(
            good, lambda label, m=method: label.startswith(m) and "cost" not in label
        )
        label = f"{method}[controller=cost_model]"
        claim = f"good draft: {label} over the best fixed one, {fixed}"
        found.append(gates.Gate(claim, gates.ratio(good, label, fixed), 0.95, unit="x"))
    return found


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", help="widen the shipped target to this size first")
    options.add_argument("--per-family", type=int, default=2, help="prompts of each family")
    options.add_argument("--repetitions", type=int, default=2)
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    quick = asked.quick
    lengths, nodes = ((1, 3), (4,)) if quick else (LENGTHS, NODES)
    adaptive = ["chain[controller=cost_model]", "tree[controller=cost_model]"]
    fixed = [f"chain[depth={n}]" for n in lengths] + [f"tree[depth=6,nodes={n}]" for n in nodes]
    work = WORK / ("never_slower-quick" if quick else "never_slower")
    tasks = prompts(1, limit=3) if quick else prompts(asked.per_family)
    with pair(asked.target, asked.draft, asked.params) as models:

        def bench(draft: Any, methods: list[str], name: str) -> dict[str, Any]:
            return run_bench(
                BenchConfig(
                    target=models.target,
                    draft=draft,
                    dtype="float32",
                    methods=methods,
                    out=work / name,
                    repetitions=1 if quick else asked.repetitions,
                    max_new_tokens=24 if quick else 128,
                    threads=asked.threads,
                    resume=asked.resume,
                    title=f"The cost model with a {name} draft",
                ),
                tasks,
            )

        useless = bench(
            random_draft(models.draft),
            ["plain", *adaptive, "prompt-lookup[controller=cost_model]", "chain[depth=5]"],
            "useless",
        )
        good = bench(models.draft, ["plain", *adaptive, *fixed], "good")
    found = verdicts(useless, good)
    document = {
        "environment": environment.describe(),
        "gates": [gate.to_dict() for gate in found],
        "useless": useless,
        "good": good,
    }
    text = f"# The cost model is never slower\n\n{gates.markdown(found)}\n"
    for name, results in (("useless", useless), ("good", good)):
        text += f"\n## With a {name} draft\n\n" + gates.speeds(results)
    gates.publish(asked.out, "never_slower", document, text)
    gates.show(found, "never slower")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""Everything a GPU can tell, in one go under ten minutes.

    python benchmarks/gpu.py                # widens the shipped target to 1B and 7B in bf16
    python benchmarks/gpu.py --dry-run      # the same code, small, on the CPU

Plain decoding eager and captured, chain, tree, prompt lookup and transformers' own; the cost of
scoring 1 to 128 nodes; every greedy divergence with its margin. Writes benchmarks/results/gpu.json
and .md after each size, so that a cut leaves what was measured. Without a GPU it says so and ends.
"""

from __future__ import annotations

import gc
from pathlib import Path
from time import monotonic
from typing import Any

import gates
import torch
from pair import WORK, console, main, pair, parser, prompts

from foretoken.bench import environment
from foretoken.bench.journal import Cell, read_journal
from foretoken.bench.metrics import first_difference
from foretoken.bench.models import Models
from foretoken.bench.prompts import encode
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.tasks import Task

METHODS = (
    "plain", "plain[kernels=dense]", "chain[depth=5]", "chain", "tree",
    "prompt-lookup", "hf:plain", "hf:compiled", "hf:assisted",
)  # fmt: skip
NODES = (1, 2, 4, 8, 16, 32, 64, 96, 128)


def measure_size(name: str, models: Any, asked: Any, dry: bool) -> dict[str, Any]:
    """One size: the bench, the scoring costs, the divergences."""
    tasks = prompts(1, limit=2 if dry else None)
    work = WORK / f"gpu-{name}{'-dry' if dry else ''}"
    config = BenchConfig(
        target=models.target,
        draft=models.draft,
        dtype="float32" if dry else "bfloat16",
        device="cpu" if dry else "cuda",
        methods=asked.methods or METHODS,
        out=work,
        repetitions=1 if dry else 2,
        max_new_tokens=8 if dry else asked.max_new_tokens,
        tuning_prompts=1 if dry else 2,
        tuning_tokens=8 if dry else 32,
        scoring_nodes=NODES[:4] if dry else NODES,
        threads=asked.threads,
        title=f"{name} on {environment.describe()['gpu'] or 'the CPU, as a dry run'}",
    )
    results = run_bench(config, tasks)
    _, journal = read_journal(work / "journal.jsonl")
    gc.collect()
    torch.cuda.empty_cache()
    results["divergences"] = divergences(config, tasks, journal.cells)
    return results


def divergences(config: BenchConfig, tasks: list[Task], cells: list[Cell]) -> list[dict[str, Any]]:
    """Where texts left plain's, and how the target itself judges the two tokens there.

    The margin is recomputed by an untouched model from the whole text so far, in one forward.
    """
    plain = {cell.prompt: cell.tokens for cell in cells if cell.row == "plain"}
    found = []
    for cell in cells:
        if cell.repetition == 0 and cell.tokens != plain.get(cell.prompt, cell.tokens):
            at = first_difference(cell.tokens, plain[cell.prompt])
            found.append({"row": cell.row, "prompt": cell.prompt, "at": at, "tokens": cell.tokens})
    if not found:
        return []
    models = Models(config.target, device=config.device, dtype=config.dtype)
    judge = models.clean("target").eval()
    ids = {task.id: encode(task, 0, (), models.tokenizer) for task in tasks}
    for entry in found:
        tokens, at = entry.pop("tokens"), entry["at"]
        other = plain[entry["prompt"]]
        if at >= min(len(tokens), len(other)):
            entry["margin"] = None  # one text only went on longer
            continue
        text = torch.tensor([ids[entry["prompt"]] + other[:at]], device=judge.device)
        with torch.inference_mode():
            logits = judge(text).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        entry["margin"] = abs(float(logits[other[at]] - logits[tokens[at]]))
        entry["top_two_gap"] = first - second
    return found


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    options.add_argument("--methods", help="other rows, comma separated")
    options.add_argument("--sizes", default="1B,7B", help="sizes to widen the shipped target to")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--minutes", type=float, default=9.0, help="begin no size after 60 %%")
    asked = options.parse_args()
    if not torch.cuda.is_available() and not asked.dry_run:
        console.print("No CUDA device here: nothing was measured. --dry-run tries the code.")
        return 0
    began = monotonic()
    document: dict[str, Any] = {
        "environment": environment.describe(),
        "dry_run": asked.dry_run,
        "sizes": {},
    }
    sizes = [None] if asked.target or asked.dry_run else asked.sizes.split(",")
    for size in sizes:
        name = size or "as given"
        minutes = (monotonic() - began) / 60
        if minutes > 0.6 * asked.minutes:
            document["sizes"][name] = {"failed": f"not begun: {minutes:.1f} minutes had passed"}
            continue
        with pair(asked.target, asked.draft, size, torch.bfloat16) as models:
            results = measure_size(name.replace(" ", "-"), models, asked, asked.dry_run)
        results["minutes"] = (monotonic() - began) / 60 - minutes
        document["sizes"][name] = results
        publish(document, asked.out)
    publish(document, asked.out)
    return 0


def publish(document: dict[str, Any], out: Path) -> None:
    """The result file, as far as it has come."""
    place = document["environment"]
    text = (
        f"# GPU\n\n{place['gpu'] or 'dry run on a CPU'}, torch {place['torch']}, {place['date']}\n"
    )
    for name, results in document["sizes"].items():
        text += f"\n## {name}\n\n"
        if "rows" not in results:
            text += results["failed"] + "\n"
            continue
        text += gates.speeds(results)
        scoring = results["scoring"]
        pairs = zip(scoring["nodes"], scoring["ms"], scoring["ratio"], strict=True)
        cost = ", ".join(f"{n}: {ms:.2f} ms ({times:.2f}x)" for n, ms, times in pairs)
        text += f"\nScoring n nodes at context {scoring['context']}: {cost}\n\n"
        found = results["divergences"]
        text += f"Greedy divergences from plain: {len(found)}\n"
        for entry in found:
            margin = "one text ended" if entry["margin"] is None else f"{entry['margin']:.4f}"
            text += f"- {entry['row']}, {entry['prompt']}, token {entry['at']}: margin {margin}\n"
    name = "gpu-dry-run" if document["dry_run"] else "gpu"
    gates.publish(out, name, document, text)


if __name__ == "__main__":
    main(run, __doc__)

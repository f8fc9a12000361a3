"""The engine against transformers on a target of about 350M parameters, same draft, same run.

    python benchmarks/stage_a.py            # about half an hour on two cores
    python benchmarks/stage_a.py --quick

Writes benchmarks/results/stage_a.json, .md, .svg and .html. `--resume` goes on after an
interruption.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gates
from pair import WORK, main, pair, parser, prompts

from foretoken.bench.report import write_reports
from foretoken.bench.run import BenchConfig, run_bench

METHODS = (
    "plain", "chain[depth=5]", "chain[depth=3]", "chain",
    "tree[depth=5]", "tree", "prompt-lookup",
    "plain[exact_bits=true]", "chain[exact_bits=true]", "tree[exact_bits=true]",
    "hf:plain", "hf:compiled", "hf:assisted", "hf:prompt-lookup",
)  # fmt: skip


def fastest(results: dict[str, Any]) -> dict[str, str | None]:
    """Our best row and the best peer, by all tokens over all seconds."""
    peers = {label: bool(row.get("peer")) for label, row in results["rows"].items()}
    return {
        "ours": gates.best(results, lambda label: not peers[label], whole=True),
        "peer": gates.best(results, lambda label: peers[label], whole=True),
    }


def verdicts(results: dict[str, Any]) -> list[gates.Gate]:
    """The bounds this stage promises, by all tokens over all seconds of a row."""
    rows, scoring = results["rows"], results["scoring"]
    ours, peer = results["best"]["ours"], results["best"]["peer"]
    chain = gates.best(results, lambda label: label.startswith("chain"), whole=True)
    sixteen = dict(zip(scoring["nodes"], scoring["ratio"], strict=True)).get(16)
    return [
        gates.Gate(
            "plain over hf:plain",
            gates.ratio(results, "plain", "hf:plain", whole=True), 1.1, unit="x",
        ),
        gates.Gate(
            f"{chain} over hf:assisted at its best setting",
            gates.ratio(results, chain, "hf:assisted", whole=True), 1.3, unit="x",
        ),
        gates.Gate(
            f"best of ours ({ours}) over the best peer ({peer})",
            gates.ratio(results, ours, peer, whole=True), 1.5, unit="x",
        ),
        *(
            gates.Gate(f"efficiency of {label}", rows[label]["efficiency"] if label else None, 0.85)
            for label in dict.fromkeys((chain, ours))
        ),
        gates.Gate(
            "scoring 16 nodes, in plain steps", sixteen, 2.0, at_least=False, unit=" steps"
        ),
    ]  # fmt: skip


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--params", default="350M", help="size to widen the shipped target to")
    options.add_argument("--per-family", type=int, default=3, help="prompts of each family")
    options.add_argument("--repetitions", type=int, default=2)
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--methods", help="other rows, comma separated")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    quick = asked.quick
    methods = asked.methods or METHODS
    work = WORK / ("stage_a-quick" if quick else "stage_a")
    with pair(asked.target, asked.draft, asked.params) as models:
        config = BenchConfig(
            target=models.target,
            draft=models.draft,
            dtype="float32",
            methods=methods,
            out=work,
            repetitions=1 if quick else asked.repetitions,
            max_new_tokens=16 if quick else asked.max_new_tokens,
            tuning_prompts=1 if quick else 3,
            tuning_tokens=8 if quick else 48,
            threads=asked.threads,
            resume=asked.resume,
            title="The engine against transformers",
        )
        tasks = prompts(1, limit=3) if quick else prompts(asked.per_family)
        results = run_bench(config, tasks)
    results["best"] = fastest(results)
    found = verdicts(results)
    results["gates"] = [gate.to_dict() for gate in found]
    publish(results, found, work, asked.out, "stage_a")
    gates.show(found, results["title"])
    return 0


def publish(
    results: dict[str, Any], found: list[gates.Gate], work: Path, out: Path, name: str
) -> None:
    """The four files that stay."""
    files = write_reports(results, work)
    text = files["markdown"].read_text(encoding="utf-8").split("![", 1)[0].rstrip()
    text += "\n\n## Bounds\n\n" + gates.markdown(found) + f"\n![speed-up]({name}.svg)\n"
    gates.publish(out, name, results, text)
    shutil.copyfile(files["html"], out / f"{name}.html")
    if "speedup" in files:
        shutil.copyfile(files["speedup"], out / f"{name}.svg")


if __name__ == "__main__":
    main(run, __doc__)

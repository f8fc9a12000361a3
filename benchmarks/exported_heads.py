"""Exported heads in vLLM: a head written by `foretoken heads export` drafts there as it does here.

    python benchmarks/exported_heads.py HEAD_DIR ... --vllm-python vllm/bin/python

Each folder is one of `foretoken train eagle` or `train medusa` (or a published one of EAGLE-3), for
the shipped mini or --target. Both engines draft chains of --depth tokens at temperature 0 in
float32; the accepted length, what is kept by depth and the texts are compared. Writes
benchmarks/results/exported-heads.json and .md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

INSIDE = "--inside-vllm"
LAYOUTS = {"eagle": "eagle", "medusa": "medusa", "eagle3-wide": "eagle3"}
METHODS = {"eagle": "eagle2", "medusa": "medusa", "eagle3": "eagle3"}  # of ours, by layout


def inside() -> None:
    """The other interpreter's part: vLLM over one target and one exported head."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "omp" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv],
                  {**os.environ, "LD_PRELOAD": str(library)})  # fmt: skip
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    guesses = {"model": asked["head"], "method": asked["layout"],
               "num_speculative_tokens": asked["depth"]}  # fmt: skip
    llm = LLM(
        model=asked["target"], skip_tokenizer_init=True, dtype="float32", max_num_seqs=1,
        max_model_len=asked["room"], enable_prefix_caching=False, enforce_eager=True,
        disable_log_stats=False, speculative_config=guesses, generation_config="vllm",
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=asked["new"], temperature=0, stop_token_ids=asked["eos"], ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    written = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    texts = [list(one.outputs[0].token_ids) for one in written]
    counted = {metric.name: metric for metric in llm.get_metrics()}
    spec = "vllm:spec_decode_num_"
    answer = {
        "texts": texts,
        "drafts": counted[f"{spec}drafts"].value,
        "kept": list(counted[f"{spec}accepted_tokens_per_pos"].values),
    }
    Path(sys.argv[3]).write_text(json.dumps(answer), encoding="utf-8")


def theirs(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What vLLM made of it."""
    from foretoken.bench.interpreters import environment

    with TemporaryDirectory(prefix="foretoken-") as folder:
        question, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        ran = subprocess.run(
            [python, __file__, INSIDE, str(question), str(answer)],
            env=environment(python), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not answer.exists():
            raise RuntimeError(f"vLLM ended with status {ran.returncode}:\n{ran.stderr[-2000:]}")
        return dict(json.loads(answer.read_text(encoding="utf-8")))


def ours(method: str, asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """What this engine makes of the head as it was before."""
    import foretoken

    depth, texts, drafts = asked["depth"], [], 0
    kept = [0] * depth
    chain = [[0] * level for level in range(1, depth + 1)]
    options = {"controller": "fixed", "depth": depth, "nodes": depth, "template": chain}
    with foretoken.load(
        asked["target"], method=method, draft_head=folder, dtype="float32", **options
    ) as session:
        for prompt in asked["prompts"]:
            found = session.generate(prompt, asked["new"], temperature=0)
            texts.append(list(found.tokens))
            for step in found.steps:
                drafts += step.drafted > 0
                for level in range(step.accepted):
                    kept[level] += 1
    return {"texts": texts, "drafts": drafts, "kept": kept}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Accepted length and what is kept at each depth, of those that were asked for there."""
    reached = [found["drafts"], *found["kept"][:-1]]
    shares = [k / r if r else 0.0 for k, r in zip(found["kept"], reached, strict=True)]
    length = 1.0 + sum(found["kept"]) / max(1, found["drafts"])
    return {"accepted_length": length, "kept_by_depth": shares, "drafts": found["drafts"]}


def run(description: str | None) -> int:
    from pair import console, parser, prompts
    from transformers import AutoTokenizer

    from foretoken import minis
    from foretoken.bench.environment import describe
    from foretoken.bench.interpreters import find
    from foretoken.engine.models import end_tokens
    from foretoken.heads import store
    from foretoken.heads.export import Base, export
    from foretoken.lm.load import load_model

    options = parser(description)
    options.add_argument("heads", nargs="+", metavar="HEAD_DIR")
    options.add_argument("--vllm-python", help="interpreter with vllm or vllm-cpu")
    options.add_argument("--depth", type=int, default=3, help="tokens drafted per step")
    asked = options.parse_args()
    python = find("vllm", asked.vllm_python).python
    target = str(asked.target or minis.path("text-target"))
    model, tokenizer = load_model(target), AutoTokenizer.from_pretrained(target)
    ids = [tokenizer(task.turns[0])["input_ids"] for task in prompts(1 if asked.quick else 4)]
    question = {
        "target": target, "depth": asked.depth, "new": 32 if asked.quick else 96, "prompts": ids,
        "room": max(map(len, ids)) + 128, "eos": sorted(end_tokens(model, tokenizer)),
    }  # fmt: skip
    told_of = {**question, "target": Path(target).name, "prompts": len(ids)}
    results: dict[str, Any] = {"environment": describe(), "asked": told_of}
    lines = ["| head | layout | accepted length here | in vLLM | kept by depth here | in vLLM | "
             "equal texts |", "|---|---|---:|---:|---|---|---:|"]  # fmt: skip
    for folder in asked.heads:
        layout = LAYOUTS[store.card_of(folder).kind]
        with TemporaryDirectory(prefix="foretoken-") as place:
            out = export(folder, Path(place) / "head", layout, Base.of(model, target))
            console.print(f"{folder} as {layout} in vLLM ...")
            other = theirs(python, {**question, "head": str(out), "layout": layout})
        mine = ours(METHODS[layout], question, folder)
        equal = sum(a == b for a, b in zip(mine["texts"], other["texts"], strict=True))
        here, there = told(mine), told(other)
        name = Path(folder).name
        results[name] = {"layout": layout, "here": here, "vllm": there, "equal_texts": equal}
        shares = [" ".join(f"{s:.3f}" for s in one["kept_by_depth"]) for one in (here, there)]
        lines.append(f"| {name} | {layout} | {here['accepted_length']:.3f} | "
                     f"{there['accepted_length']:.3f} | {shares[0]} | {shares[1]} | "
                     f"{equal} of {len(ids)} |")  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(lines)
    (asked.out / "exported-heads.json").write_text(json.dumps(results, indent=2) + "\n")
    (asked.out / "exported-heads.md").write_text(f"# Exported heads, here and in vLLM\n\n{table}\n")
    print(table)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        inside()
    else:
        from pair import main

        main(run, __doc__)

"""What scoring n nodes costs: the model's own products against the chosen kernels.

    python benchmarks/scoring_cost.py --model DIR --out results
    python benchmarks/scoring_cost.py --threads 2 --exact     # a random 350M Llama

Without --model a random Llama of about 350M parameters stands in: the cost of a forward does not
depend on what the weights are. Kernels take turns, so a busy neighbour harms all of them alike.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.bench import environment
from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.lm.kernels.choosing import installed
from foretoken.lm.kernels.linears import Product
from foretoken.lm.load import load_model
from foretoken.lm.opening import open_lm
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, TokenTree

NODES = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a random 350M Llama)")
    parser.add_argument("--context", type=int, default=200, help="tokens before the tree")
    parser.add_argument("--repeats", type=int, default=7, help="timings per row count and kernel")
    parser.add_argument("--threads", type=int, help="torch threads (default: as torch decides)")
    parser.add_argument("--exact", action="store_true", help="measure exact_bits=True as well")
    parser.add_argument("--out", type=Path, help="folder for scoring-cost.json")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(options.model) if options.model else random_llama()
    result = measure(model, options.context, options.repeats, options.exact)
    result["model"] = options.model.name if options.model else "random Llama, 350M"
    show(result)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "scoring-cost.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        Console().print(f"written to {path}")


def random_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1600, intermediate_size=3840, num_hidden_layers=12,
        num_attention_heads=25, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def measure(model: Any, context: int, repeats: int, exact: bool) -> dict[str, Any]:
    """Milliseconds by kernels and nodes; the medians of interleaved timings."""
    copied = copy.deepcopy(model) if exact else None  # one model has one set of kernels
    chosen = open_lm(model, kernels="auto")
    report = chosen.kernels
    variants: dict[str, tuple[LanguageModel, list[Product]]] = {
        "dense": (chosen, []),
        "chosen": (chosen, list(installed(model))),
    }
    if exact:
        variants["exact_bits"] = (open_lm(copied, exact_bits=True), [])
    tokens = [(7 * i) % 97 for i in range(context)]
    rows = {name: filled(lm, tokens) for name, (lm, _) in variants.items()}
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in NODES} for name in variants}
    for turn in range(repeats + 1):
        for name, (lm, products) in variants.items():
            for product in variants["chosen"][1]:
                (product.put_in if product in products else product.take_out)()
            for nodes in NODES:
                seconds = scored(lm, rows[name], nodes)
                if turn:  # the first turn warms up
                    times[name][nodes].append(1e3 * seconds)
    return {
        "environment": environment.describe(),
        "context": context,
        "repeats": repeats,
        "milliseconds": {
            name: {n: round(statistics.median(values), 3) for n, values in by_nodes.items()}
            for name, by_nodes in times.items()
        },
        "lowest": {
            name: {n: round(min(values), 3) for n, values in by_nodes.items()}
            for name, by_nodes in times.items()
        },
        "kernels": report.to_dict() if report else None,
    }


def filled(lm: LanguageModel, tokens: list[int]) -> DecodeState:
    row = DecodeState(tokens, len(tokens), SamplingParams(), SeededCoins(0), None)
    lm.prefill([row])
    return row


def scored(lm: LanguageModel, row: DecodeState, nodes: int) -> float:
    """Seconds to score a binary tree; nothing is committed."""
    tree = TokenTree(
        (row.tokens[-1], *range(1, nodes)), (-1, *((i - 1) // 2 for i in range(1, nodes)))
    )
    began = perf_counter()
    [scores] = lm.score([row], [Draft(tree, Draw.POINT)])
    scores.logits[-1, 0].item()  # waits for a GPU
    return perf_counter() - began


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"milliseconds to score n nodes: {result['model']}")
    table.add_column("kernels")
    for nodes in NODES:
        table.add_column(str(nodes), justify="right")
    table.add_column("16 / 1", justify="right")
    for name, by_nodes in result["milliseconds"].items():
        cells = [f"{by_nodes[nodes]:.1f}" for nodes in NODES]
        table.add_row(name, *cells, f"{by_nodes[16] / by_nodes[1]:.2f}")
    Console().print(table)
    threads, load = (result["environment"][key] for key in ("threads", "load_average"))
    Console().print(f"{threads} threads, load {load}, context {result['context']}")


if __name__ == "__main__":
    main()

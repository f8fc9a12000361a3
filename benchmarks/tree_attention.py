"""Attention of a tree's nodes over a long context, by each way there is, on one clock.

    python benchmarks/tree_attention.py [--contexts 2048,4096] [--nodes 16] [--dtypes float32]

Layers of the shapes of SmolLM2-135M (9 query heads on 3 of keys, 64 wide), each with a cache of its
own, as the weights of a forward leave them: not in the processor. One row, its tree and its context
random. The ways: in C over the slot cache, which captured models take where a compiler is; and for
all others the hybrid (prefix without a mask, tree under its own, merged by log-sum-exp), one mask
over all columns, and torch's attention with repeated keys as transformers calls it. Every way runs
in turn, the order rotating. With `--target DIR`, whole forwards of that model instead, by the first
three. Writes benchmarks/results/tree_attention.json and .md (tree_attention-NAME with --target).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import gates
import torch
from pair import console, main, parser
from torch.nn import functional as F

from foretoken.bench import environment
from foretoken.bench.models import Models
from foretoken.coins import SeededCoins
from foretoken.lm.runtime import tree_attention
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.cache_attention import CacheAttention
from foretoken.lm.runtime.masks import Sights
from foretoken.lm.runtime.slot_attention import ENDLESS, InSlots, Reading
from foretoken.row import make_row
from foretoken.trees.masks import Sight, ancestors
from foretoken.types import DecodeState, Draft, Draw, SamplingParams, TokenTree

HEADS, GROUPS, WIDTH, LAYERS = 9, 3, 64, 10
ALWAYS = dict.fromkeys(tree_attention.LARGE, 0)
FORWARD = 30  # layers of the model: what is reported is as many
C, HYBRID, MASKED, THEIRS = "in C", "hybrid", "masked", "as transformers"


def parents(nodes: int) -> list[int]:
    """A tree drawn at random."""
    dice = random.Random(nodes)
    return [-1, *(dice.randrange(i) for i in range(1, nodes))]


def ways(context: int, nodes: int, dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    """Attention of one layer by each way, the new keys and values written first."""
    longest = context + nodes
    cache = SlotCache(LAYERS, 1, longest)
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, 1, GROUPS, 1, WIDTH).to(dtype), layer)
    cache.rebuild()
    for group in cache.groups:
        group.keys.normal_(), group.values.normal_()
    cache.aim([0], [context], nodes, longest, {}, torch.device("cpu"))
    block = Sight(dtype, torch.device("cpu")).unpack(ancestors(parents(nodes), []), nodes)
    fold = HEADS // GROUPS
    mask = torch.zeros(1, 1, fold * nodes, longest, dtype=dtype)
    mask[..., context:] = block.repeat(fold, 1)
    states = torch.randn(1, nodes, HEADS + 2 * GROUPS, WIDTH).to(dtype).transpose(1, 2)
    query, key, value = states.split([HEADS, GROUPS, GROUPS], 1)
    own = InSlots(cache, fold, ENDLESS).over([Reading.of(0, 0, nodes, context, block)], [block])
    windows = [None] * LAYERS
    masked = CacheAttention(cache, Sights({None: mask}, {}), windows)
    hybrid = CacheAttention(cache, Sights({None: mask}, {}, prefix=context), windows)

    def theirs(layer: int) -> torch.Tensor:
        keys, values = cache.update(key, value, layer)
        wide = (states.repeat_interleave(fold, 1) for states in (keys, values))
        made = F.scaled_dot_product_attention(query, *wide, attn_mask=mask[:, :, :nodes])
        return made.transpose(1, 2)

    found = {
        HYBRID: lambda layer: hybrid(layer, query, key, value, None, None, None),
        MASKED: lambda layer: masked(layer, query, key, value, None, None, None),
        THEIRS: theirs,
    }
    return ({} if own is None else {C: lambda layer: own(layer, query, key, value, None)}) | found


def in_turn(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each way; the first round warms."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(rounds + 1):
        order = [*order[1:], order[0]]
        for name in order:
            began = perf_counter()
            ways[name]()
            if turn:
                seconds[name].append(perf_counter() - began)
    return {name: median(some) for name, some in seconds.items()}


def forward(run: Callable[[int], Any]) -> None:
    """The attention of all layers."""
    for layer in range(LAYERS):
        run(layer)


def layers(asked: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Milliseconds of the attention of a whole forward, and how far each way is from masked."""
    found = []
    for context in asked.contexts:
        each = ways(context, asked.nodes, dtype)

        first = {name: run(0).float() for name, run in each.items()}
        apart = {name: float((made - first[MASKED]).abs().max()) for name, made in first.items()}
        seconds = in_turn({name: partial(forward, run) for name, run in each.items()}, asked.rounds)
        ms = {name: 1000 * FORWARD / LAYERS * value for name, value in seconds.items()}
        found.append({"context": context, "ms": ms, "apart_from_masked": apart})
    return found


def forwards(asked: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Milliseconds of scoring a tree with the model itself."""
    models = Models(asked.target, None, dtype=str(dtype).removeprefix("torch."))
    lm = models.own("target")
    dice = random.Random(0)
    room = (lm.max_length or 1 << 30) - asked.nodes
    found = []
    for context in sorted({min(n, room) for n in asked.contexts}):
        tokens = [dice.randrange(lm.vocab_size) for _ in range(context + 1)]
        params = SamplingParams(max_new_tokens=1)
        row = make_row(tokens, params, SeededCoins(0), lm.vocab_size)
        lm.prefill([row])
        above = parents(asked.nodes)
        nodes = [tokens[-1], *(dice.randrange(lm.vocab_size) for _ in above[1:])]
        draft = Draft(TokenTree(tuple(nodes), tuple(above)), Draw.POINT)

        score = partial(scored, lm, row, draft)
        lm.score([row], [draft])
        reach, large = lm.in_slots.reach, tree_attention.LARGE
        each = {HYBRID: partial(score, 0, ALWAYS), MASKED: partial(score, 0, {})}
        each = ({C: partial(score, reach, large)} if reach >= asked.nodes else {}) | each
        seconds = in_turn(each, asked.rounds)
        tree_attention.LARGE = large
        found.append({"context": context, "ms": {k: 1000 * v for k, v in seconds.items()}})
        lm.reset()
    models.close()
    return found


def scored(
    lm: Any, row: DecodeState, draft: Draft, reach: int, large: dict[torch.dtype, int]
) -> Any:
    """Logits of a tree, with attention in C for `reach` nodes, the hybrid from `large` bytes on."""
    lm.in_slots.reach, tree_attention.LARGE = reach, large
    return lm.score([row], [draft])


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, and how many times faster than under one mask."""
    names = list(rows[0]["ms"])
    lines = [f"| context | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
    for row in rows:
        ms = row["ms"]
        cells = [f"{ms[name]:.1f} ({ms[MASKED] / ms[name]:.2f}x)" for name in names]
        lines.append(f"| {row['context']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--contexts", default="1024,2048,4096,8192,16384")
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--nodes", type=int, default=16)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--resume", action="store_true", help="keep other types of an earlier run")
    asked = options.parse_args()
    asked.contexts = [int(n) for n in asked.contexts.split(",")]
    if asked.quick:
        asked.contexts, asked.rounds = asked.contexts[:1], 1
    if asked.threads:
        torch.set_num_threads(asked.threads)
    tree_attention.LARGE = ALWAYS  # each way at every context
    name = "tree_attention" + (f"-{Path(asked.target).name}" if asked.target else "")
    known = asked.out / f"{name}.json"
    found = json.loads(known.read_text())["rows"] if asked.resume and known.exists() else {}
    for kind in asked.dtypes.split(","):
        with torch.inference_mode():
            measure = forwards if asked.target else layers
            found[kind] = measure(asked, getattr(torch, kind))
    threads = torch.get_num_threads()
    what = "whole forwards" if asked.target else f"the attention of {FORWARD} layers"
    setting = f"{asked.nodes} nodes, {threads} threads, medians of {asked.rounds} rounds"
    text = f"# A tree's nodes over a long context\n\nMilliseconds of {what}; in brackets, times "
    text += f"faster than under one mask over all columns. {setting}.\n"
    for kind, rows in found.items():
        text += f"\n## {kind}\n\n{table(rows)}"
    document = {"environment": environment.describe(), "setting": setting, "rows": found}
    gates.publish(asked.out, name, document, text)
    console.print(text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

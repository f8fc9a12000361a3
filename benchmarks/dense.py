"""Bytes per key against accepted tokens: what compressing the keys of retrieval-dense costs.

    python benchmarks/dense.py [--examples 1000] [--prompts 4] [--quick]

The target reads generated examples once; from its states, keys of every type and size are made. It
then writes about held-out prompts, at temperature 0, and each set of keys drafts for those texts:
what would be accepted follows from the texts and the states alone, so no forward is repeated.
Writes benchmarks/results/dense.json, .md and .svg.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gates
import torch
from pair import console, main, pair, parser, prompts
from torch import Tensor

import foretoken
from foretoken.bench import environment
from foretoken.bench.files import replace
from foretoken.bench.plots import curves
from foretoken.bench.svg import Picture, standalone
from foretoken.datastore.capture import capture, states_of
from foretoken.datastore.codecs import DTYPES
from foretoken.datastore.continuations import beginnings
from foretoken.datastore.dense import KeyStore, write
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.engine.session import Session
from foretoken.minis.tasks import mixed

SHARES = (1.0, 0.5, 0.25, 0.1)  # of the dimensions
DEPTH, NODES, NEIGHBOURS, SHARPNESS = 10, 16, 32, 20.0

Text = tuple[list[int], int, Tensor]  # tokens, length of the prompt, states


def texts_read(session: Session, count: int) -> Iterator[list[int]]:
    """Generated examples of the training split as ids."""
    tokenizer = session.tokenizer
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for example in mixed("train", count):
        yield tokenizer(example.prompt + example.answer)["input_ids"] + end


def texts_written(session: Session, limit: int, tokens: int, tap: int) -> list[Text]:
    """What the target says about held-out prompts, and its states on the way."""
    found = []
    for task in prompts(limit):
        ids = session.tokenizer(task.turns[0])["input_ids"]
        written = session.generate(ids, tokens).tokens
        whole = ids + written
        found.append((whole, len(ids), states_of(session.target, whole, tap)))
    return found


def tokens_per_step(store: KeyStore, texts: list[Text]) -> float:
    """Tokens a step yields, its own one included, over texts that are known."""
    steps = tokens = 0
    for whole, prompt, states in texts:
        at = prompt  # tokens committed; the first step after a prompt drafts as any other
        while at < len(whole):
            found = store.find(states[at - 2], whole[at - 1], DEPTH, NEIGHBOURS, SHARPNESS)
            step = 1 if found is None else 1 + accepted(store, found, whole[at:])
            at, steps = at + step, steps + 1
        tokens += len(whole) - prompt
    return tokens / steps


def accepted(store: KeyStore, found: Any, truth: list[int]) -> int:
    """How far a draft goes with the text."""
    best = beginnings(found, NODES, store.vocabulary.size)
    child = {(p, t): i for i, (p, t) in enumerate(zip(best.parents, best.tokens, strict=True))}
    node, length = -1, 0
    for token in truth:
        if (node, token) not in child:
            break
        node, length = child[node, token], length + 1
    return length


def measure(session: Session, examples: int, limit: int, tokens: int) -> list[dict[str, Any]]:
    """Every type at every size; the states are taken once, at full width."""
    vocabulary = Vocabulary.of(session.tokenizer.get_vocab())
    tap, width = -1, session.target.hidden_size
    console.print("reading", style="dim")
    whole = capture(
        session.target, texts_read(session, examples), vocabulary, tap=tap, dims=width,
        dtype="float32",
    )  # fmt: skip
    held_out = texts_written(session, limit, tokens, tap)
    raw = whole.codec.decode(torch.from_numpy(whole.keys))
    back = raw @ whole.codec.components.T + whole.codec.mean  # up to length, which is not kept
    found = []
    for dtype in DTYPES:
        for share in SHARES:
            dims = max(1, round(share * width))
            codec = type(whole.codec)(
                whole.codec.mean, whole.codec.components[:, :dims].contiguous(), dtype
            )
            with TemporaryDirectory() as where:
                contents = type(whole)(
                    vocabulary, tap, codec, codec.encode(back).numpy(), whole.places,
                    whole.starts, whole.tokens,
                )  # fmt: skip
                write(Path(where) / "keys", contents)
                store = KeyStore(Path(where) / "keys")
                found.append(
                    {
                        "dtype": dtype,
                        "dims": dims,
                        "bytes": store.contents.keys.shape[1],
                        "keys": store.size,
                        "tokens_per_step": tokens_per_step(store, held_out),
                    }
                )
            console.print(found[-1], style="dim")
    return found


def plot(found: list[dict[str, Any]]) -> Picture:
    """Tokens per step over bytes per key, a line per type."""
    series = {
        dtype: sorted((r["bytes"], r["tokens_per_step"]) for r in found if r["dtype"] == dtype)
        for dtype in DTYPES
    }
    title = "Bytes per key against accepted tokens"
    return curves(title, series, "bytes per key; tokens per target forward", zero=False)


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--examples", type=int, default=1000, help="generated texts to read")
    options.add_argument("--prompts", type=int, default=4, help="held-out prompts per family")
    options.add_argument("--max-new-tokens", type=int, default=96)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    sizes = (12, 1, 12) if asked.quick else (asked.examples, asked.prompts, asked.max_new_tokens)
    with pair(asked.target, asked.draft) as where, foretoken.load(where.target, "plain") as session:
        found = measure(session, *sizes)
    document = {
        "environment": environment.describe(),
        "nodes": NODES,
        "depth": DEPTH,
        "keys": found,
    }
    lines = ["| type | dimensions | bytes per key | tokens per step |", "|---|---:|---:|---:|"]
    lines += [
        f"| {r['dtype']} | {r['dims']} | {r['bytes']} | {r['tokens_per_step']:.3f} |" for r in found
    ]
    replace(asked.out / "dense.svg", standalone(plot(found)))
    text = "# Bytes per key against accepted tokens\n\n" + "\n".join(lines) + "\n\n![](dense.svg)\n"
    gates.publish(asked.out, "dense", document, text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

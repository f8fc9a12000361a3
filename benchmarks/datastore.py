"""What a look-up costs in a large datastore: one core, memory-mapped, the whole way to a trie.

    python benchmarks/datastore.py [--tokens 10000000] [--look-ups 20000] [--quick]

Texts are made of phrases that repeat, in a vocabulary of 4,096 tokens; contexts are cut out of the
texts, so that matches are long and occurrences many. Writes benchmarks/results/datastore.json and
.md.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from typing import Any

import gates
import numpy as np
from pair import main, parser

from foretoken.bench import environment
from foretoken.datastore.continuations import beginnings
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary

VOCAB, PHRASES = 4096, 20_000
DEPTH, NODES, OCCURRENCES = 10, 64, 256


def documents(tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Texts of about 400 tokens, some `tokens` in all."""
    rng = np.random.default_rng(seed)
    phrases = [rng.zipf(1.3, rng.integers(4, 40)) % VOCAB for _ in range(PHRASES)]
    made = 0
    while made < tokens:
        text = np.concatenate([phrases[i] for i in rng.integers(0, PHRASES, 20)])
        made += len(text)
        yield text


def look_ups(store: Datastore, count: int, seed: int) -> dict[str, Any]:
    """Milliseconds of finding and of the trie, over contexts cut out of the texts."""
    rng = np.random.default_rng(seed)
    texts = store.segments[0].text
    seconds, own, lengths = [], [], []
    for turn in range(count + count // 10):
        end = int(rng.integers(32, len(texts)))
        context = texts[end - 24 : end].tolist()
        began, busy = perf_counter(), thread_time()
        found = store.find(context, DEPTH, least=1, most=16, limit=OCCURRENCES)
        looked = perf_counter()
        if found is not None:
            beginnings(found, NODES, VOCAB)
        if turn >= count // 10:  # the first tenth warms the page cache
            seconds.append((looked - began, perf_counter() - began))
            own.append(1000 * (thread_time() - busy))
            lengths.append(0 if found is None else found.length)
    find, whole = 1000 * np.array(seconds).T
    return {
        "look_ups": len(seconds),
        "mean_match": float(np.mean(lengths)),
        "find_ms": spread(find),
        "find_and_trie_ms": spread(whole),
        "processor_ms": spread(np.array(own)),  # without waiting for a busy machine
    }


def spread(values: np.ndarray) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in
            (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))}  # fmt: skip


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--tokens", type=int, default=10_000_000)
    options.add_argument("--look-ups", type=int, default=20_000)
    asked = options.parse_args()
    tokens, count = (50_000, 200) if asked.quick else (asked.tokens, asked.look_ups)
    with TemporaryDirectory() as where:
        store = Datastore.create(where, Vocabulary.of_ids(VOCAB))
        began = perf_counter()
        store.add(documents(tokens, seed=0))
        built = perf_counter() - began
        began = perf_counter()
        store.add(documents(tokens // 100, seed=1), segment_tokens=tokens // 100)
        added = perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = look_ups(store, count, seed=2)
        document = {
            "environment": environment.describe(),
            "tokens": store.tokens,
            "segments": len(store.segments),
            "bytes_per_token": store.size / store.tokens,
            "build_seconds": built,
            "add_one_percent_seconds": added,
            "peak_mib": peak,
            **found,
        }
    verdicts = [
        gates.Gate("look-up, p99", found["find_ms"]["p99"], 1.0, False, " ms"),
        gates.Gate("look-up and trie, p99", found["find_and_trie_ms"]["p99"], 1.0, False, " ms"),
        gates.Gate("build", built, 120.0, False, " s"),
    ]
    document["gates"] = [gate.to_dict() for gate in verdicts]
    gates.publish(asked.out, "datastore", document, page(document) + gates.markdown(verdicts))
    gates.show(verdicts, "datastore")
    return 0


def page(found: dict[str, Any]) -> str:
    """The numbers as Markdown."""
    lines = [
        f"# A datastore of {found['tokens']:,} tokens\n",
        f"Built in {found['build_seconds']:.1f} s, {found['bytes_per_token']:.1f} bytes per token, "
        f"peak memory {found['peak_mib']:.0f} MiB; one percent more added in "
        f"{found['add_one_percent_seconds']:.2f} s, {found['segments']} segments. "
        f"Mean match {found['mean_match']:.1f} tokens, {found['look_ups']:,} look-ups.\n",
        "| milliseconds | p50 | p90 | p99 | p99.9 |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in ("find_ms", "find_and_trie_ms", "processor_ms"):
        numbers = " | ".join(f"{value:.3f}" for value in found[name].values())
        lines.append(f"| {name.removesuffix('_ms').replace('_', ' ')} | {numbers} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main(run, __doc__)

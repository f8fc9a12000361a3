"""One sorted draft for two targets beside a draft of each: accepted lengths, and memory.

    python benchmarks/sorted_drafts.py --sorted ./both \\
        --pair ./target ./texts ./draft --pair ./other ./its-texts ./its-draft

Each pair names a target, its chats as `foretoken train data` made them, and the draft that was
trained on them alone; `--sorted` is what `foretoken train sorted` made of both. Held-out chats, a
chain of four, half greedy and half at temperature 1; counts only, so no quiet machine is needed.
Writes benchmarks/results/sorted-drafts.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gates
import torch
from pair import RESULTS, console, main
from rich.progress import track

import foretoken
from foretoken.bench import environment
from foretoken.bench.intervals import interval
from foretoken.training.dataset.records import every_chat

CLOSE, HALF = 0.95, 0.5  # wanted: accepted length over a draft of its own, memory over both
DEPTH = 4
WAYS: dict[str, tuple[float, ...] | None] = {
    "a draft of its own": None,
    "sorted, all layers": (2.0, 2.0),  # no token is that sure
    "sorted, left at the second exit": (2.0, 0.0),
    "sorted, left where .6 sure": (0.6, 0.6),
}
Counts = list[tuple[int, int]]  # of every text: tokens, target forwards


def written(
    target: str, draft: str, prompts: Sequence[list[int]], tokens: int, **options: Any
) -> Counts:
    """What is accepted of a draft on these prompts."""
    with foretoken.load(
        target, "chain", draft=draft, controller="fixed", depth=DEPTH, dtype="bfloat16", **options
    ) as session:
        found = []
        for at, prompt in enumerate(track(prompts, Path(draft).name, console=console)):
            result = session.generate(prompt, tokens, temperature=float(at % 2 == 0), seed=at)
            found.append((len(result.tokens), result.stats.target_steps))
    return found


def accepted(counts: Counts, at: Sequence[int]) -> float:
    """Tokens per target forward of some texts."""
    return sum(counts[i][0] for i in at) / sum(counts[i][1] for i in at)


def weights(folder: str) -> int:
    """Bytes of a draft's weights on disk."""
    return sum(part.stat().st_size for part in Path(folder).glob("*.safetensors"))


def of_pair(pair: Sequence[str], joint: str, asked: argparse.Namespace) -> dict[str, Any]:
    """All ways of guessing for one target."""
    target, data, own = pair
    prompts = [chat.prompt for chat in every_chat(Path(data), "valid")][: asked.chats]
    texts = {}
    for name, thresholds in WAYS.items():
        given = {} if thresholds is None else {"draft_thresholds": thresholds}
        draft = own if thresholds is None else joint
        texts[name] = written(target, draft, prompts, asked.max_new_tokens, **given)
    return {name: beside(counts, texts["a draft of its own"]) for name, counts in texts.items()}


def beside(counts: Counts, own: Counts) -> dict[str, Any]:
    """An accepted length, and over that of a draft of the target's own, with intervals."""

    def length(at: Sequence[int]) -> float:
        return accepted(counts, at)

    def ratio(at: Sequence[int]) -> float:
        return accepted(counts, at) / accepted(own, at)

    whole = range(len(counts))
    return {
        "accepted_length": length(whole),
        "interval": interval(length, len(counts)),
        "over_own": ratio(whole),
        "over_own_interval": interval(ratio, len(counts)),
        "texts": counts,
    }


def spanned(value: float, span: Sequence[float] | None) -> str:
    low, high = span or (value, value)
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def run(description: str | None) -> int:
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--pair", nargs=3, action="append", required=True, metavar=("TARGET", "TEXTS", "DRAFT")
    )
    options.add_argument("--sorted", required=True, help="the draft of all of them")
    options.add_argument("--chats", type=int, default=40, help="held-out chats of each target")
    options.add_argument("--max-new-tokens", type=int, default=48)
    options.add_argument("--threads", type=int)
    options.add_argument("--out", type=Path, default=RESULTS)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    started = environment.describe()
    names = [Path(pair[0]).name for pair in asked.pair]
    found = {
        name: of_pair(pair, asked.sorted, asked)
        for name, pair in zip(names, asked.pair, strict=True)
    }
    memory = weights(asked.sorted) / sum(weights(pair[2]) for pair in asked.pair)
    whole = "sorted, all layers"
    bounds = [
        gates.Gate(f"{whole}, over a draft of its own: {name}", rows[whole]["over_own"], CLOSE)
        for name, rows in found.items()
    ]
    bounds.append(gates.Gate("its weights over those of all others", memory, HALF, at_least=False))
    lines = [
        "# One sorted draft for several targets\n",
        f"{asked.chats} held-out chats of each target, {asked.max_new_tokens} tokens, a chain of "
        f"{DEPTH}, half greedy and half at temperature 1.\n",
        gates.markdown(bounds),
        "| target | guessed by | accepted length | over a draft of its own |",
        "|---|---|---:|---:|",
    ]
    lines += [
        f"| {name} | {way} | {spanned(row['accepted_length'], row['interval'])} "
        f"| {spanned(row['over_own'], row['over_own_interval'])} |"
        for name, rows in found.items()
        for way, row in rows.items()
    ]
    document = {
        "environment": started, "targets": found, "memory": memory, "chats": asked.chats,
        "tokens": asked.max_new_tokens, "gates": [gate.to_dict() for gate in bounds],
    }  # fmt: skip
    gates.publish(asked.out, "sorted-drafts", document, "\n".join(lines) + "\n")
    gates.show(bounds, "one sorted draft for several targets")
    return 0


if __name__ == "__main__":
    main(run, __doc__)

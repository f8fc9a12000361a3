"""The card of a folder of training texts: counts, entropy, where they come from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from foretoken.training.dataset.records import (
    SPLITS,
    counted,
    every_chat,
    read_told,
    repetition,
    replace_text,
    shards,
)

CARD = "card.json"


def write_card(folder: Path, session: Any, config: Any, source: str) -> dict[str, Any]:
    """Count what a folder holds and write it down, as JSON and to be read."""
    notes: dict[str, Any] = {
        "target": source,
        "promise": str(session.engine.promise),
        "splits": {split: split_counts(folder, split) for split in SPLITS},
        "law": law_figures(folder),
        "made by": "the target itself; no text of anybody else",
    }
    replace_text(folder / CARD, json.dumps(notes, indent=2) + "\n")
    replace_text(folder / "README.md", page(notes))
    return notes


def split_counts(folder: Path, split: str) -> dict[str, Any]:
    """Chats, tokens and kinds of one split."""
    chats = list(every_chat(folder, split))
    answers = [len(chat.answer) for chat in chats]
    used: Counter[int] = Counter()
    for chat in chats:
        used.update(chat.answer)
    common = sum(count for _, count in used.most_common(8192))
    return {
        "chats": len(chats),
        "prompt_tokens": sum(len(chat.prompt) for chat in chats),
        "answer_tokens": sum(answers),
        "distinct_tokens": len(used),
        "in_8192_most_frequent": common / max(sum(answers), 1),
        "repeated_4_grams": sum(repetition(c.answer) for c in chats) / max(len(chats), 1),
        "kinds": counted(chat.kind for chat in chats),
        "temperatures": counted(f"{chat.temperature:g}" for chat in chats),
    }


def law_figures(folder: Path, at_most: int = 8) -> dict[str, float]:
    """How sure the target is on its own text, from the laws of the last shards."""
    best, kept, places = 0.0, 0.0, 0
    for path in shards(folder, "train")[-at_most:]:
        for _, laws in read_told(path):
            probs = laws.log_probs.float().exp()
            best += float(probs[:, 0].sum())
            kept += float(probs.sum())
            places += len(probs)
    return {"likeliest": best / max(places, 1), "kept_mass": kept / max(places, 1)}


def page(notes: dict[str, Any]) -> str:
    """The card as Markdown."""
    lines = [
        "# Training texts",
        "",
        f"Made by `foretoken train data` with the target `{notes['target']}`; {notes['made by']}.",
        "",
        "| | " + " | ".join(SPLITS) + " |",
        "|---|---|---|",
    ]
    for name in next(iter(notes["splits"].values())):
        cells = [told(notes["splits"][split][name]) for split in SPLITS]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    law = notes["law"]
    lines += [
        "",
        f"The target's likeliest token has a probability of {law['likeliest']:.2f} on average; the "
        f"tokens kept of each law hold {law['kept_mass']:.3f} of it.",
        "",
    ]
    return "\n".join(lines)


def told(value: Any) -> str:
    """A value in a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"

"""The card of a folder of training texts: counts, entropy, where they come from."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
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
PLAN = "plan.json"  # what a folder was begun with


def write_card(
    folder: Path,
    session: Any,
    config: Any,
    source: str,
    texts: Sequence[dict[str, Any]] = (),
    draft: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Count what a folder holds and write it down, as JSON and to be read.

    `texts` tells the sources of ordinary text, and what was taken of each; `draft` the name and the
    identity of the one that has answered in the target's place.
    """
    who = "the target itself"
    if draft is not None:
        who = f"the draft `{draft['name']}`, which answered in its place and whose words it scored"
    of_others = ", ".join(str(told["source"]) for told in texts)
    notes: dict[str, Any] = {
        "target": source,
        "vocabulary": vocabulary(session),
        "promise": str(session.engine.promise),
        "splits": {split: split_counts(folder, split) for split in SPLITS},
        "law": law_figures(folder, text=False) or law_figures(folder, text=True),
        "made by": f"{who}; beside text of others: {of_others}"
        if texts
        else f"{who}; no text of anybody else",
    }
    if draft is not None:
        notes |= {"writer": "draft", "draft": draft}
    if texts:
        notes["text"] = list(texts)
        notes["law of text"] = law_figures(folder, text=True)
    if config.features is not None:
        notes["features"] = config.features
    replace_text(folder / CARD, json.dumps(notes, indent=2) + "\n")
    replace_text(folder / "README.md", page(notes))
    return notes


def vocabulary(session: Any) -> dict[str, Any]:
    """What tells the tokens of a target from those of others."""
    found: dict[str, Any] = {"size": session.target.vocab_size}
    if session.tokenizer is not None:
        words = json.dumps(sorted(session.tokenizer.get_vocab().items()))
        found["digest"] = hashlib.sha256(words.encode()).hexdigest()
    return found


def check_vocabulary(folder: Path, session: Any, doing: str = "training on") -> None:
    """ConfigError for texts whose ids are those of another vocabulary than the target's."""
    own, path = vocabulary(session), folder / CARD
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    theirs = found.get("vocabulary", {})
    if any(theirs.get(name, value) != value for name, value in own.items()):
        raise ConfigError(
            f"{doing} the texts in {folder} was asked for.",
            f"they were made with {found.get('target') or 'a target'} of another vocabulary "
            f"({theirs['size']} tokens) than this target's ({own['size']}).",
            "make texts with this target: `foretoken train data --target T --out DIR`.",
        )


def written_by_draft(folder: Path) -> bool:
    """Whether a draft wrote the answers in a folder; once its plan alone said so."""
    paths = [path for name in (CARD, PLAN) if (path := folder / name).is_file()]
    told = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return any(one.get("writer") == "draft" for one in told)


def split_counts(folder: Path, split: str) -> dict[str, Any]:
    """Chats, tokens and kinds of one split."""
    chats, windows = list(every_chat(folder, split)), every_chat(folder, split, text=True)
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
        "text_tokens": sum(1 + len(window.answer) for window in windows),
    }


def law_figures(folder: Path, text: bool, at_most: int = 8) -> dict[str, float]:
    """How sure the target is, from the laws of the last shards; nothing where none are kept."""
    best, kept, places = 0.0, 0.0, 0
    for path in shards(folder, "train", text)[-at_most:]:
        for _, laws in read_told(path):
            probs = laws.log_probs.float().exp()
            best += float(probs[:, :1].sum())
            kept += float(probs.sum())
            places += probs.numel() and len(probs)
    return {"likeliest": best / places, "kept_mass": kept / places} if places else {}


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
    for what, law in (("its own text", notes["law"]), ("ordinary text", notes.get("law of text"))):
        if law:
            lines += [
                "",
                f"On {what} the target's likeliest token has a probability of "
                f"{law['likeliest']:.2f} on average; the tokens kept of each law hold "
                f"{law['kept_mass']:.3f} of it.",
            ]
    for told_of in notes.get("text", ()):
        lines += [
            "",
            f"Text of others from `{told_of['source']}`: {told_of['records']:,} records, "
            f"{told_of['tokens']:,} tokens, {told_of['prompts']:,} prompts. Its own licence holds.",
        ]
    lines.append("")
    return "\n".join(lines)


def told(value: Any) -> str:
    """A value in a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"

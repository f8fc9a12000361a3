"""The card of a trained draft: README.md for people, card.json for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.training.dataset.records import replace_text


def write_card(folder: Path, notes: dict[str, Any]) -> None:
    """Both files."""
    replace_text(folder / "card.json", json.dumps(notes, indent=2) + "\n")
    replace_text(folder / "README.md", page(notes))


def page(notes: dict[str, Any]) -> str:
    """What a person wants to know of a draft."""
    shape, words = notes["shape"], notes["vocabulary"]
    lines = [
        f"# A draft for {notes['target']}",
        "",
        f"Made by `foretoken train draft`: {shape['layers']} layers, {shape['hidden']} wide, "
        f"{shape['parameters']:,} parameters, most of them the embedding. A forward takes "
        f"{notes['cost']:.3f} of the target's on the machine it was made on. It scores "
        f"{words['tokens']:,} of {words['of']:,} tokens, which hold {words['mass']:.3f} of the "
        "target's own text.",
        "",
        f"Trained {notes['seconds'] / 60:.0f} minutes, {notes['steps']:,} steps, "
        f"{notes['tokens']:,} tokens, on text the target wrote.",
        "",
        "| step | acceptance | tokens per target forward, chain of 4 | estimated speed-up |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {step} | {told['acceptance']:.3f} | {told['tokens_per_forward']:.2f} | "
        f"{told['estimated_speed_up']:.2f} |"
        for step, told in notes["measured"]
    ]
    lines += [
        "",
        "Measured by the engine on held-out prompts, half of them greedy, half at temperature 1. "
        "Whatever this model guesses, the text keeps the target's law.",
        "",
        "An ordinary model: `AutoModelForCausalLM.from_pretrained` reads it. "
        "`draft_vocabulary.json` says which tokens foretoken lets it guess.",
        "",
    ]
    return "\n".join(lines)

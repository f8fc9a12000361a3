"""A trained draft on disk: an ordinary model directory, the tokens it scores, its card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from foretoken.engine.session import Session
from foretoken.errors import CheckpointError
from foretoken.lm import draft_exits, draft_vocabulary
from foretoken.lm.load import quiet
from foretoken.training.processes import is_main

# What decides how a folder is opened, config.json first: without it there is no model.
OF_A_MODEL = ("config.json", draft_exits.NAME, "model*.safetensors", "model.safetensors.index.json")


def write_draft(
    out: Path,
    model: Any,
    session: Session,
    tokens: Tensor,
    notes: dict[str, Any],
    curve: Path | None = None,
    about: str | None = None,
    beside: Mapping[str, str] | None = None,
) -> None:
    """A model directory: weights in bfloat16, tokenizer, the tokens it scores, its card.

    `about` is what its page says; without it, what `page` makes of the notes. `beside` are texts
    of other files by their names. Of several processes the main one writes.
    """
    if not is_main():
        return
    model.set_attn_implementation("sdpa")
    partial = out / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with quiet():
            model.eval().to(torch.bfloat16).save_pretrained(partial)
        if session.tokenizer is not None:
            session.tokenizer.save_pretrained(partial)
        words = partial / draft_vocabulary.NAME
        draft_vocabulary.write(words, tokens.tolist(), model.config.vocab_size)
        (partial / "card.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(about or page(notes), encoding="utf-8")
        for name, text in (beside or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        if curve is not None:
            shutil.copyfile(curve, partial / curve.name)
        forget(out)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            earlier = out / path.name
            if earlier.is_dir():  # no folder takes the place of one that holds something
                shutil.rmtree(earlier)
            os.replace(path, out / path.name)  # config.json last: without it there is no model
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"writing a draft into {out} was asked for.",
            f"the folder cannot be written ({error}); what was learned before is kept beside it.",
            "free disk space or fix the permissions, then run the same command: nothing is lost.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def forget(out: Path) -> None:
    """Take an earlier draft out of a folder: what it has and the next one lacks would be read."""
    for pattern in OF_A_MODEL:
        for path in out.glob(pattern):
            path.unlink()


def shape_of(model: Any) -> dict[str, int]:
    """What a card says of a draft's size."""
    return {
        "hidden": model.config.hidden_size,
        "layers": model.config.num_hidden_layers,
        "parameters": model.num_parameters(),
    }


def page(notes: dict[str, Any]) -> str:
    """What a person wants to know of a draft."""
    shape, words = notes["shape"], notes["vocabulary"]
    lines = [
        f"# A draft for {notes['target']}",
        "",
        f"Made by `foretoken train {notes['recipe']}`: {shape['layers']} layers, "
        f"{shape['hidden']} wide, "
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
    before = [(0, notes["before"])] if "before" in notes else []
    lines += [
        f"| {step} | {told['acceptance']:.3f} | {told['tokens_per_forward']:.2f} | "
        f"{told['estimated_speed_up']:.2f} |"
        for step, told in (*before, *notes["measured"])
    ]
    lines += [
        "",
        "Measured by the engine on held-out prompts, half of them greedy, half at temperature 1. "
        "Whatever this model guesses, the text keeps the target's law.",
        "",
        "An ordinary model: `AutoModelForCausalLM.from_pretrained` reads it. "
        f"`{draft_vocabulary.NAME}` says which tokens foretoken lets it guess.",
        "",
    ]
    return "\n".join(lines)

"""What a mini's folder says about it: card.json for programs, README.md for people."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.training.trainer import Progress

_DATA = (
    "six procedural task families (multi-turn dialogue, translation into an invented language, "
    "summarisation, question answering, mathematical reasoning, retrieval), drawn without end from "
    "seeded generators, and source text of the running interpreter's standard library; a checksum "
    "of each prompt or module name keeps the held-out part away"
)


def machine() -> str:
    """The machine in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()}-core CPU, {torch.get_num_threads()} thread(s) used"


def describe_run(
    name: str, recipe: Mapping[str, Any], parameters: int, phases: Mapping[str, Progress]
) -> dict[str, Any]:
    """The card of a finished training run, before anything is measured on it."""
    runs = {
        phase: {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds_of_training": round(progress.seconds),
            "held_out_loss": progress.held_out[-1][1] if progress.held_out else None,
            "last_training_loss": progress.train[-1][1] if progress.train else None,
        }
        for phase, progress in phases.items()
    }
    return {
        "name": name,
        "parameters": parameters,
        "data": _DATA,
        "machine": machine(),
        "recipe": recipe,
        "phases": runs,
    }


def write(folder: Path, card: Mapping[str, Any]) -> None:
    """Both files of the card."""
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (folder / "README.md").write_text(_text(card))


def is_of(folder: Path, name: str) -> bool:
    """Whether the card in a folder is that of the mini `name`."""
    try:
        found = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        return bool(found["name"] == name)
    except (OSError, ValueError, LookupError, TypeError):
        return False  # no card, or none of ours


def add_measurements(folder: Path, found: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """Put the result of ``evaluate.report``, and what else should be known, into a mini's card."""
    card = json.loads((folder / "card.json").read_text())
    card["measured"] = found
    card["notes"] = [*card.get("notes", []), *notes]
    write(folder, card)


def _text(card: Mapping[str, Any]) -> str:
    lines = [
        f"# {card['name']}",
        "",
        f"{card['parameters']:,} parameters, for measuring machinery. "
        f"Rebuild: `foretoken minis train {card['name']} --out DIR`.",
        "",
        f"Data: {card['data']}.",
        "",
        f"Machine: {card['machine']}.",
        "",
        "| phase | steps | tokens | seconds | held-out loss |",
        "|---|---|---|---|---|",
    ]
    for name, run in card["phases"].items():
        loss = "none" if run["held_out_loss"] is None else f"{run['held_out_loss']:.3f}"
        numbers = " | ".join(f"{run[k]:,}" for k in ("steps", "tokens", "seconds_of_training"))
        lines.append(f"| {name} | {numbers} | {loss} |")
    if card.get("notes"):
        lines += ["", *card["notes"]]
    if "measured" in card:
        lines += _measured(card["measured"])
    return "\n".join(lines) + "\n"


def _measured(found: Mapping[str, Any]) -> list[str]:
    """A table of the evaluation: a row per family and the mean."""
    rows = {**found["families"], "mean": found["mean"]}
    columns = list(found["mean"])
    lines = [
        "",
        f"Measured on {found['examples_per_family']} prompts per family of the {found['split']} "
        f"split (seed {found['seed']}), greedy, {found['depth']} drafted tokens; the mean accepted "
        "length counts emitted tokens per target forward; entropy is in nats per token of the "
        "reference answers.",
        "",
        "| family | " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{row[column]:.2f}" for column in columns) + " |"
        for name, row in rows.items()
    ]
    return lines

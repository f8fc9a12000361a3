"""A head in a folder: weights as safetensors, and head.json that says what they are.

head.json is the last thing written and names the weights by their digest, so a folder holds a
whole head or the one before it, whenever the writer was killed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError

CARD = "head.json"
VERSION = 1  # of the folder's form
COMMANDS = {"decision": "acceptance --for mcsd"}  # what makes a kind, where the name is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a folder's weights are, and which models they fit."""

    kind: str  # "acceptance", "exits", ...: the module that reads them
    hidden_size: int  # of the model whose hidden layers the head reads
    vocab_size: int  # of the tokens it was trained on
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the module
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it was trained, what it reached
    version: int = VERSION


def save(folder: str | Path, head: nn.Module, card: Card) -> Path:
    """Write weights, then the card that names them; an older head goes once the new one stands."""
    folder = Path(folder)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    partial = folder / ".partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, partial)
        name = f"head-{digest(partial)}.safetensors"
        move(partial, folder / name)
        text = json.dumps({**dataclasses.asdict(card), "weights": name}, indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
        move(partial, folder / CARD)
        for other in folder.glob("head-*.safetensors"):
            if other.name != name:
                other.unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"saving a head in {folder} was asked for.",
            f"the folder cannot be written ({error}).",
            "free disk space, fix the permissions, or choose another folder.",
        ) from error
    return folder


def read_card(folder: str | Path, kind: str) -> Card:
    """The card of a head of this kind; CheckpointError where there is none."""
    found = _document(Path(folder), kind)
    found.pop("weights", None)
    if found.get("kind") != kind:
        raise CheckpointError(
            f"the {kind} head in {folder} was asked for.",
            f"the folder holds a head of the kind {found.get('kind')!r}.",
            f"pass the folder of a head that `{command(kind)}` wrote.",
        )
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"the {kind} head in {folder} was asked for.",
            f"its folder has version {found.get('version')!r}; this foretoken reads {VERSION}.",
            f"train it again with `{command(kind)}`, or use a foretoken of its time.",
        )
    names = {entry.name for entry in dataclasses.fields(Card)}
    try:
        return Card(**{name: value for name, value in found.items() if name in names})
    except TypeError as error:
        raise broken(folder, kind, f"head.json lacks something: {error}") from error


def read_weights(folder: str | Path, kind: str) -> dict[str, Tensor]:
    """The weights the card names, on the CPU."""
    folder = Path(folder)
    name = str(_document(folder, kind).get("weights"))
    path = folder / Path(name).name
    if not path.is_file():
        raise broken(folder, kind, f"its weights {name} are missing")
    if digest(path) not in path.name:
        raise broken(folder, kind, f"{name} was changed or cut short")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise broken(folder, kind, f"{name} cannot be read ({error})") from error


def load_into(head: nn.Module, folder: str | Path, kind: str) -> nn.Module:
    """`head`, built from the card's options, with the folder's weights; ready to be asked."""
    try:
        head.load_state_dict(read_weights(folder, kind))
    except RuntimeError as error:
        raise broken(folder, kind, f"weights and options differ ({error})") from error
    return head.eval().requires_grad_(False)


def check_fits(card: Card, folder: str | Path, hidden_size: int, vocab_size: int) -> None:
    """ConfigError if the head was trained for a model of another width or vocabulary."""
    for what, its, given in (
        ("hidden size", card.hidden_size, hidden_size),
        ("vocabulary", card.vocab_size, vocab_size),
    ):
        if its != given:
            raise ConfigError(
                f"the {card.kind} head in {folder} was asked for with a model whose {what} is "
                f"{given}.",
                f"the head was trained for a model whose {what} is {its}.",
                f"use the model it was trained for, or train a head for this one with "
                f"`{command(card.kind)}`.",
            )


def command(kind: str) -> str:
    """The command that trains heads of a kind."""
    return f"foretoken train {COMMANDS.get(kind, kind)}"


def broken(folder: str | Path, kind: str, why: str) -> CheckpointError:
    """The folder cannot be used, and why."""
    return CheckpointError(
        f"the {kind} head in {folder} was asked for.",
        f"{why}.",
        f"train it again with `{command(kind)} --out {folder}`, or pass another folder.",
    )


def digest(path: Path) -> str:
    """A short name for a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def move(partial: Path, final: Path) -> None:
    """Give a written file its name once it is on the disk."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)


def _document(folder: Path, kind: str) -> dict[str, Any]:
    """head.json as it stands."""
    path = folder / CARD
    if not path.is_file():
        raise CheckpointError(
            f"the {kind} head in {folder} was asked for.",
            f"there is no {CARD} in that folder.",
            f"pass the folder of a finished head; `{command(kind)} --out DIR` makes one.",
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(folder, kind, f"head.json cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise broken(folder, kind, "head.json holds no object")
    return found

"""A head in a folder: weights as safetensors, and head.json that says what they are.

head.json is the last thing written and names the weights by their digest, so a folder holds a
whole head or the one before it, whenever the writer was killed. A folder without one may be in a
layout that others publish (`public`): it is read in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import public
from foretoken.heads.files import digest, move
from foretoken.heads.table import HEADS, fits_vocabulary, head_row, resolve
from foretoken.shipped import resolve as resolve_shipped

CARD = "head.json"
VERSION = 1  # of the folder's form
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ANY = "eagle3"  # the head that a folder is expected to hold where nobody says which


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a folder's weights are, and which models they fit."""

    kind: str  # the name of its row in HEADS
    hidden_size: int  # of the model whose hidden layers the head reads
    vocab_size: int  # of the tokens it was trained on
    options: Mapping[str, Any] = field(default_factory=dict)  # the rest of the module's Config
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it was trained, what it reached
    version: int = VERSION
    weights: str = ""  # the file, named by its digest


def save(folder: str | Path, name: str, head: Any, notes: Mapping[str, Any]) -> Path:
    """Write a head of the row `name`: weights, then the card that names them.

    An older head goes once the new one stands.
    """
    options = dataclasses.asdict(head.config)
    sizes = {size: options.pop(size) for size in ("hidden_size", "vocab_size")}
    folder = Path(folder)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    partial = folder / ".partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, partial)
        file = f"head-{digest(partial)}.safetensors"
        move(partial, folder / file)
        card = Card(kind=name, options=options, notes=notes, weights=file, **sizes)
        text = json.dumps(dataclasses.asdict(card), indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
        move(partial, folder / CARD)
        for other in folder.glob("head-*.safetensors"):
            if other.name != file:
                other.unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"saving a head in {folder} was asked for.",
            f"the folder cannot be written ({error}).",
            "free disk space, fix the permissions, or choose another folder.",
        ) from error
    return folder


def load(folder: str | Path, name: str) -> tuple[Any, Card]:
    """The head of a folder, frozen, and its card; its kind is `name` or one that stands for it."""
    card = read_card(folder, head_row(name).name)
    module = resolve(head_row(card.kind).module)
    options = {key: tuples(value) for key, value in card.options.items()}
    sizes = {"hidden_size": card.hidden_size, "vocab_size": card.vocab_size}
    try:
        head = module(module.Config(**sizes, **options))
    except TypeError as error:
        raise broken(folder, name, f"unknown options ({error})") from error
    try:
        head.load_state_dict(read_weights(folder, card))
    except RuntimeError as error:
        raise broken(folder, name, f"weights and options differ ({error})") from error
    scored = getattr(head, "scored", None)
    if scored is not None and not fits_vocabulary(scored, card.vocab_size):
        raise broken(folder, name, f"it scores other tokens than {card.vocab_size} different ones")
    return head.eval().requires_grad_(False), card


def method_of(folder: str | Path) -> str:
    """The method that a folder's head was trained for; CheckpointError where there is no head."""
    return head_row(card_of(folder).kind).serves


def read_as(card: Card) -> str:
    """The kind that methods know a head by: its own, or the one in whose place it is taken."""
    return head_row(card.kind).stands_for or card.kind


def window_of(notes: Mapping[str, Any]) -> int | None:
    """Tokens of the texts that a head learned from, by its notes; None where they do not say."""
    found = (notes.get("settings") or {}).get("window")
    return None if found is None else int(found)


def card_of(folder: str | Path) -> Card:
    """The card of a head of whatever kind; CheckpointError where there is none."""
    kind = _document(_place(folder), ANY).get("kind")
    if kind not in HEADS:
        raise broken(folder, ANY, f"the folder holds a head of the kind {kind!r}")
    return read_card(folder, kind)


def read_card(folder: str | Path, kind: str) -> Card:
    """The card of a head of this kind, or of one that stands for it; else CheckpointError."""
    found = _document(_place(folder), kind)
    fitting = {kind, *(row.name for row in HEADS.values() if row.stands_for == kind)}
    if found.get("kind") not in fitting:
        raise broken(folder, kind, f"the folder holds a head of the kind {found.get('kind')!r}")
    if (version := found.get("version")) != VERSION:
        raise broken(folder, kind, f"it has version {version!r}; this foretoken reads {VERSION}")
    names = {entry.name for entry in dataclasses.fields(Card)}
    try:
        return Card(**{name: value for name, value in found.items() if name in names})
    except TypeError as error:
        raise broken(folder, kind, f"head.json lacks something: {error}") from error


def read_weights(folder: str | Path, card: Card) -> dict[str, Tensor]:
    """The weights the card names, on the CPU."""
    kind, name = card.kind, card.weights
    if _is_public(place := _place(folder)):
        return public.weights(place)
    path = place / Path(name).name
    if not path.is_file():
        raise broken(folder, kind, f"its weights {name} are missing")
    if digest(path) not in path.name:
        raise broken(folder, kind, f"{name} was changed or cut short")
    try:
        return load_file(path)
    except (SafetensorError, OSError, TypeError) as error:
        raise broken(folder, kind, f"{name} cannot be read ({error})") from error


def check_fits(card: Card, folder: str | Path, hidden_size: int, vocab_size: int) -> None:
    """ConfigError if the head was trained for a model of another width or vocabulary."""
    trained = read_as(card)
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
                f"`foretoken train {trained}`.",
            )


def broken(folder: str | Path, kind: str, why: str, also: str = "") -> CheckpointError:
    """The folder cannot be used, why, and what `also` to do."""
    return CheckpointError(
        f"the {kind} head in {folder} was asked for.",
        f"{why}.",
        f"pass the folder of a finished one; `foretoken train {kind} --out DIR` makes it{also}.",
    )


def nowhere(folder: Path, kind: str) -> CheckpointError:
    """There is no such folder: a path with a slip, or a name of the hub, which no head is read
    from."""
    name, also = str(folder), ""
    if folder.exists():
        return broken(folder, kind, f"there is no {CARD}: that is a file")
    if HUB_NAME.fullmatch(name) and not folder.parent.exists():  # else a slip in the last part
        also = f", and `hf download {name} --local-dir DIR` fetches one of the hub into a folder"
    return broken(folder, kind, f"there is no {CARD}: there is no such folder", also)


def _place(folder: str | Path) -> Path:
    """A folder, or that of a shipped head by its name."""
    return Path(os.path.expanduser(str(resolve_shipped(folder))))


def _is_public(folder: Path) -> bool:
    """Whether a folder is in a layout of others."""
    return not (folder / CARD).is_file() and public.is_public(folder)


def tuples(value: Any) -> Any:
    """Lists of JSON as the tuples they were."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def _document(folder: Path, kind: str) -> dict[str, Any]:
    """head.json as it stands, or what it would say of a published head."""
    if _is_public(folder):
        return public.document(folder)
    path = folder / CARD
    if not folder.is_dir():
        raise nowhere(folder, kind)
    if not path.is_file():
        raise broken(folder, kind, f"there is no {CARD} in that folder")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(folder, kind, f"head.json cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise broken(folder, kind, "head.json holds no object")
    return found

"""A configuration that `foretoken tune` measured to be the fastest: what `tuned.json` holds.

It names target, method, draft and options; what a caller asks for besides wins over it. A file
made for another target is refused: its sizes and its draft follow what was measured there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import CheckpointError, ConfigError
from foretoken.methods import METHODS, needs_draft

NAME = "tuned.json"
FORMAT = 1
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")  # of a target's config
DO = "name a file that `foretoken tune` wrote, or the folder it is in; or tune again."
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest configuration found, and for which target."""

    target: str  # a folder or a name
    method: str
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method, as `load` takes them
    dtype: str
    made_for: Mapping[str, Any]  # what `identity` says of the target
    told: Mapping[str, Any] = field(default_factory=dict)  # what was measured, where and on what

    def to_json(self) -> str:
        """The text of a file."""
        values = {name: getattr(self, name) for name in self.__slots__}
        told = values.pop("told")
        return json.dumps({"format": FORMAT, **values, **told}, indent=1) + "\n"

    def completing(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What `load` is to be called with: what was asked for, and this for all the rest.

        The options belong to the method: they are left out where another one is asked for. So is
        the precision for a loaded model, which has its own. Method and options are left aside
        where what was brought to guess with is nothing to them: the default for it is taken.
        """
        given = {name: value for name, value in asked.items() if value is not None}
        found: dict[str, Any] = {"target": self.target}
        if idle := self.idle(given):
            LOG.warning("the tuned method %s and its options are left aside: it takes no %s, and "
                        "one was passed", self.method, idle)  # fmt: skip
        else:
            found |= {"method": self.method, "draft": self.draft}
            if given.get("method", self.method) == self.method:
                found |= self.options
        if isinstance(given.get("target", self.target), str | Path):
            found["dtype"] = self.dtype
        return found | given

    def idle(self, given: Mapping[str, Any]) -> str | None:
        """The draft or head among what was asked for that this method cannot use.

        None where it uses it, and where a method was asked for: that one is checked by `load`. A
        head wins over a draft, as where there is no file.
        """
        row = METHODS[self.method]
        if "method" in given:
            return None
        if "draft_head" in given:
            return None if "draft_head" in row.needs else "draft_head"
        return "draft" if "draft" in given and not needs_draft(row) else None

    def check_target(self, found: Mapping[str, Any]) -> None:
        """Raise where `found`, the identity of a target, is not the one this was made for.

        A vocabulary that one side does not know cannot tell them apart.
        """
        known = [name for name in SHAPE if name in self.made_for]
        if found.get("vocabulary") and self.made_for.get("vocabulary"):
            known.append("vocabulary")
        if all(found.get(name) == self.made_for[name] for name in known):
            return
        raise ConfigError(
            f"a target ({told(found)}) with a configuration tuned for another one "
            f"({told(self.made_for)}).",
            "what is fastest depends on the target, and a draft guesses for its vocabulary only.",
            "name the target that it was made for, or call foretoken tune for this one.",
        )


def identity(config: Any, tokenizer: Any) -> dict[str, Any]:
    """What tells one target from another: its shape and its vocabulary.

    Not its weights: fine-tuned further, it may be loaded with the same file.
    """
    text = config.get_text_config(decoder=True)
    shape = {name: getattr(text, name, None) for name in SHAPE}
    words = None if tokenizer is None else Vocabulary.of(tokenizer.get_vocab()).fingerprint
    return {**shape, "vocabulary": words}


def told(found: Mapping[str, Any]) -> str:
    """An identity in words."""
    words = str(found.get("vocabulary") or "no tokenizer")[:15]
    return (
        f"{found.get('model_type')}, {found.get('num_hidden_layers')} layers of "
        f"{found.get('hidden_size')}, {found.get('vocab_size')} tokens, {words}"
    )


def read_tuned(where: str | Path) -> Tuned:
    """The configuration in a file, or in the folder that holds it under its usual name."""
    path = Path(os.path.expanduser(where))
    path = path / NAME if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(
            f"a tuned configuration from {path}.",
            f"the file cannot be read ({problem.strerror or problem}).",
            DO,
        ) from problem
    except ValueError as problem:
        raise CheckpointError(
            f"a tuned configuration from {path}.", f"the file is no JSON: {problem}.", DO
        ) from problem
    return _checked(found, path)


def _checked(found: Any, path: Path) -> Tuned:
    """The configuration of a document, or CheckpointError with what it lacks."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "target": str,
        "method": str,
        "draft": (str, type(None)),
        "options": dict,
        "dtype": str,
        "made_for": dict,
    }
    wrong = "it is no JSON object"
    if isinstance(found, dict):
        missing = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
        wrong = f"it says nothing usable about {', '.join(missing)}" if missing else ""
        if found.get("format") != FORMAT:
            wrong = f"its format is {found.get('format')!r}; this version reads {FORMAT}"
        elif not missing and found["method"] not in METHODS:
            wrong = f"its method {found['method']!r} is unknown to this version"
    if wrong:
        raise CheckpointError(f"a tuned configuration from {path}.", f"{wrong}.", DO)
    rest = {name: value for name, value in found.items() if name not in (*kinds, "format")}
    return Tuned(**{name: found[name] for name in kinds}, told=rest)

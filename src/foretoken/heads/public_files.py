"""Config and tensors of a folder that somebody published; no file can run code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.decoder_layer import BASE

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"  # of weights in several files
SCALE = "embedding_scale"  # how many times its row the target embeds; `export` writes it
AROUND = "model."
FILES = (
    "model.safetensors", INDEX, "pytorch_model.bin",
    "medusa_lm_head.safetensors", "medusa_lm_head.pt",
)  # fmt: skip
LAYOUTS = ("eagle", "eagle3", "medusa")
Tensors = Mapping[str, Tensor]
UNSCALED = ("default", "mrope")  # kinds of rotary positions
LENGTH = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
SCALED = {  # kinds whose rotations do not follow the length of a text, and the numbers they need
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", LENGTH),
}


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """The config, empty tensors of the shapes of its weights, and the file these are in.

    Whoever looks at a head reads no weight: a folder may be a whole model's, by mistake.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(folder, f"{CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise unreadable(folder, f"{CONFIG} holds no object")
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise unreadable(folder, f"there is none of {', '.join(FILES)}")
    return config, kept_in(folder, file, held_shapes), file


def tensors_of(folder: Path, file: Path) -> dict[str, Tensor]:
    """The tensors of a folder, by the file that `opened` found them in."""
    return kept_in(folder, file, held_tensors)


def kept_in(folder: Path, file: Path, held: Callable[[Path], Any]) -> dict[str, Tensor]:
    """What is held by a file of weights, or by those that an index names."""
    parts = parts_of(folder, file) if file.name == INDEX else [file.name]
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= checked(folder, folder / part, held)
    return bare(found)


def parts_of(folder: Path, index: Path) -> list[str]:
    """The files that an index names, which are beside it."""
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        parts = sorted({str(name) for name in named})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise unreadable(folder, f"{index.name} cannot be read ({error})") from error
    if any(Path(name).name != name for name in parts):
        raise unreadable(folder, f"{index.name} names files of other folders")
    return parts


def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without the name of the model around the head, where there is one (NeMo)."""
    if f"{AROUND}fc.weight" not in tensors:
        return tensors
    return {name.removeprefix(AROUND): tensor for name, tensor in tensors.items()}


def held_tensors(file: Path) -> Any:
    """What a file of weights holds."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as kept:
            return {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
    return torch.load(file, map_location="cpu", weights_only=True)


def held_shapes(file: Path) -> Any:
    """The same without its numbers, which are not read."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as kept:
            names = list(kept.keys())
            shapes = {name: kept.get_slice(name).get_shape() for name in names}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if not is_zipfile(file):  # as torch wrote them once: shapes and numbers in one stream
        return torch.load(file, map_location="cpu", weights_only=True)
    return torch.load(file, map_location="meta", mmap=True, weights_only=True)


def checked(folder: Path, file: Path, held: Callable[[Path], Any]) -> dict[str, Tensor]:
    """What `held` finds in a file; CheckpointError where it holds something else than tensors."""
    try:
        found = held(file)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise unreadable(folder, f"{file.name} cannot be read ({error})") from error
    except UnpicklingError as error:
        raise unreadable(folder, f"{file.name} is no file of tensors ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise unreadable(folder, f"{file.name} holds something else than tensors by their names")
    return found


def named(folder: Path, tensors: Tensors, name: str) -> Tensor:
    """A tensor by its name; CheckpointError where it is missing."""
    if name not in tensors:
        raise unreadable(folder, f"it lacks the tensor {name}")
    return tensors[name]


class Left(dict[str, Tensor]):
    """The tensors of a folder that nobody has taken yet: what is not understood is refused."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.folder = folder

    def taken(self, name: str) -> Tensor:
        """One of them; CheckpointError where it is missing."""
        found = named(self.folder, self, name)
        del self[name]
        return found

    def refuse_all_but(self, endings: tuple[str, ...], kind: str) -> None:
        """CheckpointError if others are left than those whose names end so."""
        unknown = [name for name in self if not name.endswith(endings)]
        if unknown:
            raise unreadable(
                self.folder, f"it holds {', '.join(unknown[:3])}, which no {kind} head has here"
            )


def whole(folder: Path, config: Mapping[str, Any], name: str) -> int:
    """A positive number of the config; CheckpointError where there is none."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise unreadable(folder, f"its {CONFIG} has {value!r} as {name}, where a number is needed")
    return value


def embedding_scale(folder: Path, config: Mapping[str, Any]) -> float:
    """How many times its row of the table the target embeds a token; others do not say: once."""
    value = config.get(SCALE, 1.0)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise unreadable(folder, f"its {CONFIG} has {value!r} as {SCALE}, where a number is needed")
    return float(value)


def unreadable(folder: Path, why: str) -> CheckpointError:
    """The folder holds no head that can be used, and why."""
    return CheckpointError(
        f"a published head in {folder} was asked for.",
        f"{why}.",
        f"pass a whole folder of a known layout ({', '.join(LAYOUTS)}), or one that "
        "`foretoken train` wrote.",
    )


def rotary_base(folder: Path, config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies; CheckpointError where they are scaled."""
    base, scaling = rotary(folder, config)
    if scaling is not None:
        raise scaled(folder, scaling["rope_type"], "which no head of this kind is here")
    return base


def rotary(folder: Path, config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base of the rotary frequencies, and how transformers is told that they are scaled.

    None: they are not. In texts, which have one position for each token, `mrope` scales nothing.
    CheckpointError for a scaling that is not computed here, or that lacks a number.
    """
    found = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    for said in (config, found):
        if said.get(PARTIAL) not in (None, 1):
            why = f"its {PARTIAL} is {said[PARTIAL]!r}, and all of a head is turned here"
            raise unreadable(folder, why)
    base = float(config.get("rope_theta") or found.pop("rope_theta", None) or BASE)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in UNSCALED:
        return base, None
    if kind not in SCALED:
        raise scaled(folder, kind, "which no head is here")
    numbers = {LENGTH: config.get("max_position_embeddings"), **found}
    missing = [name for name in SCALED[kind] if not isinstance(numbers.get(name), int | float)]
    if missing:
        raise scaled(folder, kind, f"and {missing[0]} is missing")
    told = {name: value for name, value in numbers.items() if name not in ("type", "rope_theta")}
    return base, {**told, "rope_type": kind}


def scaled(folder: Path, kind: object, why: str) -> CheckpointError:
    """Rotary positions that cannot be computed."""
    return unreadable(folder, f"its rotary positions are scaled ({kind}), {why}")

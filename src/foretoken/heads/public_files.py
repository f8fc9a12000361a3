"""Config and tensors of a folder that somebody published; no file can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.decoder_layer import BASE

CONFIG = "config.json"
FILES = (
    "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
)  # fmt: skip
LAYOUTS = ("eagle", "eagle3", "medusa")
Tensors = Mapping[str, Tensor]


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """The config, the tensors and the file they are in."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(folder, f"{CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise unreadable(folder, f"{CONFIG} holds no object")
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise unreadable(folder, f"there is none of {', '.join(FILES)}")
    return config, tensors_of(folder, file), file


def tensors_of(folder: Path, file: Path) -> dict[str, Tensor]:
    """What a file of weights holds."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as kept:
                return {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        found = torch.load(file, map_location="cpu", weights_only=True)
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


def whole(folder: Path, config: Mapping[str, Any], name: str) -> int:
    """A positive number of the config; CheckpointError where there is none."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise unreadable(folder, f"its {CONFIG} has {value!r} as {name}, where a number is needed")
    return value


def refuse_scaled(folder: Path, config: Mapping[str, Any]) -> None:
    """CheckpointError for rotary positions that are scaled."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise unreadable(folder, f"its rotary positions are scaled ({kind}), which no head is here")


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
    refuse_scaled(folder, config)
    rope = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or rope.get("rope_theta") or BASE)

"""A target split over devices, layer by layer: what a `device_map` may say, and what is refused.

transformers and accelerate place the modules and carry hidden states from one device to the next.
Keys and values lie where their layer computes. On a machine without a GPU only maps to the CPU can
be run, and only these are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils.import_utils import is_accelerate_available

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.load import find_device

KINDS = ("auto", "balanced", "balanced_low_0", "sequential")
OFFLOADED = ("disk", "meta")


def check_map(device_map: Any, device: Any = None) -> None:
    """Refuse, before a weight is read, what a map cannot say here."""
    if device is not None:
        raise ConfigError(
            f"device={device!r} and device_map={device_map!r} were both passed.",
            "a map says where every module is; a device says where all of them are.",
            "leave one of the two out.",
        )
    if not is_accelerate_available():
        raise ConfigError(
            f"device_map={device_map!r} was asked for.",
            "modules are placed by accelerate, which is not installed.",
            "pip install 'foretoken[train]', or pass device= for all modules.",
        )
    if isinstance(device_map, Mapping) and device_map:
        check_places(device_map)
    elif device_map not in KINDS:
        raise ConfigError(
            f"device_map={device_map!r} was asked for.",
            f"a map is a dict of module names to devices, or one of {', '.join(KINDS)}.",
            'pass for example device_map={"": "cpu"}.',
        )


def check_places(device_map: Mapping[str, Any]) -> None:
    """Refuse modules that would lie elsewhere than in the memory of one kind of device."""
    for name, place in device_map.items():
        if str(place) in OFFLOADED:
            raise offloaded(name or "the whole model", str(place))
    places = {
        str(place): find_device(f"cuda:{place}" if isinstance(place, int) else place)
        for place in device_map.values()
    }
    if len({place.type for place in places.values()}) > 1:
        raise CapabilityError(
            f"a model was to be split over {', '.join(sorted(places))}.",
            "all of its layers are on devices of one kind: kernels and masks are made for it.",
            "map all modules to the CPU, or all to GPUs.",
        )


def check_placed(model: Any) -> None:
    """Refuse a model of which accelerate keeps a part out of memory, as with device_map='auto'."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.device.type == "meta":
            raise offloaded(name, "disk or another device")
    check_places(getattr(model, "hf_device_map", None) or {})


def offloaded(name: str, place: str) -> CapabilityError:
    return CapabilityError(
        f"{name} was to be kept on {place}.",
        "every weight is in memory: each of them is read in every forward, and trees pay because "
        "reading once serves many tokens.",
        "map it to a device with room for it, load in a smaller dtype, or use a smaller model.",
    )


def is_split(model: Any) -> bool:
    """Whether parts of a model are on different devices."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return len(places) > 1


def beside(model: Any, loading: Mapping[str, Any], draft: str | Path | Any) -> dict[str, Any]:
    """How a draft is loaded for a target: on the device of its last layer, where that was split or
    nobody said which. A loaded one stays as its owner made it: place and type are of the target.
    """
    options = dict(loading)
    if not isinstance(draft, str | Path):
        return {k: v for k, v in options.items() if k not in ("device", "device_map", "dtype")}
    split = options.pop("device_map", None) is not None
    if split or (options.get("device") is None and model.get_output_embeddings() is not None):
        options["device"] = last_device(model)
    return options


def last_device(model: Any) -> torch.device:
    """Where the output layer is."""
    found: torch.device = model.get_output_embeddings().weight.device
    return found

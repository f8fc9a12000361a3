"""Weights that a shipped head has in common with a shipped model: they lie in the package once.

A head that began as a draft and kept its embeddings as they were (`embedding_rate=0`) would repeat
most of that draft's file. Its card names them instead: which model, which weight, and the digest
of the file they were compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.files import digest
from foretoken.shipped import path

LARGE = 2**20  # elements from which a weight is worth a line in the card
FILE = "model.safetensors"


class Place(NamedTuple):
    """Where a borrowed weight lies."""

    model: str  # a shipped model's bare name
    weight: str  # its name there
    digest: str  # of that model's file


def common(weights: Mapping[str, Tensor], model: str) -> dict[str, Place]:
    """Which large weights equal one of a shipped model, bit for bit, and where that lies."""
    file = path(model) / FILE
    with safe_open(file, "pt") as lender:
        lent = {name: lender.get_tensor(name) for name in lender.keys()}  # noqa: SIM118
    return {
        name: Place(model, other, digest(file))
        for name, value in weights.items()
        for other, same in lent.items()
        if value.numel() >= LARGE and value.dtype == same.dtype and torch.equal(value, same)
    }


def read(places: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """The borrowed weights, on the CPU; CheckpointError where a lender is not what it was."""
    return {name: _weight(Place(*place)) for name, place in places.items()}


def _weight(place: Place) -> Tensor:
    file = path(place.model) / FILE
    try:
        if digest(file) != place.digest:
            raise CheckpointError(
                f"{place.weight} of the shipped model {place.model} was asked for by a head.",
                f"{file} is not the file that the head was made with.",
                "install foretoken anew; the two belong to one release.",
            )
        with safe_open(file, "pt") as lender:
            found: Tensor = lender.get_tensor(place.weight)
            return found
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{place.weight} of the shipped model {place.model} was asked for by a head.",
            f"{file} cannot be read ({error}).",
            "install foretoken anew.",
        ) from error

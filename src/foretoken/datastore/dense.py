"""What followed where the target was in a similar state: hidden states as keys, texts as values.

A key is the state after which a token was said, and lies with the keys of the same token, so that a
search sees only keys whose next token is the one just committed. A value is a place in the texts:
what follows is read there, however much is wanted, and costs nothing per key. Exact search, by
products with blocks of keys; files under a memory map.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.datastore.codecs import Codec
from foretoken.datastore.continuations import Continuations, in_order
from foretoken.datastore.disk import whole, writing
from foretoken.datastore.segment import broken
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import CheckpointError, ConfigError

FORMAT = 1
HEADER = "keys.json"
ARRAYS = ("keys", "places", "starts", "tokens", "mean", "components")
BLOCK = 1 << 14  # keys per product


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything of a key store, before it is written or after it was read."""

    vocabulary: Vocabulary
    tap: int  # the hidden layer the keys come from
    codec: Codec
    keys: npt.NDArray[np.uint8]  # [n, bytes], ordered by the token said next
    places: npt.NDArray[np.uint32]  # [n], of what follows that token
    starts: npt.NDArray[np.int64]  # [V + 1]: keys of token t are starts[t] to starts[t + 1]
    tokens: npt.NDArray[np.uint32]  # the texts; the vocabulary's size ends each of them

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        made = {"mean": self.codec.mean.numpy(), "components": self.codec.components.numpy()}
        return {name: made[name] if name in made else getattr(self, name) for name in ARRAYS}


class KeyStore:
    """Nearest states and what followed them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.contents = read(self.folder)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.contents.vocabulary

    @property
    def hidden_size(self) -> int:
        return len(self.contents.codec.mean)

    @property
    def size(self) -> int:
        """Keys."""
        return len(self.contents.keys)

    def find(
        self, state: Float[Tensor, "H"], token: int, depth: int, neighbours: int, sharpness: float
    ) -> Continuations | None:
        """What followed `token` after the states nearest to `state`, nearer ones weighing more.

        The weight of a neighbour falls with its cosine, exp(sharpness * (cosine - best)).
        """
        held = self.contents
        if depth <= 0 or not 0 <= token < self.vocabulary.size:
            return None
        first, last = int(held.starts[token]), int(held.starts[token + 1])
        if first == last:
            return None
        near, cosines = self.nearest(state, first, last, neighbours)
        weights = np.exp(sharpness * (cosines - cosines.max()))
        index = held.places[near].astype(np.int64)[:, None] + np.arange(depth)
        np.minimum(index, len(held.tokens) - 1, out=index)
        paths, weights = in_order(held.tokens[index].astype(np.int64), weights)
        return Continuations(1, paths, weights, float(weights.sum()))

    def nearest(
        self, state: Float[Tensor, "H"], first: int, last: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The `count` nearest of keys `first` to `last`, and their cosines, by exact search."""
        codec, keys = self.contents.codec, self.contents.keys
        query = codec.project(state[None].cpu())[0]
        parts = []
        for start in range(first, last, BLOCK):
            block = codec.decode(torch.from_numpy(keys[start : min(start + BLOCK, last)].copy()))
            parts.append(block @ query / block.norm(dim=-1).clamp_min(1e-9))
        cosines, order = torch.cat(parts).topk(min(count, last - first))
        return order.numpy() + first, cosines.double().numpy()

    def check(self) -> None:
        """Compare every file with its checksum."""
        header = _header(self.folder)
        for name, array in self.contents.arrays().items():
            if _sum(array) != header["sums"][name]:
                raise broken(self.folder / f"{name}.npy", "its checksum differs")


def write(folder: str | Path, contents: Contents) -> None:
    """Write a new key store, whole or not at all."""
    folder = Path(folder)
    refuse_existing(folder)
    with whole(folder) as part:
        fill(part, contents)


def fill(folder: Path, contents: Contents) -> None:
    """Write the files of a key store and wait until they are on the disk."""
    arrays = contents.arrays()
    header = {
        "format": FORMAT,
        "vocab_size": contents.vocabulary.size,
        "fingerprint": contents.vocabulary.fingerprint,
        "tap": contents.tap,
        "dtype": contents.codec.dtype,
        "sums": {name: _sum(array) for name, array in arrays.items()},
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
    }
    with writing(folder):
        for name, array in arrays.items():
            with open(folder / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        with open(folder / HEADER, "w", encoding="utf-8") as told:
            json.dump(header, told, indent=1)
            told.flush()
            os.fsync(told.fileno())


def refuse_existing(folder: Path) -> None:
    """Nothing is built over."""
    folder = Path(os.path.expanduser(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"keys in {folder} were to be made.",
            "something is there already, and nothing is overwritten.",
            "name another folder.",
        )


def read(folder: Path) -> Contents:
    """A key store under memory maps; what is missing or damaged is refused."""
    header = _header(folder)
    found: dict[str, Any] = {}
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        try:
            found[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise broken(path, "it is missing") from error
        except (OSError, ValueError, EOFError) as error:
            raise broken(path, f"it cannot be read ({error})") from error
        if list(found[name].shape) != header["shapes"][name]:
            raise broken(path, "it has another shape than what was written")
    mean, components = (torch.from_numpy(np.array(found.pop(n))) for n in ARRAYS[-2:])
    codec = Codec(mean, components, header["dtype"])
    vocabulary = Vocabulary(header["vocab_size"], header["fingerprint"])
    return Contents(vocabulary, header["tap"], codec, **found)


def _header(folder: Path) -> Mapping[str, Any]:
    path = folder / HEADER
    try:
        header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise CheckpointError(
                f"the keys in {folder} were opened.",
                f"they are of format {header['format']}; this version reads format {FORMAT}.",
                "make them anew: foretoken datastore build --dense.",
            )
        return header
    except FileNotFoundError as error:
        raise ConfigError(
            f"the keys in {folder} were asked for.",
            f"there are none: no {HEADER} in it."
            if folder.is_dir()
            else "there is no such folder.",
            "make some: foretoken datastore build TEXT... --dense --out FOLDER.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise broken(path, "it is no header") from error


def _sum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())

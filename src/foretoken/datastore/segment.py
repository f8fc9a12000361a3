"""One stretch of tokens with its suffix array: two files that never change once written.

Tokens lie big-endian, so that comparing bytes compares texts: a step of the binary search is one
slice of the map and one comparison. Ids from the vocabulary's size on end a document; no query
holds one, so no match and no continuation crosses the end of a document.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.datastore.suffixes import sort_suffixes
from foretoken.errors import CheckpointError

DEPTH = 32  # tokens to which suffixes are in order: 16 of a query, 16 behind it
PLACES = np.dtype("<u4")
CHUNK = 1 << 24  # bytes read at a time for a checksum


def token_type(separator: int) -> np.dtype[Any]:
    """The smallest type that holds all ids and the separator."""
    return np.dtype(">u2" if separator < 1 << 16 else ">u4")


@dataclass(frozen=True, slots=True)
class Described:
    """What the manifest says of a segment."""

    name: str
    tokens: int  # ends of documents included
    documents: int
    text_sum: int  # checksums of the files
    place_sum: int

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Described:
        return cls(str(entry["name"]), *(int(entry[key]) for key in list(cls.__slots__)[1:]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def files(self, folder: Path) -> tuple[Path, Path]:
        return folder / f"{self.name}.tokens", folder / f"{self.name}.suffixes"


def write_segment(
    folder: Path, name: str, tokens: npt.NDArray[np.integer], documents: int, separator: int
) -> Described:
    """Write both files and wait until they are on the disk."""
    text = tokens.astype(token_type(separator)).tobytes()
    places = sort_suffixes(tokens, DEPTH).astype(PLACES).tobytes()
    made = Described(name, len(tokens), documents, zlib.crc32(text), zlib.crc32(places))
    for path, content in zip(made.files(folder), (text, places), strict=True):
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return made


class Segment:
    """A segment under a memory map."""

    def __init__(self, folder: Path, described: Described, separator: int) -> None:
        self.described, self.folder = described, folder
        kind = token_type(separator)
        text, places = described.files(folder)
        self._bytes = mapped(text, described.tokens * kind.itemsize)
        self._width = kind.itemsize
        raw = mapped(places, described.tokens * PLACES.itemsize)
        self._place = memoryview(raw).cast("I")
        self.text: npt.NDArray[np.integer] = np.frombuffer(self._bytes, kind)
        self.places: npt.NDArray[np.uint32] = np.frombuffer(raw, PLACES)

    def longest(self, query: bytes, least: int, most: int) -> tuple[int, int, int]:
        """The longest end of `query` that occurs, between `least` and `most` tokens long.

        Its length and the bounds of its suffixes in the array; length 0 if there is none. What
        occurs has shorter ends that occur, so the length is found by halving.
        """
        best, start = 0, 0
        while least <= most:
            n = (least + most + 1) // 2
            first = self.first(query[-n * self._width :])
            if first is None:
                most = n - 1
            else:
                best, start, least = n, first, n + 1
        if best == 0:
            return 0, 0, 0
        wanted = query[-best * self._width :]
        stop = bisect_right(self._place, wanted, lo=start, key=self._reader(len(wanted)))
        return best, start, stop

    def first(self, wanted: bytes) -> int | None:
        """Where in the array the suffixes that begin with `wanted` start; None: nowhere."""
        read = self._reader(len(wanted))
        at = bisect_left(self._place, wanted, key=read)
        return at if at < len(self._place) and read(self._place[at]) == wanted else None

    def _reader(self, length: int) -> Any:
        """The first `length` bytes of the suffix at a position."""
        text, width = self._bytes, self._width

        def read(place: int) -> bytes:
            start = place * width
            return text[start : start + length]

        return read

    def after(
        self, skipped: int, start: int, stop: int, depth: int, limit: int
    ) -> tuple[npt.NDArray[np.int64], float]:
        """`depth` tokens behind the first `skipped` of suffixes `start` to `stop`, in their order.

        Of more than `limit` suffixes, evenly spaced ones stand for all: an ordered array makes
        that a stratified sample. Second: how many suffixes each row stands for.
        """
        count = stop - start
        taken = min(count, limit)
        chosen = start + (np.arange(taken) * count) // taken
        begin = self.places[chosen].astype(np.int64) + skipped
        index = begin[:, None] + np.arange(depth)
        np.minimum(index, len(self.text) - 1, out=index)  # the last token ends a document
        return self.text[index].astype(np.int64), count / taken

    def check(self) -> None:
        """Compare both files with their checksums."""
        described = self.described
        sums = described.text_sum, described.place_sum
        for path, expected in zip(described.files(self.folder), sums, strict=True):
            seen = 0
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    seen = zlib.crc32(chunk, seen)
            if seen != expected:
                raise broken(path, "its checksum is not the one it was written with")


def mapped(path: Path, size: int) -> mmap.mmap:
    """A file of `size` bytes under a read-only map."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise broken(path, f"it has {found} bytes where {size} were written")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise broken(path, "it is missing") from error
    except OSError as error:
        raise broken(path, f"it cannot be read ({error.strerror or error})") from error


def broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the datastore {path.parent} was opened.",
        f"{path.name} is not what was written: {why}.",
        "copy the datastore again, or build it anew: foretoken datastore build.",
    )

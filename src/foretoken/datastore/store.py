"""A datastore: a folder of segments and a manifest that names those which count.

Nothing that is in use is ever changed. New segments are written beside the old ones, and one
rename puts the new manifest in the place of the old one: whoever is killed on the way leaves the
old datastore, and files that the next writer sweeps away. Readers keep what they have mapped.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.datastore.continuations import Continuations, in_order
from foretoken.datastore.disk import whole, writing
from foretoken.datastore.segment import (
    DEPTH,
    Described,
    Segment,
    broken,
    token_type,
    write_segment,
)
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import CheckpointError, ConfigError

LOG = logging.getLogger(__name__)
FORMAT = 1
MANIFEST = "datastore.json"
LOCK = "lock"
SEGMENT_TOKENS = 1 << 26  # of a segment: sorting one takes about 40 bytes per token
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # of a folder: not every file system does
ENDINGS = (".tokens", ".suffixes", ".part")  # of files a killed writer may leave


class Datastore:
    """Texts that can be asked what followed a context in them."""

    def __init__(self, folder: str | Path) -> None:
        """Open; what is missing, empty, damaged or of another format is refused."""
        self.folder = Path(os.path.expanduser(folder))
        self._open()
        if not self.segments:
            raise ConfigError(
                f"the datastore {self.folder} was asked for.",
                "it is empty: there is no text to look anything up in.",
                "put some in: foretoken datastore add FOLDER TEXT...",
            )

    @classmethod
    def to_fill(cls, folder: str | Path) -> Datastore:
        """Open for `add`; an empty one is welcome."""
        store = cls.__new__(cls)
        store.folder = Path(os.path.expanduser(folder))
        store._open()
        return store

    @classmethod
    def create(cls, folder: str | Path, vocabulary: Vocabulary) -> Datastore:
        """An empty datastore in a new or empty folder, or in place of an empty one."""
        folder = Path(os.path.expanduser(folder))
        refuse_existing(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _commit(folder, vocabulary, [], 0)
        return cls.to_fill(folder)

    @classmethod
    def build(
        cls, folder: str | Path, vocabulary: Vocabulary, documents: Iterable[Sequence[int]]
    ) -> Datastore:
        """A new datastore of documents; its folder is there when it is whole, and not before."""
        folder = Path(os.path.expanduser(folder))
        refuse_existing(folder)
        with whole(folder) as part:
            if not cls.create(part, vocabulary).add(documents):
                raise ConfigError(
                    f"a datastore in {folder} was to be built.",
                    "the texts named hold no token.",
                    "name texts that are not empty, or pass --traffic 5000.",
                )
            refuse_existing(folder)  # again: building takes its time
            shutil.rmtree(folder, ignore_errors=True)
        return cls(folder)

    @property
    def tokens(self) -> int:
        """Tokens in all segments, without the ends of documents."""
        return sum(s.described.tokens - s.described.documents for s in self.segments)

    @property
    def documents(self) -> int:
        return sum(s.described.documents for s in self.segments)

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        files = [path for s in self.segments for path in s.described.files(self.folder)]
        return sum(path.stat().st_size for path in files)

    def find(
        self, context: Sequence[int], depth: int, *, least: int, most: int, limit: int
    ) -> Continuations | None:
        """What followed the longest end of `context` that goes on somewhere, `depth` tokens each.

        Ends of `least` to `most` tokens are looked for, in all segments; `limit` occurrences of a
        segment are read at most, evenly spaced. None: nothing was found.
        """
        query = self._query(context, most)
        most = len(query) // self._width
        while depth > 0 and most >= least:
            longest, places = self._longest(query, least, most)
            if not places:
                return None
            parts = [s.after(longest, start, stop, depth, limit) for s, start, stop in places]
            paths = np.concatenate([rows for rows, _ in parts])
            weights = np.concatenate([np.full(len(rows), weight) for rows, weight in parts])
            goes_on = paths[:, 0] < self.vocabulary.size  # else a document ends there
            if goes_on.any():
                paths, weights = paths[goes_on], weights[goes_on]
                if len(parts) > 1 or longest + depth > DEPTH:
                    paths, weights = in_order(paths, weights)
                return Continuations(longest, paths, weights, float(weights.sum()))
            most = longest - 1
        return None

    def _longest(
        self, query: bytes, least: int, most: int
    ) -> tuple[int, list[tuple[Segment, int, int]]]:
        """The longest end of `query` in any segment, and where it is in each that has it."""
        longest = 0
        found: list[tuple[Segment, int, int]] = []
        for segment in self.segments:
            length, start, stop = segment.longest(query, max(least, longest), most)
            if length > longest:
                longest, found = length, []
            if length:
                found.append((segment, start, stop))
        return longest, found

    def _query(self, context: Sequence[int], most: int) -> bytes:
        """The end of a context as bytes, from behind the last id that is no token here."""
        tail = list(context[-most:]) if most > 0 else []
        for at in range(len(tail) - 1, -1, -1):
            if not 0 <= tail[at] < self.vocabulary.size:
                tail = tail[at + 1 :]
                break
        return np.array(tail, token_type(self.vocabulary.size)).tobytes()

    def add(self, documents: Iterable[Sequence[int]], segment_tokens: int = SEGMENT_TOKENS) -> int:
        """Put documents in, all of them or, if it does not come to an end, none; how many.

        Segments of similar size are merged, so that their number grows with the logarithm of the
        text. Other writers wait, where the file system has locks.
        """
        with _locked(self.folder):
            self._open()
            _sweep(self.folder)
            try:
                return self._added(documents, segment_tokens)
            finally:
                _sweep(self.folder)
                self._open()

    def _added(self, documents: Iterable[Sequence[int]], segment_tokens: int) -> int:
        """Write segments and make them count."""
        added, serial = 0, self._serial
        made: list[Described] = [s.described for s in self.segments]
        for tokens, count in _stretches(documents, self.vocabulary.size, segment_tokens):
            name, serial = f"{serial:06d}", serial + 1
            with writing(self.folder):
                made.append(write_segment(self.folder, name, tokens, count, self.vocabulary.size))
            added += count
        with writing(self.folder):
            while _worth_merging(made, segment_tokens):
                name, serial = f"{serial:06d}", serial + 1
                made[-2:] = [self._merged(made[-2:], name)]
            if added:
                _commit(self.folder, self.vocabulary, made, serial)
        return added

    def _merged(self, parts: Sequence[Described], name: str) -> Described:
        """One segment of several, written anew; damaged ones are refused, not copied."""
        opened = [Segment(self.folder, part, self.vocabulary.size) for part in parts]
        for segment in opened:
            segment.check()
        tokens = np.concatenate([segment.text for segment in opened])
        documents = sum(part.documents for part in parts)
        return write_segment(self.folder, name, tokens, documents, self.vocabulary.size)

    def check(self) -> None:
        """Read everything and compare it with its checksums."""
        for segment in self.segments:
            segment.check()

    def _open(self) -> None:
        for _ in range(2):  # a writer may replace the segments between manifest and maps
            manifest = _read_manifest(self.folder)
            try:
                self._map(manifest)
                return
            except CheckpointError:
                if _read_manifest(self.folder) == manifest:
                    raise
        self._map(manifest)

    def _map(self, manifest: dict[str, Any]) -> None:
        self.vocabulary = Vocabulary(manifest["vocab_size"], manifest["fingerprint"])
        self._width = token_type(self.vocabulary.size).itemsize
        self._serial = int(manifest["serial"])
        described = [Described.read(entry) for entry in manifest["segments"]]
        self.segments = [Segment(self.folder, d, self.vocabulary.size) for d in described]


def refuse_existing(folder: Path) -> None:
    """Nothing is built over, but a datastore without documents."""
    if folder.exists() and not (folder.is_dir() and _is_empty(folder)):
        raise ConfigError(
            f"a new datastore in {folder} was asked for.",
            "something is there already, and nothing is overwritten.",
            "name another folder, or put more text into a datastore: foretoken datastore add.",
        )


def _is_empty(folder: Path) -> bool:
    """Whether nothing, or a datastore without documents, is in a folder."""
    if not (folder / MANIFEST).exists():
        return not any(folder.iterdir())
    return not _read_manifest(folder)["segments"]


def _worth_merging(made: Sequence[Described], most: int) -> bool:
    """Whether the last two segments are of similar size, and small enough together."""
    if len(made) < 2:
        return False
    older, newer = made[-2].tokens, made[-1].tokens
    return older < 2 * newer and older + newer <= most


def _stretches(
    documents: Iterable[Sequence[int]], separator: int, most: int
) -> Iterator[tuple[npt.NDArray[np.integer], int]]:
    """Documents with their ends, in arrays of about `most` tokens."""
    held: list[npt.NDArray[np.integer]] = []
    size = count = 0
    kind = token_type(separator)
    for document in documents:
        ids = np.asarray(document, np.int64)
        if len(ids) == 0:
            continue
        if ids.min() < 0 or ids.max() >= separator:
            raise ConfigError(
                f"a document with the id {int(ids.max() if ids.min() >= 0 else ids.min())} was "
                "to be put into a datastore.",
                f"ids of its vocabulary are 0 to {separator - 1}.",
                "encode the text with the tokenizer the datastore was made with.",
            )
        held += [ids.astype(kind), np.array([separator], kind)]
        size, count = size + len(ids) + 1, count + 1
        if size >= most:
            yield np.concatenate(held), count
            held, size, count = [], 0, 0
    if held:
        yield np.concatenate(held), count


def _commit(
    folder: Path, vocabulary: Vocabulary, segments: Sequence[Described], serial: int
) -> None:
    """Make these segments the datastore, in one rename that outlives a power cut."""
    body = {
        "format": FORMAT,
        "vocab_size": vocabulary.size,
        "fingerprint": vocabulary.fingerprint,
        "serial": serial,
        "segments": [segment.to_dict() for segment in segments],
    }
    part = folder / f"{MANIFEST}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump({**body, "sum": _sum(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _settle(folder)  # the segments' own names first
    os.replace(part, folder / MANIFEST)
    _settle(folder)


def _sum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _settle(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where a folder can be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # as on Windows
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"the datastore {folder} was asked for.",
            "there is none: " + (f"no {MANIFEST} in it." if folder.is_dir() else "no such folder."),
            "build one: foretoken datastore build TEXT... --out FOLDER.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise broken(path, f"it cannot be read ({error})") from error
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"the datastore {folder} was opened.",
                f"it is of format {manifest['format']}; this version reads format {FORMAT}.",
                "build it anew: foretoken datastore build.",
            )
        body = {key: value for key, value in manifest.items() if key != "sum"}
        good = manifest["sum"] == _sum(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken(path, "it is no manifest") from error
    if not good:
        raise broken(path, "its checksum is not the one it was written with")
    return body


def _sweep(folder: Path) -> None:
    """Remove what the manifest does not name: leftovers of a failed writer, merged segments."""
    names = {entry["name"] for entry in _read_manifest(folder)["segments"]}
    for path in folder.iterdir():
        if path.suffix in ENDINGS and path.stem not in names:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; the system lets go of the lock of a killed one. Where the system or the
    file system has no locks, nobody waits.
    """
    with writing(folder):
        file = open(folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # not everywhere, as on file systems of clusters
            LOG.warning("%s has no locks: let one process at a time write there", folder)
        yield

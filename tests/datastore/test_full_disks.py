"""A disk that is full, and datastores with nothing in them."""

import errno
import os
import resource
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from foretoken.datastore.disk import whole
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import ConfigError

WORDS = Vocabulary.of_ids(4)


@contextmanager
def full_disk(room):
    """No file grows beyond `room` bytes: what a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 100, 1000])
def test_a_build_that_finds_no_room_leaves_nothing(tmp_path, room):
    with full_disk(room), pytest.raises(ConfigError, match="nothing can be written there"):
        Datastore.build(tmp_path / "deep" / "d", WORDS, [[1, 2] * 1000])
    assert list(tmp_path.iterdir()) == []


def test_an_addition_that_finds_no_room_leaves_the_datastore_as_it_was(tmp_path):
    store = Datastore.build(tmp_path / "d", WORDS, [[1, 2] * 100])
    before = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    with full_disk(1000), pytest.raises(ConfigError, match="nothing can be written there"):
        store.add([[3] * 5000])
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before
    assert store.documents == 1 and store.add([[3] * 5000]) == 1
    Datastore(tmp_path / "d").check()


def test_documents_that_break_on_the_way_leave_nothing(tmp_path):
    def documents():
        yield [1, 2, 3]
        raise ConfigError("a", "b", "c")

    with pytest.raises(ConfigError):
        Datastore.build(tmp_path / "d", WORDS, documents())
    assert list(tmp_path.iterdir()) == []


def test_an_empty_datastore_is_neither_built_nor_opened(tmp_path):
    for documents in ([], [[]]):
        with pytest.raises(ConfigError, match="no token"):
            Datastore.build(tmp_path / "d", WORDS, documents)
    store = Datastore.create(tmp_path / "d", WORDS)
    with pytest.raises(ConfigError, match="it is empty"):
        Datastore(tmp_path / "d")
    assert store.add([[1, 2]]) == 1 and Datastore(tmp_path / "d").documents == 1


def test_a_build_takes_the_place_of_an_empty_one_and_of_nothing_else(tmp_path):
    Datastore.create(tmp_path / "d", Vocabulary.of_ids(9))
    assert Datastore.build(tmp_path / "d", WORDS, [[1]]).vocabulary == WORDS
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        Datastore.build(tmp_path / "d", WORDS, [[1]])

    def rival():
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "mine").write_text("")
        yield [1]

    with pytest.raises(ConfigError, match="nothing is overwritten"):
        Datastore.build(tmp_path / "late", WORDS, rival())
    assert (tmp_path / "late" / "mine").exists() and len(list(tmp_path.iterdir())) == 2


def test_two_builds_of_one_folder_leave_each_other_alone(tmp_path):
    place = tmp_path / "deep" / "d"
    with whole(place) as outer:
        (outer / "mine").write_text("")
        with pytest.raises(KeyError), whole(place) as inner:
            (inner / "theirs").write_text("")
            raise KeyError
        assert inner != outer and [path.name for path in outer.iterdir()] == ["mine"]
    assert [path.name for path in place.iterdir()] == ["mine"]
    assert list(place.parent.iterdir()) == [place]
    assert place.stat().st_mode == place.parent.stat().st_mode, "open to whom other folders are"


def test_a_build_that_fails_beside_another_says_why(tmp_path):
    """The folder that it made above its own is the other's, too."""
    place = tmp_path / "deep" / "d"
    with pytest.raises(KeyError), whole(place):
        (place.parent / ".d.another.part").mkdir()
        raise KeyError
    assert [path.name for path in place.parent.iterdir()] == [".d.another.part"]


def unlocked(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("found", [None, SimpleNamespace(flock=unlocked, LOCK_EX=2)])
def test_where_there_are_no_locks_a_datastore_is_built_and_grows(found, tmp_path, monkeypatch):
    """None: a system that does not know them."""
    monkeypatch.setitem(sys.modules, "fcntl", found)
    store = Datastore.build(tmp_path / "d", WORDS, [[1, 2] * 10])
    assert store.add([[3]]) == 1 and Datastore(tmp_path / "d").documents == 2


def test_where_folders_cannot_be_opened_a_datastore_is_built_all_the_same(tmp_path, monkeypatch):
    opened = os.open

    def refuses(path, *given, **named):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *given, **named)

    monkeypatch.setattr(os, "open", refuses)
    assert Datastore.create(tmp_path / "d", WORDS).add([[1, 2]]) == 1

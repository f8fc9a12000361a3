"""A writer is killed, really, at every call that touches the datastore's files."""

import os
import signal
import subprocess
import sys

import pytest

from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary

WRITER = """
import os, signal, sys
from foretoken.datastore.store import Datastore

folder, deadline = sys.argv[1], int(sys.argv[2])
store = Datastore(folder)
seen = 0

def count(event, arguments):
    global seen
    if event in ("open", "os.rename", "os.remove", "mmap.__new__", "fcntl.flock", "os.listdir"):
        seen += 1
        if seen == deadline:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
store.add([[2] * 40 for _ in range(10)])  # as long as what is there: the two are merged
print(seen)
"""

OLD, NEW = 10, 20


def kill_at(folder, deadline):
    """Runs a writer that dies at its `deadline`-th call."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(folder), str(deadline)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


def fresh(folder):
    store = Datastore.create(folder, Vocabulary.of_ids(4))
    store.add([[1] * 40 for _ in range(OLD)])
    return folder


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How many calls a writer makes that nobody kills."""
    ran = kill_at(fresh(tmp_path_factory.mktemp("whole") / "d"), -1)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_a_killed_writer_leaves_the_old_datastore_or_the_new_one(calls, tmp_path):
    assert calls > 10
    seen = []
    for deadline in range(1, calls + 1):
        folder = fresh(tmp_path / str(deadline))
        ran = kill_at(folder, deadline)
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        store = Datastore(folder)
        store.check()
        seen.append(store.documents)
        assert store.documents in (OLD, NEW)
        found = store.find([1, 1], 2, least=1, most=4, limit=9)
        assert found is not None and found.paths[0].tolist() == [1, 1]
        store.add([[3] * 5])  # the lock is free, and what was left is swept away
        assert store.documents == seen[-1] + 1
        held = {f.name for s in store.segments for f in s.described.files(folder)}
        assert {f.name for f in folder.iterdir()} == held | {"datastore.json", "lock"}
    assert seen == sorted(seen) and {OLD, NEW} == set(seen)

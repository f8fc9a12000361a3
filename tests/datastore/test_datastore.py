import json
import shutil

import numpy as np
import pytest

from foretoken.datastore import store as store_module
from foretoken.datastore.continuations import beginnings
from foretoken.datastore.segment import DEPTH
from foretoken.datastore.store import MANIFEST, Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import CheckpointError, ConfigError

EVERYTHING = 10**6


def texts(seed, count=30, vocab=4, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def made(folder, documents, vocab=4, **options):
    store = Datastore.create(folder, Vocabulary.of_ids(vocab))
    store.add(documents, **options)
    return store


def scanned(documents, context, depth, least, most):
    """What `find` promises, by a scan: the longest match that goes on, rows in order."""
    for n in range(min(most, len(context)), least - 1, -1):
        suffix = context[-n:]
        rows = []
        for text in documents:
            for at in range(n, len(text)):
                if text[at - n : at] == suffix:
                    rows.append(tuple((text[at : at + depth] + [-1] * depth)[:depth]))
        if rows:
            return n, sorted(rows)
    return None


def asked(store, context, depth=4, least=1, most=16, limit=EVERYTHING):
    """The answer of `find` in the form of `scanned`."""
    found = store.find(context, depth, least=least, most=most, limit=limit)
    if found is None:
        return None
    end = store.vocabulary.size
    rows = []
    for path in found.paths.tolist():
        kept = path[: next((i for i, t in enumerate(path) if t >= end), depth)]
        rows.append(tuple((kept + [-1] * depth)[:depth]))
    return found.length, sorted(rows)


@pytest.mark.parametrize("vocab", [2, 4, 9, 70_000])
def test_look_up_equals_a_scan(tmp_path, vocab):
    documents = texts(vocab, vocab=min(vocab, 9))
    store = made(tmp_path / "d", documents, vocab)
    rng = np.random.default_rng(5)
    for n in range(300):
        context = texts(n, 1, min(vocab, 9))[0]
        if n % 2:  # half of the contexts are cut out of the texts, so that matches are long
            text = documents[rng.integers(len(documents))]
            context = text[: rng.integers(1, len(text) + 1)]
        least, most = 1 + n % 3, 2 + n % 15
        assert asked(store, context, 4, least, most) == scanned(documents, context, 4, least, most)


@pytest.mark.parametrize("length", range(1, 17))
def test_every_match_length_is_found(tmp_path, length):
    documents = texts(3, count=12, vocab=3)
    store = made(tmp_path / "d", documents, 3)
    for text in documents:
        for end in range(length, len(text) + 1):
            context = text[:end]
            assert asked(store, context, 3, length, length) == scanned(
                documents, context, 3, length, length
            )


def test_a_store_grown_in_steps_equals_one_built_at_once(tmp_path):
    documents = texts(7, count=120)
    whole = made(tmp_path / "whole", documents)
    steps = Datastore.create(tmp_path / "steps", Vocabulary.of_ids(4))
    many = Datastore.create(tmp_path / "many", Vocabulary.of_ids(4))
    for start in range(0, len(documents), 10):
        steps.add(documents[start : start + 10])
    many.add(documents, segment_tokens=100)  # too small to be merged
    assert len(whole.segments) == 1 and len(many.segments) > 5
    assert whole.documents == steps.documents == many.documents == 120
    assert whole.tokens == steps.tokens == many.tokens == sum(map(len, documents))
    for n in range(150):
        context = texts(100 + n, 1)[0]
        expected = asked(whole, context)
        assert asked(steps, context) == asked(many, context) == expected
        found = [
            s.find(context, 4, least=1, most=16, limit=EVERYTHING) for s in (whole, steps, many)
        ]
        tries = [beginnings(f, 12, 4) for f in found]
        assert tries[0] == tries[1] == tries[2]


def test_segments_stay_few(tmp_path):
    store = Datastore.create(tmp_path / "d", Vocabulary.of_ids(4))
    for n in range(64):
        store.add(texts(n, 2))
        assert len(store.segments) <= 8
    names = {path.name for path in (tmp_path / "d").iterdir()}
    files = {f.name for s in store.segments for f in s.described.files(tmp_path / "d")}
    assert names == files | {MANIFEST, "lock"}, "merged segments are swept away"


def test_no_match_crosses_the_end_of_a_document(tmp_path):
    store = made(tmp_path / "d", [[0, 1], [2, 3]])
    found = store.find([9, 0, 1], 3, least=1, most=16, limit=9)
    assert found is None
    found = store.find([0], 3, least=1, most=16, limit=9)
    assert found.paths.tolist() == [[1, 4, 2]] and beginnings(found, 9, 4).tokens == [1]


def test_a_match_that_ends_its_document_gives_way_to_a_shorter_one(tmp_path):
    store = made(tmp_path / "d", [[0, 1, 2], [1, 2, 3]])
    found = store.find([0, 1, 2], 1, least=1, most=16, limit=9)
    assert found.length == 2 and found.paths.tolist() == [[3]]


def test_of_many_occurrences_an_even_sample_speaks_for_all(tmp_path):
    documents = [[0, 1 + (n % 10 == 0)] for n in range(1000)]
    store = made(tmp_path / "d", documents)
    found = store.find([0], 1, least=1, most=4, limit=50)
    assert len(found.paths) == 50 and found.weights.sum() == 1000
    tree = beginnings(found, 9, 4)
    counts = dict(zip(tree.tokens, tree.weights, strict=True))
    assert counts[1] == pytest.approx(900, abs=20) and counts[2] == pytest.approx(100, abs=20)


def test_rows_stay_in_order_behind_long_matches(tmp_path):
    """A match and what follows may be longer than the array is in order."""
    rng = np.random.default_rng(0)
    head = rng.integers(0, 4, 16).tolist()
    documents = [head + rng.integers(0, 2, 40).tolist() for _ in range(40)]
    store = made(tmp_path / "d", documents)
    found = store.find(head, 40, least=1, most=16, limit=EVERYTHING)
    assert found.length + 40 > DEPTH
    rows = found.paths.tolist()
    assert rows == sorted(rows) and len(rows) == 40


def test_ids_of_a_context_that_are_none_of_the_store_end_the_query(tmp_path):
    store = made(tmp_path / "d", [[0, 1, 2, 3]])
    found = store.find([0, 7, 1, 2], 1, least=1, most=16, limit=9)
    assert found.length == 2 and found.paths.tolist() == [[3]]
    assert store.find([1, 2, 4], 1, least=1, most=16, limit=9) is None


def test_reopened_it_answers_as_before(tmp_path):
    documents = texts(1)
    first = made(tmp_path / "d", documents)
    again = Datastore(tmp_path / "d")
    shutil.move(tmp_path / "d", tmp_path / "moved")
    moved = Datastore(tmp_path / "moved")
    context = documents[0][:7]
    assert asked(first, context) == asked(again, context) == asked(moved, context)
    moved.check()


def test_a_reader_keeps_what_it_opened(tmp_path):
    documents = texts(1)
    reader = made(tmp_path / "d", documents)
    before = asked(reader, documents[0][:5])
    writer = Datastore(tmp_path / "d")
    for n in range(5):
        writer.add(texts(50 + n))  # merges remove the reader's files
    assert asked(reader, documents[0][:5]) == before
    assert Datastore(tmp_path / "d").documents == 180


def test_documents_that_cannot_be_read_to_the_end_leave_nothing_behind(tmp_path):
    store = made(tmp_path / "d", texts(1))
    before = sorted(path.name for path in (tmp_path / "d").iterdir())

    def failing():
        yield from texts(2, count=200)
        yield [0, 99]

    with pytest.raises(ConfigError, match="id 99"):
        store.add(failing(), segment_tokens=50)
    assert Datastore(tmp_path / "d").documents == 30
    store.add([[1]])
    after = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert len(after) <= len(before) + 2, "what the failed writer left is swept away"


def test_nothing_is_built_over(tmp_path):
    made(tmp_path / "d", texts(1))
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        Datastore.create(tmp_path / "d", Vocabulary.of_ids(4))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        Datastore.create(tmp_path / "file", Vocabulary.of_ids(4))
    Datastore.create(tmp_path / "empty", Vocabulary.of_ids(4))
    assert Datastore.create(tmp_path / "empty", Vocabulary.of_ids(5)).vocabulary.size == 5


def test_an_empty_store_knows_nothing(tmp_path):
    store = Datastore.create(tmp_path / "d", Vocabulary.of_ids(4))
    assert store.find([1, 2], 3, least=1, most=16, limit=9) is None
    assert store.add([]) == 0 and store.tokens == 0


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "gone":
        path.unlink()
    elif how == "longer":
        path.write_bytes(bytes(content) + b"\0\0")
    else:
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)


@pytest.mark.parametrize("ending", [".tokens", ".suffixes"])
@pytest.mark.parametrize("how", ["cut", "gone", "longer"])
def test_a_damaged_file_is_refused(tmp_path, ending, how):
    made(tmp_path / "d", texts(1))
    [path] = (tmp_path / "d").glob(f"*{ending}")
    damage(path, how)
    with pytest.raises(CheckpointError, match=path.name):
        Datastore(tmp_path / "d")


@pytest.mark.parametrize("ending", [".tokens", ".suffixes"])
def test_a_flipped_bit_is_found_by_a_check_and_harms_nobody_else(tmp_path, ending):
    documents = texts(1)
    made(tmp_path / "d", documents)
    [path] = (tmp_path / "d").glob(f"*{ending}")
    content = bytearray(path.read_bytes())
    for at in range(3, len(content), 7):
        content[at] ^= 0x80
    path.write_bytes(content)
    store = Datastore(tmp_path / "d")
    for n in range(40):  # whatever it answers, its guesses are ids of the vocabulary
        found = store.find(texts(n, 1)[0], 5, least=1, most=16, limit=9)
        if found is not None:
            assert all(0 <= t < 4 for t in beginnings(found, 20, 4).tokens)
    with pytest.raises(CheckpointError, match="checksum"):
        store.check()
    with pytest.raises(CheckpointError, match="checksum"):
        store.add(documents)  # a merge copies no damage


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_a_damaged_manifest_is_refused(tmp_path, how):
    made(tmp_path / "d", texts(1))
    damage(tmp_path / "d" / MANIFEST, how)
    with pytest.raises(CheckpointError, match=MANIFEST):
        Datastore(tmp_path / "d")


def test_another_format_is_refused_by_its_number(tmp_path):
    made(tmp_path / "d", texts(1))
    path = tmp_path / "d" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        Datastore(tmp_path / "d")


def test_a_folder_that_is_no_datastore_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        Datastore(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"no {MANIFEST}"):
        Datastore(tmp_path)


def test_a_fingerprint_tells_vocabularies_apart():
    one = Vocabulary.of({"a": 0, "b": 1})
    assert one == Vocabulary.of({"b": 1, "a": 0}) and one.size == 2
    for other in ({"a": 1, "b": 0}, {"a": 0, "c": 1}, {"a": 0, "b": 1, "c": 2}):
        with pytest.raises(ConfigError, match="another tokenizer"):
            one.refuse_other(Vocabulary.of(other), "here")
    with pytest.raises(ConfigError, match="another tokenizer"):
        Vocabulary.of_ids(2).refuse_other(one, "here")


def test_ids_need_as_many_bytes_as_the_vocabulary(tmp_path):
    assert made(tmp_path / "small", [[1] * 99]).size == 100 * 6
    assert made(tmp_path / "large", [[1] * 99], 65_536).size == 100 * 8
    assert store_module.token_type(65_535).itemsize == 2


def test_a_folder_may_lie_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Datastore.build("~/built", Vocabulary.of_ids(4), texts(1))
    made("~/made", texts(1))
    for name in ("built", "made"):
        assert (tmp_path / name / MANIFEST).is_file()
        assert Datastore(f"~/{name}").folder == Datastore.to_fill(f"~/{name}").folder
        assert Datastore(f"~/{name}").folder == tmp_path / name

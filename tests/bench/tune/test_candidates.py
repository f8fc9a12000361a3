"""What is tried."""

import pytest

from foretoken.audit.fixtures import random_head
from foretoken.bench.rows import row_of
from foretoken.bench.tune.candidates import (
    candidates,
    check_datastores,
    drafting,
    named,
    reading,
    simplest,
    sizes,
    untrained,
)  # fmt: skip
from foretoken.datastore.dense import HEADER
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.engine.assemble import check_options
from foretoken.errors import CheckpointError, ConfigError
from foretoken.types import Shape


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "texts"
    Datastore.build(folder, Vocabulary.of_ids(9), [[1, 2, 3, 4]])
    return str(folder)


def test_plain_and_auto_are_never_missing_and_nothing_needs_what_is_not_there() -> None:
    labels = [spec.label for spec in candidates((), ())]
    assert labels[:2] == ["plain", "auto"]
    assert {"prompt-lookup", "suffix", "fused", "token-recycling"} < set(labels)
    assert not {"chain", "rest", "medusa", "beam-sampling", "specee"} & set(labels)
    assert len(labels) == len(set(labels))


def test_every_draft_and_datastore_is_tried(store) -> None:
    found = candidates(("a/small", "b/small", "other"), (store,))
    labels = [spec.label for spec in found]
    for name in ("a-small", "b-small", "other"):
        assert {f"chain[draft={name}]", f"tree[draft={name}]", f"rasd[draft={name}]"} < set(labels)
        assert f"rasd[draft={name},datastore=texts]" in labels
    assert "rest[datastore=texts]" in labels and "fused[sources=all,datastore=texts]" in labels
    assert not any("retrieval-dense" in label or "specdec" in label for label in labels)
    for spec in found:
        check_options(spec.method, **spec.method_options)  # none is refused for its options
    chain = next(spec for spec in found if spec.label == "chain[draft=a-small]")
    assert chain.draft == "a/small" and chain.method_options == {}


def test_every_method_that_reads_a_head_is_tried_with_it() -> None:
    folder = str(random_head("eagle3", 32, 16))
    found = {
        spec.method: spec for spec in candidates((), (), (folder,)) if "draft_head" in spec.options
    }
    assert set(found) == {"eagle3", "eagle3-chain", "eagle3-mcsd", "eagle3-hybrid"}
    for spec in found.values():
        check_options(spec.method, **spec.method_options)
        assert spec.method_options == {"draft_head": folder}
    assert set(reading(str(random_head("dspark", 32, 16)))) == {"dspark", "dspark-chain"}
    order = simplest([*candidates((), (), (folder,)), row_of("chain", {})])
    assert order.index("auto") < order.index(found["eagle3"].label)


def test_what_the_user_brought_is_prepared_before_the_rest(store) -> None:
    labels = [spec.label for spec in candidates(("small",), (store,))]
    assert labels.index("tree[draft=small]") < labels.index("suffix")
    assert labels.index("rest[datastore=texts]") < labels.index("fused") < labels.index("suffix")


@pytest.mark.parametrize("name", [*untrained(), *drafting()])
def test_sizes_are_options_that_the_method_has(name) -> None:
    for shape in Shape:
        for spec in sizes(row_of(name, {}), shape):
            check_options(spec.method, **spec.method_options)
            assert spec.label.startswith(f"{name}[")


def test_the_simplest_asks_least_of_who_runs_it(store) -> None:
    specs = [*candidates(("small",), (store,)), row_of("suffix", {"depth": 4})]
    order = simplest(specs[::-1])
    assert order[0] == "plain"
    for less, more in (
        ("suffix", "fused"), ("prompt-lookup", "auto"), ("suffix", "suffix[depth=4]"),
        ("fused", "rest[datastore=texts]"), ("rest[datastore=texts]", "chain[draft=small]"),
        ("chain[draft=small]", "rasd[draft=small,datastore=texts]"),
    ):  # fmt: skip
        assert order.index(less) < order.index(more), (less, more)


def test_folders_without_a_datastore_are_refused(tmp_path, store) -> None:
    check_datastores((store,))
    with pytest.raises(ConfigError, match=r"neither datastore\.json nor keys\.json"):
        check_datastores((store, str(tmp_path)))
    with pytest.raises(CheckpointError, match="head"):
        candidates((), (), (str(tmp_path),))


def test_datastores_in_the_home_directory_are_found_there(tmp_path, store, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / HEADER).write_text("{}")
    check_datastores(("~/texts", "~/keys"))
    labels = [spec.label for spec in candidates((), ("~/texts", "~/keys"))]
    assert {"rest[datastore=texts]", "retrieval-dense[keys=keys]"} < set(labels)
    assert not {"rest[datastore=keys]", "retrieval-dense[keys=texts]"} & set(labels)


def test_names_are_short_and_tell_apart() -> None:
    assert named(("x/a", "y/b", "x/a")) == {"x/a": "a", "y/b": "b"}
    assert set(named(("x/a", "y/a")).values()) == {"x-a", "y-a"}
    deep = ("p/x/a", "q/x/a", "q/x/a/", "y/a", "x-a", "b")
    assert named(deep) == {"p/x/a": "p-x-a", "q/x/a": "q-x-a", "y/a": "y-a", "x-a": "x-a", "b": "b"}
    assert len(set(named(("/a/b", "a/b", "p/a-b/c", "a/b/c", "q/b/c")).values())) == 5


def test_drafts_whose_last_folders_agree_are_all_tried() -> None:
    found = candidates(("one/run/final", "two/run/final"), ())
    drafts = [spec.draft for spec in {spec.label: spec for spec in found}.values()]
    assert drafts.count("one/run/final") == drafts.count("two/run/final") == len(drafting())

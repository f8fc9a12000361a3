"""Names of rows, and settings of the bench."""

from pathlib import Path

import pytest

from foretoken.bench.catalogue import GROUPS, group
from foretoken.bench.files import writable
from foretoken.bench.models import check_rows
from foretoken.bench.rows import DEFAULT_METHODS, default_methods, left_out, parse_methods
from foretoken.bench.run import BenchConfig
from foretoken.errors import ConfigError
from foretoken.methods import METHODS, needs_draft


def test_options_belong_to_their_row() -> None:
    text = "plain, chain[depth=4,controller=cost_model],chain[exact_bits=true],hf:plain"
    plain, chain, exact, peer = parse_methods(text)
    assert plain.label == "plain" and not plain.options and not plain.needs_draft
    assert chain.options == {"depth": 4, "controller": "cost_model"} and chain.needs_draft
    assert exact.model_options == {"exact_bits": True} and exact.method_options == {}
    assert exact.label == "chain[exact_bits=true]"
    assert peer.peer and not peer.needs_draft


def test_the_default_rows_are_all_methods_and_all_peers() -> None:
    labels = [spec.label for spec in parse_methods(DEFAULT_METHODS)]
    assert labels[:4] == ["plain", "chain", "tree", "prompt-lookup"] and len(labels) == 8


def test_without_a_draft_the_default_rows_are_those_that_need_none() -> None:
    assert default_methods("some/draft") == list(DEFAULT_METHODS)
    assert default_methods(None) == [
        "plain", "prompt-lookup", "hf:plain", "hf:compiled", "hf:prompt-lookup",
    ]  # fmt: skip


def test_default_rows_of_one_text_are_left_out_of_requests_at_once_and_told() -> None:
    found = default_methods("some/draft", 10)
    assert found == ["plain", "chain", "tree", "prompt-lookup"]
    [told] = left_out(found)
    assert "10 requests at once leave out hf:plain" in told and "hf:assisted" in told
    assert left_out(default_methods("some/draft")) == []
    check_rows(parse_methods(found), "some/draft", 10)


def test_every_method_has_a_group_and_no_group_is_empty() -> None:
    names = [*METHODS, *(name for name in DEFAULT_METHODS if name.startswith("hf:"))]
    assert {group(name) for name in names} == set(GROUPS)
    assert group("layerskip") == "self-speculation" and group("suffix") == "look-up"
    assert group("specee") == group("mcsd-dynamic") == "lossy"
    assert group("rasd") == group("dsbd") == "draft model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chian", "did you mean chain"),
        ("plain,plain", "asked for twice"),
        ("chain[depth]", "written key=value"),
        ("chain[depth=]", "written key=value"),
        ("hf:asisted", "hf:assisted"),
        ("", "without methods"),
    ],
)
def test_misspelt_rows_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_methods(text)
    assert said in str(caught.value)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="repetitions"):
        BenchConfig(target="x", repetitions=0)


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    with pytest.raises(ConfigError, match="nothing can be written there"):
        writable(file / "below")
    assert list(writable(tmp_path / "new").iterdir()) == []


def test_a_label_names_a_folder_without_its_place() -> None:
    [spec] = parse_methods("rest[datastore=/home/somebody/texts]")
    assert spec.label == "rest[datastore=texts]"
    assert spec.options == {"datastore": "/home/somebody/texts"}


def test_folders_of_one_name_are_told_apart_in_every_label() -> None:
    text = "eagle3[draft_head=/a/x/head],eagle3[draft_head=/b/x/head],eagle3[draft_head=y/head]"
    specs = parse_methods(f"{text},medusa[draft_head=/a/x/head],plain")
    assert [spec.label for spec in specs] == [
        "eagle3[draft_head=a-x-head]", "eagle3[draft_head=b-x-head]", "eagle3[draft_head=y-head]",
        "medusa[draft_head=head]", "plain",
    ]  # fmt: skip
    assert [spec.options["draft_head"] for spec in specs[:2]] == ["/a/x/head", "/b/x/head"]
    assert [spec.label for spec in parse_methods("rest[datastore=t],rest[datastore=p/t]")] == [
        "rest[datastore=t]", "rest[datastore=p-t]",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="twice"):
        parse_methods("rest[datastore=p/t],rest[datastore=q/t],rest[datastore=p/t/]")


def test_a_family_is_all_its_rows_that_have_what_they_need() -> None:
    plain = [spec.label for spec in parse_methods("training-free")]
    assert plain == [
        "plain", "prompt-lookup", "suffix", "token-recycling", "lookahead", "auto", "fused",
        "layerskip", "del", "swift",
    ]  # fmt: skip
    assert not any(needs_draft(METHODS[name]) for name in plain)
    more = parse_methods("training-free[datastore=/some/store,keys=/some/keys],hf:plain")
    assert [s.label for s in more if s.label not in plain] == [
        "rest[datastore=store]", "retrieval-dense[keys=keys]", "hf:plain",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="datastore, keys"):
        parse_methods("training-free[depth=3]")
    with pytest.raises(ConfigError, match="twice"):
        parse_methods("plain,training-free")


def test_rows_that_a_family_leaves_out_are_told_with_what_they_take() -> None:
    told = left_out("training-free,chain")
    assert [line.split(",")[0] for line in told] == [
        "training-free leaves out rest",
        "training-free leaves out retrieval-dense",
        "training-free leaves out auto-draft",
        "training-free leaves out hybrid",
        "training-free leaves out rasd",
    ]
    assert "datastore=FOLDER" in told[0] and "keys=FOLDER" in told[1] and "second" in told[4]
    given = "training-free[datastore=/some/store,keys=/some/keys]"
    more = left_out([given, "rasd", "hybrid", "auto-draft"])
    assert more == [] == left_out("plain,chain")

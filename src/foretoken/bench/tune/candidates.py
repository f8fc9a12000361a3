"""What is tried: every method that needs no training, and every draft, head and store at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.bench.catalogue import lossless
from foretoken.bench.rows import UNTRAINED, RowSpec, row_of, short_names
from foretoken.datastore.dense import HEADER
from foretoken.datastore.store import MANIFEST
from foretoken.engine.assemble import config_fields
from foretoken.errors import ConfigError
from foretoken.heads.store import card_of, read_as
from foretoken.methods import FAMILIES, METHODS, Method, needs_draft
from foretoken.types import Shape

DRAFTING = ("draft-model", "portfolio")  # families whose rows take a draft as it is
ALWAYS = ("plain", "auto")
# `auto-draft` and `auto-eagle3` are, at one temperature, one of two others, which are tried
# themselves; the realigned ones write what `chain` does, and are there to be held against it.
APART = ("auto-draft", "auto-eagle3", "eqspec", "exspec")
SIZES: dict[Shape, tuple[dict[str, Any], ...]] = {
    Shape.CHAIN: ({"depth": 2}, {"depth": 4}, {"depth": 8}),
    Shape.TREE: (
        {"depth": 4, "nodes": 8},
        {"depth": 8, "nodes": 24},
        {"max_depth": 16, "max_nodes": 128},
    ),
}


def candidates(
    drafts: Sequence[str], datastores: Sequence[str], heads: Sequence[str] = ()
) -> list[RowSpec]:
    """Rows with their default settings, in the order in which they are prepared.

    Plain and auto first; then what the user brought, which must not fall to a short time limit;
    then methods made of several others before these.
    """
    small, stores = named(drafts), named(datastores)
    found = [row_of(name, {}) for name in ALWAYS]
    for path, name in named(heads).items():
        for method in reading(path):
            found.append(labelled(method, {"draft_head": path}, {"draft_head": name}))
    for path, name in small.items():
        for method in drafting():
            found.append(labelled(method, {"draft": path}, {"draft": name}))
            if "datastore" in config_fields(method):
                found += [
                    labelled(
                        method,
                        {"draft": path, "datastore": at},
                        {"draft": name, "datastore": store},
                    )
                    for at, store in stores.items()
                    if has_texts(at)
                ]
    for path, name in stores.items():
        if has_texts(path):
            found.append(labelled("rest", {"datastore": path}, {"datastore": name}))
            sources = (*METHODS["fused"].inner, "rest")
            options = {"sources": sources, "datastore": path}
            found.append(labelled("fused", options, {"sources": "all", "datastore": name}))
        if has_keys(path):
            found.append(labelled("retrieval-dense", {"keys": path}, {"keys": name}))
    rest = [name for name in untrained() if name not in ALWAYS]
    found += [row_of(name, {}) for name in sorted(rest, key=lambda name: not METHODS[name].inner)]
    return found


def untrained() -> list[str]:
    """Methods that need nothing at all."""
    return [
        row.name
        for family in FAMILIES
        if family.name in UNTRAINED
        for row in family.methods
        if not row.needs and not needs_draft(row) and lossless(row.name)
    ]


def drafting() -> list[str]:
    """Methods that need a draft model and nothing else."""
    return [
        row.name
        for family in FAMILIES
        if family.name in DRAFTING
        for row in family.methods
        if needs_draft(row) and not row.needs and plain_parts(row) and lossless(row.name)
        if row.name not in APART
    ]


def reading(folder: str) -> list[str]:
    """Methods that read the head of a folder; CheckpointError where there is none."""
    kind = read_as(card_of(folder))
    return [
        row.name
        for row in METHODS.values()
        if row.needs == ("draft_head",) and kind in kinds_read(row) and lossless(row.name)
        if row.name not in APART
    ]


def kinds_read(row: Method) -> set[str]:
    """Kinds of heads that a method, or what it is made of, reads."""
    inside = {kind for name in row.inner for kind in kinds_read(METHODS[name])}
    return inside | ({row.head} if row.head else set())


def plain_parts(row: Method) -> bool:
    """Whether nothing of it was trained, and it runs in the loop that most do."""
    return row.controller in ("cost_model", "fixed") and row.engine == METHODS["plain"].engine


def labelled(method: str, options: dict[str, Any], shown: dict[str, Any]) -> RowSpec:
    """A row with options, labelled with other, shorter values."""
    return RowSpec(row_of(method, shown).label, method, options)


def named(paths: Sequence[str]) -> dict[str, str]:
    """Paths or names, each once, with the last part as a name; longer where two would be equal."""
    names = short_names(paths)
    once = {Path(path): path for path in reversed(paths)}  # as it was written first
    return {once[place]: name for place, name in names.items()}


def has_texts(folder: str) -> bool:
    """Whether a datastore of texts is in a folder."""
    return Path(os.path.expanduser(folder), MANIFEST).exists()


def has_keys(folder: str) -> bool:
    """Whether a store of hidden states is in a folder."""
    return Path(os.path.expanduser(folder), HEADER).exists()


def check_datastores(folders: Sequence[str]) -> None:
    """Refuse a folder in which there is nothing to look guesses up in."""
    for folder in folders:
        if not has_texts(folder) and not has_keys(folder):
            raise ConfigError(
                f"the datastore {folder} was asked for.",
                f"there is neither {MANIFEST} nor {HEADER} in it.",
                "name folders that `foretoken datastore build` wrote, with commas between them.",
            )


def sizes(spec: RowSpec, shape: Shape) -> list[RowSpec]:
    """The same row with other sizes, and with its paper's own setting."""
    known = {
        *config_fields(spec.method, "fixed", spec.options.get("verifier")),
        *config_fields(spec.method, None, spec.options.get("verifier")),
    }
    row = METHODS[spec.method]
    tried = [size for size in SIZES[shape] if known.issuperset(size)]
    tried += [{"preset": "paper"}] if row.paper and row.paper_options else []
    inside = spec.label.removeprefix(spec.method).strip("[]")
    return [
        RowSpec(
            f"{spec.method}[{','.join(filter(None, [inside, written(size)]))}]",
            spec.method,
            {**spec.options, **size},
        )
        for size in tried
    ]


def written(size: dict[str, Any]) -> str:
    """Options as a label shows them."""
    return ",".join(f"{name}={value}" for name, value in size.items())


def simplest(specs: Sequence[RowSpec]) -> list[str]:
    """Labels, those first that ask the least of who runs them.

    Plain decoding; then nothing but a method, a datastore, another model; then as the catalogue
    has it, portfolios after what they are made of; then the default size before others.
    """
    order = list(METHODS)

    def burden(spec: RowSpec) -> tuple[Any, ...]:
        stores = sum(name in spec.options for name in ("datastore", "keys"))
        head = "draft_head" in spec.options
        sized = len(spec.options) - stores - head - ("draft" in spec.options)
        return (
            spec.method != "plain",
            spec.needs_draft or head,
            stores,
            len(METHODS[spec.method].inner),
            sized,
            order.index(spec.method),
        )

    return [spec.label for spec in sorted(specs, key=burden)]

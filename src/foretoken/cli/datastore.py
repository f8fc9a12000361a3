"""`foretoken datastore`: texts that retrieval methods guess from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import Commands, app
from foretoken.cli.logs import hushed, status
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.datastore.dense import KeyStore
    from foretoken.datastore.store import Datastore

datastore = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Texts that rest and rasd look things up in: build, add, info.",
    epilog="Example: `foretoken datastore build notes.txt src/ --out ./store`",
)
app.add_typer(datastore, name="datastore")

Texts = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Text files, .jsonl files with a text each, folders of such.", metavar="TEXT..."
    ),
]
Traffic = Annotated[
    int, typer.Option(help="Also so many generated examples of the six task families.")
]
Seed = Annotated[int | None, typer.Option(help="Of generated examples; default: 0.")]


@datastore.command(epilog="Example: `foretoken datastore build --traffic 5000 --out ./store`")
def build(
    out: Annotated[Path, typer.Option(help="New folder.")],
    texts: Texts = None,
    traffic: Traffic = 0,
    seed: Seed = None,
    target: Annotated[
        str, typer.Option(help="Model directory, hub name or mini whose tokenizer is used.")
    ] = o.DEFAULT_TARGET,
    dense: Annotated[
        bool, typer.Option("--dense", help="Keys for retrieval-dense: the target reads the texts.")
    ] = False,
    dims: Annotated[
        int | None, typer.Option(help="Principal components kept of a key; default: 64.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of keys: float32, float16, float8_e4m3 (default), float8_e5m2, int8, binary."
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Of the target, for keys; default: -1, the last.")
    ] = None,
    json_: o.AsJson = False,
) -> None:
    """Make a datastore of texts for one target's tokenizer, or keys for one target."""
    keys = {"tap": layer, "dims": dims, "dtype": dtype}
    shape = {name: value for name, value in keys.items() if value is not None}
    if shape and not dense:
        raise ConfigError(
            "--dims, --dtype or --layer was passed without --dense.",
            "they are about keys; a datastore of texts has none.",
            "add --dense for keys, or leave them out.",
        )
    documents = gathered(texts, traffic, seed)
    words = tokenizer(target)
    if dense:
        build_keys(out, documents, words, target, shape, json_)
        return
    from foretoken.datastore.store import Datastore
    from foretoken.datastore.vocabulary import Vocabulary

    known = Vocabulary.of(words.get_vocab())
    show(Datastore.build(out, known, encoded(documents, words, quiet=hushed(json_))), json_)


@datastore.command(epilog="Example: `foretoken datastore add ./store more.txt`")
def add(
    folder: Annotated[Path, typer.Argument(help="A datastore.")],
    texts: Texts = None,
    traffic: Traffic = 0,
    seed: Seed = None,
    target: Annotated[
        str, typer.Option(help="Model directory, hub name or mini whose tokenizer is used.")
    ] = o.DEFAULT_TARGET,
    json_: o.AsJson = False,
) -> None:
    """Put more texts into a datastore; a killed run leaves it as it was."""
    documents = gathered(texts, traffic, seed)
    from foretoken.datastore.store import Datastore
    from foretoken.datastore.vocabulary import Vocabulary

    store = Datastore.to_fill(folder)
    words = tokenizer(target)
    store.vocabulary.refuse_other(Vocabulary.of(words.get_vocab()), folder)
    store.add(encoded(documents, words, quiet=hushed(json_)))
    show(store, json_)


@datastore.command(epilog="Example: `foretoken datastore info ./store --check`")
def info(
    folder: Annotated[Path, typer.Argument(help="A datastore.")],
    check: Annotated[
        bool, typer.Option("--check", help="Read everything and compare checksums.")
    ] = False,
    json_: o.AsJson = False,
) -> None:
    """What a datastore holds, of texts or of keys."""
    from foretoken.datastore.dense import HEADER, KeyStore
    from foretoken.datastore.store import Datastore

    if Path(os.path.expanduser(folder), HEADER).exists():
        keys = KeyStore(folder)
        if check:
            keys.check()
        show_keys(keys, json_)
        return
    store = Datastore(folder)
    if check:
        store.check()
    show(store, json_)


def build_keys(
    out: Path,
    documents: Iterator[str],
    words: Any,
    target: str,
    shape: dict[str, Any],
    json_: bool,
) -> None:
    """Let the target read the documents and keep its states."""
    from foretoken.datastore.capture import capture
    from foretoken.datastore.dense import KeyStore, fill, refuse_existing
    from foretoken.datastore.disk import whole
    from foretoken.datastore.vocabulary import Vocabulary
    from foretoken.lm.load import load_model
    from foretoken.lm.opening import open_lm

    refuse_existing(out)
    with whole(out) as part, open_lm(load_model(o.source(target))) as reader:
        contents = capture(
            reader,
            encoded(documents, words, quiet=hushed(json_)),
            Vocabulary.of(words.get_vocab()),
            **shape,
        )
        fill(part, contents)
    show_keys(KeyStore(out), json_)


def tokenizer(target: str) -> Any:
    """The tokenizer of a model, without the model."""
    from foretoken.lm.load import load_tokenizer

    words = load_tokenizer(o.source(target))
    if words is None:
        raise ConfigError(
            f"a datastore for {target} was asked for.",
            "it has no tokenizer, and a datastore keeps ids of one.",
            "pass --target with a model directory that holds a tokenizer.",
        )
    return words


def gathered(texts: list[Path] | None, traffic: int, seed: int | None) -> Iterator[str]:
    """The documents asked for; what cannot be read is refused before the first one."""
    if not texts and traffic <= 0:
        raise ConfigError(
            "a datastore of nothing was asked for.",
            "it is made of text files, or of generated examples.",
            "name text files or folders, or pass --traffic 5000.",
        )
    if seed is not None and traffic <= 0:
        raise ConfigError(
            f"--seed {seed} was passed without --traffic.",
            "a seed chooses generated examples; texts of files are taken as they are.",
            "leave --seed out, or pass --traffic 5000.",
        )
    from foretoken.datastore.documents import files_of, read

    files = files_of(texts or [])

    def all_of_them() -> Iterator[str]:
        for file in files:
            yield from read(file)
        if traffic > 0:
            yield from generated(traffic, seed or 0)

    return all_of_them()


def generated(count: int, seed: int) -> Iterator[str]:
    """Examples of the families' training split, in turn: none of them is ever asked in a bench."""
    from foretoken.minis.tasks import mixed

    for example in mixed("train", count, seed):
        yield example.prompt + example.answer


def encoded(documents: Iterator[str], words: Any, quiet: bool) -> Iterator[list[int]]:
    """Token ids of every document, ended as the target would end it, with a sign of life."""
    end = [] if words.eos_token_id is None else [words.eos_token_id]
    with status("reading", quiet) as told:
        total = 0
        for text in documents:
            ids = list(words(text, verbose=False)["input_ids"])
            total += len(ids)
            told(f"{total:,} tokens")
            yield ids if ids[-1:] == end else ids + end
        told(f"sorting {total:,} tokens")


def show_keys(store: KeyStore, json_: bool) -> None:
    """What a key store holds, as a line or as JSON."""
    held = store.contents
    found = {
        "folder": str(store.folder),
        "keys": store.size,
        "bytes_per_key": held.codec.bytes_per_key,
        "dims": held.codec.components.shape[1],
        "dtype": held.codec.dtype,
        "layer": held.tap,
        "hidden_size": store.hidden_size,
        "tokens": len(held.tokens),
        "vocab_size": store.vocabulary.size,
        "fingerprint": store.vocabulary.fingerprint,
    }
    if json_:
        o.print_json(found)
        return
    print(
        f"{store.folder}: {store.size:,} keys of {found['bytes_per_key']} bytes "
        f"({found['dims']} of {store.hidden_size} dimensions, {held.codec.dtype})"
    )


def show(store: Datastore, json_: bool) -> None:
    """What a datastore holds, as a line or as JSON."""
    found = {
        "folder": str(store.folder),
        "tokens": store.tokens,
        "documents": store.documents,
        "segments": [s.described.tokens for s in store.segments],
        "bytes": store.size,
        "vocab_size": store.vocabulary.size,
        "fingerprint": store.vocabulary.fingerprint,
    }
    if json_:
        o.print_json(found)
        return
    print(
        f"{store.folder}: {store.tokens:,} tokens, {store.documents:,} documents, "
        f"{len(store.segments)} segments, {store.size / 2**20:.1f} MiB"
    )

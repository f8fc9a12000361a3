"""`foretoken vocabulary`: the tokens that a draft is to score, chosen without training."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import stage
from foretoken.errors import ConfigError

PROMPTS = 96  # where nobody says
WRITTEN = 96  # tokens that the target writes after each prompt, where no texts are given


@app.command(
    epilog="Example: `foretoken vocabulary --target ./model --draft ./small --data ./texts "
    "--out ./small`"
)
def vocabulary(
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts of the target: a text file, .jsonl, or a folder of `foretoken train "
            "data`. Needed for all but the shipped target, which writes some."
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=2, help="Prompts that it writes after without --data; default: 96."),
    ] = None,
    size: Annotated[
        str, typer.Option(help="Tokens to keep; auto: as many as pay by what is measured.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="File, or the draft's folder, to write; default: only tell."),
    ] = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    json_: o.AsJson = False,
) -> None:
    """Choose the tokens that a draft scores: those that its target writes most often.

    A smaller output layer makes guesses cheaper and misses rare tokens. Both are measured for
    several sizes, and the one with the most expected tokens per second is taken.
    """
    asked = sized(size)
    check_texts(target, data, prompts)
    whole, small = o.pair(target, draft)
    if small is None:
        raise ConfigError(
            "a draft vocabulary was asked for without a draft.",
            "it is chosen for one target and one draft.",
            "pass --draft DIR.",
        )
    place = None if out is None else placed(out)
    from foretoken.cli.train import prompts as prompts_of
    from foretoken.engine.loading import load
    from foretoken.engine.models import opened_draft
    from foretoken.lm.draft_vocabulary import write
    from foretoken.lm.load import load_model
    from foretoken.training import reduced_vocabulary as reduced

    loading = {"device": device, "dtype": dtype}
    with ExitStack() as open_, stage("choosing tokens", json_):
        session = open_.enter_context(
            load(whole, "chain", small, draft_vocabulary="off", depth=4, **loading)
        )
        vocab, model = session.target.vocab_size, load_model(small, **loading)
        check_same_ids(session.draft, model, vocab, small)
        always = {*session.eos, *getattr(session.tokenizer, "all_special_ids", ())}
        sizes = reduced.sizes_to_try(vocab, len(always)) if asked is None else [asked, vocab]
        check_size(sizes[0], len(always), vocab)
        if data is not None:
            texts = reduced.read_texts(data, session)
        else:
            some = prompts_of(None, "train", prompts or PROMPTS)
            texts = reduced.written_by(session, some, WRITTEN)
        counted, held_out = reduced.parted(texts)
        order = reduced.ranked(counted, always, vocab)
        drafts: dict[int, Any] = {}
        for count in dict.fromkeys(sizes):
            drafts[count] = opened_draft(model, small, order[:count])
            open_.callback(drafts[count].close)
        rows = reduced.tried(session.target, drafts, order, held_out)
    best = max(rows, key=lambda row: row.per_second)
    chosen = best.tokens if asked is None else asked
    if place is not None:
        write(place, order[:chosen], vocab)
    show(rows, chosen, vocab, place, json_)


def check_texts(target: str, data: Path | None, prompts: int | None) -> None:
    """Refuse texts that are asked for twice, and a target of other texts than the shipped prompts:
    every later load would take a list that was counted on them."""
    if data is not None and prompts is not None:
        raise ConfigError(
            f"--prompts {prompts} was passed with --data.",
            "the target writes nothing where there are texts of it.",
            "leave one of the two out.",
        )
    if o.only_toys(target, data):
        raise ConfigError(
            f"a draft vocabulary for {target} was asked for without its texts.",
            "the prompts at hand are of the shipped minis' toy families: a draft that scores the "
            "words of these alone guesses little of any other text.",
            f"run `foretoken train data --target {target} --out DIR`, then pass --data DIR; a file "
            "of its texts will do, too.",
        )


def check_same_ids(draft: Any, model: Any, width: int, source: Any) -> None:
    """Refuse a draft with other ids than its target's `width`: these are counted here, and its rows
    would be chosen by them."""
    from foretoken.lm.views.mapped_tokens import MappedTokens

    if isinstance(draft, MappedTokens) or len(model.get_output_embeddings().weight) != width:
        raise ConfigError(
            f"a draft vocabulary was asked for, for the draft {source}.",
            "its tokenizer or its width is not the target's; tokens are chosen by the target's "
            "ids, of which the draft's output rows are no list.",
            "use a draft with the ids of its target; this one drafts with all of its tokens.",
        )


def placed(out: Path) -> Path:
    """The file that --out names, or that in the folder that it names; tried before any work."""
    from foretoken.bench.files import writable
    from foretoken.lm.draft_vocabulary import NAME

    place = out / NAME if out.is_dir() or not out.suffix else out
    writable(place.parent)
    return place


def sized(size: str) -> int | None:
    """--size as a number; None for auto."""
    if size == "auto":
        return None
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(
            f"--size {size} was passed.",
            "a size is a number of tokens, or auto.",
            "pass --size 8192, say, or leave it out.",
        )
    return int(size)


def check_size(size: int, always: int, vocab: int) -> None:
    """Room for the tokens that every draft has to score, and no more than there are."""
    if not always <= size <= vocab:
        raise ConfigError(
            f"a draft vocabulary of {size} tokens was asked for.",
            f"it holds the {always} special and end tokens, and the draft has {vocab} in all.",
            f"pass a --size from {max(always, 1)} to {vocab}, or auto.",
        )


def show(rows: list[Any], chosen: int, vocab: int, place: Path | None, as_json: bool) -> None:
    """What every size would give, and which one it is."""
    if as_json:
        o.print_json(
            {
                "chosen": chosen,
                "vocab_size": vocab,
                "file": None if place is None else str(place),
                "sizes": [asdict(row) for row in rows],
            }
        )
        return
    from rich.console import Console
    from rich.table import Table

    names = ("tokens", "covered", "guessed", "ms a guess", "best depth", "tokens/s expected", "")
    table = Table(*names)
    for row in rows:
        mark = "chosen" if row.tokens == chosen else ""
        table.add_row(
            f"{row.tokens:,}", f"{row.coverage:.1%}", f"{row.hits:.1%}", f"{row.draft_ms:.2f}",
            str(row.depth), f"{row.per_second:.1f}", mark,
        )  # fmt: skip
    Console().print(table)
    if place is None:
        print("nothing was written: pass --out")
    else:
        print(place)

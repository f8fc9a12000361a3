"""`foretoken train`: parts that methods need besides their models, trained on what models say."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import hushed
from foretoken.errors import ConfigError, meant

LOG = logging.getLogger(__name__)
HELD_OUT = 10  # one passage of a file in this many is kept for judging


@app.command(epilog="Example: `foretoken train acceptance --out ./head --set prompts=300`")
def train(
    name: Annotated[str | None, typer.Argument(help="What to make or train; see --list.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder it is written to; a killed run resumes there.")
    ] = None,
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts that `train data` made, for drafts and for heads; or, for heads, data and "
            "online, prompts: a text file of passages, or .jsonl with a prompt each. Without it "
            "heads learn from texts of the shipped minis' toy families, whatever the target."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Ordinary text for `data`, beside the chats: a .txt or .jsonl file (a text or "
            "messages a line), a folder of such, or a data set's name; repeatable.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A training option; repeatable."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List what can be trained; with a NAME, its options.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, do not resume.")] = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    json_: o.AsJson = False,
) -> None:
    """Make a draft for a target, or train a method's head, from what the models themselves say.

    A draft takes two commands: `train data` has the target write texts, `train draft` learns them.
    Several processes learn together: `torchrun --nproc-per-node 2 -m foretoken train draft`.
    """
    from foretoken.heads.table import HEADS, resolve
    from foretoken.training.recipes import RECIPES, check_processes

    if name is None:
        tell([
            *({"name": row.name, "makes": row.makes, "from what": row.summary, "trainable": True}
              for row in RECIPES.values()),
            *({"name": row.name, "makes": f"a head for {row.serves}", "from what": row.summary,
               "trainable": row.trainable} for row in HEADS.values()),
        ], json_)  # fmt: skip
        return
    require_extra()
    check_name(name, (*RECIPES, *HEADS))
    from foretoken.training.config import options
    from foretoken.training.heads import trainable

    cls = resolve(RECIPES[name].config if name in RECIPES else trainable(name).config)
    if list_:
        tell([asdict(option) for option in options(cls)], json_)
        return
    given, config = configuration(name, cls, set_)
    if out is None:
        raise ConfigError(
            f"`foretoken train {name}` was asked for without a folder.",
            "what it makes, its checkpoints and its loss curve are kept in one.",
            f"pass --out DIR; `foretoken train {name} --list` tells every other option.",
        )
    check_processes(name)
    check_text(name, text or ())
    if name in RECIPES:
        cook_recipe(
            name, config, out, target=target, draft=draft, data=data, text=text or (), fresh=fresh,
            json_=json_, device=device, dtype=dtype,
        )  # fmt: skip
        return
    check_written(name, data, given)
    train_head(
        name, config, out, target=target, draft=draft, data=data, fresh=fresh, json_=json_,
        device=device, dtype=dtype,
    )  # fmt: skip


def configuration(name: str, cls: Any, set_: list[str] | None) -> tuple[dict[str, Any], Any]:
    """What --set says, and the options it makes; `method` and the like are options here, too."""
    from foretoken.training.config import configured

    training = f"`foretoken train {name}`"
    lists = f"`foretoken train {name} --list`"
    given = o.settings(set_, taken=(), fields=(f"what {training} takes", "seed=1", lists))
    try:
        return given, configured(cls, given, training)
    except ConfigError as error:
        do = f"{error.do} {lists} tells what each option means."
        raise ConfigError(error.asked, error.possible, do) from error


def check_name(name: str, known: Sequence[str]) -> None:
    """ConfigError for what nothing trains."""
    if name not in known:
        raise ConfigError(
            f"training {name!r} was asked for.",
            f"what can be trained is {', '.join(known)}.",
            f"{meant(name, known)} `foretoken train --list` tells what each one makes.",
        )


def unused_draft(name: str, do: str) -> ConfigError:
    return ConfigError(
        f"--draft was passed to `foretoken train {name}`.",
        "nothing of it reads a draft.",
        do,
    )


def check_text(name: str, text: Sequence[str]) -> None:
    """ConfigError for ordinary text that is handed to what does not read it."""
    if text and name != "data":
        raise ConfigError(
            f"--text was passed to `foretoken train {name}`.",
            "`foretoken train data` reads it; what learns takes the folder that comes of it.",
            "run `foretoken train data --text ... --out DIR`, then pass --data DIR.",
        )


def check_written(name: str, data: Path | None, given: Collection[str]) -> None:
    """ConfigError for a folder of texts handed to a head that has its own written or that cannot
    learn from a draft's, and for options of how texts are written where these are there already.
    """
    from foretoken.training.heads import check_writer, trainable

    if data is None or not data.is_dir():
        return
    row = trainable(name)
    if row.models != ("target",):
        raise ConfigError(
            f"training the head {name!r} on the texts in {data} was asked for.",
            f"it learns from what {' and '.join(row.models)} say at one temperature, of texts "
            "that are written while it is trained.",
            "pass a file of prompts with --data, or none.",
        )
    check_writer(name, data)
    if unused := [one for one in ("temperature", "new_tokens") if one in given]:
        raise ConfigError(
            f"{' and '.join(unused)} passed with --set beside the texts in {data}.",
            "these are written already: their answers are as long, and as random, as "
            "`foretoken train data` was asked for.",
            f"leave {' and '.join(unused)} out; or make other texts: `foretoken train data --set "
            "temperatures=... --set new_tokens=... --out DIR`; or pass a file of prompts.",
        )


def train_head(
    name: str,
    config: Any,
    out: Path,
    *,
    target: str,
    draft: str | None,
    data: Path | None,
    fresh: bool,
    json_: bool,
    **loading: Any,
) -> None:
    """Train a row of HEADS on what the models say, and tell how good it became."""
    from foretoken.training.heads import run_training, trainable

    row = trainable(name)
    if draft is not None and "draft" not in row.models:
        raise unused_draft(name, "leave it out, or see `foretoken train NAME --list` for `start`.")
    # Drafts of one size, so that a run that goes on draws the texts it would have drawn.
    method, given = ("chain", ["depth=5"]) if "draft" in row.models else (None, None)
    session = o.open_session(
        target=target, draft=draft, method=method, given=given, quiet=hushed(json_), **loading
    )  # fmt: skip
    if o.only_toys(target, data):
        LOG.warning("the head %s for %s learns from texts of the shipped minis' toy families; "
                    "--data FILE takes the target's own prompts", name, target)  # fmt: skip
    some = partial(prompts, data, seed=config.seed)
    if data is not None and data.is_dir():
        some = partial(chats, data, session, window=getattr(config, "window", None))
    with session:
        found = run_training(session, name, some, config, out, fresh=fresh, show=not hushed(json_))
    if json_:
        o.print_json(found)
        return
    figures = {"untrained": found["untrained"], **found["figures"]}
    tell([{"held-out tokens": which, **row} for which, row in figures.items() if row])
    print(out)


def cook_recipe(
    name: str,
    config: Any,
    out: Path,
    *,
    target: str,
    draft: str | None,
    data: Path | None,
    text: Sequence[str],
    fresh: bool,
    json_: bool,
    **loading: Any,
) -> None:
    """Make what a row of RECIPES makes, and tell what came of it."""
    from foretoken.training.processes import is_main, target_device
    from foretoken.training.recipes import RECIPES, Order, check_order, cook

    check_order(name, target, data, out)
    if draft is not None and (name == "sorted" or getattr(config, "writer", "draft") != "draft"):
        raise unused_draft(
            name,
            "leave it out: a sorted draft begins anew."
            if name == "sorted"
            else "leave it out, or pass --set writer=draft: it then writes in the target's place.",
        )
    given: tuple[str, ...] = ()
    row, own = RECIPES[name], not o.only_toys(target, data)
    texts = row.needs_texts or (row.reads_texts and data is not None and data.is_dir())
    if own and not texts:
        given = tuple(prompts(data, "all", config.chats, seed=config.seed))  # it splits them itself
    start = o.pair(target, draft)[1] if row.teaches or draft is not None else None
    show = is_main() and not hushed(json_)
    loading["device"] = target_device(loading.get("device"))
    with o.open_session(
        target=target, draft=None, method="plain", quiet=not show,
        given=[f"max_rows={getattr(config, 'rows', 24)}"], **loading,
    ) as session:  # fmt: skip
        order = Order(session, config, out, data, start, given, target, show, tuple(text), fresh)
        notes = cook(name, order)
    if not is_main():
        return
    if json_:
        o.print_json(notes)
        return
    print(out)


def tell(rows: list[dict[str, Any]], as_json: bool = False) -> None:
    """Rows with the same names as a table, or as JSON."""
    if as_json:
        o.print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in (rows[0] if rows else ())))
    for row in rows:
        table.add_row(*(escape(cell(value)) for value in row.values()))
    Console().print(table)


def cell(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def prompts(data: Path | None, split: str, count: int, seed: int = 0) -> list[str]:
    """`count` prompts of a split (train or valid) or of all: from a file, or of six families."""
    if data is not None:
        found = _passages(data, split)
        if split != "valid" and len(found) > count:
            option = "chats" if split == "all" else "prompts"
            LOG.warning("%d of %d prompts in %s are taken; --set %s=%d: all", count, len(found),
                        data, option, len(found))  # fmt: skip
        return found[:count]
    from foretoken.minis import tasks

    split = "train" if split == "all" else split
    each = -(-count // len(tasks.FAMILIES))
    drawn = [tasks.examples(family, split, each, seed) for family in tasks.FAMILIES]
    return [example.prompt for turn in zip(*drawn, strict=True) for example in turn][:count]


def chats(
    folder: Path, session: Any, split: str, count: int, window: int | None = None
) -> Sequence[Any]:
    """`count` chats of a split of a folder that `train data` made for this target; says what is
    left out of those to learn from.
    """
    from foretoken.training.dataset.card import check_vocabulary
    from foretoken.training.dataset.records import every_chat
    from foretoken.training.dataset.stream import none_there

    check_vocabulary(folder, session)
    every = every_chat(folder, split)
    found = list(islice(every, count))
    if split == "train" and (left := sum(1 for _ in every)):
        LOG.warning("%d of %d chats are learned from; --set prompts=%d: all", count, count + left,
                    count + left)  # fmt: skip
    lengths = [len(one.prompt) + len(one.answer) for one in found]
    long = sum(length > (window or length) for length in lengths)
    if split == "train" and long > len(found) // 2:
        LOG.warning("%d of %d chats are longer than window=%d and lose their beginning; the "
                    "longest has %d tokens", long, len(found), window, max(lengths))  # fmt: skip
    if not found:
        raise none_there(folder, split)
    return found


def require_extra() -> None:
    """What training needs beyond the package's own requirements, before any work is done."""
    missing = [name for name in ("accelerate", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "training was asked for.",
            f"this installation lacks {' and '.join(missing)}.",
            "install them: pip install 'foretoken[train]'.",
        )


def _passages(data: Path, split: str) -> list[str]:
    """The passages of a file, between empty lines or one to a JSON line, of one split."""
    try:
        text = data.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            f"the file cannot be read ({error}).",
            "pass a text file in UTF-8.",
        ) from error
    if data.suffix == ".jsonl":
        found = [_prompt(data, line) for line in text.split("\n") if line.strip()]
    else:
        found = [passage.strip("\n") for passage in text.split("\n\n") if passage.strip()]
    if split == "all" and found:
        return found
    if len(found) < 2:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            f"it holds {len(found)}; one to train on and one to judge by are the least.",
            "pass a file of many passages with empty lines between them, or a .jsonl file.",
        )
    held_out = [i % HELD_OUT == min(HELD_OUT, len(found)) - 1 for i in range(len(found))]
    return [one for one, held in zip(found, held_out, strict=True) if held == (split != "train")]


def _prompt(data: Path, line: str) -> str:
    """The prompt of one JSON line."""
    try:
        record = json.loads(line)
        prompt = record["prompt" if "prompt" in record else "text"]
        if not isinstance(prompt, str):
            raise TypeError(f"a {type(prompt).__name__} is no text")
        return prompt
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"prompts from {data} were asked for.",
            'a line looks like {"prompt": "..."}.',
            f"mend the line that starts with {line[:60]!r} ({error}).",
        ) from error

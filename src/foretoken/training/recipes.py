"""Everything that `foretoken train NAME` makes beside heads: texts of the target, draft models."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.heads.table import resolve
from foretoken.training.processes import several


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row: what is made, by which options, by which code."""

    name: str
    makes: str  # in a word or two
    summary: str
    config: str  # its options, "module:Class"
    run: str  # "module:function", which takes an Order and returns the notes of a card
    needs_texts: bool  # learns from a folder that `train data` made, passed as --data
    reads_texts: bool = False  # takes the prompts of such a folder, or a file of prompts
    teaches: bool = False  # a draft that exists; the shipped one of a shipped target by default
    processes: bool = False  # may be run by several


@dataclass(frozen=True, slots=True)
class Order:
    """What a recipe is asked to make, and from what."""

    session: Any  # over the target, decoding plainly
    config: Any
    out: Path
    data: Path | None
    draft: Any  # where a draft is that the recipe starts from, or None
    prompts: tuple[str, ...]  # given ones, for `data`
    source: str  # the target, as it was named
    show: bool
    texts: tuple[str, ...] = ()  # sources of ordinary text, for `data`
    fresh: bool = False  # forget an earlier run in `out`, behind whatever could be refused


RECIPES = {
    row.name: row
    for row in (
        Recipe(
            "data",
            "training texts",
            "prompts that the target makes itself, its answers, its laws at every token and at "
            "those of ordinary text",
            config="training.dataset.making:DataConfig",
            run="training.dataset.making:run",
            needs_texts=False,
            reads_texts=True,
        ),
        Recipe(
            "draft",
            "a draft model",
            "a small model of the target's vocabulary, from random weights or --draft (FastDraft)",
            config="training.drafts.making:DraftConfig",
            run="training.drafts.making:run",
            needs_texts=True,
            processes=True,
        ),
        Recipe(
            "sorted",
            "a draft model",
            "one that is left early where it is sure, for several targets at once (S2D)",
            config="training.drafts.sorting:SortedConfig",
            run="training.drafts.sorting:run",
            needs_texts=True,
        ),
        Recipe(
            "distill",
            "a draft model",
            "a draft that exists, on the target's laws, along its own texts too (DistillSpec)",
            config="training.drafts.distilling:DistillConfig",
            run="training.drafts.distilling:run",
            needs_texts=True,
            teaches=True,
            processes=True,
        ),
        Recipe(
            "adaspec",
            "a draft model",
            "a draft that exists, on the places where it has most to gain (AdaSPEC)",
            config="training.drafts.selecting:AdaspecConfig",
            run="training.drafts.selecting:run",
            needs_texts=True,
            teaches=True,
            processes=True,
        ),
        Recipe(
            "online",
            "a draft model",
            "a draft that exists, from prompts replayed as live traffic, while it serves (OSD)",
            config="training.online.replay:OnlineConfig",
            run="training.online.replay:run",
            needs_texts=False,
            reads_texts=True,
            teaches=True,
        ),
    )
}


# Shards of texts, which `--fresh` makes anew.
LEFT_BY_RUNS = (
    "train-*.jsonl", "valid-*.jsonl", "train-*.safetensors", "valid-*.safetensors", "plan.json",
)  # fmt: skip


def clear(out: Path, patterns: Sequence[str] = ()) -> None:
    """Forget an earlier run in this folder: its checkpoints, and its shards by `patterns`."""
    if (out / "training").is_dir():
        shutil.rmtree(out / "training")
    made = (out / "plan.json").is_file()  # else shards are of something else
    for pattern in patterns if made else ():
        for path in out.glob(pattern):
            path.unlink()


def check_order(name: str, source: str, data: Path | None, out: Path | None = None) -> None:
    """ConfigError for a recipe that lacks the texts it learns from, or would write over them."""
    row = RECIPES[name]
    if data is not None and out is not None and data.resolve() == out.resolve():
        raise ConfigError(
            f"training {row.makes} from {data} into the same folder was asked for.",
            "what is made would be written over what it is made from.",
            "pass another --out.",
        )
    model = out is not None and (out / "config.json").is_file()
    if out is not None and model and not (out / "card.json").is_file():
        raise ConfigError(
            f"training {row.makes} into {out} was asked for.",
            "a model that training did not make is in that folder, and would be written over.",
            "pass another --out.",
        )
    if not row.needs_texts:
        return
    if data is None or not any(data.glob("train-*.jsonl")):
        given = (
            "without texts to learn from" if data is None else f"from {data}, where there are none"
        )
        raise ConfigError(
            f"training {row.makes} was asked for {given}.",
            "it learns from what the target writes, in a folder that `foretoken train data` makes.",
            f"run `foretoken train data --target {source} --out DIR`, then pass --data DIR.",
        )


def check_processes(name: str) -> None:
    """ConfigError for several processes that would do the same work, each for itself."""
    able = [row.name for row in RECIPES.values() if row.processes]
    if several() and name not in able:
        raise ConfigError(
            f"`foretoken train {name}` was asked for in several processes.",
            f"these are trained by several: {', '.join(able)}.",
            "start it once, without a launcher.",
        )


def cook(name: str, order: Order) -> dict[str, Any]:
    """Make what the row `name` makes; the notes of its card."""
    row, data = RECIPES[name], order.data
    if row.needs_texts or (data is not None and data.is_dir()):
        from foretoken.training.dataset.card import check_vocabulary

        assert data is not None, "check_order has looked"
        doing = "training on" if row.needs_texts else "taking the prompts of"
        check_vocabulary(data, order.session, doing)
    found: dict[str, Any] = resolve(row.run)(order)
    return found

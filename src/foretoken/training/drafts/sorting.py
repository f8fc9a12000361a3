"""`foretoken train sorted`: one draft of several sizes, for several targets (arXiv 2407.01955)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.session import Session
from foretoken.errors import ConfigError, check_values
from foretoken.lm import draft_exits
from foretoken.lm.draft_exits import NEVER, Exits
from foretoken.training.capture import models_of
from foretoken.training.dataset.card import check_vocabulary
from foretoken.training.dataset.records import every_chat, laws_kept
from foretoken.training.drafts.exit_policies import Priced, compared, priced
from foretoken.training.drafts.learning import fit, held_out, run_folder, told
from foretoken.training.drafts.making import DraftConfig, by_laws_alone, chosen, decided, planned
from foretoken.training.drafts.measuring import EngineAcceptance
from foretoken.training.drafts.shape import Shape, build
from foretoken.training.drafts.words import covered, frequent, mass
from foretoken.training.drafts.writing import page, write_draft
from foretoken.training.identity import identity
from foretoken.training.objectives.sorted_laws import SortedLaws
from foretoken.training.recipes import Order

DEFAULT = 0.6  # threshold of all exits while it learns, and none is chosen yet


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedConfig(DraftConfig):
    """How large a sorted draft is, where it may be left, and how it learns."""

    cost: float = 0.055  # share of the target that decides the width; layers are half as many more
    exits: tuple[int, ...] | None = None  # layers before each, the last all; none: three thirds
    thresholds: tuple[float, ...] | None = None  # of all but the last; none: the fastest ones
    also: str | tuple[str, ...] | None = None  # texts of other targets with the same tokenizer

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        given, asked = self.exits, self.thresholds
        sound = given is None or (
            len(given) > 1 and Exits(given, (NEVER,) * (len(given) - 1)).fits()
        )
        counted = asked is None or given is None or len(asked) == len(given) - 1
        check_values(
            self,
            ("exits", sound, "two ascending numbers of layers or more: 2,4,6"),
            ("thresholds", asked is None or min(asked, default=-1.0) >= 0, "0 or more each"),
            ("thresholds", counted, "one for every exit but the last"),
        )

    @property
    def others(self) -> tuple[Path, ...]:
        """Folders of the other targets' texts."""
        named = (self.also,) if isinstance(self.also, str) else self.also or ()
        return tuple(Path(name).expanduser() for name in named)

    def exits_of(self, layers: int) -> Exits:
        """The exits of a draft of this depth, at the thresholds it learns with."""
        found = self.exits or tuple(sorted({max(1, layers // 3), max(1, 2 * layers // 3), layers}))
        exits = Exits(found, self.thresholds or (DEFAULT,) * (len(found) - 1))
        if len(found) < 2 or not exits.fits(layers):
            raise ConfigError(
                f"a draft of {layers} layers with the exits {exits} was asked for.",
                "the last exit is behind all layers, and each but the last has a threshold.",
                "pass for example --set shape=192x6 --set exits=2,4,6.",
            )
        return exits


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train sorted` does."""
    assert order.data is not None, "its row says that it needs texts"
    return make_sorted(
        order.session, order.config, order.data, order.out, source=order.source,
        fresh=order.fresh, show=order.show,
    )  # fmt: skip


def make_sorted(
    session: Session,
    config: SortedConfig,
    data: Path,
    out: Path,
    *,
    source: str = "",
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Train a sorted draft on the texts in `data` and of other targets; the notes of its card.

    It is measured, and its thresholds are chosen, on the session's target.
    """
    width, folders = session.target.vocab_size, (data, *config.others)
    check_folders(folders, session)
    parts = planned(folders, config)
    config = by_laws_alone(config, *folders)
    if config.shape is not None:
        config.exits_of(config.shape[1])  # raises for others, before anything is deleted
    work = run_folder(out, config, folders, source, identity(*models_of(session)), fresh=fresh)
    target = session.target.model
    counts = mass(folders, width)
    tokens = frequent(counts, config.vocabulary, session.eos)
    shape = depth_of(config, work, target, len(tokens))
    exits = config.exits_of(shape.layers)
    prices = priced(target, shape, len(tokens), exits)
    cost = prices[(shape.layers,), shape.layers]
    model = build(shape, target, counts, config.seed)
    objective = SortedLaws.at(exits.layers, tokens, len(counts), config.hard)
    measure = EngineAcceptance(session, held_out(data, config.held_out), tokens, cost, exits=exits)
    runs = {
        name: fit(
            model, objective, config, folders, work / name, measure, text=text, share=share,
            show=show,
        )
        for name, text, share in parts
    }  # fmt: skip
    tried = compared(model, exits, measure, prices)
    best = max(tried, key=lambda one: one.speed_up)
    taken = exits if config.thresholds is not None else best.exits
    notes = {
        "recipe": "sorted",
        "target": source,
        "shape": asdict(shape) | {"parameters": model.num_parameters()},
        "cost": cost,
        "vocabulary": {"tokens": len(tokens), "of": len(counts), "mass": covered(counts, tokens)},
        "exits": {"layers": list(exits.layers), "thresholds": list(taken.thresholds)},
        "each": [one.told() for one in tried[: len(exits.layers)]],
        "policies": [one.told() for one in tried[len(exits.layers) :]],
        **told(runs["run"]),
        **({"on_text": told(runs["text"])} if "text" in runs else {}),
        "settings": asdict(config),
    }
    write_draft(
        out, model, session, tokens, notes, work / "run" / "loss.png",
        about=page(notes) + about_exits(exits, taken, tried),
        beside={draft_exits.NAME: taken.text()},
    )  # fmt: skip
    return notes


def depth_of(config: SortedConfig, work: Path, target: Any, rows: int) -> Shape:
    """The shape asked for, or the one of an ordinary draft with half as many layers more."""
    shape, _ = decided(work, lambda: chosen(config, target, rows))
    if config.shape is not None:
        return shape
    deep = config.exits[-1] if config.exits else max(3, 3 * round(shape.layers / 2))
    return Shape(shape.hidden, deep)


def check_folders(folders: Sequence[Path], session: Session) -> None:
    """ConfigError for texts that one sorted draft cannot learn from, or not beside the others."""
    for folder in folders[1:]:
        check_texts(folder, session.target.vocab_size)
        check_vocabulary(folder, session)
    found = {folder: laws_kept(folder) for folder in folders}
    kept = {folder: count for folder, count in found.items() if count is not None}  # with texts
    first, own = next(iter(kept.items()), (folders[0], 0))
    for folder, count in kept.items():
        if count and count == own:
            continue
        raise ConfigError(
            f"training a sorted draft on the texts in {folder} was asked for.",
            f"{count} tokens are kept of each law beside them, and {own} in {first}; its exits "
            "learn laws, as many tokens of each in every folder, and at least one.",
            f"make all of them with one number: `foretoken train data --set laws={own or 16} --out "
            "DIR`.",
        )


def check_texts(folder: Path, width: int) -> None:
    """ConfigError for a folder without texts, or with tokens that the target does not have."""
    why = "there are none of `foretoken train data` in it"
    if any(every_chat(folder, "train")):
        last = max(
            max((*chat.prompt, *chat.answer), default=0) for chat in every_chat(folder, "train")
        )
        if last < width:
            return
        why = f"they hold the token {last}, and this target has {width}"
    raise ConfigError(
        f"texts of another target, in {folder}, were asked for.",
        f"{why}; one draft serves targets with the same tokenizer.",
        "make them with `foretoken train data --target T --out DIR`, then pass --set also=DIR.",
    )


def about_exits(exits: Exits, taken: Exits, tried: list[Priced]) -> str:
    """The part of a page that tells of the exits."""
    lines = [
        "",
        "## Exits",
        "",
        f"Usable behind layers {', '.join(map(str, exits.layers))}. A token leaves behind the "
        f"first that is sure enough of its likeliest one: {taken.asked}. `{draft_exits.NAME}` "
        "tells foretoken; `foretoken.load(draft_thresholds=...)` may say otherwise.",
        "",
        "| thresholds | layers per token | cost | acceptance | tokens per target forward | "
        "estimated speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for one in tried:
        said = one.told()
        shown = ", ".join("never" if t > 1 else f"{t:g}" for t in one.exits.thresholds)
        lines.append(
            f"| {shown} | {said['layers_per_token']:.2f} | {said['cost']:.3f} | "
            f"{said['acceptance']:.3f} | {said['tokens_per_forward']:.2f} | "
            f"{said['estimated_speed_up']:.2f} |"
        )
    return "\n".join([*lines, ""])

"""`foretoken train data`: prompts that the target makes or that are given, and its answers.

Ordinary text is scored beside them. A shard follows from the seed, its number and the shards before
it: a killed run goes on where it was. Decoding is our own, with rows joining a full batch; laws and
hidden states are kept in the same pass.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.engine.session import Session
from foretoken.errors import ConfigError, check_values
from foretoken.training.bar import tracked
from foretoken.training.capture import models_of
from foretoken.training.config import check_types
from foretoken.training.dataset.card import PLAN, write_card
from foretoken.training.dataset.lockstep import decode
from foretoken.training.dataset.own_answers import draft_session
from foretoken.training.dataset.prompts import Prompt, Prompts
from foretoken.training.dataset.records import (
    DOCUMENT,
    TEXT,
    Chat,
    Laws,
    Told,
    every_chat,
    repetition,
    replace_text,
    shard_path,
    write_shard,
)
from foretoken.training.dataset.states import States
from foretoken.training.dataset.stream import none_there
from foretoken.training.dataset.windows import Read, digest, laws_along, scored
from foretoken.training.folders import check_idle, working_alone
from foretoken.training.identity import identity
from foretoken.training.recipes import LEFT_BY_RUNS, Order, clear
from foretoken.types import DecodeState, Step

WANTED = 0.001  # share of held-out chats; whoever asks for less wants none
LETTERS = 8  # of a given prompt's digest, in a plan
ENOUGH = 32  # texts of a first shard, of which some should be worth learning from
FREE = ("chats", "features_gib", "lockstep")  # options that may change in a folder that has texts


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How many chats, how long, how varied."""

    chats: int = 8192  # prompts with an answer, in whole shards, before any filter; 0: text only
    shard: int = 512  # chats in a shard; one is lost where a run is killed
    prompt_tokens: int = 120  # that the target adds to a user turn, at most
    new_tokens: int = 160  # of an answer, at most
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # of answers, in turns
    writer: str = "target"  # of the answers; draft: on-policy texts, with the target's laws
    min_p: float = 0.05  # of the prompts it makes, which are drawn at temperature 1
    repeated: float = 0.5  # share of repeated 4-grams above which a text is left out
    held_out: float = 0.04  # share of the chats that no draft is trained on
    laws: int = 16  # likeliest tokens kept of every law; 0: drafts ask the target while they learn
    longest: int = 1024  # tokens of a prompt; longer ones are left out
    rows: int = 128  # decoded together; more than 16 pay where there are no drafts
    lockstep: int = 0  # on a GPU: so many, or as many as fit, a token of each per forward instead
    text_tokens: int = 2_000_000  # of ordinary text, at most
    text_window: int = 384  # tokens of ordinary text that are scored and learned together
    features: str | int | tuple[str | int, ...] | None = None  # hidden states kept: final, layers
    features_gib: float = 16.0  # of hidden states, at most; refused before any work
    seed: int = 0  # of prompts, samples and the split

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("shard", "prompt_tokens", "new_tokens", "longest", "rows", "text_tokens")
        check_values(
            self,
            *((name, getattr(self, name) >= 1, "1 or more") for name in counts),
            *((name, getattr(self, name) >= 0, "0 or more")
              for name in ("chats", "laws", "lockstep")),
            ("text_window", self.text_window >= 8, "8 or more"),
            ("features_gib", self.features_gib > 0, "above 0"),
            ("writer", self.writer in ("target", "draft"), "target or draft"),
            ("temperatures", min(self.temperatures, default=-1.0) >= 0, "0 or more each"),
            ("held_out", 0 < self.held_out < 1, "between 0 and 1"),
            ("repeated", 0 < self.repeated <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p < 1, "from 0 to 1"),
            ("lockstep", not self.lockstep or self.plainly,
             "0 where laws or features are kept, or a draft writes"),
            ("lockstep", self.lockstep <= self.shard, "at most shard: so many chats are there"),
        )  # fmt: skip

    @property
    def plainly(self) -> bool:
        """Whether the target writes and nothing else is kept of what it says."""
        return not self.laws and self.features is None and self.writer == "target"


class Maker:
    """Makes shards of chats with one target; `writer` answers in its place."""

    def __init__(
        self,
        session: Session,
        config: DataConfig,
        folder: Path,
        given: Sequence[Any] = (),
        writer: Session | None = None,
    ) -> None:
        self.writer = writer
        self.session, self.config, self.folder = session, config, folder
        self.states = States.of(session, config.features)
        self.prompts = Prompts(session, config, folder, given)

    @torch.inference_mode()
    def shard(self, index: int) -> None:
        """Make the shard with this number."""
        rng = random.Random(f"{self.config.seed}/{index}")
        prompts = self.prompts.of_shard(rng, index)
        parts: dict[str, list[Told]] = {"train": [], "valid": []}
        for chat, laws in self.answers(prompts, index):
            held = rng.random() < self.config.held_out
            if chat.answer and repetition(chat.answer) <= self.config.repeated:
                parts["valid" if held else "train"].append((chat, laws))
        few = index == 0 and self.config.held_out >= WANTED and not parts["valid"]
        if few and len(parts["train"]) > 1:  # without one to judge by no draft could be trained
            parts["valid"].append(parts["train"].pop())
        if index == 0 and self.config.shard >= ENOUGH and not any(parts.values()):
            raise nothing_kept(self.config, len(prompts))
        write_shard(self.folder, index, parts)
        for told in parts.values():  # all that a run that goes on would know of
            self.prompts.remember(chat.prompt for chat, _ in told)

    @torch.inference_mode()
    def text_shard(self, index: int, windows: Sequence[list[int]], held_out: set[int]) -> None:
        """Score the windows of ordinary text of the shard with this number."""
        parts: dict[str, list[Told]] = {"train": [], "valid": []}
        begin = index * self.config.shard
        for at, window in enumerate(windows[begin : begin + self.config.shard], begin):
            told = scored(self.session, window, self.states, self.config.laws)
            parts["valid" if at in held_out else "train"].append(told)
        write_shard(self.folder, index, parts, TEXT)

    def answers(self, prompts: Sequence[Prompt], index: int) -> list[Told]:
        """What is written after each prompt, and the target's laws on the way."""
        config, writer = self.config, self.writer or self.states.session(self.session)
        temperatures = config.temperatures
        if all(kind == DOCUMENT for kind, _ in prompts):  # one greedy text, over and over
            temperatures = tuple(one for one in temperatures if one > 0) or (1.0,)
        turns = len(temperatures)
        rows: list[DecodeState] = []
        for turn, temperature in enumerate(temperatures):
            mine: list[Any] = [ids for _, ids in prompts[turn::turns]]
            if mine:
                first = 1_000_003 * config.seed + index * config.shard * turns + turn
                seeds = [first + i * turns for i in range(len(mine))]
                rows += writer.rows(mine, config.new_tokens, temperature=temperature, seed=seeds)
        laws = self.read_along if self.writer else self.written_by_target
        kinds = [kind for turn in range(turns) for kind, _ in prompts[turn::turns]]
        return [
            (Chat(kind, row.params.temperature, row.tokens[: row.prompt_len], row.new_tokens), said)
            for kind, row, said in zip(kinds, rows, laws(writer, rows), strict=True)
        ]

    def written_by_target(self, writer: Session, rows: list[DecodeState]) -> list[Laws]:
        """Write the rows, and keep the target's laws of the same forwards."""
        if self.config.lockstep:
            decode(writer, rows, self.config.lockstep)
            return [Laws.none(len(row.new_tokens)) for row in rows]
        keeper = LawKeeper(self.config.laws, self.states)
        writer.decode(rows, keeper.watch)
        return [keeper.of(row) for row in rows]

    def read_along(self, writer: Session, rows: list[DecodeState]) -> list[Laws]:
        """Let a draft write the rows, then ask the target along them."""
        writer.decode(rows)
        size = self.config.laws
        return [
            laws_along(
                self.session, row.tokens[: row.prompt_len], row.new_tokens, self.states, size
            )
            for row in rows
        ]


def nothing_kept(config: DataConfig, prompts: int) -> ConfigError:
    """Of a first shard whose texts were all left out: hours of further ones might be, too."""
    return ConfigError(
        f"a shard of {config.shard} training texts was asked for.",
        f"{prompts} prompts were new, short enough and not repeating themselves, and every answer "
        f"to them was empty, or repeated more than {config.repeated:.0%} of its 4-grams.",
        "look at what this target writes (foretoken generate); give prompts with --data, or raise "
        "repeated.",
    )


class LawKeeper:
    """Listens to steps and keeps the likeliest tokens of the target's law at every new token."""

    def __init__(self, size: int, states: States) -> None:
        self.size, self.states = size, states
        self.parts: dict[int, list[Laws]] = {}

    def watch(self, step: Step, at: int) -> None:
        """Keep what one step says of one row."""
        row, count = step.rows[at], len(step.emitted[at])
        places = [0, *step.verdicts[at].path][:count]
        laws = self.states.laws(step.scores[at], places, self.size)
        self.parts.setdefault(row.uid, []).append(laws)

    def of(self, row: DecodeState) -> Laws:
        """The laws at a row's new tokens."""
        return Laws.joined(self.parts[row.uid])


def make_data(
    session: Session,
    config: DataConfig,
    folder: Path,
    given: Sequence[Any] = (),
    texts: Sequence[str] = (),
    *,
    writer: Session | None = None,
    draft: Any = None,
    source: str = "",
    fresh: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Fill `folder` with chats of the session's target and with ordinary text that it scores.

    `given` are prompts that it answers in place of its own, as it does the user's messages of the
    chats in `texts`: files, folders and data sets of text. `writer`, a session with the `draft` of
    that name, answers in the target's place. `fresh` deletes the texts of an earlier run first.
    Returns the notes of the card.
    """
    read = Read.of(session, config, texts)
    given = [*given, *read.prompts]
    wanted = min(config.chats, len(given)) if given else config.chats
    maker = Maker(session, config, folder, given, writer)
    check_work(maker, wanted, read)
    plan = {"target": source, "given": told_of(given), "text": read.name, **asdict(config)}
    wrote: dict[str, str] | None = None
    if writer is not None:
        wrote = {"name": str(draft), "identity": identity(*models_of(writer))}
        plan["draft"] = wrote["identity"]
    with working_alone(folder):
        if fresh:  # behind whatever could be wrong with what was asked for
            check_idle(folder / "training")
            clear(folder, LEFT_BY_RUNS)
        same_plan(folder, plan, given, read)
        held_out = read.held_out(config.held_out, config.seed)
        count = -(-len(read.windows) // config.shard)
        for index in tracked(range(count), "ordinary text, shards", count, show):
            if not shard_path(folder, "train", index, TEXT).is_file():
                maker.text_shard(index, read.windows, held_out)
        count = -(-wanted // config.shard)
        for index in tracked(range(count), "training texts, shards", count, show):
            if shard_path(folder, "train", index).is_file():
                maker.prompts.known(index)
            else:
                maker.shard(index)
                write_card(folder, session, config, source, read.sources, wrote)
        return write_card(folder, session, config, source, read.sources, wrote)


def check_work(maker: Maker, chats: int, read: Read) -> None:
    """ConfigError where nothing is to be made, or more hidden states than there may be."""
    if not chats and not read.windows:
        raise ConfigError(
            "training texts were asked for with chats=0.",
            "there is no ordinary text either, or none of 8 tokens or more.",
            "pass --text FILE, or more chats.",
        )
    if chats:
        maker.prompts.check()
    given, shard = len(maker.prompts.given), maker.config.shard
    whole = -(-chats // shard) * shard  # the last one, too, so that more chats go on behind it
    written = min(whole, given) if given else whole
    places = written * maker.config.new_tokens + read.tokens
    target, limit = maker.session.target, maker.config.features_gib
    maker.states.check_size(places, target.hidden_size, limit)


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train data` does."""
    session, config, given = order.session, order.config, list[Any](order.prompts)
    if order.data is not None and order.data.is_dir():
        given = [chat.prompt for chat in every_chat(order.data, "train")]
        if not given:
            raise none_there(order.data, "train")
    writing = draft_session(session, order.draft) if config.writer == "draft" else nullcontext()
    with writing as writer:
        return make_data(
            session, config, order.out, given, order.texts, writer=writer, draft=order.draft,
            source=order.source, fresh=order.fresh, show=order.show,
        )  # fmt: skip


def told_of(given: Sequence[Any]) -> dict[str, Any]:
    """Of given prompts, in a plan; `each` has some letters for every one of them, in order."""
    each = "".join(digest(one)[:LETTERS] for one in given)
    return {"count": len(given), "digest": digest(list(given)), "each": each}


def same_prompts(before: Any, given: Sequence[Any], shard: int) -> bool:
    """Whether prompts begin as those of a folder do; more of them, or fewer, are welcome, unless
    its last shard, which is not made again, has room for more."""
    count = before if isinstance(before, int) else before["count"]  # once a mere number
    if not count or not given:
        return not count and not given
    if isinstance(before, int):
        return count >= len(given)
    if count > len(given):
        each = before.get("each")  # once it was not there
        return each is None or bool(each.startswith(told_of(given)["each"]))
    if count < len(given) and count % shard:
        return False
    return bool(before["digest"] == told_of(given[:count])["digest"])


def check_shards(folder: Path, given: int, plan: dict[str, Any]) -> None:
    """ConfigError where fewer prompts than before would end within a shard that is yet to be made:
    once made it counts as whole, and the rest of it would never be answered.
    """
    index, rest = divmod(given, plan["shard"])
    reached = plan["chats"] > index * plan["shard"]
    if rest and reached and not shard_path(folder, "train", index).is_file():
        raise ConfigError(
            f"training texts in {folder} were asked for, of {given} prompts.",
            f"it was begun with more, and its shard {index} of {plan['shard']} prompts, which is "
            f"not made yet, would have {rest} alone.",
            f"pass all that it was begun with, or a multiple of {plan['shard']}; or another --out.",
        )


def same_text(before: dict[str, Any], read: Read, given: int) -> bool:
    """Whether ordinary text is that of a folder, whatever number of chats comes with it.

    Once its name was of these, too: of as many as there were then.
    """
    told = before.get("given")
    count = told["count"] if isinstance(told, dict) else told or 0
    others = given - len(read.prompts)  # that were given by themselves, which come first
    once = digest([read.windows, read.prompts[: max(0, count - others)]])
    return before["text"] in (read.name, once)


def same_plan(folder: Path, plan: dict[str, Any], given: Sequence[Any], read: Read) -> None:
    """Refuse to go on in a folder of another target or other options; more chats are welcome."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PLAN
    asked = json.loads(json.dumps(plan))
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        # An option that is younger than the folder had its default; who drafted it is not known.
        unknown = {"text": None, "draft": asked.get("draft")}
        before = {**unknown, **json.loads(json.dumps(asdict(DataConfig()))), **found}
        alike = {
            "given": same_prompts(before["given"], given, plan["shard"]),
            "text": same_text(before, read, len(given)),
        }
        other = sorted(
            name
            for name in asked
            if name not in FREE and not alike.get(name, asked[name] == before[name])
        )
        if other:
            raise ConfigError(
                f"training texts in {folder} were asked for.",
                f"the folder holds some that were made with another {', '.join(other)}.",
                "pass the options they were made with, or another --out.",
            )
        known = before.get("given")
        if isinstance(known, dict) and known["count"] > len(given):
            check_shards(folder, len(given), plan)
            asked["given"] = known  # of all that are there
    replace_text(path, json.dumps(asked, indent=2) + "\n")

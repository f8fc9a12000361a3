"""Prompts for training texts: given ones, or those that the target makes itself."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.chat import chat_ids
from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.training.dataset.lockstep import decode
from foretoken.training.dataset.openers import opened
from foretoken.training.dataset.records import DOCUMENT, read_chats, repetition, shard_path

MARK = "@@@"  # what stands for the user's words while a chat template is taken apart

Prompt = tuple[str, list[int]]  # its kind, and its token ids


@dataclass(frozen=True, slots=True)
class Template:
    """What stands around the user's words in a chat of one turn."""

    head: list[int]
    tail: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Template | None:
        """Of a tokenizer's chat template; None for a model that is not made for chats."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        message = [{"role": "user", "content": MARK}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        head, found, tail = text.partition(MARK)
        if not found:
            return None
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (head, tail)]
        return cls(*ids)


class Prompts:
    """The prompts of the shards in a folder; `config` is a DataConfig."""

    def __init__(
        self, session: Session, config: Any, folder: Path, given: Sequence[Any] = ()
    ) -> None:
        self.session, self.config, self.folder, self.given = session, config, folder, list(given)
        self.template = Template.of(session.tokenizer)
        self.seen: set[bytes] = set()  # digests of prompts, so that none comes twice

    def check(self) -> None:
        """ConfigError where none are given and the target cannot make any."""
        if not self.given and self.template is None:
            self.start()

    def of_shard(self, rng: random.Random, index: int) -> list[Prompt]:
        """The given prompts of a shard, or those the target makes; none comes twice."""
        return self.fresh(self.made(rng, index))

    def made(self, rng: random.Random, index: int) -> list[Prompt]:
        if self.given:
            begin = index * self.config.shard
            return [
                ("given", self.ids(one)) for one in self.given[begin : begin + self.config.shard]
            ]
        if self.template is None:
            start = self.start()
            return [(DOCUMENT, [start]) for _ in range(self.config.shard)]
        return self.own_prompts(rng, index, self.template)

    def own_prompts(self, rng: random.Random, index: int, template: Template) -> list[Prompt]:
        """User turns that the target continues behind openers of several kinds."""
        tokenizer, config = self.session.tokenizer, self.config
        earlier = self.earlier(index)
        begun = [opened(rng, earlier) for _ in range(config.shard)]
        ids = [
            template.head + tokenizer(one.text, add_special_tokens=False)["input_ids"]
            for one in begun
        ]
        to_write = [i for i, one in enumerate(begun) if not one.whole]
        rows = self.session.rows(
            [ids[i] for i in to_write],
            config.prompt_tokens,
            temperature=1.0,
            min_p=config.min_p,
            seed=[rng.getrandbits(40) for _ in to_write],
        )
        decode(self.session, rows, config.lockstep)
        unfinished = set()
        for i, row in zip(to_write, rows, strict=True):
            if row.finish is None or row.finish.reason != "stop":
                unfinished.add(i)
            ids[i] += row.new_tokens[:-1]
        least = len(template.head) + 3
        return [
            (one.kind, prompt + template.tail)
            for i, (one, prompt) in enumerate(zip(begun, ids, strict=True))
            if i not in unfinished and len(prompt) >= least
        ]

    def known(self, index: int) -> None:
        """Take in the prompts of a shard that is on disk."""
        for split in ("train", "valid"):
            shard = read_chats(shard_path(self.folder, split, index))
            self.remember(chat.prompt for chat in shard)

    def remember(self, prompts: Iterable[list[int]]) -> None:
        """Prompts whose answers were kept: they do not come again."""
        self.seen.update(map(named, prompts))

    def earlier(self, index: int) -> list[str]:
        """Texts of the shard before this one, for prompts that give one."""
        if index == 0:
            return []
        tokenizer = self.session.tokenizer
        texts = [
            tokenizer.decode(chat.answer, skip_special_tokens=True)
            for chat in read_chats(shard_path(self.folder, "train", index - 1))
            if chat.kind not in ("code", "translation")
        ]
        return [text for text in texts if len(text.split(" ")) >= 60]

    def fresh(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts that are new, not empty, short enough and not repeating themselves."""
        config, kept = self.config, []
        longest = min(config.longest, self.session.target.max_length or config.longest)
        here: set[bytes] = set()
        for kind, ids in prompts:
            name = named(ids)
            again = (name in self.seen or name in here) and kind != DOCUMENT
            if not again and 0 < len(ids) <= longest and repetition(ids) <= config.repeated:
                kept.append((kind, ids))
            here.add(name)
        return kept

    def ids(self, prompt: Any) -> list[int]:
        """A given prompt as the target reads it: a question to a chat model, else a text or ids."""
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str) and self.template is not None:
            return chat_ids([{"role": "user", "content": prompt}], self.session.tokenizer)
        return list(self.session.tokenizer(prompt)["input_ids"])

    def start(self) -> int:
        """The token that documents of a model without a chat template begin with."""
        tokenizer = self.session.tokenizer
        found = getattr(tokenizer, "bos_token_id", None)
        found = getattr(tokenizer, "eos_token_id", None) if found is None else found
        if found is None:
            raise ConfigError(
                "texts of the target's own were asked for.",
                "its tokenizer has neither a chat template nor a token that begins a text.",
                "pass prompts with --data FILE, or --set chats=0 for ordinary text alone.",
            )
        return int(found)


def named(ids: list[int]) -> bytes:
    """A digest of a prompt."""
    return hashlib.sha256(json.dumps(ids).encode()).digest()

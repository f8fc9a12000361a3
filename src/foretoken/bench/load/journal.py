"""Finished blocks on disk, so that an interrupted load test goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench import json_lines
from foretoken.bench.load.record import Block, block_of
from foretoken.errors import ConfigError

NAME = "journal.jsonl"


@dataclass(slots=True)
class Journal:
    """The file of finished blocks: what was asked on its first line, then a block a line."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    finished: bool = False

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self._write({"kind": "block", **block.to_dict()})

    def finish(self) -> None:
        self.finished = True
        self._write({"kind": "finished"})

    def block(self, key: str) -> Block | None:
        """The finished block of a load, a round and a server."""
        return next((block for block in self.blocks if block.key == key), None)

    def same(self, server: str, made: dict[str, str]) -> None:
        """ConfigError where blocks of a server were measured with something else than `made` says.

        What a block of before does not tell is no difference.
        """
        for block in self.blocks:
            if block.server != server:
                continue
            differ = {what: was for what, was in block.made.items() if made.get(what, was) != was}
            if differ:
                told = "; ".join(f"{what}: {was} -> {made[what]}" for what, was in differ.items())
                raise ConfigError(
                    f"going on with the load test in {self.path.parent}.",
                    f"the finished blocks of {server} were measured with another {told}.",
                    "go on with what it was begun with, or name another --out.",
                )

    def _write(self, entry: dict[str, Any]) -> None:
        json_lines.append(self.path, entry, "block")

    def take(self, kind: str, entry: dict[str, Any]) -> None:
        """Take in a line of the file."""
        if kind == "block":
            self.blocks.append(block_of(entry))
        else:
            self.finished = kind == "finished"


def open_journal(out: Path, asked: dict[str, Any], resume: bool) -> Journal:
    """A journal for `asked`: a new one, or with `resume` the one an interrupted test left."""
    path = out / NAME
    asked = json.loads(json.dumps(asked))
    if path.exists():
        before, journal = read_journal(path)
        if resume:
            differ = [key for key in {**asked, **before} if asked.get(key) != before.get(key)]
            if differ:
                raise ConfigError(
                    f"going on with the load test in {out}.",
                    f"it was begun with other settings ({', '.join(differ)} differ).",
                    "ask for the same again, or name another --out.",
                )
            return journal
        if journal.blocks and not journal.finished:
            raise ConfigError(
                f"a new load test in {out}.",
                f"an interrupted one left {len(journal.blocks)} finished blocks there.",
                "go on with --resume, or name another --out.",
            )
    json_lines.begin(path, asked)
    return Journal(path)


def read_journal(path: Path) -> tuple[dict[str, Any], Journal]:
    """What was asked and what is finished. A last line cut off by a kill is removed."""
    journal = Journal(path)
    return json_lines.read(path, journal.take, "block"), journal

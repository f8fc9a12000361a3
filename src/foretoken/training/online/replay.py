"""`foretoken train online`: a draft learns from prompts replayed as traffic (arXiv 2310.07177).

Each prompt is written twice, by the draft that learns and by the one it began as, so that both can
be compared in acceptance and in time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, ConfigError, check_values
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.opening import open_draft
from foretoken.training.bar import stage
from foretoken.training.capture import models_of
from foretoken.training.dataset.making import DataConfig
from foretoken.training.dataset.prompts import Prompts
from foretoken.training.dataset.records import every_chat, replace_text
from foretoken.training.drafts.distilling import read_draft
from foretoken.training.drafts.learning import run_folder
from foretoken.training.drafts.writing import shape_of, write_draft
from foretoken.training.identity import identity
from foretoken.training.online.draft import RECENT, OnlineDraft
from foretoken.training.online.served import twin
from foretoken.training.online.settings import OnlineSettings
from foretoken.training.online.telling import Fared, draw, figures, page
from foretoken.training.recipes import Order

JOURNAL = "requests.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig(OnlineSettings):
    """How prompts are replayed, beside how the draft learns from them."""

    chats: int = 400  # prompts, in their order
    new_tokens: int = 64  # written after each, at most
    temperature: float = 0.0  # of what is written
    method: str = "chain"  # that guesses with the draft
    depth: int = 4  # of its guesses
    save_every: int = 50  # requests between two states on disk

    def __post_init__(self) -> None:
        OnlineSettings.__post_init__(self)
        check_values(
            self,
            *((name, getattr(self, name) >= 1, "1 or more")
              for name in ("chats", "new_tokens", "depth", "save_every")),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
        )  # fmt: skip


def run(order: Order) -> dict[str, Any]:
    """What `foretoken train online` does; the notes of its card."""
    config, session = order.config, order.session
    prompts = read_prompts(order)
    model, tokens = read_draft(order)
    texts = order.data if order.data is not None and order.data.is_dir() else None
    begun_as = identity(*models_of(session), model)
    work = run_folder(
        order.out, config, texts, order.source, begun_as, order.prompts, fresh=order.fresh
    )
    width = model.config.vocab_size
    rows = None if len(tokens) == width else OutputRows.of_tokens(tokens.tolist(), width)
    with closing(open_draft(twin(model, session.target.model.dtype), rows)) as draft:
        writers = [
            Session(
                assemble(config.method, session.target, draft, depth=config.depth, max_rows=1),
                method=config.method, tokenizer=session.tokenizer, draft=draft, eos=session.eos,
            )
            for _ in range(2)
        ]  # fmt: skip
        with OnlineDraft(writers[0], config) as online:
            replay = Replay(config, online, writers[1], work)
            replay.run(prompts, order.show)
            online.learn(1)
            return written(order, replay, tokens)


class Replay:
    """Writes prompts one after the other with a draft that learns and with a frozen one."""

    def __init__(
        self, config: OnlineConfig, online: OnlineDraft, frozen: Session, work: Path
    ) -> None:
        self.config, self.online, self.frozen, self.work = config, online, frozen, work
        self.fared: dict[str, list[Fared]] = {"learning": [], "frozen": []}
        if online.load(work):
            self.resume()

    def run(self, prompts: Sequence[list[int]], show: bool) -> None:
        """Replay what was not replayed yet; a killed run goes on at its last state."""
        done = len(self.fared["frozen"])
        with stage("requests", len(prompts), show, done) as told:
            for at, prompt in enumerate(prompts[done:], done):
                self.one(at, prompt)
                if self.online.failure is not None:
                    raise self.online.failure
                if (at + 1) % self.config.save_every == 0 or at + 1 == len(prompts):
                    self.save()
                told(at + 1, f"acceptance {self.online.acceptance:.3f}")

    def one(self, at: int, prompt: list[int]) -> None:
        """A prompt by both, in turns which of them is first."""
        sessions = [("learning", self.online.session), ("frozen", self.frozen)]
        for name, session in sessions if at % 2 else sessions[::-1]:
            began = perf_counter()
            result = session.generate(
                prompt, self.config.new_tokens, temperature=self.config.temperature,
                seed=self.config.seed + at,
            )  # fmt: skip
            self.fared[name].append(Fared.of(result, perf_counter() - began))

    def save(self) -> None:
        """The journal, then the state that says how much of it counts."""
        document = {name: [asdict(one) for one in some] for name, some in self.fared.items()}
        try:
            replace_text(self.work / JOURNAL, json.dumps(document) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"saving a replay in {self.work} was asked for.",
                f"the folder cannot be written ({error}); its last state is whole.",
                "free disk space or fix the permissions, then run the same command: it goes on.",
            ) from error
        self.online.save(self.work)

    def resume(self) -> None:
        """Read the journal up to the state that was loaded."""
        path = self.work / JOURNAL
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            for name, some in self.fared.items():
                some += [Fared(**one) for one in found[name][: self.online.requests]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"going on with a replay in {self.work} was asked for.",
                f"its journal cannot be read ({error}).",
                "pass --fresh to begin anew.",
            ) from error


def read_prompts(order: Order) -> list[list[int]]:
    """Token ids of the prompts: given ones, or those of a folder that `train data` made."""
    config, session = order.config, order.session
    if order.data is not None and order.data.is_dir():
        found = [chat.prompt for chat in every_chat(order.data, "train")]
    else:
        prompts = Prompts(session, DataConfig(), order.out)
        found = [prompts.ids(prompt) for prompt in order.prompts]
    longest = session.target.max_length
    if longest is not None:
        found = [ids for ids in found if len(ids) + config.new_tokens <= longest]
    if not found:
        raise ConfigError(
            "learning from traffic was asked for without a prompt.",
            "there is none, or none that leaves room for the text behind it.",
            "pass --data FILE of prompts, or a folder that `foretoken train data` made.",
        )
    return found[: config.chats]


def written(order: Order, replay: Replay, tokens: torch.Tensor) -> dict[str, Any]:
    """Write the learned drafts with their cards and curves; the notes."""
    online, config = replay.online, order.config
    model = online.learners[0].model
    curve = replay.work / "acceptance.png"
    draw(curve, replay.fared, RECENT)
    notes = {
        "recipe": "online",
        "target": order.source,
        "draft": str(order.draft),
        "shape": shape_of(model),
        "vocabulary": {"tokens": len(tokens), "of": model.config.vocab_size},
        "steps": online.served_steps,
        "learning_seconds": online.seconds,
        **figures(replay.fared, RECENT),
        "settings": asdict(config),
    }
    for topic, learner in enumerate(online.learners):
        folder = order.out if config.topics == 1 else order.out / f"topic-{topic}"
        folder.mkdir(parents=True, exist_ok=True)
        learned = twin(learner.serving, torch.float32)
        write_draft(folder, learned, order.session, tokens, notes, curve, page(notes, RECENT))
    return notes

"""The draft of a server learns in its idle moments, and goes on from there after a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import torch

from foretoken.engine.session import Session
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, check_values
from foretoken.training.drafts.writing import shape_of, write_draft
from foretoken.training.folders import alone_in, try_writing
from foretoken.training.online.draft import OnlineDraft
from foretoken.training.online.giving_way import never
from foretoken.training.online.served import twin
from foretoken.training.online.settings import OnlineSettings

LOG = logging.getLogger(__name__)
DRAFT = "draft"  # folder of what was learned, as any session loads it


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSettings(OnlineSettings):
    """How the draft of a server learns: in short slices, which a new request breaks off."""

    interval: int = 64  # requests without an idle moment until it learns in its share of busy time
    rate: float = 3e-4  # of AdamW; for a draft that is far from its best, 1e-3
    warmup: int = 20  # optimizer steps until the rate is whole
    begin: int = 32  # parts of texts heard before any is learned
    trial: int = 32  # new parts that learned weights must do better on before they serve
    slice_tokens: int = 128  # tokens learned at a stretch
    tables: bool = False  # whether embedding and output layer learn: slices twice as long
    save_every: float = 60.0  # seconds at least between two states on disk

    def __post_init__(self) -> None:
        OnlineSettings.__post_init__(self)
        check_values(self, ("save_every", self.save_every >= 0, "0 seconds or more"))


class IdleLearning:
    """Learns from what a session writes, whenever it writes nothing; its state is in `folder`."""

    def __init__(
        self, session: Session, folder: Path, settings: ServingSettings | None = None
    ) -> None:
        self.folder, self.settings = folder, settings or ServingSettings()
        check_writable(folder)
        with ExitStack() as undone:
            try:
                self.lock = alone_in(folder, taken(folder))
            except OSError as error:  # somebody else's file
                raise unwritable(folder, error) from error
            if self.lock is not None:
                undone.callback(self.lock.close)
            self.online = OnlineDraft(session, self.settings)
            undone.callback(self.online.close)
            self.resumed = self.online.load(folder)
            undone.pop_all()
        self.saved, self.saved_at = self.known, monotonic()

    def __str__(self) -> str:
        begun = f"goes on after {self.online.steps:,} steps" if self.resumed else "begins"
        return f"{begun} in idle moments, state in {self.folder}; {self.online}"

    @property
    def known(self) -> tuple[int, int, int]:
        """How much was heard and learned, and what guesses."""
        return self.online.requests, self.online.steps, self.online.served_steps

    def rest(self, disturbed: Callable[[], bool] = never) -> bool:
        """Save what was learned if it is time, or learn a slice until `disturbed`; False where
        nothing is left."""
        if self.known != self.saved and monotonic() - self.saved_at >= self.settings.save_every:
            self.save()
        return self.online.rest(disturbed)

    def save(self) -> None:
        """Write the state. Where the disk is full the one before stays, and learning goes on."""
        self.saved_at, known = monotonic(), self.known
        try:
            self.online.save(self.folder)
            self.saved = known
        except (OSError, ForetokenError) as error:
            LOG.warning("online: what was learned could not be saved: %s", error)

    def finish(self) -> None:
        """Save, and write the learned drafts; the session goes on with them."""
        if self.known != self.saved:
            self.save()
        self.export()
        if self.lock is not None:
            self.lock.close()

    def export(self) -> None:
        """Every draft that guesses with what it learned as a model directory, for `--draft`."""
        online, session = self.online, self.online.session
        for topic, learner in enumerate(online.learners):
            if not learner.served_steps:
                continue
            one = self.folder / (DRAFT if len(online.learners) == 1 else f"{DRAFT}-{topic}")
            try:
                model = twin(learner.serving, torch.float32)
                width = model.config.vocab_size
                tokens = torch.arange(width) if online.tokens is None else online.tokens.cpu()
                notes = {
                    "recipe": "online", "shape": shape_of(model), "steps": learner.served_steps,
                    "vocabulary": {"tokens": len(tokens), "of": width},
                    "settings": asdict(self.settings),
                }  # fmt: skip
                one.mkdir(parents=True, exist_ok=True)
                write_draft(one, model, session, tokens, notes, about=about(learner.served_steps))
            except (OSError, RuntimeError, MemoryError, ForetokenError) as error:
                LOG.warning("online: a learned draft could not be written: %s", error)


def taken(folder: Path) -> ConfigError:
    """Of a folder that another server has."""
    return ConfigError(
        f"keeping what a draft learns in {folder} was asked for.",
        "another server keeps there what its draft learns.",
        "name another folder, or end that server.",
    )


def about(steps: int) -> str:
    """The page of a learned draft."""
    return (
        "# A draft that learned while it served\n\n"
        f"`foretoken serve --learn` took {steps:,} optimizer steps on the target's laws where "
        "guesses of live traffic were rejected (arXiv 2310.07177). Load it with `--draft`.\n"
    )


def check_writable(folder: Path) -> None:
    """CheckpointError where nothing could be kept, before any request."""
    try:
        try_writing(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"keeping what a draft learns in {folder} was asked for.",
        f"the folder cannot be written ({error}).",
        "name a folder that can.",
    )

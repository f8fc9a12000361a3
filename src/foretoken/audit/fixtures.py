"""What rows of METHODS cannot be built without (`Method.needs`), made small for any vocabulary.

A row that needs an option gets it here, so that the audit, the contract tests and every other loop
over METHODS can build it. A new need is a maker in MAKERS: sizes of the
target's vocabulary and hidden states to the option's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from foretoken.datastore.codecs import Codec
from foretoken.datastore.dense import Contents, write
from foretoken.datastore.store import Datastore
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.heads import decision, store
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.heads.exits import ExitPredictors
from foretoken.heads.table import head_row, resolve
from foretoken.methods import Method, method

_folders: list[TemporaryDirectory[str]] = []  # removed when the interpreter ends


def needed(
    entry: Method,
    vocab_size: int,
    controller: str | None = None,
    hidden_size: int | None = None,
    target_hidden: int | None = None,
) -> dict[str, Any]:
    """The options without which the row cannot be built, for a target of `vocab_size` ids.

    A controller may have needs too; `hidden_size` is the draft's and `target_hidden` the target's,
    a table's if left out.
    """
    sizes = vocab_size, target_hidden or vocab_size
    found = {name: _made(name, *sizes) for name in entry.needs if name in MAKERS}
    for kind in {one.head for one in (entry, *map(method, entry.inner)) if one.head}:
        found["draft_head"] = random_head(kind, *sizes)
    if (controller or entry.controller) == "acceptance_head":
        head = random_acceptance(hidden_size or vocab_size, vocab_size)
        found |= {"head": head, "threshold": 0.5, "shortest": 1}
    if (controller or entry.controller) == "decision":
        found |= {"head": random_decision(hidden_size or vocab_size, vocab_size), "threshold": 0.5}
    return found


def folder() -> Path:
    """A new folder that lasts as long as the interpreter."""
    _folders.append(TemporaryDirectory(prefix="foretoken-audit-"))
    return Path(_folders[-1].name)


@cache
def _made(name: str, vocab_size: int, hidden_size: int) -> Any:
    return MAKERS[name](vocab_size, hidden_size)


def tiny_datastore(vocab_size: int, hidden_size: int) -> Path:
    """Two segments of texts that hold every pair of the first ids, some of them more often."""
    where = folder() / "datastore"
    store = Datastore.create(where, Vocabulary.of_ids(vocab_size))
    ids = range(min(vocab_size, 8))
    store.add([[a, b, (a + b + 1) % vocab_size, a, b] for a in ids for b in ids])
    store.add([[i % vocab_size, (3 * i) % vocab_size, (i * i) % vocab_size] for i in range(12)])
    return where


def tiny_keys(vocab_size: int, hidden_size: int) -> Path:
    """Random states, some of them before every one of the first ids."""
    generator = torch.Generator().manual_seed(6)
    tokens = np.arange(400) % min(vocab_size, 8)
    states = torch.randn(320, hidden_size, generator=generator)
    codec = Codec.fit(states, min(hidden_size, 8), "float8_e4m3")
    said = np.sort(np.arange(320) % min(vocab_size, 8))
    contents = Contents(
        Vocabulary.of_ids(vocab_size),
        -1,
        codec,
        codec.encode(states).numpy(),
        ((np.arange(320) * 7) % 390).astype(np.uint32),
        np.searchsorted(said, np.arange(vocab_size + 1)),
        np.append(tokens, vocab_size).astype(np.uint32),
    )
    where = folder() / "keys"
    write(where, contents)
    return where


@cache
def random_acceptance(hidden_size: int, vocab_size: int) -> Path:
    """An acceptance head that knows nothing, but whose answers spread over (0, 1).

    An exact method is exact with any head, so the worst of heads is the best of witnesses.
    """
    head = AcceptanceHead(
        AcceptanceHead.Config(hidden_size=hidden_size, vocab_size=vocab_size, blocks=2)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        logits = head(1.5 * torch.randn(256, hidden_size, generator=generator))
    margins = logits[:, 1] - logits[:, 0]
    temperature = float(margins.std()) / 1.5
    shift = 0.5 - float(margins.mean()) / temperature
    head.config = replace(head.config, temperature=temperature, shift=shift)
    return store.save(folder(), "acceptance", head, {"weights": "random"})


@cache
def random_head(kind: str, vocab_size: int, hidden_size: int) -> Path:
    """A head of HEADS that knows nothing, in the shape that its Config gives."""
    module = resolve(head_row(kind).module)
    head = module(module.Config(hidden_size=hidden_size, vocab_size=vocab_size))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return store.save(folder(), kind, head, {"weights": "random"})


def silent_predictors(vocab_size: int, hidden_size: int) -> str:
    """Predictors that never fire: what they would change is a lossy method's own affair."""
    shape = ExitPredictors.Config(
        hidden_size=hidden_size, vocab_size=vocab_size, layers=(0, 1, 2), candidates=2, hidden=4
    )
    head = ExitPredictors(shape)
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
        for layer in head.layers:
            predictor: Any = head.predictors[str(layer)]
            predictor[2].bias.fill_(-100.0)
    return str(store.save(folder(), "exits", head, {"weights": "zero"}))


@cache
def random_decision(hidden_size: int, vocab_size: int, model: str = "soft") -> Path:
    """A decision model that knows nothing, but says yes about as often as no."""
    head = decision.DecisionHead(
        decision.DecisionHead.Config(hidden_size=hidden_size, vocab_size=vocab_size, model=model)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
        if model == "soft":
            seen = 1.5 * torch.randn(256, hidden_size, generator=generator)
        else:
            logits = 2.0 * torch.randn(256, vocab_size, generator=generator)
            seen = decision.certainty(logits.softmax(-1))
        margins = head(seen)
        last: Any = head.layers[-1]
        last.weight /= margins.std()
        last.bias.copy_((last.bias - margins.mean()) / margins.std())
    return store.save(folder(), "decision", head, {"weights": "random"})


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "datastore": tiny_datastore,
    "keys": tiny_keys,
    "predictors": silent_predictors,
}

"""One head in place of several that go on from each other: the means of their weights.

Heads that were trained on from one beginning, on other texts or in another order, lie in one valley
of the loss, and their mean is better than each (model soups, arXiv 2203.05482). It costs what one
costs. Heads that began from different random weights have nothing in common; their mean is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.lm import draft_vocabulary


def average(folders: Sequence[str | Path], shares: Sequence[float], out: Path) -> Path:
    """Write the mean head of `folders`, each counting as its share, into `out`.

    Its weights have the types of the last one's. ConfigError for fewer than two heads, for shares
    that are not one above 0 for each, and for heads of different shapes or tokens; CheckpointError
    for folders without a head, or one that cannot be written.
    """
    check_shares(folders, shares)
    cards = [store.card_of(folder) for folder in folders]
    pairs = list(zip(folders, cards, strict=True))
    head = [store.load(folder, card.kind)[0] for folder, card in pairs][-1]  # all can be used
    states = [store.read_weights(store.place_of(folder), card) for folder, card in pairs]
    scored = [vocabulary(folder, card) for folder, card in pairs]
    for folder, card, tokens in zip(folders, cards, scored, strict=True):
        same = (card.kind, card.options, card.hidden_size, card.vocab_size, tokens) == (
            cards[0].kind, cards[0].options, cards[0].hidden_size, cards[0].vocab_size, scored[0],
        )  # fmt: skip
        if not same:
            refuse(folders[0], folder, "they are of different kinds, shapes or vocabularies")
    for folder, state in zip(folders, states, strict=True):
        for name, value in state.items():
            if not value.is_floating_point() and not torch.equal(value, states[0][name]):
                refuse(folders[0], folder, f"{name} differs")
    total = sum(shares)
    parts = [share / total for share in shares]
    means = {name: mean(name, states, parts) for name in states[0]}
    head.load_state_dict(means, assign=True)  # in the types that they are kept in
    made_of = [
        {"head": Path(folder).name, "share": share, "weights": card.weights,
         **{name: card.notes.get(name) for name in ("steps", "seconds")}}
        for folder, share, card in zip(folders, parts, cards, strict=True)
    ]  # fmt: skip
    store.save(out, cards[0].kind, head, {"average_of": made_of})
    (out / draft_vocabulary.NAME).unlink(missing_ok=True)  # an older head's
    if scored[0] is not None:
        draft_vocabulary.write(out / draft_vocabulary.NAME, scored[0], cards[0].vocab_size)
    return out


def mean(name: str, states: Sequence[dict[str, Tensor]], parts: Sequence[float]) -> Tensor:
    """The mean of one tensor, summed in float32; integers are alike."""
    last = states[-1][name]
    if not last.is_floating_point():
        return states[0][name]
    pairs = zip(states, parts, strict=True)
    weighed = [part * state[name].float() for state, part in pairs]
    return torch.stack(weighed).sum(0).to(last.dtype)


def vocabulary(folder: str | Path, card: store.Card) -> list[int] | None:
    """The tokens that a head scores by a list beside it; None: no list."""
    place = store.place_of(folder) / draft_vocabulary.NAME
    return draft_vocabulary.read(place, card.vocab_size) if place.is_file() else None


def check_shares(folders: Sequence[str | Path], shares: Sequence[float]) -> None:
    if len(folders) < 2:
        raise ConfigError(
            f"the mean of {len(folders)} heads was asked for.",
            "a mean is of two heads or more.",
            "name the folders of several heads that go on from each other.",
        )
    if len(shares) != len(folders) or not all(0 < share < float("inf") for share in shares):
        raise ConfigError(
            f"shares of {', '.join(f'{share:g}' for share in shares) or 'nothing'} were asked for.",
            f"each of the {len(folders)} heads has one above 0; they need not sum to 1.",
            "name as many as there are heads, in their order, or none for equal ones.",
        )


def refuse(one: str | Path, other: str | Path, why: str) -> None:
    raise ConfigError(
        f"the mean of the heads {one} and {other} was asked for.",
        f"{why}.",
        "average heads that go on from each other: `foretoken train NAME --set start=HEAD`.",
    )

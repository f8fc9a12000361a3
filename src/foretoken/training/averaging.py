"""One head in place of several that go on from each other: the means of their weights.

Heads that were trained on from one beginning, on other texts or in another order, lie in one valley
of the loss, and their mean is better than each (model soups, arXiv 2203.05482). It costs what one
costs. Heads that began from different random weights have nothing in common; their mean is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads import made_for, store
from foretoken.lm import draft_vocabulary
from foretoken.shipped import resolve


def average(folders: Sequence[str | Path], shares: Sequence[float], out: Path) -> Path:
    """Write the mean head of `folders`, each counting as its share, into `out`.

    Its weights have the types of the first one's. ConfigError for fewer than two heads, for shares
    that are not one above 0 for each, and for heads of different shapes or tokens; CheckpointError
    for folders without a head, or one that cannot be written.
    """
    check_shares(folders, shares)
    cards = [store.card_of(folder) for folder in folders]
    heads = [store.load(folder, card.kind)[0] for folder, card in zip(folders, cards, strict=True)]
    states = [head.state_dict() for head in heads]
    lists = [listed(folder, card) for folder, card in zip(folders, cards, strict=True)]
    first = alike(cards[0], lists[0])
    for folder, card, tokens, state in zip(folders, cards, lists, states, strict=True):
        if alike(card, tokens) != first:
            refuse(folders[0], folder, "they are of different kinds, shapes or vocabularies")
        for name, value in state.items():
            if not value.is_floating_point() and not torch.equal(value, states[0][name]):
                refuse(folders[0], folder, f"{name} differs")
    parts = [share / sum(shares) for share in shares]
    kept = store.read_weights(folders[0], cards[0])  # whose types modules do not keep
    means = {name: mean(name, states, parts).to(kept[name].dtype) for name in states[0]}
    heads[0].load_state_dict(means, assign=True)
    made_of = [
        {"head": Path(folder).name, "share": share, "weights": card.weights,
         **{name: card.notes.get(name) for name in ("steps", "seconds")}}
        for folder, share, card in zip(folders, parts, cards, strict=True)
    ]  # fmt: skip
    notes = {"average_of": made_of, **target_of(cards), **longest_window(cards)}
    store.save(out, cards[0].kind, heads[0], notes)
    draft_vocabulary.put(out, lists[0], cards[0].vocab_size)
    return out


def target_of(cards: Sequence[store.Card]) -> dict[str, Any]:
    """What all heads say alike of the model that they were trained for."""
    return {
        name: cards[0].notes[name]
        for name in (made_for.WHO, made_for.WHAT)
        if cards[0].notes.get(name) and len({card.notes.get(name) for card in cards}) == 1
    }


def longest_window(cards: Sequence[store.Card]) -> dict[str, Any]:
    """Tokens of the longest texts that any of the heads learned from, if all say so."""
    found = [window for card in cards if (window := store.window_of(card.notes)) is not None]
    return {"settings": {"window": max(found)}} if len(found) == len(cards) else {}


def alike(card: store.Card, tokens: list[int] | None) -> tuple[Any, ...]:
    """What heads that have a mean have in common."""
    return card.kind, card.options, card.hidden_size, card.vocab_size, tokens


def mean(name: str, states: Sequence[dict[str, Tensor]], parts: Sequence[float]) -> Tensor:
    """The mean of one tensor; integers are alike."""
    values = [state[name] for state in states]
    if not values[0].is_floating_point():
        return values[0]
    weighed = [part * value.float() for value, part in zip(values, parts, strict=True)]
    return torch.stack(weighed).sum(0)


def listed(folder: str | Path, card: store.Card) -> list[int] | None:
    """The tokens that a head scores by a list beside it; None: no list."""
    rows = draft_vocabulary.chosen_rows(None, resolve(folder), card.vocab_size)
    return None if rows is None else rows.tokens.tolist()


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

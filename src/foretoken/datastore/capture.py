"""Keys from a target that reads texts: a hidden state for every token it would have to guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.datastore.codecs import Codec
from foretoken.datastore.dense import Contents
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import ConfigError
from foretoken.row import make_row
from foretoken.sampling import SamplingParams
from foretoken.types import Layer

FITTED = 20_000  # keys the projection is fitted to, the first ones
PIECE = 2_048  # most tokens of a document read at once, whatever the target could read


def capture(
    target: LanguageModel,
    documents: Iterable[Sequence[int]],
    vocabulary: Vocabulary,
    *,
    tap: int = -1,
    dims: int = 64,
    dtype: str = "float8_e4m3",
) -> Contents:
    """A key for every place of the texts that something follows.

    The projection is fitted to the first keys; those are encoded when it is known, all others as
    they come, so memory holds FITTED states, those of one piece of a text, and the small keys.
    """
    check_layer(target, tap)
    waiting: list[Tensor] = []
    encoded: list[Tensor] = []
    said: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.int64]] = []
    texts: list[npt.NDArray[np.int64]] = []
    codec: Codec | None = None
    size = 0
    for document in documents:
        ids = np.asarray(document, np.int64)
        longest = min(target.max_length or PIECE, PIECE)
        for start in range(0, len(ids), longest):
            piece = ids[start : start + longest]
            if len(piece) > 2:
                waiting.append(states_of(target, piece.tolist(), tap)[:-1])
                said.append(piece[1:-1])
                places.append(np.arange(size + 2, size + len(piece)))
            texts.append(np.append(piece, vocabulary.size))
            size += len(piece) + 1
            if codec is None and sum(map(len, waiting)) >= FITTED:
                codec = Codec.fit(torch.cat(waiting)[:FITTED], dims, dtype)
            if codec is not None:
                encoded += [codec.encode(states) for states in waiting]
                waiting = []
    if waiting:
        codec = codec or Codec.fit(torch.cat(waiting), dims, dtype)
        encoded += [codec.encode(states) for states in waiting]
    if codec is None:
        raise ConfigError(
            "keys of texts were asked for.",
            "there is no text of three tokens or more in them.",
            "name longer texts.",
        )
    return _ordered(vocabulary, tap, codec, encoded, said, places, texts)


def _ordered(
    vocabulary: Vocabulary,
    tap: int,
    codec: Codec,
    encoded: list[Tensor],
    said: list[npt.NDArray[np.int64]],
    places: list[npt.NDArray[np.int64]],
    texts: list[npt.NDArray[np.int64]],
) -> Contents:
    """All keys in order of the token said next."""
    tokens = np.concatenate(said)
    order = np.argsort(tokens, kind="stable")
    return Contents(
        vocabulary,
        tap,
        codec,
        torch.cat(encoded).numpy()[order],
        np.concatenate(places)[order].astype(np.uint32),
        np.searchsorted(tokens[order], np.arange(vocabulary.size + 1)),
        np.concatenate(texts).astype(np.uint32),
    )


def check_layer(target: LanguageModel, tap: int) -> None:
    """ConfigError for a layer that the target does not have."""
    if not -target.layers <= tap < target.layers:
        raise ConfigError(
            f"states of layer {tap} were asked for.",
            f"the target has {target.layers} layers: 0 to {target.layers - 1}, or -1 for the last, "
            "-2 for the one before it, and so on.",
            "choose one of these, and make keys with the target they are for.",
        )


def states_of(target: LanguageModel, tokens: list[int], tap: int) -> Tensor:
    """[S - 1, H]: the target's states after every token but the last."""
    row = make_row(tokens, SamplingParams(), SeededCoins(0), target.vocab_size)
    with torch.inference_mode():
        [seen] = target.prefill([row], (Layer(tap),))
        target.free([row])
    assert seen is not None, "a target shows the layers it is asked for"
    return seen[:, 0].float().cpu().clone()

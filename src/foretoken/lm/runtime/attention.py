"""Attention that shares keys and values between grouped query heads without copying them.

transformers repeats the whole cache once per query head of a group when there is a mask and more
than one query. Here the heads of a group become rows of one product instead. The function is used
for the length of our own forwards only; it also stands for itself in a plain forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from foretoken.lm.runtime.tree_attention import hybrid, of_rows, pays

NAME = "foretoken"
MOST_FOLDED = 256  # more query rows than this: the product dominates, and repeating is cheap


def attend(
    module: torch.nn.Module | None,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, KV, K, D]
    value: Tensor,  # [B, KV, K, D of values]
    attention_mask: Tensor | None,  # [B, 1, Q, K], or [B, 1, group * Q, K] folded beforehand
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    unmasked: bool = False,  # every query sees every key
    causal: bool = False,  # queries and keys are the same tokens, in order
    prefix: int = 0,  # first columns that every query of every row sees: the mask is zero there
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(query key^T scaling) value, for one layer."""
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    fold = heads // groups
    mask = None if unmasked or causal else attention_mask
    odd = softcap is not None or s_aux is not None
    if mask is not None and not odd and not dropout and pays(query, key, value, prefix):
        return hybrid(query, key, value, mask, prefix, scaling).transpose(1, 2).contiguous(), None
    if fold > 1 and not odd and fold * queries > MOST_FOLDED:
        key, value = repeated(key, fold), repeated(value, fold)
        fold = 1
    if causal and (fold > 1 or odd):
        mask = triangle(queries, query)
    if mask is not None:
        mask = of_rows(mask, queries, fold)
    folded = query.reshape(batch, heads // fold, fold * queries, -1)
    if odd:
        sinks = None if s_aux is None else s_aux.reshape(1, -1, fold, 1)
        mixed = by_hand(folded, key, value, mask, scaling, softcap, sinks, queries)
    else:
        mixed = F.scaled_dot_product_attention(
            folded,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal and mask is None,
        )
    return mixed.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,  # [1, KV, group, 1]: one more logit per head, of no value
    queries: int,
) -> Tensor:
    """What the fused kernel has no argument for: soft-capped scores (Gemma 2), sinks (gpt-oss)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    column = sinks.expand(query.shape[0], -1, -1, queries).reshape(*scores.shape[:-1], 1)
    laws = torch.cat([scores, column.to(scores.dtype)], -1)
    laws = laws.softmax(-1, dtype=torch.float32)[..., :-1]
    return laws.to(query.dtype) @ value


def repeated(states: Tensor, times: int) -> Tensor:
    """[B, KV, K, D] to [B, KV * times, K, D]."""
    batch, groups, columns, width = states.shape
    wide = states[:, :, None].expand(batch, groups, times, columns, width)
    return wide.reshape(batch, groups * times, columns, width)


def triangle(queries: int, like: Tensor) -> Tensor:
    """[1, 1, Q, Q] causal mask."""
    mask = like.new_full((queries, queries), torch.finfo(like.dtype).min)
    return mask.triu_(1)[None, None]


class Place:
    """Where a configuration keeps the name of its attention function; models may share one."""

    FIELD = "_attn_implementation_internal"

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.inside = 0  # forwards that look the name up just now
        self.name: str | None = None  # what they all use
        self.before: Any = None  # the user's choice


_lock = threading.Lock()
_turn = threading.Condition(_lock)
_waiting: list[Any] = []  # who wants another function than those inside
_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()


class Switch:
    """`with switch.to(name)`: that attention function inside, the user's choice outside.

    It writes into the configurations' own dictionaries: the setters take some 10 microseconds, and
    a draft model's forward may take a few hundred. Models may share a configuration: who wants
    another function waits, and the last forward to leave puts the user's choice back.
    """

    def __init__(self, configs: Sequence[Any]) -> None:
        self.name: str | None = None
        self.places: list[Place] = []
        for fields in [config.__dict__ for config in configs]:
            assert Place.FIELD in fields, "transformers renamed its field"
            with _lock:
                self.places.append(_places.setdefault(id(fields), Place(fields)))

    def to(self, name: str | None) -> Switch:
        """The function of the next forward; None keeps the user's."""
        self.name = name
        return self

    def clashes(self) -> bool:
        """Whether somebody inside uses another function."""
        for place in self.places:  # noqa: SIM110, a generator costs more than all the rest
            if place.inside and place.name != self.name:
                return True
        return False

    def __enter__(self) -> None:
        name = self.name
        with _lock:
            while self.clashes():
                _waiting.append(self)
                _turn.wait()
            for place in self.places:
                if not place.inside:
                    place.name, place.before = name, place.fields[place.FIELD]
                    if name is not None:
                        place.fields[place.FIELD] = name
                place.inside += 1

    def __exit__(self, *_: object) -> None:
        with _lock:
            for place in self.places:
                place.inside -= 1
                if not place.inside:
                    place.fields[place.FIELD] = place.before
            if _waiting:
                _waiting.clear()
                _turn.notify_all()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)  # additive, for forwards without our masks

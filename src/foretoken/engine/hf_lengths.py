"""How far `generate` may write where positions end, or where their rotary scaling changes.

Rotary positions of a fixed scaling go on beyond a model's context, and so do we, token by token.
What `generate` writes beyond a table of positions, or where `dynamic` and `longrope` scaling set in
with keys cached under the old one, depends on how it was called before: that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.errors import CapabilityError

FIXED = frozenset({"default", "linear", "yarn", "llama3", "proportional"})  # rotary scalings


def check_lengths(model: Any, padding: Sequence[int], width: int, longest: int) -> None:
    """Refuse rows of `width` columns, padded on the left, that may grow beyond what we can repeat.

    `longest` counts columns, padding included.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = rotary_scalings(config)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    positions = longest - 1 - min(padding)  # the last token is not fed
    if limit is not None and positions > limit and not (kinds and kinds <= FIXED | {"longrope"}):
        reason = "a table of that many positions"
        if kinds:
            named = ", ".join(sorted(kinds - FIXED))
            reason = f"rotary positions of type {named}, whose keys change beyond them"
        raise too_long(positions, f"this model has {reason}", int(limit), width - min(padding))
    if "longrope" in kinds:
        _check_switch(model, config, padding, width, longest)


def _check_switch(
    model: Any, config: Any, padding: Sequence[int], width: int, longest: int
) -> None:
    """longrope: every row on one side of its switch, or one that `generate` starts anew there."""
    switch = longrope_switch(config)
    if switch is None or longest - 1 <= switch or width - max(padding) > switch:
        return
    if any(padding):
        raise too_long(
            longest - 1,
            f"longrope scales all rows of a batch by the longest one beyond {switch} positions",
            switch,
            width,
            "generate row by row, or ",
        )
    if width <= switch and not restarts(model):
        positions = longest - 1
        why = f"{type(model).__name__} keeps keys of the short scaling beyond {switch} positions"
        raise too_long(positions, why, switch, width)


def too_long(
    positions: int, why: str, limit: int, prompt: int, instead: str = ""
) -> CapabilityError:
    """What to do about a text that could outgrow `limit` positions."""
    room = limit + 1 - prompt
    shorter = f"pass max_new_tokens={room} or less" if room > 0 else "pass a shorter prompt"
    return CapabilityError(
        f"a text that may take {positions} positions was asked for inside generate.",
        f"{why}: beyond {limit}, generate's text would not be repeated.",
        f"{instead}{shorter}, or drop custom_generate.",
    )


def rotary_scalings(config: Any) -> frozenset[str]:
    """The types of rotary positions of all layers; empty for a model that has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return frozenset(str(part["rope_type"]) for part in parts if "rope_type" in part)


def longrope_switch(config: Any) -> int | None:
    """The last length at which longrope scales as in training."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    found = [part.get("original_max_position_embeddings") for part in parts]
    found.append(getattr(config, "original_max_position_embeddings", None))
    return min((int(at) for at in found if at), default=None)


def restarts(model: Any) -> bool:
    """Whether `generate` drops the cache of this model at the switch, as Phi-3's does."""
    prepare = type(model).prepare_inputs_for_generation
    return not str(prepare.__qualname__).startswith("GenerationMixin.")

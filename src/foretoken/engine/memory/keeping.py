"""A budget around a load: refused before weights are read, then bound to what was loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from foretoken.drafters.nothing import Nothing
from foretoken.engine.memory.amounts import amount, enough, told
from foretoken.engine.memory.bounded import Bounded, Room
from foretoken.engine.memory.layout import largest_draft, largest_of, layout_of
from foretoken.engine.memory.plan import Layout, Need
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.heap import collect, use_large_blocks_again
from foretoken.lm.views.view import innermost
from foretoken.types import Shape

LEAST = 64  # tokens of a text that a budget has to hold, at least
USUAL = 1024  # tokens of the rows that have to fit before memory goes to second copies of weights


class Budget:
    """What `load` was told of memory, before and after the weights are there."""

    def __init__(self, given: Any, layout: Layout, nodes: int) -> None:
        self.bytes, self.layout, self.nodes = amount(given), layout, nodes
        least = layout.without_copies().plan(Need(1, LEAST))
        if least.total > self.bytes:
            raise too_small(self.bytes, least.weights, least.generation)

    @classmethod
    def asked(
        cls, given: Any, target: Any, method: str, draft: Any, config: Mapping[str, Any],
        *, controller: str | None = None, **reading: Any,
    ) -> Budget:  # fmt: skip
        """Of a request; nothing was loaded yet. CapabilityError where it can hold no text."""
        layout = layout_of(target, method, draft, config=config, **reading)
        made = cls(given, layout, largest_draft(method, config, controller)[1])
        use_large_blocks_again(made, room=False)
        return made

    def kernels(self, asked: str, max_rows: int) -> str:
        """The mode of kernels: second copies of weights where a usual batch fits beside them."""
        longest = self.layout.target.max_length or USUAL
        usual = self.layout.plan(Need(max_rows, min(USUAL, longest), self.nodes))
        return "inplace" if asked == "auto" and usual.total > self.bytes else asked

    def bind(self, engine: Any, draft: Any) -> None:
        """Have an engine that was just assembled keep to it."""
        models = dict(models_of(engine, draft))
        held = self.layout.head + all_held(models, draft)
        layout = replace(self.layout, loaded=held)
        if models["target"].lean is None:  # its own modules run, with masks
            layout = replace(layout, target=replace(layout.target, in_c=False))
        if layout.draft is not None and "draft" in models:  # planned in the type of the target
            layout = replace(layout, draft=layout.draft.of_type(models["draft"].model.dtype))
        room = Room(layout, self.bytes, most_guessed(engine), not engine.drafter.traits.fixed)
        if not room.fits(1, LEAST, 0):
            raise too_small(self.bytes, held + layout.data, room.takes(1, LEAST, 0))
        for lm in models.values():
            lm.borrowing.kernels.spare_memory()
            lm.grant(1, LEAST)
        engine.waiting = Bounded(room, models.items(), engine.max_rows)
        collect()


def models_of(engine: Any, draft: Any) -> Iterator[tuple[str, CachedLM]]:
    """The models whose caches a budget sizes: the target, and whatever drafts with a cache."""
    yield "target", innermost(engine.target)  # type: ignore[misc]
    guesser = getattr(engine.drafter, "model", None)
    own = getattr(guesser, "decoder", None)  # of a head that reads states
    own = getattr(guesser, "lm", None) if own is None else own
    for role, lm in (("draft", draft), ("head", own)):
        found = None if lm is None else innermost(lm)
        if isinstance(found, CachedLM) and found is not innermost(engine.target):
            yield role, found
            return


def most_guessed(engine: Any) -> int:
    """Nodes of the largest draft that an engine may make, by the parts that it was made of."""
    if isinstance(engine.drafter, Nothing):
        return 0
    config = engine.controller.config
    sizes = {option.name: getattr(config, option.name) for option in fields(config)}
    return largest_of(sizes, engine.drafter.traits.shape is Shape.CHAIN)[1]


def all_held(models: Mapping[str, CachedLM], draft: Any) -> int:
    """Bytes of the weights of loaded models; of a head, which is counted by its card, only what
    kernels keep beside them."""
    held = 0
    for role, lm in models.items():
        whole = getattr(draft, "whole", None) if role == "draft" else None
        held += int(lm.kernels.extra_bytes) if role == "head" else weights_held(lm, whole)
    return held


def weights_held(lm: CachedLM, whole: Any = None) -> int:
    """Bytes of a loaded model's parameters and buffers, and of second copies beside them.

    `whole` is the model of whose output layer this one has some rows: it has to stay as well.
    """
    models = [lm.model] if whole is None else [lm.model, whole]
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    held: dict[int, int] = {one.data_ptr(): one.nbytes for one in tensors}
    return sum(held.values()) + int(lm.kernels.extra_bytes)


def too_small(budget: int, weights: int, generation: int) -> CapabilityError:
    return CapabilityError(
        f"a memory budget of {told(budget)} was asked for.",
        f"weights take {told(weights)}, and one text of {LEAST} tokens without guesses "
        f"{told(generation)} beside them.",
        f"pass memory_budget={enough(weights + generation)!r} or more, load in a smaller dtype, or "
        f"use a smaller model.",
    )

"""One forward of an unmodified model over the tokens of several rows: a mask, positions, a cache.

The attention function is switched for the length of the forward. The only caller of a model.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.lm.runtime import attention
from foretoken.lm.runtime.cache import SlotCache
from foretoken.lm.runtime.cache_attention import (
    Attention,
    CacheAttention,
    RowsApart,
    RowsTogether,
)
from foretoken.lm.runtime.captured import FILLING, HEADLESS, WHOLE, Call, Captured, Cut
from foretoken.lm.runtime.family import Family, Structure
from foretoken.lm.runtime.masks import Masks, Sights, window_bounds
from foretoken.lm.runtime.packing import Batch, Feed, Numbers, beginning, padded, repeated
from foretoken.lm.runtime.partial_forwards import Part, Stack
from foretoken.lm.runtime.plan import Plan
from foretoken.lm.runtime.slot_attention import InSlots, Reading, SlotAttention
from foretoken.lm.runtime.taps import tapping
from foretoken.types import Scores, Taps

_NOTHING = nullcontext()
# Bytes of padded columns per row and layer that cost what attention of one more row costs to call.
MOST_WASTED = 150_000


class Replays(Protocol):
    """Captured forwards (`kernels.graphs`)."""

    def logits(self, batch: Batch) -> Tensor | None:
        """Logits of a batch; None where it is one for the ordinary forward."""
        ...

    def drop(self) -> None:
        """Forget what was captured."""
        ...


class BatchForward:
    """A model, its slot cache, and how both are called."""

    plan: Plan
    vocab_size: int

    @property
    def lean(self) -> Captured | None:
        """The model as it was captured; None where its modules run."""
        return None

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.device: torch.device = model.device
        self.masks = Masks(model.dtype, self.device)
        self.empty_cache()
        self.span: Any = None  # of exact sums (`kernels.bits`); None where bits are not promised
        self.graphs: Replays | None = None
        self.numbers = Numbers(self.device)
        self._places: dict[tuple[int, int], Tensor] = {}
        self.structure = Structure.of(model, family.layers)
        self._layers, self._decoder = self.structure.layers, self.structure.decoder
        self._switch = attention.Switch(self.structure.configs)
        accepted = inspect.signature(model.forward).parameters
        self._positions_accepted = "position_ids" in accepted
        self._keep_accepted = "logits_to_keep" in accepted

    def empty_cache(self) -> None:
        """Forget all rows, and give their memory back."""
        self.cache = SlotCache(self.family.layers)
        self.in_slots = InSlots(self.cache, self.family.fold)

    def grant(self, slots: int, columns: int) -> None:
        """Have a cache of this size and no more, from the next forward on (`SlotCache.grant`).

        Attention is the one in C then, wherever it can be had: it needs no masks and no scores.
        """
        self.cache.grant(slots, columns)
        self.in_slots.always()

    @cached_property
    def stack(self) -> Stack:
        """The decoder layers, some of which a forward may leave out."""
        return Stack(self.model, self._layers)

    def _run(self, feeds: list[Feed], taps: Taps, part: Part | None = None) -> list[Scores]:
        """Forward the feeds together where rows may differ in length, else one by one."""
        if not self.cache.groups:
            self._begin(feeds)
        if len(feeds) == 1 and feeds[0].tokens:
            return [self._run_one(feeds[0], taps, part)]
        fed = [feed for feed in feeds if feed.tokens]
        if not fed:
            return [Scores(self.masks.nothing.new_zeros(0, self.vocab_size)) for _ in feeds]
        fed.sort(key=_slot)
        together = len(fed) > 1 and self.plan.ragged
        if together and part is None and self.lean is not None and self._lies_flat(fed):
            ran = self._run_flat(fed, taps)
        elif together and self._fits_padded(fed):
            ran = self._run_together(fed, taps, part)
        else:
            ran = [self._run_one(feed, taps, part) for feed in fed]
        said = {feed.memory.slot: score for feed, score in zip(fed, ran, strict=True)}
        hidden = None if ran[0].hidden is None else ran[0].hidden[:0]
        none = Scores(ran[0].logits[:0], hidden)
        return [said.get(feed.memory.slot, none) for feed in feeds]

    def _begin(self, feeds: list[Feed]) -> None:
        """Have the cache's buffers made by a token alone, where attention in C waits for them: with
        another attention the first text would round as no later one does."""
        possible = self.lean is not None and self.lean.plain_scores and self.device.type == "cpu"
        if possible and self.in_slots.waits() and any(feed.tokens for feed in feeds):
            self._run_one(beginning(feeds), (), None)

    def _fits_padded(self, feeds: list[Feed]) -> bool:
        """Whether the cache was granted the columns that a padded batch of these would have."""
        width = max([len(feed.tokens) for feed in feeds])
        return self.cache.takes(max([feed.start for feed in feeds]) + width)

    def _run_together(self, feeds: list[Feed], taps: Taps, part: Part | None) -> list[Scores]:
        """One forward over rows by ascending slot."""
        batch = self._batch(feeds)
        logits, hidden = self._forward(batch, taps, part)
        scores = []
        for i, feed in enumerate(feeds):
            feed.settle()
            stop = len(feed.tokens)
            last = (i + 1) * batch.kept - (batch.width - stop)
            features = None if hidden is None else hidden[i, feed.tapped : stop]
            scores.append(Scores(logits[last - feed.scored : last], features))
        return scores

    def _lies_flat(self, feeds: list[Feed]) -> bool:
        """Whether rows can be laid end to end: on a CPU, behind one prefill, no window in sight."""
        if self.device.type != "cpu" or window_bounds(feeds, self.family.windows):
            return False
        self.cache.reserve([feed.memory.slot for feed in feeds], [feed.stop for feed in feeds])
        self.cache.aim([feeds[0].memory.slot], [feeds[0].start], 1, 1, {}, self.device)
        return self.cache.in_place

    def _run_flat(self, feeds: list[Feed], taps: Taps) -> list[Scores]:
        """One forward over rows laid end to end: nothing is padded but attention, where that pays.

        Products cost what the tokens cost, and logits are made where they are wanted.
        """
        stops = list(accumulate(len(feed.tokens) for feed in feeds))
        starts = [0, *stops[:-1]]
        numbers = [
            [token for feed in feeds for token in feed.tokens],
            [position for feed in feeds for position in feed.positions],
        ]
        ids, positions = torch.tensor(numbers).unsqueeze(1).unbind()
        wanted = [
            place for feed, stop in zip(feeds, stops, strict=True)
            for place in range(stop - feed.scored, stop)
        ]  # fmt: skip
        attend = self._attention_apart(feeds, starts, stops, ids, positions)
        lean = self.lean
        assert lean is not None
        cut, places = WHOLE if wanted else prompt_cut(taps), torch.tensor(wanted)
        given = [feed.embedded for feed in feeds if feed.embedded is not None]
        embedded = torch.cat(given)[None] if given else None
        *tapped, logits = lean.run(ids, positions, places, attend, taps, cut, embedded)
        states = _side_by_side(tapped)
        hidden = None if states is None else states[0]
        if not wanted:
            logits = self.masks.nothing.new_zeros(0, self.vocab_size)
        parts = torch.split(logits, [feed.scored for feed in feeds])
        scores = []
        for feed, part, start, stop in zip(feeds, parts, starts, stops, strict=True):
            feed.settle()
            first = stop - feed.scored if feed.scored else start
            scores.append(Scores(part, None if hidden is None else hidden[first:stop]))
        return scores

    def _attention(self, batch: Batch) -> Attention:
        """How one row, or a padded batch, attends."""
        lean, feeds, windows = self.lean, batch.feeds, self.family.windows
        alone = lean is not None and lean.plain_scores and len(feeds) == 1
        if alone and not window_bounds(feeds, windows):
            self._aim(batch, {})
            found = self._attention_in_slots(feeds, [0], [batch.width])
            if found is not None:
                return found
        return CacheAttention(self.cache, self._sights(batch), windows)

    def _sights(self, batch: Batch) -> Sights:
        """What a batch sees in the cache, which is pointed at its rows."""
        sights = self.masks.sights(batch, self.family, self.plan)
        self._aim(batch, sights.lows(self.family))
        return sights

    def _aim(self, batch: Batch, lows: dict[int, int]) -> None:
        slots = [feed.memory.slot for feed in batch.feeds]
        starts = [feed.start for feed in batch.feeds]
        self.cache.aim(slots, starts, batch.width, batch.longest, lows, self.device)

    def _attention_apart(
        self, feeds: list[Feed], starts: list[int], stops: list[int], ids: Tensor, positions: Tensor
    ) -> Attention:
        """How rows laid end to end attend: as a padded batch, or each over its own columns."""
        if self.lean is not None and self.lean.plain_scores:
            found = self._attention_in_slots(feeds, starts, stops)
            if found is not None:
                return found
        longest = max(feed.stop for feed in feeds)
        widths = {len(feed.tokens) for feed in feeds}
        wasted = sum(longest - feed.stop for feed in feeds) * self.cache.column_bytes
        windows = self.family.windows
        if len(widths) == 1 and wasted <= MOST_WASTED * len(feeds):
            [width] = widths
            batch = Batch(feeds, width, longest, 1, ids, positions)
            slots = [feed.memory.slot for feed in feeds]
            sights = self.masks.sights(batch, self.family, self.plan)
            self.cache.aim(slots, [f.start for f in feeds], width, longest, {}, self.device)
            return RowsTogether(CacheAttention(self.cache, sights, windows), len(feeds))
        rows = []
        for feed, a, b in zip(feeds, starts, stops, strict=True):
            batch = Batch([feed], b - a, feed.stop, 1, ids[:, a:b], positions[:, a:b])
            sights = self.masks.sights(batch, self.family, self.plan).kept()
            self.cache.aim([feed.memory.slot], [feed.start], b - a, feed.stop, {}, self.device)
            rows.append((CacheAttention(self.cache, sights, windows), a, b))
        return RowsApart(rows)

    def _attention_in_slots(
        self, feeds: list[Feed], starts: list[int], stops: list[int]
    ) -> Attention | None:
        """Each over its own columns in one call per layer, where that can be had."""
        widest = max(len(feed.tokens) for feed in feeds)
        if not self.in_slots.takes(widest):
            return None  # before any mask is made
        kept: list[Tensor] = []
        rows = [
            self._reading(feed, a, b, kept) for feed, a, b in zip(feeds, starts, stops, strict=True)
        ]
        return SlotAttention(self.in_slots, rows, kept)

    def _reading(self, feed: Feed, first: int, last: int, kept: list[Tensor]) -> Reading:
        """What attention in C is told of a row; the mask that it points to is put to those kept."""
        unseen, mask = feed.unseen, None
        if not feed.in_order_behind(unseen):
            mask = self.masks.behind(feed, last - first)[:, unseen:]
            kept.append(mask)
        return Reading.of(feed.memory.slot, first, last, feed.start, mask, unseen)

    def _run_one(self, feed: Feed, taps: Taps, part: Part | None) -> Scores:
        """The forward of a lone row, which a draft model makes once per token."""
        if part is None and feed.scored and feed.embedded is None:
            found = self._run_in_slots(feed, taps)
            if found is not None:
                return found
        width = count = len(feed.tokens)
        if self.plan.ordered and count == 1:
            width = 2  # products of a single row round differently from all others
        tokens, positions = padded(feed.tokens, width), padded(feed.positions, width)
        both = self.numbers.of(tokens, positions)
        kept = width - count + feed.scored if feed.scored else 1
        batch = Batch([feed], width, feed.stop, kept, *both)
        if feed.embedded is not None:
            batch.embedded = repeated(feed.embedded, width)[None]
        logits, hidden = self._forward(batch, taps, part)
        feed.settle()
        if width > count or not feed.scored:  # places too many
            last = kept - (width - count)
            logits = logits[last - feed.scored : last]
        return Scores(logits, None if hidden is None else hidden[0, feed.tapped : count])

    def _run_in_slots(self, feed: Feed, taps: Taps) -> Scores | None:
        """The same where attention of it can be had in C; nothing is made anew that could be kept.

        Behind a forward code and data are cold: each object more costs a microsecond or several.
        """
        lean, width, slot = self.lean, len(feed.tokens), feed.memory.slot
        if lean is None or not lean.plain_scores or self.graphs is not None:
            return None
        if window_bounds([feed], self.family.windows):
            return None
        self.cache.reserve([slot], [feed.stop])
        if not self.in_slots.takes(width):
            return None
        kept: list[Tensor] = []
        attend = SlotAttention(self.in_slots, (self._reading(feed, 0, width, kept),), kept)
        ids, positions = self.numbers.of(feed.tokens, feed.positions)
        places = self._last(width, feed.scored)
        *tapped, logits = lean.run(ids, positions, places, attend, taps)
        feed.settle()
        states = _side_by_side(tapped)
        return Scores(logits, None if states is None else states[0, feed.tapped :])

    def _batch(self, feeds: list[Feed]) -> Batch:
        """Padded ids and positions, in one transfer."""
        rows = len(feeds)
        width = max([len(feed.tokens) for feed in feeds])
        numbers = [padded(feed.tokens, width) for feed in feeds]
        numbers += [padded(feed.positions, width) for feed in feeds]
        both = torch.tensor(numbers, device=self.device)
        scored = [len(feed.tokens) - feed.scored for feed in feeds if feed.scored]
        first = min(scored, default=width)
        longest = max([feed.stop for feed in feeds])
        batch = Batch(feeds, width, longest, max(1, width - first), both[:rows], both[rows:])
        given = [repeated(f.embedded, width) for f in feeds if f.embedded is not None]
        batch.embedded = torch.stack(given) if given else None
        return batch

    def _forward(self, batch: Batch, taps: Taps, part: Part | None) -> tuple[Tensor, Tensor | None]:
        """The model call: logits [B * kept, V] and tapped features [B, Q, L, H] of a batch."""
        if self.graphs is not None and not taps and part is None and batch.embedded is None:
            replayed = self.graphs.logits(batch)
            if replayed is not None:
                return replayed.flatten(0, 1), None
        feeds, family = batch.feeds, self.family
        slots = [feed.memory.slot for feed in feeds]
        self.cache.reserve(slots, [feed.start + batch.width for feed in feeds])
        if not self.plan.tree:
            self._aim(batch, {})
            arguments = {"attention_mask": self.masks.places(batch, family, self.plan)}
            return self._call(batch, arguments, taps, part)
        lean = self.lean
        if lean is not None:
            attend = self._attention(batch)
            call = Call(batch, self._last(batch.width, batch.kept), attend, taps)
            if part is not None:
                *tapped, logits = part.run(lean, call)
            elif any(feed.scored for feed in feeds):
                *tapped, logits = call.run(lean)
            else:  # a prompt's tokens
                *tapped, last = call.run(lean, prompt_cut(taps))
                logits = last.new_zeros(len(feeds) * batch.kept, 0)
            return logits, _side_by_side(tapped)
        arguments = self._sights(batch).arguments(family)
        if self.span is not None:
            arguments["order"] = self.span.order_of(feeds, batch.key_positions())
        return self._call(batch, arguments, taps, part)

    def _last(self, width: int, kept: int) -> Tensor:
        """Places that logits are wanted at."""
        found = self._places.get((width, kept))
        if found is None:
            if len(self._places) > 4096:
                self._places = {}
            found = torch.arange(width - kept, width, device=self.device)
            self._places[width, kept] = found
        return found

    def _call(
        self, batch: Batch, arguments: dict[str, Any], taps: Taps, part: Part | None
    ) -> tuple[Tensor, Tensor | None]:
        """The forward of the model's own modules, under our attention function."""
        if self._positions_accepted:
            arguments["position_ids"] = batch.positions
        headless = part is not None and not part.head
        if self._keep_accepted and not headless:
            arguments["logits_to_keep"] = batch.places if taps or part else batch.kept
        if batch.embedded is None:
            arguments["input_ids"] = batch.ids
        else:
            arguments["inputs_embeds"] = batch.embedded
        arguments |= {"past_key_values": self.cache, "use_cache": True}
        run = self.stack.body if headless else self.model
        entered = _NOTHING if part is None else part.entered(self.stack, batch.feeds, batch.width)
        tapped: list[Tensor] = []
        with self._switch.to(self.plan.attention), entered:
            if taps:
                with tapping(self._layers, self._decoder, taps) as tapped:
                    output = run(**arguments)
            else:
                output = run(**arguments)
        logits = output.last_hidden_state[..., :0] if headless else output.logits
        if logits.shape[1] > batch.kept:
            logits = logits[:, -batch.kept :]
        return logits.flatten(0, 1), _side_by_side(tapped, self.device)


def _side_by_side(tapped: list[Tensor], device: torch.device | None = None) -> Tensor | None:
    """Tapped features [B, Q, L, H] of L layers, each [B, Q, H], on a device; one is not copied."""
    if device is not None:
        tapped = [states.to(device) for states in tapped]
    if len(tapped) > 1:
        return torch.stack(tapped, dim=2)
    return tapped[0].unsqueeze(2) if tapped else None


def prompt_cut(taps: Taps) -> Cut:
    """What runs for tokens of prompts: no head, and only what fills the cache if nobody listens."""
    return HEADLESS if taps else FILLING


def _slot(feed: Feed) -> int:
    return feed.memory.slot

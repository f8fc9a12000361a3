"""CachedLM: a transformers causal LM that scores trees and takes them back.

The model is not altered: trees travel as a 4-D mask and positions, rows live in a slot cache, and
the attention function is switched for the length of one forward. The only caller of a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm import attention
from foretoken.lm.bits import Span, order_of
from foretoken.lm.bits_probe import promise_bits
from foretoken.lm.cache import SlotCache
from foretoken.lm.exits import finish
from foretoken.lm.family import attention_configs, decoder_layers, decoder_of, describe
from foretoken.lm.fast import KernelReport, choose_kernels, restore
from foretoken.lm.feed import Batch, Feed, Memory, committed_feed, renewed_feed, tree_feed
from foretoken.lm.graphs import Graphs
from foretoken.lm.hidden import tapping
from foretoken.lm.inferring import inferring
from foretoken.lm.leaving import score_leaving
from foretoken.lm.masking import Masks
from foretoken.lm.plan import Plan
from foretoken.lm.probe import choose_plan
from foretoken.lm.shadow import Watched
from foretoken.lm.stages import Part, Stage
from foretoken.lm.viewed import Viewed
from foretoken.trees.masks import depths
from foretoken.types import DecodeState, Draft, Scores

_NOTHING = nullcontext()
CHUNK = 512  # tokens of a prompt fed together: a mask of a whole long prompt would not fit


class CachedLM(Viewed):
    """The LanguageModel protocol over an unmodified transformers model.

    `kernels` is a mode of `lm.fast.choose_kernels`. `exact_bits` promises logits and cache whose
    bits do not depend on what is scored together (`lm.bits`), or refuses with the reason. Use as a
    context manager, or call `close`, to get the model back as it was: dense kernels, training mode.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str = "target",
        exact_bits: bool = False,
        kernels: str = "auto",
    ) -> None:
        self.family = describe(model)
        self.model, self.name, self.exact_bits = model, name, exact_bits
        self.was_training = model.training
        model.eval()
        self.device: torch.device = model.device
        self.masks = Masks(model.dtype, self.device)
        self.cache = SlotCache(self.family.layers)
        self.max_length, self.hidden_size = self.family.max_length, self.family.hidden
        self._rows: dict[int, Memory] = {}  # uid -> memory, any order
        self._slots: list[int] = []  # slot -> uid
        self._layers = decoder_layers(model, self.family.layers)
        self._decoder = decoder_of(model)
        self._switch = attention.Switch(attention_configs(model))
        accepted = inspect.signature(model.forward).parameters
        self._positions_accepted = "position_ids" in accepted
        self._keep_accepted = "logits_to_keep" in accepted
        self.plan: Plan
        self.span: Span | None = None  # of exact sums; None where bits are not promised
        self.graphs: Graphs | None = None
        self.watched: Watched | None = None  # hidden states that a view wants of every prompt
        self.caps, self.vocab_size = choose_plan(self)
        self.kernels: KernelReport | None = None
        if exact_bits:
            self.kernels = promise_bits(self)
        elif kernels != "dense":
            self.kernels = choose_kernels(model, kernels)
        if self.device.type == "cuda" and self.plan.tree:
            self.graphs = Graphs(self)

    def __enter__(self) -> CachedLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget all rows and give the model back as it was."""
        if self.kernels is not None:
            restore(self.model)
        self.model.train(self.was_training)
        self.reset()

    def reset(self) -> None:
        """Forget all rows and give their memory back."""
        self._rows, self._slots = {}, []
        self.cache = SlotCache(self.family.layers)

    @inferring
    def prefill(
        self, row: DecodeState, taps: tuple[int, ...] = ()
    ) -> Float[Tensor, "S L H"] | None:
        """Cache all tokens of the row but the last."""
        assert row.uid not in self._rows, "prefill of a row that is already cached"
        memory = Memory(slot=len(self._slots))
        self._rows[row.uid] = memory
        self._slots.append(row.uid)
        parts = self._fill(memory, row.tokens, taps)
        if not taps:
            return None
        if not parts:
            like = self.masks.nothing
            return like.new_zeros(0, len(taps), self.family.hidden)
        return torch.cat(parts)

    @inferring
    def score(
        self, rows: Sequence[DecodeState], drafts: Sequence[Draft], taps: tuple[int, ...] = ()
    ) -> list[Scores]:
        """One forward over every row's tree; uncached committed tokens are fed along."""
        trees = [draft.tree for draft in drafts]
        memories = [self._memory(row) for row in rows]
        early = [memory.early for memory in memories]
        wishes = [memory.leave for memory in memories]
        for memory in memories:
            memory.forget()
        if any(early) and not taps:
            return finish(self, rows, trees, early)
        if any(wishes) and not taps:
            return score_leaving(self, rows, trees, wishes)
        scored = self._advance(
            rows, [tree.tokens for tree in trees], [tree.parents for tree in trees], taps
        )
        return [Scores(logits, hidden) for logits, hidden in scored]

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> list[Float[Tensor, "n V"]]:
        """Append nodes to the rows' open trees; a parent of -1 opens a new one."""
        return [score.logits for score in self.grow_scores(rows, tokens, parents, ())]

    @inferring
    def grow_scores(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        taps: tuple[int, ...],
    ) -> list[Scores]:
        """As `grow`, with tapped features."""
        for row, above in zip(rows, parents, strict=True):
            if above and above[0] < 0:
                self._memory(row).forget()
        scored = self._advance(rows, tokens, parents, taps)
        return [Scores(logits, hidden) for logits, hidden in scored]

    @inferring
    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        """Keep the root and `path` of each open tree, forget the rest."""
        for row, path in zip(rows, paths, strict=True):
            memory = self._memory(row)
            nodes = [0, *path]
            assert nodes[-1] < len(memory.tokens), "commit of a node that was never fed"
            if memory.partial:  # the other layers know nothing of them yet: they are fed again
                memory.forget()
                continue
            self.cache.keep(memory.slot, memory.cached, nodes)
            memory.cached += len(nodes)
            memory.forget()

    @inferring
    def prune(
        self,
        rows: Sequence[DecodeState],
        kept: Sequence[Sequence[int]],
        settled: Sequence[int],
    ) -> None:
        """Keep ascending nodes of each open tree; the first `settled` ones become cached tokens."""
        for row, nodes, count in zip(rows, kept, settled, strict=True):
            memory = self._memory(row)
            self.cache.keep(memory.slot, memory.cached, nodes)
            memory.prune(nodes, count)

    @inferring
    def free(self, rows: Sequence[DecodeState]) -> None:
        """Forget rows. The last slot's row moves into the gap, so that slots stay contiguous."""
        for row in rows:
            memory = self._rows.pop(row.uid, None)
            if memory is None:
                continue
            last = self._slots.pop()
            if last != row.uid:
                moved = self._rows[last]
                self.cache.move(moved.slot, memory.slot, moved.cached + len(moved.tokens))
                moved.slot = memory.slot
                self._slots[memory.slot] = last

    @property
    def rows_held(self) -> int:
        return len(self._rows)

    def _memory(self, row: DecodeState) -> Memory:
        memory = self._rows.get(row.uid)
        assert memory is not None, "a row that was never prefilled, or was freed"
        return memory

    def _fill(self, memory: Memory, tokens: list[int], taps: tuple[int, ...]) -> list[Tensor]:
        """Cache committed tokens but the last, in chunks; their tapped features."""
        parts: list[Tensor] = []
        stop, switch = len(tokens) - 1, self.family.switch
        memory.far = switch is not None and stop > switch
        step = stop if memory.far else CHUNK  # longrope scales by the last position of a call
        while memory.cached < stop:
            feed = committed_feed(memory, tokens, min(stop, memory.cached + step))
            if self.watched is not None and feed.cached == stop and not taps:
                stage = Stage(0, self.layers, head=False, last=self.watched.last)
                [(_, memory.shown)] = self._run([feed], self.watched.taps, stage)
                continue
            [(_, hidden)] = self._run([feed], taps)
            if hidden is not None:
                parts.append(hidden)
        return parts

    def _advance(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        taps: tuple[int, ...],
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Logits and tapped features of new nodes."""
        if self.family.switch is not None:
            return [
                self._advance_scaled(row, new, above, taps)
                for row, new, above in zip(rows, tokens, parents, strict=True)
            ]
        feeds = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            memory = self._memory(row)
            if not memory.tokens and len(row.tokens) - 1 - memory.cached > CHUNK:
                self._fill(memory, row.tokens, ())
            missing = () if memory.tokens else row.tokens[memory.cached : -1]
            feeds.append(tree_feed(memory, missing, new, above))
        return self._run(feeds, taps)

    def _advance_scaled(
        self,
        row: DecodeState,
        tokens: Sequence[int],
        parents: Sequence[int],
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """As `_advance` for longrope, whose scaling follows the last position of a call.

        Nodes on both sides of the switch are scored in one call each, and the columns are always
        those that a forward over the row without a cache would have made.
        """
        memory, switch = self._memory(row), self.family.switch
        assert switch is not None
        root = len(row.tokens) - 1
        beyond = [root + depth >= switch for depth in depths(parents, memory.depths)]
        sides = sorted(set(beyond))
        parts = []
        for side in sides:
            if len(sides) == 1 and memory.far == side:
                missing = () if memory.tokens else row.tokens[memory.cached : -1]
                feed = tree_feed(memory, missing, tokens, parents)
            else:
                feed = renewed_feed(memory, row.tokens[:-1], tokens, parents, side, switch)
                if side != sides[-1]:
                    feed.nodes = None  # they enter the tree with the second call
            parts += self._run([feed], taps)
            memory.far = side
        if len(parts) == 1:
            return parts[0]
        far = torch.tensor(beyond, device=self.device)
        (near_logits, near_hidden), (far_logits, far_hidden) = parts
        logits = torch.where(far[:, None], far_logits, near_logits)
        if near_hidden is None or far_hidden is None:
            return logits, None
        return logits, torch.where(far[:, None, None], far_hidden, near_hidden)

    def _run(
        self, feeds: list[Feed], taps: tuple[int, ...], part: Part | None = None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Forward the feeds together where rows may differ in length, else one by one."""
        fed = [feed for feed in feeds if feed.tokens]
        if not self.plan.ragged and len(fed) > 1:
            return [self._run([feed], taps, part)[0] for feed in feeds]
        if not fed:
            return [(self.masks.nothing.new_zeros(0, self.vocab_size), None) for _ in feeds]
        fed.sort(key=_slot)
        batch = self._batch(fed)
        logits, hidden = self._forward(batch, taps, part)
        if len(feeds) == 1 and hidden is None and logits.shape[1] == feeds[0].scored:
            feeds[0].settle()
            return [(logits[0], None)]
        rows: dict[int, tuple[Tensor, Tensor | None]] = {}
        skipped = batch.width - logits.shape[1]
        for i, feed in enumerate(fed):
            feed.settle()
            stop = len(feed.tokens)
            start = stop - feed.scored
            features = None
            if hidden is not None:
                features = hidden[i, start if feed.scored else 0 : stop]
            rows[feed.memory.slot] = logits[i, start - skipped : stop - skipped], features
        none = logits[0, :0], None if hidden is None else hidden[0, :0]
        return [rows.get(feed.memory.slot, none) for feed in feeds]

    def _batch(self, feeds: list[Feed]) -> Batch:
        """Padded ids and positions, in one transfer."""
        rows = len(feeds)
        width = max([len(feed.tokens) for feed in feeds])
        if self.exact_bits and width == rows == 1:
            width = 2  # products of a single row round differently from all others
        numbers = [_padded(feed.tokens, width) for feed in feeds]
        numbers += [_padded(feed.positions, width) for feed in feeds]
        both = torch.tensor(numbers, device=self.device)
        first = min([len(feed.tokens) - feed.scored for feed in feeds])
        longest = max([feed.stop for feed in feeds])
        return Batch(feeds, width, longest, max(1, width - first), both[:rows], both[rows:])

    def _forward(
        self, batch: Batch, taps: tuple[int, ...], part: Part | None
    ) -> tuple[Tensor, Tensor | None]:
        """The model call: logits [B, kept, V] and tapped features [B, Q, L, H] of a batch."""
        if self.graphs is not None and not taps and part is None:
            replayed = self.graphs.logits(batch)
            if replayed is not None:
                return replayed, None
        feeds, width = batch.feeds, batch.width
        columns = max([feed.start for feed in feeds]) + width
        self.cache.reserve(feeds[-1].memory.slot + 1, columns)
        arguments, lows = self.masks.arguments(batch, self.family, self.plan)
        self.cache.aim(
            [feed.memory.slot for feed in feeds],
            [feed.start for feed in feeds],
            width,
            batch.longest,
            lows,
            self.device,
        )
        if self.span is not None:
            arguments["order"] = order_of(self.span, feeds, batch.key_positions())
        if self._positions_accepted:
            arguments["position_ids"] = batch.positions
        headless = part is not None and not part.head
        if self._keep_accepted and not headless:
            arguments["logits_to_keep"] = batch.kept
        arguments |= {"input_ids": batch.ids, "past_key_values": self.cache, "use_cache": True}
        run = self.stack.body if headless else self.model
        entered = _NOTHING if part is None else part.entered(self.stack, feeds, width)
        tapped: list[Tensor] = []
        with self._switch.to(self.plan.attention), entered:
            if taps:
                last = None if part is None else part.last
                with tapping(self._layers, self._decoder, taps, last) as tapped:
                    output = run(**arguments)
            else:
                output = run(**arguments)
        logits = output.last_hidden_state[..., :0] if headless else output.logits
        if logits.shape[1] > batch.kept:
            logits = logits[:, -batch.kept :]
        return logits, torch.stack(tapped, dim=2) if taps else None


def _slot(feed: Feed) -> int:
    return feed.memory.slot


def _padded(numbers: list[int], width: int) -> list[int]:
    missing = width - len(numbers)
    return numbers + numbers[-1:] * missing if missing else numbers

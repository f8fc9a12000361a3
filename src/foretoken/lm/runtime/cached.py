"""CachedLM: a transformers causal LM that scores trees and takes them back.

The model is not altered: trees travel as a 4-D mask and positions, and rows live in a slot cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.lm.runtime.batch_forward import BatchForward
from foretoken.lm.runtime.captured import Captured, end_of
from foretoken.lm.runtime.family import Family
from foretoken.lm.runtime.heap import give_back, sparing
from foretoken.lm.runtime.layer_cache import SlotLayerCache
from foretoken.lm.runtime.output_head import OutputHead
from foretoken.lm.runtime.packing import (
    Memory,
    committed_feed,
    tree_feed,
)
from foretoken.lm.runtime.prefixes import Prefixes, column_size, keep_text, retire
from foretoken.lm.runtime.scaled_rows import advance_scaled
from foretoken.lm.runtime.self_check import compare_with_fresh
from foretoken.lm.runtime.sharing import exclusive, shared_by
from foretoken.lm.runtime.trees_at_once import TreesAtOnce
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import Caps, DecodeState, Draft, Ragged, Rows, Scores, Taps

CHUNK = 512  # tokens of prompts fed together: a mask of a whole long prompt would not fit
NARROW = 32  # tokens of each, however many prompts


class CachedLM(BatchForward):
    """The LanguageModel protocol over an unmodified transformers model.

    `opening.open_lm` makes one: it finds the plan, and attaches kernels and captured graphs. Leave
    it as a context manager, or call `close`, to get the model back as it was.
    """

    caps: Caps
    lossless = True

    def __init__(
        self, model: Any, family: Family, borrowing: Any = None, name: str = "target"
    ) -> None:
        super().__init__(model, family)
        self.name = name
        self.borrowing = borrowing  # `kernels.borrowed`: evaluation mode and kernels, shared
        self.shared = shared_by(model)
        self.lock = self.shared.lock
        self.layers, self.hidden_size = family.layers, family.hidden
        self.max_length = family.max_length
        self._rows: dict[int, Memory] = {}  # uid -> memory, any order
        self._slots: list[int] = []  # slot -> uid
        self._layer_caches: dict[int, SlotLayerCache] = {}  # by layer, once they were asked for
        self.kernels: Any = None  # KernelReport of what stands in for linear layers
        self.prefixes: Prefixes | None = None  # of texts that are over; None: nothing is kept
        self._read_by: OutputHead | None = None  # what read states last

    def __enter__(self) -> CachedLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @exclusive
    def close(self) -> None:
        """Forget all rows and give the model back as it was."""
        self.borrowing.close()
        self.reset()

    @property
    def lean(self) -> Captured | None:
        """The model as it was captured; None where its modules run."""
        found: Captured | None = None if self.borrowing is None else self.borrowing.lean
        return found

    @property
    def closed(self) -> bool:
        return bool(self.borrowing.closed)

    def check_usable(self) -> None:
        """ConfigError where the model was closed, or set to training mode since it was loaded."""
        self.borrowing.check_usable()

    @exclusive
    def refresh(self, full: bool = False) -> int:
        """Follow weights that were changed or replaced since the last look; how many there were.

        The look takes about a millisecond; `full` compares every number that was copied.
        """
        found = self.borrowing.refresh(full, self.structure.check)
        if full or found.weights or found.patched:
            self.shared.changes += 1
            if self.prefixes is not None:
                self.prefixes.clear()
        if found.patched and self.graphs is not None:
            self.graphs.drop()  # captured at addresses that may be others' by now
            self.graphs = None if found.hooked else self.graphs  # hooks read what may change
        return int(found.weights)

    def reset(self) -> None:
        """Forget all rows and give their memory back."""
        self._rows, self._slots = {}, []
        if self.prefixes is not None:
            self.prefixes.clear()
        self.empty_cache()

    @cached_property
    def trees_at_once(self) -> TreesAtOnce:
        """What grows trees in one call."""
        return TreesAtOnce(self.model.dtype)

    @property
    def _head(self) -> OutputHead:
        """What reads states; looked at anew where the model has another output layer by now."""
        if self._read_by is None or self._read_by.head is not self.model.get_output_embeddings():
            self._read_by = OutputHead(self.model, self._decoder)
        return self._read_by

    def grant(self, slots: int, columns: int) -> None:
        """A cache of this size and no more, and no graphs: no plan knows what they take."""
        super().grant(slots, columns)
        self.graphs = None

    @exclusive
    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        """Cache tokens of the rows, all but the last or `limit` more; features of those fed now.

        A row that begins as a text whose prefix was kept takes it over: those tokens count as fed.
        """
        begun: list[list[Tensor]] = [[] for _ in rows]
        for i, row in enumerate(rows):
            known = row.uid in self._rows
            memory = self._entered(row)
            assert not known or not memory.cached or self.missing(row), "it was already cached"
            if not known and self.prefixes is not None:
                begun[i] = self._resume(self.prefixes, row, memory, taps, last)
        parts = self._fill(rows, taps, limit, last)
        if not taps:
            return [None] * len(rows)
        none = self.masks.nothing.new_zeros(0, len(taps), self.hidden_size)
        fed = [torch.cat([*own, *part] or [none]) for own, part in zip(begun, parts, strict=True)]
        if self.prefixes is not None and last is None:
            for row, states in zip(rows, fed, strict=True):
                self._memory(row).listen(states, taps, self.prefixes.limit, column_size(self.cache))
        return [states if last is None else states[-last:] for states in fed]

    def keep_prefixes(self, limit: int) -> None:
        """Keep up to so many bytes of texts that are over, for texts that begin alike; 0: none."""
        self.prefixes = Prefixes(limit) if limit and self.family.switch is None else None

    @exclusive
    def keep_text(self, row: DecodeState) -> None:
        """Keep what is cached of a row that goes on, for those that begin as it does, if anything
        is kept at all."""
        if self.prefixes is not None:
            keep_text(row, self._memory(row), self.cache, self.prefixes)

    def _resume(
        self, prefixes: Prefixes, row: DecodeState, memory: Memory, taps: Taps, last: int | None
    ) -> list[Tensor]:
        """Take over what is kept of a text that begins alike; the features of those tokens.

        Features that were not kept have to be made, so their tokens are fed.
        """
        if row.rehearsal:
            return []
        most = len(row.tokens) - 1 - ((last or 0) if taps else 0)
        wanted = taps if last is None else ()
        found = prefixes.find(row.tokens, most, wanted, row.owner) if most > 0 else None
        if found is None:
            return []
        prefix, shared = found
        self.cache.reserve([memory.slot], [shared])
        if not self.cache.put(memory.slot, prefix.columns, shared):
            prefixes.clear()  # made for other buffers
            return []
        memory.cached = row.reused[self.name] = shared
        if not wanted or prefix.features is None:
            return []
        return [prefix.features[:shared]]

    @exclusive
    def supply(self, row: DecodeState, embedded: Float[Tensor, "n H"]) -> None:
        """What stands for the embeddings of the tokens of this row that are fed next, in order.

        From then on every token of the row needs its own.
        """
        self._entered(row).supplied = embedded

    def _entered(self, row: DecodeState) -> Memory:
        """What is kept of a row, which is known from now on."""
        if row.uid not in self._rows:
            self._rows[row.uid] = Memory(len(self._slots), weights=self.shared)
            self._slots.append(row.uid)
            self.cache.used = len(self._slots)
        return self._rows[row.uid]

    def forget_states(self) -> None:
        """Keep none of the rows that there are, for whoever begins alike."""
        for memory in self._rows.values():
            memory.fed.clear()

    def missing(self, row: DecodeState) -> int:
        """Committed tokens that are not cached yet, the last one aside."""
        memory = self._rows.get(row.uid)
        return len(row.tokens) - 1 - (0 if memory is None else memory.cached)

    @exclusive
    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        """One forward over every row's tree; uncached committed tokens are fed along."""
        for row in rows:
            self._memory(row).forget()
        trees = [draft.tree for draft in drafts]
        return self._advance(
            rows, [tree.tokens for tree in trees], [tree.parents for tree in trees], taps
        )

    @exclusive
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Append nodes to the rows' open trees; a parent of -1 opens a new one."""
        for row, above in zip(rows, parents, strict=True):
            if above and above[0] < 0:
                self._memory(row).forget()
        return self._advance(rows, tokens, parents, taps)

    @exclusive
    def grow_trees(
        self,
        rows: Rows,
        rules: Sequence[GrowthRule],
        names: Tensor | None = None,
        table: Float[Tensor, "V H"] | None = None,
    ) -> list[Grown | None]:
        """Open a new tree of each row and let it grow; None: to be asked level by level instead.

        `names` are the tokens of the first columns of the logits, where others are not meant. With
        a `table`, what was supplied enters up to the root, and at other nodes the table's row of
        the token and what was said at the parent: the logits behind those of `names`.
        """
        memories = [*map(self._memory, rows)]
        return self.trees_at_once.grow(self, rows, memories, rules, names, table)

    @exclusive
    def commit(self, rows: Rows, paths: Ragged) -> None:
        """Keep the root and `path` of each open tree, forget the rest."""
        for row, path in zip(rows, paths, strict=True):
            memory = self._memory(row)
            assert max(path, default=0) < len(memory.tokens), "commit of a node that was never fed"
            if path:
                self.cache.keep(memory.slot, memory.cached, [0, *path])
            memory.cached += 1 + len(path)
            memory.forget()

    @exclusive
    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
        """Keep ascending nodes of each open tree; the first `settled` ones become cached tokens."""
        for row, nodes, count in zip(rows, kept, settled, strict=True):
            memory = self._memory(row)
            self.cache.keep(memory.slot, memory.cached, nodes)
            memory.prune(nodes, count)

    @exclusive
    def free(self, rows: Rows) -> None:
        """Forget rows. The last slot's row moves into the gap, so that slots stay contiguous."""
        for row in rows:
            memory = self._rows.pop(row.uid, None)
            if memory is None:
                continue
            if self.prefixes is not None:
                retire(row, memory, row.reused.get(self.name, 0), self.cache, self.prefixes)
            last = self._slots.pop()
            if last != row.uid:
                moved = self._rows[last]
                self.cache.move(moved.slot, memory.slot)
                moved.slot = memory.slot
                self._slots[memory.slot] = last
            self.cache.used = len(self._slots)
            self.cache.vacate(self.cache.used)

    @exclusive
    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n H"]:
        """Input embeddings, as they enter the first layer."""
        embedded: Tensor = self.model.get_input_embeddings()(
            torch.tensor(tokens, dtype=torch.long, device=self.device)
        )
        return embedded

    @exclusive
    def unembed(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Logits of hidden states behind the last norm, as the model's own forward makes them."""
        lean = self.lean
        return self._head(hidden) if lean is None else end_of(lean, hidden, lean.layers + 1)

    def layer_cache(self, layer: int) -> SlotLayerCache:
        """What layer `layer` keeps of cached tokens, as views of the slot cache."""
        if layer not in self._layer_caches:
            self._layer_caches[layer] = SlotLayerCache(self, layer)
        return self._layer_caches[layer]

    @exclusive
    def columns(self, row: DecodeState, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values [heads, S, size] of a row's cached tokens in a layer, where they lie;
        None before the first forward.
        """
        memory = self._memory(row)
        return self.cache.kept(layer, memory.slot, memory.cached)

    @exclusive
    def read_out(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Logits of hidden states behind any layer: the model's own norm and head."""
        lean = self.lean
        return self.stack.read_out(states) if lean is None else end_of(lean, states, lean.layers)

    @exclusive
    def self_check(self, row: DecodeState) -> None:
        """CapabilityError where the cache says another next token than a forward without it, as
        behaviour that sets in late (windows, scalings) may have it. Closes the row's open tree."""
        memory = self._memory(row)
        self.refresh()  # nobody may have looked since the row began
        if memory.stale:
            return  # its first columns are of other weights: a fresh forward would say others
        memory.forget()
        [score] = self._advance([row], [row.tokens[-1:]], [[-1]], ())
        memory.forget()
        keep = {"logits_to_keep": 1} if self._keep_accepted else {}
        compare_with_fresh(self.model, row.tokens, score.logits[0], self.verified, **keep)
        if self.cache.exact:
            give_back()
        self.shared.verified = max(self.shared.verified, len(row.tokens))

    @property
    def verified(self) -> float:
        """Tokens up to which logits from the cache were seen to be right."""
        return self.shared.verified

    @property
    def rows_held(self) -> int:
        return len(self._rows)

    def _memory(self, row: DecodeState) -> Memory:
        memory = self._rows.get(row.uid)
        assert memory is not None, "a row that was never prefilled, or was freed"
        return memory

    def _fill(
        self, rows: Rows, taps: Taps = (), limit: int | None = None, last: int | None = None
    ) -> list[list[Tensor]]:
        """Cache committed tokens but the last, in chunks, all rows in turn; tapped features."""
        switch = self.family.switch
        stops = [len(row.tokens) - 1 for row in rows]
        parts: list[list[Tensor]] = [[] for _ in rows]
        for i, row in enumerate(rows):
            memory = self._memory(row)
            memory.far = switch is not None and stops[i] > switch
            if limit is not None and not memory.far:
                stops[i] = min(stops[i], memory.cached + limit)
        while due := [i for i, row in enumerate(rows) if self._memory(row).cached < stops[i]]:
            step, feeds = max(CHUNK // len(due), NARROW), []
            for i in due:
                memory = self._memory(rows[i])
                # longrope scales by the last position of a call
                stop = stops[i] if memory.far else min(stops[i], memory.cached + step)
                feeds.append(committed_feed(memory, rows[i].tokens, stop))
            wanted = [last is None or feed.cached > stops[i] - last
                      for i, feed in zip(due, feeds, strict=True)]  # fmt: skip
            with sparing(self.cache.exact and sum(len(feed.tokens) for feed in feeds) > NARROW):
                ran = self._run(feeds, taps if any(wanted) else ())
            for i, score, keep in zip(due, ran, wanted, strict=True):
                if keep and score.hidden is not None:
                    parts[i].append(score.hidden)
        return parts

    def _advance(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps) -> list[Scores]:
        """Logits and tapped features of new nodes."""
        if self.family.switch is not None:
            memories = [self._memory(row) for row in rows]
            return [
                advance_scaled(self._run, self.family.switch, memory, row, new, above, taps)
                for memory, row, new, above in zip(memories, rows, tokens, parents, strict=True)
            ]
        feeds = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            memory = self._memory(row)
            if not memory.tokens and len(row.tokens) - 1 - memory.cached > CHUNK:
                self._fill([row])
            missing = () if memory.tokens else row.tokens[memory.cached : -1]
            feeds.append(tree_feed(memory, missing, new, above))
        with sparing(self.cache.exact and sum(map(len, tokens)) > NARROW):
            return self._run(feeds, taps)

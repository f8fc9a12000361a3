"""A draft left behind the first of its exits that is sure enough (S2D, arXiv 2407.01955).

Each call leaves a row's layers where the likeliest of its tokens reaches the exit's threshold.
Layers behind have no keys and values of these tokens: what the exit's layer gave waits, un-normed,
until a later call of the row goes deeper, and runs there in one strip with it. So columns of deeper
layers are always a beginning of those of the first ones, and a rejected token is forgotten wherever
it is: cached and waiting tokens together are those consumed, for every group of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.errors import CapabilityError
from foretoken.lm.draft_exits import Exits
from foretoken.lm.runtime.cached import CHUNK, CachedLM
from foretoken.lm.runtime.packing import Feed, Memory, tree_feed
from foretoken.lm.runtime.partial_forwards import Stage
from foretoken.lm.runtime.sharing import exclusive
from foretoken.lm.views.view import TargetView
from foretoken.types import DecodeState, Draft, Layer, Ragged, Rows, Scores, Taps

Waiting = list[Tensor]  # for each exit but the last: states [n, H] that no deeper layer has seen


class SortedExits(TargetView):
    """Laws of `lm` at the exit that a call takes; `counted` logits are those of tokens.

    A caller that reads hidden states gets those of the whole model, and its laws; where all tokens
    leave at one exit, those of the layers before it.
    """

    base: CachedLM

    def __init__(self, lm: LanguageModel, exits: Exits, counted: int | None = None) -> None:
        super().__init__(lm)
        self.exits, asked = exits, exits.asked
        self.stops, self.thresholds = asked.layers, (*asked.thresholds, 0.0)
        self.counted = counted
        self.left: Counter[int] = Counter()  # layers -> calls of a row that ended behind them
        self._waiting: dict[int, Waiting] = {}  # by row
        self._nothing = torch.zeros(0, self.base.hidden_size, device=self.base.device,
                                    dtype=self.base.model.dtype)  # fmt: skip
        if not exits.fits(self.base.layers) or self.base.family.switch is not None:
            raise CapabilityError(
                f"a draft with the exits {exits} was asked for, {self.base.family.name}.",
                f"it has {self.base.layers} layers, or scales its positions by the longest one of "
                "a call, and work cannot be split there.",
                'pass draft_thresholds="off": the draft then runs all its layers.',
            )

    def keep_prefixes(self, limit: int) -> None:
        """Nothing is kept: the columns of deeper layers are only a beginning of the first ones'."""

    @exclusive
    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        """As the wrapped model, through all layers."""
        self.catch_up([row for row in rows if row.uid in self._waiting])
        found = self.base.prefill(rows, taps, limit=limit, last=last)
        for row in rows:
            self._waiting[row.uid] = [self._nothing] * (len(self.stops) - 1)
        return found

    @exclusive
    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        trees = [draft.tree for draft in drafts]
        for row in rows:
            self._cut(row, ())
        return self.grow(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)

    @exclusive
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Append nodes to the rows' open trees; each row ends at an exit of its own."""
        for row, above in zip(rows, parents, strict=True):
            if above and above[0] < 0:
                self._cut(row, ())
        if self.stops[0] == self.layers or (taps and len(self.stops) > 1):
            self.catch_up(rows)
            scores = self.base.grow(rows, tokens, parents, taps)
            self.left[self.layers] += len(scores)
            return scores
        feeds = [self._entering(*one) for one in zip(rows, tokens, parents, strict=True)]
        scores = self._run(rows, feeds, 0, taps)
        for i, threshold in enumerate(self.thresholds):
            inside = [n for n, score in enumerate(scores)
                      if not sure_enough(score.logits[:, : self.counted], threshold)]  # fmt: skip
            if not inside:
                break
            deeper = [rows[n] for n in inside]
            strips = [self._strip(rows[n], i, len(tokens[n])) for n in inside]
            for n, score in zip(inside, self._run(deeper, strips, i + 1), strict=True):
                scores[n] = score
        self.left.update(round(score.share * self.layers) for score in scores)
        return scores

    @exclusive
    def commit(self, rows: Rows, paths: Ragged) -> None:
        for row, path in zip(rows, paths, strict=True):
            self._trim(row, (0, *path))
        self.base.commit(rows, paths)

    @exclusive
    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
        for row, nodes in zip(rows, kept, strict=True):
            self._trim(row, nodes)
        self.base.prune(rows, kept, settled)

    @exclusive
    def free(self, rows: Rows) -> None:
        for row in rows:
            self._waiting.pop(row.uid, None)
        self.base.free(rows)

    @exclusive
    def reset(self) -> None:
        self._waiting = {}
        self.base.reset()

    @exclusive
    def self_check(self, row: DecodeState) -> None:
        """As the wrapped model, of a cache made anew: deeper layers may lack tokens."""
        self.free([row])
        self.prefill([row])
        self.base.self_check(row)

    def waiting(self, row: DecodeState) -> list[int]:
        """Tokens of a row that wait at each exit but the last."""
        return [len(states) for states in self._waiting[row.uid]]

    def _entering(self, row: DecodeState, tokens: Sequence[int], parents: Sequence[int]) -> Feed:
        """New nodes, and committed tokens that no layer has seen, for the first layers."""
        memory = self.base._memory(row)
        if not memory.tokens and len(row.tokens) - 1 - memory.cached > CHUNK:
            self.catch_up([row])
            self.base._fill([row])
        missing = () if memory.tokens else row.tokens[memory.cached : -1]
        return tree_feed(memory, missing, tokens, parents)

    def _strip(self, row: DecodeState, exit: int, scored: int) -> Feed:
        """All that waits at an exit, for the layers behind it; the last ones are scored."""
        memory, count = self.base._memory(row), len(self._waiting[row.uid][exit])
        filled = memory.cached + len(memory.tokens) - count
        known = max(filled - memory.cached, 0)
        late = [0] * max(memory.cached - filled, 0)  # ids of tokens whose states are at hand
        deeper = Memory(
            memory.slot, min(filled, memory.cached),
            memory.tokens[:known], memory.depths[:known], memory.seen[:known],
        )  # fmt: skip
        above = [(bits ^ 1 << node).bit_length() - 1 for node, bits in enumerate(memory.seen)]
        feed = tree_feed(deeper, late, memory.tokens[known:], above[known:])
        feed.scored = scored
        return feed

    def _run(
        self, rows: Rows, feeds: list[Feed], group: int, taps: Taps = (), head: bool = True
    ) -> list[Scores]:
        """Run feeds through a group of layers: laws of its exit, states left waiting there."""
        start, stop = (0, *self.stops)[group : group + 2]
        given = None
        if group:
            given = {f.memory.slot: self._waiting[row.uid][group - 1]
                     for row, f in zip(rows, feeds, strict=True)}  # fmt: skip
        waits = group < len(self.stops) - 1
        if waits:
            taps = (Layer(stop - 1),)
            for feed in feeds:
                feed.whole = True
        ran = self.base._run(feeds, taps, Stage(start, stop, head=head, states=given))
        for row, feed, score in zip(rows, feeds, ran, strict=True):
            if group:
                self._waiting[row.uid][group - 1] = self._nothing
            if waits and feed.tokens:
                assert score.hidden is not None
                waiting = self._waiting[row.uid]
                waiting[group] = torch.cat([waiting[group], score.hidden[:, 0]])
                score.hidden = None
            score.share = stop / self.layers
        return ran

    @exclusive
    def catch_up(self, rows: Rows) -> None:
        """Run what waits through all layers behind, without a head."""
        for exit in range(len(self.stops) - 1):
            late = [row for row in rows if len(self._waiting[row.uid][exit])]
            if late:
                strips = [self._strip(row, exit, 0) for row in late]
                self._run(late, strips, exit + 1, head=False)

    def _cut(self, row: DecodeState, nodes: Sequence[int]) -> None:
        """Forget the open tree but for these nodes, which stay waiting where they wait."""
        self._trim(row, nodes)
        self.base._memory(row).forget()

    def _trim(self, row: DecodeState, nodes: Sequence[int]) -> None:
        """Of what waits, keep committed tokens and these ascending nodes of the open tree."""
        memory, waiting = self.base._memory(row), self._waiting[row.uid]
        stop = memory.cached + len(memory.tokens)  # columns of the layers before the exit
        stands = [memory.cached + node for node in nodes]
        for exit, states in enumerate(waiting):
            start = stop - len(states)
            kept = [*range(start, min(memory.cached, stop)),
                    *(column for column in stands if start <= column < stop)]  # fmt: skip
            if len(kept) < len(states):
                waiting[exit] = states[[column - start for column in kept]]
            stop = start


def sure_enough(logits: Float[Tensor, "n V"], threshold: float) -> bool:
    """Whether the likeliest token of a level reaches a threshold, before any temperature."""
    if threshold == 0.0 or not len(logits):
        return True
    known = logits.float()
    return bool((known.amax(-1) - known.logsumexp(-1)).exp().max() >= threshold)

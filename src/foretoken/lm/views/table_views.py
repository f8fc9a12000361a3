"""Views of a TableLM: what its early layers would say is its own table, disturbed.

They raise AssertionError where a caller breaks the protocol, as the table itself does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.draft_exits import Exits
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.table import Memory, TableLM
from foretoken.lm.views.early_exit_scoring import Leave
from foretoken.lm.views.few_rows import FewRows
from foretoken.lm.views.layer_predictions import LayerPredictions
from foretoken.lm.views.sorted_exits import sure_enough
from foretoken.lm.views.view import TargetView
from foretoken.types import DecodeState, Draft, Ragged, Rows, Scores, Taps


class TableEarlyExits(TargetView):
    """Early exits of a table: the fewer layers, the more its logits are disturbed."""

    base: TableLM
    head = 0.0

    def __init__(self, lm: LanguageModel, depths: tuple[int, ...]) -> None:
        super().__init__(lm)
        self.depths = depths
        self._open: dict[int, tuple[int, Memory]] = {}  # row -> depth and tree

    def draft(
        self, rows: Rows, tokens: Ragged, parents: Ragged, depths: Sequence[int]
    ) -> list[Float[Tensor, "n V"]]:
        table = self.base
        assert len({row.uid for row in rows}) == len(rows), "one row twice in a forward"
        table.layers_run += max(depths)
        grown = []
        for row, new, above, depth in zip(rows, tokens, parents, depths, strict=True):
            assert depth in self.depths, f"depth {depth} is none of the exits {self.depths}"
            memory = table._memory(row)
            if above[0] < 0 or row.uid not in self._open:
                memory.forget()
                self._open[row.uid] = depth, Memory(memory.cached)
            known, tree = self._open[row.uid]
            assert known == depth, "a tree was gone on with at another depth"
            grown.append(table._grow_row(row, tree, new, above, table.behind(depth)))
        return grown

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        """Scoring goes on where early layers stopped, with the very nodes they were fed."""
        for row, draft in zip(rows, drafts, strict=True):
            _, early = self._open.pop(row.uid, (0, Memory([])))
            fed = len(early.tokens)
            assert list(draft.tree.tokens[:fed]) == early.tokens, (
                "scored nodes are not those drafted"
            )
            assert list(draft.tree.parents[:fed]) == early.parents, "scored nodes hang elsewhere"
        return self.lm.score(rows, drafts, taps)

    def free(self, rows: Rows) -> None:
        for row in rows:
            self._open.pop(row.uid, None)
        self.lm.free(rows)

    def predictions(self, states: Sequence[Float[Tensor, "n L V"]]) -> list[LayerPredictions]:
        laws = [one.softmax(-1) for one in states]
        return [LayerPredictions(law.argmax(-1), law.amax(-1)) for law in laws]


class TableSkippedLayers(TargetView):
    """A table without some sublayers: each that is missing disturbs it a little."""

    base: TableLM
    searchable = True

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self.units = 2 * (self.base.layers - 2)

    def draft(
        self, rows: Rows, tokens: Ragged, parents: Ragged, skipped: frozenset[int]
    ) -> list[Float[Tensor, "n V"]]:
        table = self.base
        table.layers_run += table.layers - len(skipped) / 2
        logits = without(table, skipped)
        return [
            table._grow_row(row, table._memory(row), new, above, logits)
            for row, new, above in zip(rows, tokens, parents, strict=True)
        ]

    def fits(self, row: DecodeState, count: int) -> bool:
        """A table has no cache."""
        return True

    def guesses(self, row: DecodeState, count: int, skipped: frozenset[int]) -> list[int]:
        table = self.base
        table.layers_run += table.layers - len(skipped) / 2
        logits = without(table, skipped)
        assert not table._memory(row).tokens, "a search beside an open tree"
        ends = range(row.prompt_len + 1, row.prompt_len + count + 1)
        return [int(table._look_up(logits, row.tokens[:end]).argmax()) for end in ends]


class TableColumns(TargetView):
    """Some columns of a table's logits, as a model gives that computes those rows alone."""

    def __init__(self, lm: LanguageModel, columns: Sequence[int]) -> None:
        super().__init__(lm)
        self.columns, self.vocab_size = list(columns), len(columns)

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        return [self.pick(score) for score in self.lm.score(rows, drafts, taps)]

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return [self.pick(score) for score in self.lm.grow(rows, tokens, parents, taps)]

    def pick(self, score: Scores) -> Scores:
        return Scores(score.logits[:, self.columns], score.hidden, score.p, score.share)


def scoring_few(table: TableLM, tokens: Sequence[int]) -> FewRows:
    """A table as a draft that scores `tokens` alone."""
    rows = OutputRows.of_tokens(tokens, table.vocab_size)
    return FewRows(TableColumns(table, tokens), rows)


class TableSortedExits(TargetView):
    """A table left at the first exit that is sure enough, level by level."""

    base: TableLM

    def __init__(self, lm: LanguageModel, exits: Exits) -> None:
        super().__init__(lm)
        self.exits = exits

    def after(self, tokens: Sequence[int]) -> Float[Tensor, "V"]:
        """Logits of the next token, from the exit that a level of this one node takes."""
        return self.told([tokens])[0]

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        trees = [draft.tree for draft in drafts]
        for row in rows:
            self.base._memory(row).forget()
        return self.grow(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        scores = self.lm.grow(rows, tokens, parents, taps)
        for row, new, score in zip(rows, tokens, scores, strict=True):
            if new and not taps:
                score.said = self.told(self.base._contexts(row)[-len(new) :])
        return scores

    def told(self, contexts: Ragged) -> Float[Tensor, "n V"]:
        """The logits of a level behind the exit that it takes."""
        for layers, threshold in zip(self.exits.layers, (*self.exits.thresholds, 0.0), strict=True):
            shown = self.base.behind(layers)
            logits = torch.stack([self.base._look_up(shown, tokens) for tokens in contexts])
            if sure_enough(logits, threshold):
                break
        return logits


class TableEarlyExitScoring(TargetView):
    """Scoring of a table that ends early: what is told is the disturbed table behind that layer.

    A table has nothing to cache by layers, so no token is ever fed again.
    """

    lossless = False
    base: TableLM

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self._wishes: dict[int, Leave] = {}

    def leave(self, row: DecodeState, wish: Leave) -> None:
        self._wishes[row.uid] = wish

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        scores = self.lm.score(rows, drafts, taps)
        for row, score in zip(rows, scores, strict=True):
            wish = self._wishes.pop(row.uid, None)
            if wish is not None:
                score.said = left_early(self.base, wish, self.base._contexts(row))
        return scores

    def free(self, rows: Rows) -> None:
        for row in rows:
            self._wishes.pop(row.uid, None)
        self.lm.free(rows)


def left_early(table: TableLM, wish: Leave, contexts: Ragged) -> Float[Tensor, "N V"]:
    """The logits of all nodes behind the layer where their row leaves."""
    for layer in range(table.layers):
        shown = table.behind(layer + 1)
        logits = torch.stack([table._look_up(shown, tokens) for tokens in contexts])
        wish.depth = layer + 1
        if layer in wish.active and layer + 1 < table.layers:
            some = logits.gather(1, wish.candidates)
            if wish.asks(layer, some.float(), logits.argmax(-1).tolist):
                break
    return logits


def without(table: TableLM, skipped: frozenset[int]) -> Float[Tensor, "*context V"]:
    """The table as its other sublayers would have it; always the same for the same ones."""
    logits = table.logits
    for unit in sorted(skipped):
        generator = torch.Generator().manual_seed(unit)
        noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        logits = logits + table.disturbance / table.layers * noise
    return logits

"""Language models as rectangular batches: their rows left-padded, and realigned for every forward.

The batches of eqspec and exspec (arXiv 2510.22876). A realigned model has a cache of its own over
the weights of the one it is made of, so that both can be used side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel, LayerCache
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.aligned import WHY, AlignedLM
from foretoken.lm.runtime.alignment import Alignment
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.table import TableLM
from foretoken.lm.views.few_rows import FewRows
from foretoken.lm.views.view import TargetView, innermost
from foretoken.types import Caps, DecodeState, Draft, Ragged, Rows, Scores, Taps


class Realigned(TargetView):
    """A CachedLM whose rows lie in an aligned cache; its own cache stays as it is."""

    lm: CachedLM

    prefixes = None  # nothing is kept, whatever the model beside it keeps

    def __init__(self, lm: CachedLM, aligned: type[AlignedLM] = AlignedLM) -> None:
        super().__init__(lm)
        self.base = self.aligned = aligned(lm)
        self.caps = self.aligned.caps

    @property
    def alignment(self) -> Alignment:
        """Pads of the rows, and what realigning took."""
        return self.aligned.alignment

    @property
    def rows_held(self) -> int:
        return self.aligned.rows_held

    def close(self) -> None:
        """Forget all rows and give the model back as it was."""
        self.aligned.reset()
        self.lm.close()

    def keep_prefixes(self, limit: int) -> None:
        """Nothing is kept: prompts are fed whole, as in the published batches."""

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        return self.aligned.prefill(rows, taps, limit=limit, last=last)

    def missing(self, row: DecodeState) -> int:
        return self.aligned.missing(row)

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        return self.aligned.score(rows, drafts, taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return self.aligned.grow(rows, tokens, parents, taps)

    def commit(self, rows: Rows, paths: Ragged) -> None:
        self.aligned.commit(rows, paths)

    def free(self, rows: Rows) -> None:
        self.aligned.free(rows)

    def self_check(self, row: DecodeState) -> None:
        self.lm.refresh()  # the change is told once: to whoever has more to forget
        self.aligned.self_check(row)

    def layer_cache(self, layer: int) -> LayerCache:
        return self.aligned.layer_cache(layer)


class TableRealigned(TargetView):
    """A table as a rectangular batch: it keeps no columns, so that moving them takes no time."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__(lm)
        self.caps = Caps("chain", True, lm.caps.taps, WHY)
        self.alignment = Alignment()

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        assert all(draft.tree.is_chain for draft in drafts), WHY
        self.alignment.align(rows)
        return self.lm.score(rows, drafts, taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        opening = [row for row, above in zip(rows, parents, strict=True) if above and above[0] < 0]
        if opening:
            self.alignment.align(opening)
        return self.lm.grow(rows, tokens, parents, taps)

    def free(self, rows: Rows) -> None:
        self.lm.free(rows)
        self.alignment.forget(rows)


def realigned(lm: LanguageModel) -> LanguageModel:
    """`lm` as a rectangular batch; CapabilityError for what cannot be one."""
    if isinstance(innermost(lm), TableLM):
        return TableRealigned(lm)
    if isinstance(lm, CachedLM):
        return Realigned(lm)
    if type(lm) is FewRows:
        return FewRows(realigned(lm.lm), lm.output_rows, lm.follow, lm.whole)
    raise CapabilityError(
        f"{type(lm).__name__} over {type(innermost(lm)).__name__} was asked for as a left-padded "
        "batch.",
        "an ordinary model can be one, also with a reduced vocabulary; not one that is left early, "
        "and none with another tokenizer.",
        'use another draft, or pass draft_thresholds="off"; method chain takes them all.',
    )

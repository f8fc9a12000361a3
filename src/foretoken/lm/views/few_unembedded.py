"""A target whose output layer is read at some rows, for heads that draft on its states."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.contract import LanguageModel
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.few_rows import RowsOfOutput, rows_of_output
from foretoken.lm.views.view import TargetView


class FewUnembedded(TargetView):
    """Logits of hidden states at `rows` alone, over all tokens."""

    def __init__(self, lm: LanguageModel, rows: OutputRows) -> None:
        super().__init__(lm)
        self.output_rows = rows
        model = getattr(self.base, "model", None)  # a table has no layers
        self.part: RowsOfOutput | None = None
        if model is not None:
            self.output_rows = rows = rows.to(model.device)
            self.part = rows_of_output(model, rows.rows)
            with torch.inference_mode():
                self.head = self.base._head

    def unembed(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        if self.part is None:
            return self.output_rows.spread(self.lm.unembed(hidden)[:, self.output_rows.rows])
        self.part.follow()
        with torch.inference_mode():
            return self.output_rows.spread(self.head.shaped(self.part.few(hidden)))

"""A target whose output layer is read at some rows, for heads that draft on its states."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
        part = self.followed()
        if part is None:
            return self.output_rows.spread(self.lm.unembed(hidden)[:, self.output_rows.rows])
        with torch.inference_mode():
            return self.output_rows.spread(self.head.shaped(part.few(hidden)))

    def followed(self) -> RowsOfOutput | None:
        """The rows as they are now; None where no rows can be read of what the model's owner has
        put in its output layer's place, such as one with an adapter beside it."""
        if self.part is None:
            return None
        whole = self.base.model.get_output_embeddings()
        if whole is self.part.whole:
            self.part.follow()
        elif isinstance(whole, nn.Linear):
            self.part = rows_of_output(self.base.model, self.output_rows.rows)
        else:
            return None
        return self.part

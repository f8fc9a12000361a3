"""A model of which only some rows of the output layer are computed, beside the caller's own.

The copy has modules of its own over the very weights of the model, which stays as it is: another
session may have it, and its owner may train it. Only the output layer is a new one, of the rows
that are wanted, and follows the whole one when that is changed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.lm.runtime.fingerprints import Fingerprint
from foretoken.lm.runtime.rounding import allowed
from foretoken.lm.runtime.sharing import share

LEAST = 32  # rows: a model is probed by the spread of its logits, which a few do not show


class RowsOfOutput:
    """The smaller output layer, and the one whose rows it holds."""

    def __init__(self, whole: nn.Linear, rows: Int[Tensor, "n"]) -> None:
        self.whole, self.rows = whole, rows
        weight = whole.weight
        self.few = nn.Linear(
            weight.shape[1], len(rows), whole.bias is not None,
            device=weight.device, dtype=weight.dtype,
        ).requires_grad_(False)  # fmt: skip
        self.seen: list[Fingerprint] = []
        self.read()

    def read(self) -> None:
        """Take the rows as they are now."""
        with torch.inference_mode(False), torch.no_grad():
            for mine, theirs in zip(self.few.parameters(), self.whole.parameters(), strict=True):
                mine.copy_(theirs.detach().clone()[self.rows])
        self.seen = [Fingerprint(weight) for weight in self.whole.parameters()]

    def follow(self, full: bool = False) -> None:
        """Read again if the whole layer was changed; `full` reads in any case."""
        now = zip(self.seen, self.whole.parameters(), strict=True)
        if full or any(mark.moved(weight) or mark.written() for mark, weight in now):
            self.read()


def with_few_rows(model: Any, rows: Int[Tensor, "n"]) -> tuple[Any, RowsOfOutput]:
    """The model with `rows` of its output layer, and those rows.

    CapabilityError where its logits are more than that layer says, row by row.
    """
    copied = sharing_weights(model).eval()
    share(copied, model)
    whole = copied.get_output_embeddings()
    if type(whole) is not nn.Linear:
        raise refusal(model, f"its output layer is a {type(whole).__name__}")
    before = some_logits(copied)
    if before.shape[-1] != whole.weight.shape[0]:
        raise refusal(model, "its logits are not those of its output layer")
    part = RowsOfOutput(whole, rows)
    for module in list(copied.modules()):
        for name, child in module._modules.items():
            if child is whole:
                module._modules[name] = part.few
    after = some_logits(copied)
    wanted = before[:, rows]
    error = float((after - wanted).abs().max()) if after.shape == wanted.shape else float("inf")
    if not error <= allowed(model.dtype) * float(wanted.std().clamp(min=1e-6)):
        raise refusal(model, "logits of some rows alone are not those beside all others")
    return copied, part


def rows_of_output(model: Any, rows: Int[Tensor, "n"]) -> RowsOfOutput:
    """Rows of a model's own output layer; CapabilityError for one that is not plainly linear."""
    whole = model.get_output_embeddings()
    if not isinstance(whole, nn.Linear):
        raise refusal(model, f"its output layer is a {type(whole).__name__}")
    return RowsOfOutput(whole, rows)


def enough(rows: Int[Tensor, "n"], all_of_them: int) -> Int[Tensor, "n"]:
    """The rows, and behind them others where there are fewer than LEAST."""
    if len(rows) >= min(LEAST, all_of_them):
        return rows
    others = torch.arange(min(2 * LEAST, all_of_them), device=rows.device)
    others = others[~torch.isin(others, rows)]
    return torch.cat([rows, others[: LEAST - len(rows)]])


def sharing_weights(model: Any) -> Any:
    """A copy of a model's modules over the same tables of weights: what replaces one is seen."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            memo[id(table)] = table
    return copy.deepcopy(model, memo)


def some_logits(model: Any) -> Tensor:
    """Logits [3, V] of a short text."""
    ids = torch.arange(3, device=model.device)[None]
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return found


def refusal(model: Any, why: str) -> CapabilityError:
    return CapabilityError(
        f"a reduced vocabulary was asked for of a draft, {type(model).__name__}.",
        f"{why}, so its rows cannot be computed apart.",
        'pass draft_vocabulary="off", or a draft whose output layer is a plain linear one.',
    )

"""CTC-drafter's head: a block of frames that say tokens or nothing, learnt as a sequence.

A block as DFlash has it, but its slots are frames: repeats of a frame's token and blanks drop out,
and the loss counts every way in which frames collapse to the target's next tokens (connectionist
temporal classification, arXiv 2412.00061). So a slot need not know which token it stands for.

Departures: the block is DFlash's (the paper's single layer reads states alone, not the last token),
and the blank is a class of its own, where the release takes token 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.block import Block


class CtcBlock(Block):
    """`depth` frames; the last class of each is the blank."""

    def __init__(self, config: Block.Config) -> None:
        super().__init__(config)
        self.blank = nn.Linear(config.hidden_size, 1)

    def frames(
        self, slots: Float[Tensor, "*n H"], logits: Float[Tensor, "*n V"]
    ) -> Float[Tensor, "*n V+1"]:
        """Logits of tokens and of the blank, at slots and what the output layer makes of them."""
        return torch.cat([logits, self.blank(slots)], -1)

    def learn(
        self, texts: Mapping[str, Tensor], ends: Any, at: Int[Tensor, "n A"]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the next tokens behind these places, half as many as there are frames.

        Only places with all of these tokens teach: they count, and are among those scored. A label
        that is cut short would teach blanks where text goes on. Of texts: as in `Block.learn`.
        "length" is how many tokens the likeliest frames collapse to, before the first that is not
        the target's, at all places.
        """
        ids, weights = texts["input_ids"], texts["weights"]
        slots = self.slots(texts, ends, at)
        said = self.frames(slots, ends.unembed(slots)).flatten(0, 1).float().log_softmax(-1)
        number = tokens_of(self.depth)
        after = at[..., None] + torch.arange(1, number + 1, device=ids.device)
        inside = after.clamp(max=ids.shape[1] - 1)
        row = torch.arange(len(ids), device=ids.device)[:, None, None]
        labels = ends.places[ids[row, inside]].flatten(0, 1)
        counts = ((weights[row, inside] > 0) & (after < ids.shape[1])).flatten(0, 1)
        lengths = (counts & (labels >= 0)).cumprod(-1).sum(-1)
        frames = torch.full_like(lengths, self.depth)
        loss = F.ctc_loss(
            said.transpose(0, 1), labels, frames, lengths, blank=said.shape[-1] - 1,
            reduction="none", zero_infinity=True,
        )  # fmt: skip
        whole = lengths == number
        best = said.detach().argmax(-1).tolist()
        told = zip(best, labels.tolist(), lengths.tolist(), strict=True)
        right = [
            agreeing(collapsed(one, said.shape[-1] - 1), label[:length])
            for one, label, length in told
        ]
        taught = loss[whole].sum() / max(1, int(whole.sum()))
        return taught, {"length": torch.tensor(right, dtype=torch.float32).mean()}


def tokens_of(frames: int) -> int:
    """Tokens that so many frames learn to say: half of them, as repeats need blanks between."""
    return max(1, frames // 2)


def collapsed(frames: list[int], blank: int) -> list[int]:
    """What frames say: a token that the frame before said is not said again, blanks say nothing."""
    before = [blank, *frames]
    return [
        token for last, token in zip(before, frames, strict=False) if token not in (last, blank)
    ]


def agreeing(said: list[int], labels: list[int]) -> int:
    """How many tokens are right before the first that is not."""
    pairs = zip(said, labels, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

"""EAGLE's head: the target's next hidden state, from the last one and the token chosen after it.

States are those behind the target's last norm, so the target's own output layer reads the guess as
a law. Knowing the token takes away what the states alone cannot know (arXiv 2401.15077).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import DecoderLayer, causal
from foretoken.heads.table import HeadConfig

LAW = 0.1  # weight of the law's loss beside that of the states; paper 0.1


class Eagle(nn.Module):
    """Embedding and state joined by a linear map, then one decoder layer without a first norm."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        heads: int = 4  # of the attention; the target's own number where it is trained
        inner: int = 64  # width of the MLP; the target's as well

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.join = nn.Linear(2 * width, width)
        self.layer = DecoderLayer(width, config.heads, config.inner, normed=False)

    @property
    def memory_size(self) -> int:
        """Numbers kept of a token."""
        return self.layer.memory_size

    def forward(
        self,
        embedded: Float[Tensor, "B Q H"],
        before: Float[Tensor, "B Q H"],
        positions: Int[Tensor, "B Q"],
        sees: Bool[Tensor, "B Q S+Q"],
        memory: Float[Tensor, "B S M"],
    ) -> tuple[Float[Tensor, "B Q H"], Float[Tensor, "B Q M"]]:
        """States guessed at tokens, from these and the states before them; memory of the tokens."""
        joined = self.join(torch.cat([embedded, before], -1))
        found: tuple[Tensor, Tensor] = self.layer(joined, positions, sees, memory)
        return found

    def learn(self, texts: Mapping[str, Tensor], ends: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Smooth L1 to the target's states plus cross-entropy to its laws.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts;
        "read" [n T H], where it is given, stands for the states as the head is shown them.
        """
        ids, true = texts["input_ids"], texts["hidden"]
        before = F.pad(texts.get("read", true)[:, :-1], (0, 0, 1, 0))
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        memory = true.new_zeros(len(ids), 0, self.memory_size)
        sees = causal(ids.shape[1], ids.device).expand(len(ids), -1, -1)
        guessed, _ = self(ends.embed(ids), before, positions, sees, memory)
        counts = texts["weights"][:, 1:] > 0  # tokens whose law is learnt where they were said
        guessed, true = guessed[:, :-1][counts], true[:, :-1][counts]
        logits, law = ends.unembed(guessed), ends.unembed(true).softmax(-1)
        number = max(1, len(guessed))
        entropy = F.cross_entropy(logits, law, reduction="sum") / number
        apart = F.smooth_l1_loss(guessed, true, reduction="sum") / (number * true.shape[-1])
        hits = (logits.argmax(-1) == ids[:, 1:][counts]).float().sum() / number
        return apart + LAW * entropy, {"right": hits.detach()}

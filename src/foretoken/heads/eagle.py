"""EAGLE's head: the target's next hidden state, from the last one and the token chosen after it.

States are those behind the target's last norm, so the target's own output layer reads the guess as
a law. Knowing the token takes away what the states alone cannot know (arXiv 2401.15077).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import BASE, EPS, AttentionShape, DecoderLayer, causal
from foretoken.heads.llama import llama_of
from foretoken.heads.table import HeadConfig
from foretoken.types import FinalNorm, Layer, Taps

LAW = 0.1  # weight of the law's loss beside that of the states; paper 0.1


class Eagle(nn.Module):
    """Embedding and state joined by a linear map, then one decoder layer without a first norm."""

    goes_on = Layer(-1)
    adds_tokens = False
    scored = None  # the target's output layer reads its states

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        heads: int = 1  # of the attention; the target's own number where it is trained
        inner: int = 64  # width of the MLP; the target's as well
        kv_heads: int = 0  # that keys and values have; 0: as many as queries
        size: int = 0  # of an attention head; 0: the width over their number
        base: float = BASE  # of the rotary frequencies
        eps: float = EPS  # of the norm
        bias: bool = False  # of the attention
        join_bias: bool = True
        begins: int = 0  # 1: a text's first token, which no state is before, is never read

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.width = config, config.hidden_size
        self.begins = config.begins
        self.join = nn.Linear(2 * self.width, self.width, bias=config.join_bias)
        shape = AttentionShape(
            kv_heads=config.kv_heads, size=config.size, base=config.base, eps=config.eps,
            bias=config.bias,
        )  # fmt: skip
        self.layer = DecoderLayer(self.width, config.heads, config.inner, normed=False, shape=shape)

    def reads_of(self, layers: int) -> Taps:
        """The target's state behind its last norm."""
        return (FinalNorm(),)

    def fused(self, states: Float[Tensor, "*n 1 H"]) -> Float[Tensor, "*n H"]:
        """The target's state as it is."""
        return states[..., 0, :]

    def entering(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n H"], embed: Any
    ) -> Float[Tensor, "*n H"]:
        """Embeddings and the states before them, joined."""
        found: Tensor = self.join(torch.cat([embed(tokens), before], -1))
        return found

    def decoder(self, positions: int) -> Any:
        """Its layer as a model of transformers."""
        return llama_of([self.layer], None, None, positions)

    def saying(self, guessed: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        """What the output layer reads of guessed states: they themselves."""
        return guessed

    def forward(
        self, tokens: Int[Tensor, "B T"], before: Float[Tensor, "B T H"], embed: Any
    ) -> Float[Tensor, "B T H"]:
        """States guessed at the tokens of whole texts, from these and the states before them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        memory = before.new_zeros(len(tokens), 0, self.layer.memory_size)
        sees = causal(tokens.shape[1], tokens.device).expand(len(tokens), -1, -1).clone()
        sees[:, self.begins :, : self.begins] = False
        found: Tensor = self.layer(self.entering(tokens, before, embed), positions, sees, memory)[0]
        return found

    def learn(self, texts: Mapping[str, Tensor], ends: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Smooth L1 to the target's states plus cross-entropy to its laws.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts;
        "read" [n T H], where it is given, stands for the states as the head is shown them.
        """
        ids, true = texts["input_ids"], texts["hidden"]
        before = F.pad(texts.get("read", true)[:, :-1], (0, 0, 1, 0))
        guessed = self(ids, before, ends.embed)
        counts = texts["weights"][:, 1:] > 0  # tokens whose law is learnt where they were said
        guessed, true = guessed[:, :-1][counts], true[:, :-1][counts]
        logits, law = ends.unembed(self.saying(guessed)), ends.unembed(true).softmax(-1)
        number = max(1, len(guessed))
        entropy = F.cross_entropy(logits, law, reduction="sum") / number
        apart = F.smooth_l1_loss(guessed, true, reduction="sum") / (number * true.shape[-1])
        hits = (logits.argmax(-1) == ends.places[ids[:, 1:][counts]]).float().sum() / number
        return apart + LAW * entropy, {"right": hits.detach()}

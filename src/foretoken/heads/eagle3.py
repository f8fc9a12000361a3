"""EAGLE-3's head: a small decoder that reads tokens beside hidden states of the target.

At every token it joins the token's embedding with the state before it: three layers of the target,
fused, where the target has read the text, and its own output where it goes on alone. It learns to
live on its own outputs (training-time test) and is asked for laws only, never for the target's
states (arXiv 2503.01840).

Two departures: the joined vector enters the residual stream, where the paper widens the first
attention's input, so that behind it stands an ordinary Llama, which runs as one; and the head is as
narrow as is asked, where the paper's is as wide as its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foretoken.heads.decoder_layer import BASE, DecoderLayer
from foretoken.heads.table import HeadConfig

EPS = 1e-6


class Eagle3(nn.Module):
    """What it goes on with is `width` wide; it scores `tokens` of the target's vocabulary."""

    scored: Int[Tensor, "n"]  # the target's id of each output

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        taps: tuple[int, ...] = (0,)  # layers of the target whose outputs it reads
        tokens: int = 0  # outputs; 0: one for each token of the target
        width: int = 64
        layers: int = 1
        heads: int = 1  # of the attention
        inner: int = 256  # width of the MLPs

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.fuse = nn.Linear(len(config.taps) * config.hidden_size, width, bias=False)
        self.embedding = nn.Linear(config.hidden_size, width, bias=False)
        self.embedded_norm = nn.RMSNorm(width, eps=EPS)
        self.state_norm = nn.RMSNorm(width, eps=EPS)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(width, config.heads, config.inner) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(width, eps=EPS)
        outputs = config.tokens or config.vocab_size
        self.lm_head = nn.Linear(width, outputs, bias=False)
        self.register_buffer("scored", torch.arange(outputs))

    def fused(self, states: Float[Tensor, "*n L H"]) -> Float[Tensor, "*n W"]:
        """The target's hidden states as one state of the head's own kind."""
        found: Tensor = self.fuse(states.flatten(-2))
        return found

    def entering(
        self, embedded: Float[Tensor, "*n H"], before: Float[Tensor, "*n W"]
    ) -> Float[Tensor, "*n W"]:
        """What enters the layers at tokens, from the target's embeddings and the states before."""
        read = self.embedded_norm(self.embedding(embedded)), self.state_norm(before)
        found: Tensor = before + self.join(torch.cat(read, -1))
        return found

    def forward(
        self,
        entering: Float[Tensor, "B Q W"],
        positions: Int[Tensor, "B Q"],
        sees: Bool[Tensor, "B Q S+Q"],
        memories: Sequence[Float[Tensor, "B S M"]],
    ) -> tuple[Float[Tensor, "B Q W"], list[Float[Tensor, "B Q M"]]]:
        """States behind the last layer, before its norm, and what each layer adds to its memory."""
        states, kept = entering, []
        for layer, memory in zip(self.layers, memories, strict=True):
            states, new = layer(states, positions, sees, memory)
            kept.append(new)
        return states, kept

    def decoder(self, positions: int) -> Any:
        """Its layers, norm and outputs as a model of transformers, with weights of its own."""
        from transformers import LlamaConfig, LlamaForCausalLM

        own, first = self.config, self.layers[0]
        assert isinstance(first, DecoderLayer)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(self.scored), hidden_size=own.width, intermediate_size=own.inner,
                num_hidden_layers=own.layers, num_attention_heads=own.heads,
                num_key_value_heads=own.heads, head_dim=first.size, rms_norm_eps=EPS,
                rope_parameters={"rope_type": "default", "rope_theta": BASE},
                max_position_embeddings=positions, tie_word_embeddings=False,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        weights = {"model.norm.weight": self.norm.weight, "lm_head.weight": self.lm_head.weight}
        for i, layer in enumerate(self.layers):
            weights |= {f"model.layers.{i}.{name}": value for name, value in of_llama(layer)}
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert missing == ["model.embed_tokens.weight"] and not unknown, (missing, unknown)
        ready: Any = model
        return ready.eval().requires_grad_(False)


def of_llama(layer: Any) -> list[tuple[str, Tensor]]:
    """The weights of a decoder layer by their names in transformers' Llama."""
    query, key, value = layer.attention.weight.chunk(3)
    return [
        ("input_layernorm.weight", layer.before.weight),
        ("self_attn.q_proj.weight", query),
        ("self_attn.k_proj.weight", key),
        ("self_attn.v_proj.weight", value),
        ("self_attn.o_proj.weight", layer.joined.weight),
        ("post_attention_layernorm.weight", layer.between.weight),
        ("mlp.gate_proj.weight", layer.gate.weight),
        ("mlp.up_proj.weight", layer.up.weight),
        ("mlp.down_proj.weight", layer.down.weight),
    ]

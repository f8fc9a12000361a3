"""EAGLE-3's head in the shape that is published (arXiv 2503.01840; github SafeAILab/EAGLE).

The queries, keys and values of its one layer read a token's embedding and the state before it side
by side, each behind a norm of its own, so they are twice as wide as the rest. It runs as a Llama
whose residual stream holds both: embeddings in the first half, which nothing is added to, states in
the second, which alone the MLP, the last norm and the output layer read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.errors import CapabilityError
from foretoken.heads.decoder_layer import BASE, EPS
from foretoken.heads.table import HeadConfig
from foretoken.types import Embedding, Layer, Taps

PLACES = 3  # states of the target that it reads, where nothing else is said
SHALLOWEST = 4  # layers of a target in which these places lie


class WideEagle3(nn.Module):
    """It goes on with what its layer puts out, `width` numbers of which the second half is read."""

    begins = 1
    goes_on = Layer(-1)
    adds_tokens = False
    scored: Int[Tensor, "n"]  # the target's id of each output

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        # places in the target: i is behind i layers, 0 the embeddings; (): 2, n // 2 and n - 3 of
        # a target of n layers
        taps: tuple[int, ...] = ()
        tokens: int = 0  # outputs; 0: one for each token of the target
        state: int = 0  # width of its states; 0: the hidden size
        heads: int = 1  # of the attention
        kv_heads: int = 0  # that keys and values have; 0: as many as queries
        size: int = 0  # of one; 0: the width of the states over their number, made even
        inner: int = 64  # width of the MLP
        base: float = BASE  # of the rotary frequencies
        # how they are scaled, as transformers writes it; None: not at all
        scaling: Mapping[str, Any] | None = None
        eps: float = EPS  # of the norms
        bias: bool = False  # of queries, keys and values
        join_bias: bool = False  # of the map that fuses the target's states
        embeds: bool = False  # has embeddings of its own, beside the target's
        normed_residual: bool = False  # states enter the residual stream behind their norm

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.state = state = config.state or config.hidden_size
        self.width = 2 * state
        self.heads, self.shared = config.heads, config.kv_heads or config.heads
        self.size = config.size or 2 * -(-state // (2 * config.heads))
        read = (len(config.taps) or PLACES) * config.hidden_size
        self.fuse = nn.Linear(read, state, bias=config.join_bias)
        if config.embeds:
            self.embedding = nn.Embedding(config.vocab_size, state)
        self.norms = nn.ModuleDict({
            name: nn.RMSNorm(state, eps=config.eps)
            for name in ("embedding", "state", "between", "last")
        })  # fmt: skip
        made = (self.heads + 2 * self.shared) * self.size
        self.attention = nn.Linear(self.width, made, bias=config.bias)
        self.joined = nn.Linear(self.heads * self.size, state, bias=False)
        self.gate = nn.Linear(state, config.inner, bias=False)
        self.up = nn.Linear(state, config.inner, bias=False)
        self.down = nn.Linear(config.inner, state, bias=False)
        tokens = config.tokens or config.vocab_size
        self.output = nn.Linear(state, tokens, bias=False)
        self.register_buffer("scored", torch.arange(tokens))

    def reads_of(self, layers: int) -> Taps:
        """Three places of a target of so many layers, unless the head names others."""
        places = self.config.taps or (2, layers // 2, layers - 3)
        if not self.config.taps and layers < SHALLOWEST:
            raise CapabilityError(
                f"a published EAGLE-3 head was asked for with a target of {layers} layers.",
                f"it reads states near both ends and the middle of {SHALLOWEST} layers or more.",
                "use the target it was trained for, or train a head: `foretoken train eagle3`.",
            )
        return tuple(Layer(place - 1) if place else Embedding() for place in places)

    def fused(self, states: Float[Tensor, "*n L H"]) -> Float[Tensor, "*n W"]:
        """The target's states as one of the head's, behind nothing where embeddings stand."""
        return F.pad(self.fuse(states.flatten(-2)), (self.state, 0))

    def entering(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n W"], embed: Any
    ) -> Float[Tensor, "*n W"]:
        """Embeddings of tokens beside the states before them."""
        embedded = self.embedding(tokens) if self.config.embeds else embed(tokens)
        state = before[..., self.state :]
        if self.config.normed_residual:
            state = self.norms["state"](state)
        return torch.cat([embedded, state], -1)

    def decoder(self, positions: int) -> Any:
        """Its layer and outputs as a model of transformers, with copies of the weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = self.config
        rotary = {"rope_type": "default", **(config.scaling or {}), "rope_theta": config.base}
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=1, hidden_size=self.width,  # its own tables are put in below
                intermediate_size=config.inner, num_hidden_layers=1,
                num_attention_heads=self.heads, num_key_value_heads=self.shared,
                head_dim=self.size, rms_norm_eps=config.eps, attention_bias=config.bias,
                rope_parameters=rotary,
                max_position_embeddings=positions, tie_word_embeddings=False,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        layer, mlp = model.model.layers[0], model.model.layers[0].mlp
        layer.input_layernorm = Halves(self, config.normed_residual)
        layer.post_attention_layernorm = SecondHalf(self, "between")
        mlp.gate_proj, mlp.up_proj = as_linear(self.gate.weight), as_linear(self.up.weight)
        mlp.down_proj = as_linear(self.below(self.down.weight))
        model.model.norm = SecondHalf(self, "last")
        model.lm_head = as_linear(self.output.weight)
        kept = [self.heads * self.size, self.shared * self.size, self.shared * self.size]
        for name, part in zip("qkv", torch.split(self.attention.weight, kept), strict=True):
            setattr(layer.self_attn, f"{name}_proj", as_linear(part))
        if config.bias:
            for name, part in zip("qkv", torch.split(self.attention.bias, kept), strict=True):
                getattr(layer.self_attn, f"{name}_proj").bias = nn.Parameter(part.clone())
        layer.self_attn.o_proj = as_linear(self.below(self.joined.weight))
        count = len(self.scored)
        model.config.vocab_size = model.vocab_size = model.model.vocab_size = count
        embeddings = model.model.embed_tokens
        embeddings.num_embeddings = count
        embeddings.weight = nn.Parameter(moving(count, self.output.weight, self.width), False)
        return model.eval().requires_grad_(False)

    def below(self, weight: Float[Tensor, "state n"]) -> Float[Tensor, "W n"]:
        """A map into the second half of the stream."""
        return F.pad(weight, (0, 0, self.state, 0))


class Halves(nn.Module):
    """What the attention reads of the residual stream: each half behind a norm of its own."""

    def __init__(self, head: WideEagle3, normed: bool) -> None:
        super().__init__()
        self.state = head.state
        self.first = copied(head.norms["embedding"])
        self.second = nn.Identity() if normed else copied(head.norms["state"])

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        first, second = x[..., : self.state], x[..., self.state :]
        return torch.cat([self.first(first), self.second(second)], -1)


class SecondHalf(nn.Module):
    """The states of the residual stream, behind a norm."""

    def __init__(self, head: WideEagle3, name: str) -> None:
        super().__init__()
        self.state, self.norm = head.state, copied(head.norms[name])

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n state"]:
        found: Tensor = self.norm(x[..., self.state :])
        return found


def moving(count: int, like: Tensor, width: int) -> Float[Tensor, "count W"]:
    """Embeddings that nobody reads, as they are supplied: with them a model is probed when it is
    opened, so that they differ. Each is the one before moved by a number: a line in memory.
    """
    line = torch.arange(count + width).sin().to(like.device, like.dtype)
    return line.as_strided((count, width), (1, 1))


def copied(norm: nn.Module) -> nn.RMSNorm:
    """A norm of the same weights."""
    assert isinstance(norm, nn.RMSNorm)
    found = nn.RMSNorm(norm.normalized_shape, eps=norm.eps)
    found.weight = nn.Parameter(norm.weight.detach().clone())
    return found


def as_linear(weight: Float[Tensor, "out in"]) -> nn.Linear:
    """A map without a bias, of a copy of these weights."""
    found = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    found.weight = nn.Parameter(weight.detach().clone())
    return found

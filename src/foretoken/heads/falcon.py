"""Falcon's head: EAGLE's, but k states in a pass, and blocks go on from each other's guesses.

Token i enters with the state before it, as in EAGLE's head, and is read as the state k places
later: the inputs of k tokens give the next k laws. The tokens of a block do not know each other's
guesses, so an LSTM runs over a block's inputs and attention lets every slot see the whole block
(semi-autoregressive drafting, arXiv 2412.12639).

Departures. The LSTM starts anew with every block, where the paper lets it run over the text and the
release runs it over no tokens at all. What later blocks see of an input is the LSTM's output for
that input alone: it is the same however a text is cut into blocks, so that keys and values are kept
while blocks, which end at whatever token is the last, begin anywhere. Before the text its first
input is repeated. There is no dropout; a tenth of the law's loss is at the text's own token, which
the target drew, where the paper draws another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.heads.decoder_layer import DecoderLayer
from foretoken.heads.table import HeadConfig
from foretoken.types import FinalNorm, Taps

LAW = 0.1  # weight of the law's loss beside that of the states; paper 0.1
SOFT = 0.9  # part of it that is at the target's law, not at the token drawn; paper 0.9
HEAT = 0.95  # temperature of both laws there; paper 0.95


class Recurrence(nn.Module):
    """An LSTM of two layers that starts anew with every block.

    Written out, as blocks are short: torch's own takes twice the time on a CPU.
    """

    def __init__(self, read: int, width: int) -> None:
        super().__init__()
        self.given = nn.ModuleList(nn.Linear(size, 4 * width) for size in (read, width))
        self.kept = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in self.given)

    def forward(
        self, inputs: Float[Tensor, "*n k R"]
    ) -> tuple[Float[Tensor, "*n k H"], Float[Tensor, "*n k H"]]:
        """Outputs along the inputs, and what the output for each of them alone would be."""
        both = inputs[None]
        for given, kept in zip(self.given, self.kept, strict=True):
            gates = given(both)
            alone = opened(gates[-1], None)[0]
            found, cell = [alone[..., 0, :]], opened(gates[0][..., 0, :], None)[1]
            for step in range(1, inputs.shape[-2]):
                output, cell = opened(gates[0][..., step, :] + kept(found[-1]), cell)
                found.append(output)
            both = torch.stack([torch.stack(found, -2), alone])
        return both[0], both[1]


def opened(
    gates: Float[Tensor, "*n 4H"], cell: Float[Tensor, "*n H"] | None
) -> tuple[Float[Tensor, "*n H"], Float[Tensor, "*n H"]]:
    """An LSTM's output and cell behind its gates: in, forget, new, out; no cell: the first step."""
    enter, forget, new, leave = gates.chunk(4, -1)
    fresh = enter.sigmoid() * new.tanh()
    cell = fresh if cell is None else forget.sigmoid() * cell + fresh
    return leave.sigmoid() * cell.tanh(), cell


class Falcon(nn.Module):
    """The LSTM over embeddings beside states, then one decoder layer without a first norm."""

    reads: Taps = (FinalNorm(),)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(HeadConfig):
        block: int = 2  # k, tokens guessed in a pass; paper 2
        heads: int = 1  # of the attention; the target's own number where it is trained
        inner: int = 64  # width of the MLP; the target's as well

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.block, width = config, config.block, config.hidden_size
        self.recurrence = Recurrence(2 * width, width)
        self.layer = DecoderLayer(width, config.heads, config.inner, normed=False)

    def inputs(
        self, tokens: Int[Tensor, "*n"], before: Float[Tensor, "*n H"], embed: Any
    ) -> Float[Tensor, "*n 2H"]:
        """What is read at tokens: their embeddings and the states before them."""
        return torch.cat([embed(tokens), before], -1)

    def entering(
        self, inputs: Float[Tensor, "*n k 2H"]
    ) -> tuple[Float[Tensor, "*n k H"], Float[Tensor, "*n k H"]]:
        """What enters the layer at the slots of blocks, and what later blocks see of each input."""
        found: tuple[Tensor, Tensor] = self.recurrence(inputs)
        return found

    def remember(
        self, alone: Float[Tensor, "B S H"], positions: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B S M"]:
        """Keys and values of inputs for later blocks, from the second of what `entering` gives."""
        return self.layer.remember(alone, positions)

    def forward(
        self,
        along: Float[Tensor, "B A k H"],
        positions: Int[Tensor, "B A"],
        sees: Bool[Tensor, "B A S"],
        memory: Float[Tensor, "B S M"],
    ) -> Float[Tensor, "B A k H"]:
        """States guessed k places behind the slots of blocks, whose first slots stand here.

        `sees` says which rows of the memory each block looks at, beside the whole of itself.
        """
        count, blocks, size, _ = along.shape
        places = (positions[..., None] + torch.arange(size, device=along.device)).flatten(1)
        block_of = torch.arange(blocks, device=along.device).repeat_interleave(size)
        own = (block_of[:, None] == block_of).expand(count, -1, -1)
        every = torch.cat([sees.repeat_interleave(size, 1), own], -1)
        found: Tensor = self.layer(along.flatten(1, 2), places, every, memory)[0]
        return found.view_as(along)

    def slots(self, texts: Mapping[str, Tensor], first: int) -> Int[Tensor, "A k"]:
        """Places of texts, as `learn` is given them, in blocks from `first` on (not above 0).

        Texts are longer than a block; those slots are left out behind which no token is guessed.
        """
        ids = texts["input_ids"]
        begins = torch.arange(first, ids.shape[1] - self.block, self.block, device=ids.device)
        return begins[:, None] + torch.arange(self.block, device=ids.device)

    def counted(self, texts: Mapping[str, Tensor], at: Int[Tensor, "A k"]) -> Bool[Tensor, "n A k"]:
        """Slots whose token is to be learnt."""
        weights, guessed = texts["weights"], at + self.block
        inside = guessed.clamp(max=weights.shape[1] - 1)
        return (weights[:, inside] > 0) & (guessed < weights.shape[1])

    def guessed(
        self,
        texts: Mapping[str, Tensor],
        ends: Any,
        at: Int[Tensor, "A k"],
        shown: Bool[Tensor, "n A k"] | None = None,
    ) -> Float[Tensor, "n A k H"]:
        """States guessed at the slots of blocks; each block sees the text before it.

        The `shown` slots read, instead of their own inputs, those k places later: the token and the
        state that they guess. Nobody sees that but their block.
        """
        ids, read = texts["input_ids"], texts.get("read", texts["hidden"])
        inputs = self.inputs(ids, F.pad(read[:, :-1], (0, 0, 1, 0)), ends.embed)
        own = inputs[:, at.clamp(min=0)]
        along, alone = self.entering(own)
        if shown is not None:
            answers = inputs[:, (at + self.block).clamp(max=ids.shape[1] - 1)]
            along = self.entering(torch.where(shown[..., None], answers, own))[0]
        places = at.flatten().expand(len(ids), -1)
        memory = self.remember(alone.flatten(1, 2), places)
        sees = (at.flatten() >= 0) & (at.flatten() < at[:, :1])
        found: Tensor = self(
            along, at[:, 0].expand(len(ids), -1), sees.expand(len(ids), -1, -1), memory
        )
        return found

    def learn(
        self,
        texts: Mapping[str, Tensor],
        ends: Any,
        at: Int[Tensor, "A k"],
        learnt: Bool[Tensor, "n A k"],
        shown: Bool[Tensor, "n A k"] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Smooth L1 to the target's states plus cross-entropy to its laws, at the learnt slots.

        Of texts: "input_ids" [n T], "hidden" [n T H], "weights" [n T], above 0 where it counts;
        "read" [n T H], where it is given, stands for the states as the head is shown them. `at` and
        `shown` are as in `guessed`. How often each slot is right is told beside the loss.
        """
        ids, hidden, last = texts["input_ids"], texts["hidden"], texts["input_ids"].shape[1] - 1
        guessed = self.guessed(texts, ends, at, shown)[learnt]
        true = hidden[:, (at + self.block - 1).clamp(max=last)][learnt]
        tokens = ends.places[ids[:, (at + self.block).clamp(max=last)][learnt]]  # -1: not scored
        said, law = ends.unembed(guessed), (ends.unembed(true) / HEAT).softmax(-1)
        number = max(1, len(tokens))
        soft = F.cross_entropy(said / HEAT, law, reduction="sum") / number
        drawn = F.cross_entropy(said, tokens, reduction="sum", ignore_index=-1) / number
        apart = F.smooth_l1_loss(guessed, true, reduction="sum") / (number * true.shape[-1])
        hits = torch.zeros_like(learnt, dtype=torch.float32)
        hits[learnt] = (said.argmax(-1) == tokens).float()
        shares = hits.sum((0, 1)) / learnt.sum((0, 1)).clamp(min=1)
        right = {f"depth_{slot}": share for slot, share in enumerate(shares, 1)}
        return apart + LAW * (SOFT * soft + (1 - SOFT) * drawn), right

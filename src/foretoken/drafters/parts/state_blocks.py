"""A head that guesses k of the target's states in a pass, as a draft model (Falcon).

A pass is a block of k inputs. The root's holds the last k committed tokens with the target's states
before them; a node k levels below the end of another block opens a block of its own, with the
tokens of its path and what that block guessed. Nodes between read the slot of their level. All
blocks that open in a level go through one pass (arXiv 2412.12639).

Rows of the layer's memory are those of inputs by themselves, so the committed text is remembered
once, wherever later blocks begin; an open tree's rows lie behind it and are written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import PIECE, HeadOptions, TrainedHead, reading_few
from foretoken.lm.views.few_rows import is_silenced
from foretoken.trees.masks import depths
from foretoken.types import DecodeState, FinalNorm, Ragged, Rows, Scores, Taps


@dataclass(frozen=True, slots=True)
class Block:
    """What one block of the open tree guessed, and what blocks below it see."""

    states: Float[Tensor, "k H"]
    laws: Float[Tensor, "k V"]
    seen: tuple[int, ...]  # rows of the memory behind the committed ones


@dataclass(slots=True)
class Tree:
    """The open tree of a row; lists run over its nodes, the root first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # that nodes read

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> range:
        """New nodes."""
        born = len(self.tokens)
        self.tokens += tokens
        self.parents += parents
        self.depths += depths(parents, self.depths)
        return range(born, len(self.tokens))

    def above(self, node: int) -> Block | None:
        """The block that ends at a node which opens another; the root has none above it."""
        return self.blocks[self.parents[node]] if node else None

    def path(self, node: int, count: int) -> list[int]:
        """The last tokens down to `node`."""
        found = []
        for _ in range(count):
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]


@dataclass(slots=True)
class Known:
    """A row as the head knows it."""

    last: Float[Tensor, "k 2H"]  # inputs at its last tokens, the root's at the end
    memory: Float[Tensor, "C M"]  # rows of committed tokens, then of the open tree, then room
    length: int = 0  # committed tokens
    used: int = 0  # rows
    tree: Tree = field(default_factory=Tree)

    def close_tree(self) -> None:
        self.tree, self.used = Tree(), self.length

    def add(self, rows: Float[Tensor, "n M"]) -> None:
        """Rows behind those in use."""
        wanted = self.used + len(rows)
        if wanted > len(self.memory):
            # Zeros, not whatever is there: what nobody looks at still must be a number.
            longer = self.memory.new_zeros(2 * wanted, self.memory.shape[1])
            longer[: self.used] = self.memory[: self.used]
            self.memory = longer
        self.memory[self.used : wanted] = rows
        self.used = wanted

    def commit(self, inputs: Float[Tensor, "n 2H"], rows: Float[Tensor, "n M"]) -> None:
        """Follow the text by n tokens."""
        self.close_tree()
        self.add(rows)
        self.length = self.used
        size = len(self.last)
        self.last = torch.cat([self.last, inputs[-size:]])[-size:]


Opening = list[tuple[Known, list[int]]]  # of each row, the nodes that open a block


class StateBlocks(TrainedHead):
    """Laws by a module of the kind `falcon`."""

    context: int | None = None
    max_length: int | None = None  # positions are rotary

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.taps = self.head.reads
        self.target = reading_few(target, (config or self.Config()).draft_head)
        self.hidden_size = target.hidden_size
        self.block: int = self.head.block
        self.nothing = self.like.new_zeros(1, self.hidden_size)  # the state before the first token

    def embedded(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """The target's input embeddings."""
        found = self.target.embed(tokens.flatten().tolist()).to(self.like)
        return found.view(*tokens.shape, -1)

    def read(
        self, tokens: Sequence[int] | Ragged, before: Float[Tensor, "*n H"]
    ) -> Float[Tensor, "*n 2H"]:
        """Inputs at tokens, with the states before them."""
        ids = torch.tensor(tokens, device=before.device)
        found: Tensor = self.head.inputs(ids, before, self.embedded)
        return found

    def remembered(
        self, inputs: Float[Tensor, "n 2H"], positions: Sequence[int]
    ) -> Float[Tensor, "n M"]:
        """Rows of committed inputs."""
        places = torch.tensor(positions, dtype=torch.long, device=inputs.device)
        pieces = []
        for own, at in zip(torch.split(inputs, PIECE), torch.split(places, PIECE), strict=True):
            alone = self.head.entering(own[:, None])[1][:, 0]
            pieces.append(self.head.remember(alone[None], at[None])[0])
        return torch.cat(pieces)

    @torch.inference_mode()
    def open(self, row: DecodeState, features: Features | None) -> bool:
        assert features is not None, "the engine asks for the taps"
        if is_silenced(self.target, row.params):
            return False
        inputs = self.read(row.tokens, torch.cat([self.nothing, features[:, 0].to(self.like)]))
        rows = self.remembered(inputs, range(len(inputs)))
        row.private[self] = known = Known(inputs[:1].repeat(self.block, 1), rows[:0])
        known.commit(inputs, rows)
        return True

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes, whose parents' are known; all blocks open in one pass."""
        assert all(tap == FinalNorm() for tap in taps), "it guesses what the output layer reads"
        fed: list[tuple[Tree, range]] = []
        opening: Opening = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            known: Known = row.private[self]
            if above[0] < 0:
                known.close_tree()
            tree = known.tree
            fed.append((tree, nodes := tree.add(new, above)))
            if ends := [node for node in nodes if tree.depths[node] % self.block == 0]:
                opening.append((known, ends))
        if opening:
            self.guess(opening)
        for tree, nodes in fed:
            for node in nodes:
                if node not in tree.blocks:
                    tree.blocks[node] = tree.blocks[tree.parents[node]]
        return [self.said(tree, nodes, taps) for tree, nodes in fed]

    def said(self, tree: Tree, nodes: range, taps: Taps) -> Scores:
        """What nodes read in their blocks."""
        slots = [(tree.blocks[node], tree.depths[node] % self.block) for node in nodes]
        logits = torch.stack([block.laws[slot] for block, slot in slots])
        if not taps:
            return Scores(logits)
        states = torch.stack([block.states[slot] for block, slot in slots])
        return Scores(logits, states[:, None].expand(-1, len(taps), -1))

    def guess(self, opening: Opening) -> None:
        """Open blocks at nodes, in one pass."""
        like, widest = self.like, max(len(nodes) for _, nodes in opening)
        firsts = like.new_zeros(len(opening), widest, dtype=torch.long)
        for own, (known, nodes) in zip(firsts, opening, strict=True):
            begins = [known.length + known.tree.depths[node] - self.block for node in nodes]
            own[: len(nodes)] = firsts.new_tensor(begins)
        memory = torch.nn.utils.rnn.pad_sequence(
            [known.memory[: known.used] for known, _ in opening], batch_first=True
        )
        real = torch.tensor([[a < len(nodes) for a in range(widest)] for _, nodes in opening])
        real = real.to(like.device)
        inputs = like.new_zeros(len(opening), widest, self.block, 2 * self.hidden_size)
        inputs[real] = self.entered(opening)
        along, alone = self.head.entering(inputs)
        states = self.head(along, firsts, self.sight(opening, firsts, memory.shape[1]), memory)
        states = states[real]
        laws = self.target.unembed(states.flatten(0, 1)).view(*states.shape[:2], -1)
        places = firsts[..., None] + torch.arange(self.block, device=like.device)
        rows = self.head.remember(alone.flatten(1, 2), places.flatten(1)).unflatten(1, (widest, -1))
        guessed = zip(states, laws, rows[real], strict=True)
        for known, nodes in opening:
            for node in nodes:
                self.hang(known, node, *next(guessed))

    def hang(
        self,
        known: Known,
        node: int,
        states: Float[Tensor, "k H"],
        laws: Float[Tensor, "k V"],
        rows: Float[Tensor, "k M"],
    ) -> None:
        """Give a node the block that it opened, which blocks below remember."""
        seen: tuple[int, ...] = ()
        if (above := known.tree.above(node)) is not None:  # the root's inputs are committed
            seen = (*above.seen, *range(known.used, known.used + self.block))
            known.add(rows)
        known.tree.blocks[node] = Block(states, laws, seen)

    def entered(self, opening: Opening) -> Float[Tensor, "n k 2H"]:
        """Inputs of the blocks that open."""
        below = [
            (tree.path(node, self.block), above.states)
            for tree, nodes in ((known.tree, nodes) for known, nodes in opening)
            for node in nodes
            if (above := tree.above(node)) is not None
        ]
        made = iter(())
        if below:
            tokens, states = zip(*below, strict=True)
            made = iter(self.read(tokens, torch.stack(states)))
        return torch.stack([
            next(made) if node else known.last for known, nodes in opening for node in nodes
        ])  # fmt: skip

    def sight(
        self, opening: Opening, firsts: Int[Tensor, "B A"], rows: int
    ) -> Bool[Tensor, "B A S"]:
        """Which rows of the memory blocks see: the committed text before them and their path's."""
        lengths = firsts.new_tensor([known.length for known, _ in opening])[:, None]
        sees = torch.arange(rows, device=firsts.device) < torch.minimum(firsts, lengths)[..., None]
        for own, (known, nodes) in zip(sees, opening, strict=True):
            for one, node in zip(own, nodes, strict=False):
                if (above := known.tree.above(node)) is not None and above.seen:
                    one[list(above.seen)] = True
        return sees

    @torch.inference_mode()
    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Remember what was committed; the open tree is forgotten."""
        seen = [one for one in features if one is not None]
        assert len(seen) == len(rows), "features come with every verdict"
        counts = [len(one) for one in seen]
        fresh = [
            token for row, count in zip(rows, counts, strict=True) for token in row.tokens[-count:]
        ]
        places = [
            place for row, count in zip(rows, counts, strict=True)
            for place in range(len(row.tokens) - count, len(row.tokens))
        ]  # fmt: skip
        inputs = self.read(fresh, torch.cat(seen)[:, 0].to(self.like))
        kept = self.remembered(inputs, places)
        parts = zip(torch.split(inputs, counts), torch.split(kept, counts), strict=True)
        for row, (new, remembered) in zip(rows, parts, strict=True):
            known: Known = row.private[self]
            known.commit(new, remembered)

"""A feature head as a draft model: it goes on with the target's hidden states, token by token.

From a token's embedding and the target's state before it (behind the last norm), a feature head
guesses the state at that token; the target's own output head reads the guess as a law (EAGLE,
arXiv 2401.15077). Token i stands at position i, whose state before is that of token i - 1, and
nothing before the first. Committed tokens are fed with the target's true states; those of an open
tree with guessed ones, and are forgotten when the tree is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import HeadOptions, TrainedHead
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.views.few_rows import is_silenced
from foretoken.lm.views.few_unembedded import FewUnembedded
from foretoken.trees.masks import ancestors, depths
from foretoken.types import DecodeState, FinalNorm, Ragged, Rows, Scores, Taps

CHUNK = 512  # prompt tokens in one forward of the head


@dataclass(slots=True)
class Followed:
    """A row as the head knows it. Node 0 of the open tree is the last committed token."""

    memory: Float[Tensor, "S M"]  # keys and values: committed tokens, then nodes but the root
    before: Float[Tensor, "n H"]  # true states before the committed tokens not fed yet
    committed: int = 0  # tokens fed with true states
    states: list[Tensor] = field(default_factory=list)  # [H] guessed at each node
    sight: list[int] = field(default_factory=list)  # bits of the nodes that each node sees
    depths: list[int] = field(default_factory=list)

    def shut(self) -> None:
        """Forget the nodes below the root."""
        self.memory = self.memory[: self.committed]
        del self.states[1:], self.sight[1:], self.depths[1:]


@dataclass(slots=True)
class Feed:
    """What one row feeds in one forward."""

    known: Followed
    tokens: Sequence[int]
    before: Float[Tensor, "q H"]  # the state before each token
    positions: Sequence[int]
    sees: Bool[Tensor, "q S+q"]  # columns: the row's memory, then the tokens fed now


class FeatureHead(TrainedHead):
    """A draft model by a module that maps embeddings and states to states."""

    context: int | None = None
    max_length: int | None = None  # its positions are rotary

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        reduced = chosen_rows(None, (config or self.Config()).draft_head, target.vocab_size)
        if reduced is not None:  # its folder lists the tokens that it scores
            target = FewUnembedded(target, reduced)
        self.target, self.hidden_size = target, target.hidden_size
        self.dtype = target.embed([0]).dtype  # of the output head's weights as well
        weight = next(self.head.parameters())
        self.nothing = weight.new_zeros(0, self.head.memory_size)
        self.start = weight.new_zeros(1, self.hidden_size)  # the state before the first token

    @torch.inference_mode()
    def open(self, row: DecodeState, features: Features | None) -> bool:
        assert features is not None, "the engine asks for the taps"
        if is_silenced(self.target, row.params):
            return False
        before = torch.cat([self.start, features[:, 0].to(self.start)])
        row.private[self] = known = Followed(self.nothing, before)
        while len(known.before) > CHUNK:
            self.settle(known, self.run([committed_feed(known, row.tokens, CHUNK)]))
        return True

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes; a root is fed with the committed tokens before it."""
        assert all(tap == FinalNorm() for tap in taps), "it guesses states behind the last norm"
        feeds = []
        for row, new, above in zip(rows, tokens, parents, strict=True):
            known: Followed = row.private[self]
            if above[0] < 0:
                assert len(new) == 1, "nodes below a root need the state guessed at it"
                known.shut()
                feeds.append(committed_feed(known, row.tokens))
            else:
                feeds.append(tree_feed(known, new, above))
        fed = iter(self.run([feed for feed in feeds if feed.tokens]))
        guessed: list[Tensor] = []
        for feed, above in zip(feeds, parents, strict=True):
            known = feed.known
            if above[0] < 0:
                if feed.tokens:  # else this root was fed before
                    self.settle(known, [next(fed)])
                guessed.append(known.states[0][None])
            else:
                states, memory = next(fed)
                known.memory = torch.cat([known.memory, memory])
                known.states += states
                guessed.append(states)
        logits = torch.split(self.laws(torch.cat(guessed)), [len(states) for states in guessed])
        return [
            Scores(said, states[:, None].expand(-1, len(taps), -1) if taps else None)
            for said, states in zip(logits, guessed, strict=True)
        ]

    def laws(self, states: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Logits of guessed states, by the target's own output head."""
        return self.target.unembed(states.to(self.dtype))

    def settle(self, known: Followed, ran: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Committed tokens were fed: the last of them is the root of the next tree."""
        [(states, memory)] = ran
        known.memory = torch.cat([known.memory, memory])
        known.before = known.before[len(states) :]
        known.committed += len(states)
        known.states, known.sight, known.depths = [states[-1]], [1], [0]

    def run(self, feeds: Sequence[Feed]) -> list[tuple[Tensor, Tensor]]:
        """States and memory of every token fed, in one forward over rows of different lengths."""
        if not feeds:
            return []
        width = max(len(feed.tokens) for feed in feeds)
        held = max(len(feed.known.memory) for feed in feeds)
        embedded = self.target.embed([token for feed in feeds for token in feed.tokens])
        parts = torch.split(embedded.to(self.start), [len(feed.tokens) for feed in feeds])
        device = self.start.device
        positions = torch.zeros(len(feeds), width, dtype=torch.long, device=device)
        sees = torch.eye(held + width, dtype=torch.bool, device=device)[held:]
        sees = sees.repeat(len(feeds), 1, 1)  # padding sees itself
        for i, feed in enumerate(feeds):
            new, old = len(feed.tokens), len(feed.known.memory)
            positions[i, :new] = torch.tensor(feed.positions, device=device)
            sees[i, :new, :old] = feed.sees[:, :old]
            sees[i, :new, held : held + new] = feed.sees[:, old:]
        states, memory = self.head(
            padded(parts, width),
            padded([feed.before for feed in feeds], width),
            positions,
            sees,
            padded([feed.known.memory for feed in feeds], held),
        )
        return [
            (states[i, : len(f.tokens)], memory[i, : len(f.tokens)]) for i, f in enumerate(feeds)
        ]

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Drop what was fed with guessed states; the true ones wait for the next root."""
        for row, seen in zip(rows, features, strict=True):
            assert seen is not None, "features come with every verdict"
            known: Followed = row.private[self]
            known.shut()
            known.before = torch.cat([known.before, seen[:, 0].to(self.start)])


def committed_feed(known: Followed, tokens: Sequence[int], most: int | None = None) -> Feed:
    """Committed tokens whose states before are known, up to `most` of them."""
    before = known.before[:most]
    first, count = known.committed, len(before)
    sees = torch.ones(count, first + count, dtype=torch.bool, device=before.device).tril(first)
    last = first + count
    return Feed(known, tokens[first:last], before, range(first, last), sees)


def tree_feed(known: Followed, tokens: Sequence[int], parents: Sequence[int]) -> Feed:
    """New nodes below those of the open tree; each sees the text and its own path."""
    fed, root = len(known.states), known.committed - 1
    assert max(parents) < fed, "a node needs the state guessed at its parent"
    sight = ancestors(parents, known.sight)
    down = depths(parents, known.depths)
    before = torch.stack([known.states[parent] for parent in parents])
    sees = torch.ones(len(tokens), root + fed + len(tokens), dtype=torch.bool)
    sees[:, root:] = torch.tensor(
        [[bits >> node & 1 for node in range(fed + len(tokens))] for bits in sight]
    ).bool()
    known.sight, known.depths = known.sight + sight, known.depths + down
    return Feed(known, tokens, before, [root + depth for depth in down], sees.to(before.device))


def padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """Rows [n_i, *] as one tensor [B, length, *], zeros behind each."""
    if len(rows) == 1 and len(rows[0]) == length:
        return rows[0][None]
    whole = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole

"""A head that reads trigrams beside the target's states, as a draft model (Chimera).

Of the text before the root a row remembers keys and values: of the target's states, and of the
trigrams that end in its tokens. They grow by what is committed. A node of the open tree adds two
rows for the nodes below it: its own trigram's, and that of the layer's output at it, which stands
for the state that the target has not computed yet (arXiv 2402.15758).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.contract import Features, LanguageModel
from foretoken.drafters.parts.trained_head import PIECE, HeadOptions, TrainedHead, reading_few
from foretoken.lm.views.few_rows import is_silenced
from foretoken.types import DecodeState, FinalNorm, Ragged, Rows, Scores, Taps

TABULATED = 8192  # trigrams kept encoded

Trigram = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Node:
    """Of an open tree."""

    trigram: Trigram  # ends in its token
    path: tuple[int, ...]  # nodes from the root to itself


@dataclass(slots=True)
class Known:
    """A row: what it remembers of the text before the root, and its open tree."""

    state: Float[Tensor, "H"]  # the target's last one
    memory: Float[Tensor, "S M"]
    nodes: list[Node] = field(default_factory=list)
    below: list[Float[Tensor, "2 M"]] = field(default_factory=list)  # of every node


class TrigramReader(TrainedHead):
    """Laws by a module of the kind `chimera`."""

    context: int | None = None
    max_length: int | None = None  # positions are rotary

    def __init__(self, target: LanguageModel, kind: str, config: HeadOptions | None = None) -> None:
        super().__init__(target, kind, config)
        self.target = reading_few(target, (config or self.Config()).draft_head)
        self.hidden_size = target.hidden_size
        self.deepest: int = self.head.depth
        self.table: dict[Trigram, Float[Tensor, "H"]] = {}

    @torch.inference_mode()
    def open(self, row: DecodeState, features: Features | None) -> bool:
        assert features is not None, "the engine asks for the taps"
        if is_silenced(self.target, row.params):
            return False
        states = features[:, 0].to(self.like)
        # Before a single token nothing was said.
        state = states[-1] if len(states) else self.like.new_zeros(self.hidden_size)
        row.private[self] = Known(state, self.remembered(row.tokens, states))
        return True

    def remembered(
        self, tokens: Sequence[int], states: Float[Tensor, "n H"]
    ) -> Float[Tensor, "S M"]:
        """What the layer keeps of the last states before the root, and of the trigrams there; none
        ends at the first token.
        """
        root = len(tokens) - 1
        first = root - len(states)
        ends = range(max(1, first), root)
        encoded = self.encoded([trigram_at(tokens, place) for place in ends])
        positions = torch.tensor([[*range(first, root), *ends]], device=self.like.device)
        kept: Tensor = self.head.remember(torch.cat([states, encoded])[None], positions)[0]
        return kept

    def encoded(self, trigrams: Sequence[Trigram]) -> Float[Tensor, "n H"]:
        """Rows of trigrams: they depend on three tokens alone, and are computed once."""
        fresh = [one for one in dict.fromkeys(trigrams) if one not in self.table]
        if fresh:
            if len(self.table) > TABULATED:
                self.table = {one: self.table[one] for one in trigrams if one in self.table}
            for start in range(0, len(fresh), PIECE):
                some = fresh[start : start + PIECE]
                tokens = [token for trigram in some for token in trigram]
                embedded = self.target.embed(tokens).to(self.like).view(len(some), 3, -1)
                # copies: a view would hold the rows of all trigrams that were made with it
                made = (row.clone() for row in self.head.encode(embedded))
                self.table |= zip(some, made, strict=True)
        rows = [self.table[one] for one in trigrams]
        return torch.stack(rows) if rows else self.like.new_zeros(0, self.hidden_size)

    @torch.inference_mode()
    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Laws after new nodes of all rows: one pass of the layer, a head for each depth."""
        assert all(tap == FinalNorm() for tap in taps), "it guesses what the output layer reads"
        known: list[Known] = [row.private[self] for row in rows]
        fresh = []
        for row, one, new, above in zip(rows, known, tokens, parents, strict=True):
            if above[0] < 0:
                one.nodes, one.below = [], []
            fresh.append(placed(row.tokens, one.nodes, new, above))
        outputs = self.looked(rows, known, fresh)
        for one, new_nodes in zip(known, fresh, strict=True):
            one.nodes += new_nodes
        said, sizes = self.said(known, fresh, outputs), [len(new) for new in tokens]
        logits = torch.split(self.target.unembed(said), sizes)
        shown = torch.split(said[:, None].expand(-1, len(taps), -1), sizes)
        return [
            Scores(law, hidden if taps else None) for law, hidden in zip(logits, shown, strict=True)
        ]

    def looked(
        self, rows: Rows, known: Sequence[Known], fresh: Sequence[Sequence[Node]]
    ) -> Float[Tensor, "N H"]:
        """The layer's outputs at new nodes; what those below will see of them is remembered."""
        sizes = [len(new) for new in fresh]
        encoded = self.encoded([node.trigram for new in fresh for node in new])
        positions = torch.zeros(len(rows), max(sizes), dtype=torch.long)
        for own, row, new in zip(positions, rows, fresh, strict=True):
            root = len(row.tokens) - 1
            own[: len(new)] = torch.tensor([root + len(node.path) - 1 for node in new])
        positions = positions.to(self.like.device)
        memory = pad_sequence(
            [torch.cat([one.memory, *one.below]) for one in known], batch_first=True
        )
        sees = sight(known, fresh, memory.shape[1]).to(self.like.device)
        inputs = pad_sequence(list(torch.split(encoded, sizes)), batch_first=True)
        outputs, kept = self.head(inputs, positions, sees, memory)
        below = torch.stack([kept, self.head.remember(outputs, positions)], 2)
        for one, own, size in zip(known, below, sizes, strict=True):
            one.below += own[:size]
        return torch.cat([own[:size] for own, size in zip(outputs, sizes, strict=True)])

    def said(
        self,
        known: Sequence[Known],
        fresh: Sequence[Sequence[Node]],
        outputs: Float[Tensor, "N H"],
    ) -> Float[Tensor, "N H"]:
        """What the output layer reads, by the head of each node's depth."""
        pairs = [(one.state, node) for one, new in zip(known, fresh, strict=True) for node in new]
        states = torch.stack([state for state, _ in pairs])
        steps = torch.tensor([len(node.path) - 1 for _, node in pairs])
        found = torch.empty_like(outputs)
        for step in set(steps.tolist()):
            here = steps == step
            found[here] = self.head.saying(step, states[here], outputs[here])
        return found

    @torch.inference_mode()
    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Remember what was committed; the tree is forgotten."""
        for row, seen in zip(rows, features, strict=True):
            assert seen is not None, "features come with every verdict"
            known: Known = row.private[self]
            states = seen[:, 0].to(self.like)
            new = self.remembered(row.tokens, states)
            row.private[self] = Known(states[-1], torch.cat([known.memory, new]))


def trigram_at(tokens: Sequence[int], place: int) -> Trigram:
    """The token at a place of a text and the two before it; the first one stands before itself."""
    return tokens[max(0, place - 2)], tokens[max(0, place - 1)], tokens[place]


def placed(
    text: Sequence[int], nodes: Sequence[Node], tokens: Sequence[int], parents: Sequence[int]
) -> list[Node]:
    """New nodes of a tree that has `nodes` and whose root ends the text."""
    found = []
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True), len(nodes)):
        if parent < 0:
            found.append(Node(trigram_at(text, len(text) - 1), (place,)))
        else:
            above = nodes[parent]
            found.append(Node((*above.trigram[1:], token), (*above.path, place)))
    return found


def sight(
    known: Sequence[Known], fresh: Sequence[Sequence[Node]], columns: int
) -> Bool[Tensor, "B Q S+Q"]:
    """Whom new nodes see: the text, both rows of every node above them, and themselves."""
    width = max(map(len, fresh))
    sees = torch.zeros(len(known), width, columns + width, dtype=torch.bool)
    sees[:, :, columns:] = torch.eye(width, dtype=torch.bool)  # of padding, too: never nothing
    for own, one, new in zip(sees, known, fresh, strict=True):
        text = len(one.memory)
        own[:, :text] = True
        for query, node in zip(own, new, strict=False):
            above = torch.tensor(node.path[:-1], dtype=torch.long)
            query[text : text + 2 * len(one.nodes)].view(-1, 2)[above] = True
    return sees

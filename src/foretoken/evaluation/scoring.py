"""Log-likelihoods of continuations under the target's own law.

All continuations of one context are one tree behind it: the context is read once, and what they
begin with alike is read once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.row import make_row
from foretoken.trees.build import Trie
from foretoken.types import DecodeState, Draft, Draw, Finish, SamplingParams

Answer = tuple[float, bool]  # log-likelihood, and whether greedy decoding would write it
NODES = 256  # scored together: their logits are what takes memory


@dataclass(eq=False, slots=True)
class Question:
    """A context, and the continuations of it that are to be scored.

    One continuation may have any length and is read in pieces; several fit into one tree.
    """

    context: Sequence[int]
    continuations: dict[int, Sequence[int]]  # by the number of the request
    read: int = 0  # tokens of a single continuation that were scored
    chances: dict[int, list[Tensor]] = field(default_factory=dict)  # log-probabilities, in pieces
    greedy: dict[int, bool] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Nodes scored in the next forward, at most."""
        return min(sum(len(tokens) for tokens in self.continuations.values()), NODES)

    @property
    def over(self) -> bool:
        return self.read >= max(map(len, self.continuations.values()))

    def piece(self) -> dict[int, Sequence[int]]:
        """What is scored next of each continuation."""
        end = self.read + NODES
        return {number: tokens[self.read : end] for number, tokens in self.continuations.items()}

    def tree(self, row: DecodeState) -> Trie:
        """The last cached-to-be token with the next pieces below it; their last tokens need no
        node, as nothing behind them is asked for.
        """
        trie = Trie(row.tokens[-1])
        for tokens in self.piece().values():
            trie.add(0, tokens[:-1])
        return trie

    def take(self, trie: Trie, logits: Tensor, dtype: torch.dtype | None) -> None:
        """Note what the target says about the pieces; `logits` [N, V] are those of the tree."""
        for number, tokens in self.piece().items():
            nodes = [0]
            for token in tokens[:-1]:
                nodes.append(trie.known[nodes[-1], token])
            said = logits[nodes]
            wanted = torch.tensor(tokens, device=logits.device)
            laws = F.log_softmax(said, dim=-1, dtype=dtype)
            chances = laws.gather(1, wanted[:, None])[:, 0]
            self.chances.setdefault(number, []).append(chances)
            best = bool((said.argmax(-1) == wanted).all())
            self.greedy[number] = self.greedy.get(number, True) and best
        self.read += NODES

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Each request's number with its answer."""
        for number, parts in self.chances.items():
            yield number, (float(torch.cat(parts).sum()), self.greedy[number])


def questions_of(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], trees: bool
) -> list[Question]:
    """Pairs of context and continuation by their contexts, the longest first.

    Continuations that are too long for one tree, or all where the target scores no `trees`, are
    read one by one.
    """
    found: dict[tuple[int, ...], list[Question]] = {}
    for number, (context, continuation) in enumerate(pairs):
        known = found.setdefault(tuple(context), [])
        room = NODES - len(continuation) if trees else -1
        fitting = [one for one in known if one.nodes <= room]
        if fitting:
            fitting[0].continuations[number] = continuation
        else:
            known.append(Question(context, {number: continuation}))
    asked = [one for known in found.values() for one in known]
    return sorted(asked, key=lambda one: -len(one.context) - one.nodes)


def batches(questions: Sequence[Question], rows: int) -> Iterator[list[Question]]:
    """Questions read together: so many rows and NODES nodes at most."""
    batch: list[Question] = []
    for question in questions:
        full = len(batch) == rows or sum(one.nodes for one in batch) + question.nodes > NODES
        if batch and full:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


@torch.inference_mode()
def read(lm: LanguageModel, questions: Sequence[Question], dtype: torch.dtype | None) -> None:
    """Score all continuations of some questions, together."""
    params = SamplingParams()
    rows = [make_row(one.context, params, SeededCoins(0), lm.vocab_size) for one in questions]
    try:
        lm.prefill(rows)
        asked = list(zip(rows, questions, strict=True))
        while asked:
            tries = [question.tree(row) for row, question in asked]
            drafts = [Draft(trie.tree(), Draw.POINT) for trie in tries]
            scores = lm.score([row for row, _ in asked], drafts)
            for (row, question), trie, score in zip(asked, tries, scores, strict=True):
                [*pieces] = question.piece().values()
                question.take(trie, score.logits, dtype)
                if not question.over:
                    lm.commit([row], [range(1, len(trie))])
                    row.tokens += pieces[0]
            asked = [(row, question) for row, question in asked if not question.over]
        for row in rows:
            row.finish = Finish("length")  # their keys and values may serve a later one
    finally:
        lm.free(rows)


def score(
    lm: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    rows: int = 1,
    dtype: torch.dtype | None = None,
    told: Callable[[int, Answer], None] = lambda number, answer: None,
) -> list[Answer]:
    """The answer of each pair of context and continuation, in order; none of them is empty.

    `rows` contexts are read together. `dtype` is the one in which laws are made of logits; None:
    the target's. `told` hears of each answer as it comes.
    """
    found: dict[int, Answer] = {}
    for batch in batches(questions_of(pairs, lm.caps.tree == "mask"), rows):
        read(lm, batch, dtype)
        for question in batch:
            for number, answer in question.answers():
                found[number] = answer
                told(number, answer)
    return [found[number] for number in range(len(pairs))]

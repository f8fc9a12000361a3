"""What live traffic teaches a draft: the target's laws where its guesses were rejected.

The law at a place is read from the logits that verified the draft, before temperature and the rest.
The context of a rejection ends with the last accepted token: both models say the corrected token,
at index s of the text, from the state of the token at s - 1.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.native.best_columns import best_columns
from foretoken.training.dataset.records import Laws
from foretoken.trees.build import guessed, guessed_path
from foretoken.types import DecodeState, Step, TokenTree

MOST_PLACES = 1024  # of one text; the oldest leave


@dataclass(frozen=True, slots=True)
class Lesson:
    """A part of a text, the places in it that are learned, and the target's laws of their tokens.

    `places` [n] are indices of the tokens that are said, never of those that say them; `counts` [n]
    is how many places of its kind each stands for.
    """

    tokens: Tensor  # [T]
    places: Tensor  # [n], each from 1 to T - 1
    laws: Laws  # [n k]
    counts: Tensor  # [n]
    greedy: bool  # whether the target wrote its likeliest tokens

    @property
    def nbytes(self) -> int:
        parts = (self.tokens, self.places, self.laws.tokens, self.laws.log_probs, self.counts)
        return sum(part.nbytes for part in parts)


class Buffer:
    """The newest lessons: at most `most` of them, and at most `room` bytes."""

    def __init__(self, most: int, room: int) -> None:
        self.most, self.room = most, room
        self.lessons: deque[Lesson] = deque()
        self.nbytes = 0
        self.fresh = 0  # added since they were last drawn

    def __len__(self) -> int:
        return len(self.lessons)

    def add(self, lesson: Lesson) -> None:
        """Keep it, and let the oldest leave that have no room any more."""
        self.lessons.append(lesson)
        self.nbytes += lesson.nbytes
        self.fresh += 1
        while len(self) > self.most or self.nbytes > self.room:
            self.nbytes -= self.lessons.popleft().nbytes
        self.fresh = min(self.fresh, len(self))

    def draw(self, count: int, rng: random.Random) -> tuple[list[Lesson], list[Lesson]]:
        """Others at random, and the newest ones that were not drawn yet: `count` together."""
        new = min(self.fresh, count)
        older = len(self) - new
        self.fresh = 0
        others = sorted(rng.sample(range(older), min(count - new, older)))
        return (
            [self.lessons[i] for i in others],
            [self.lessons[i] for i in range(older, len(self))],
        )


Chances = tuple[list[int], list[float]]  # the likeliest tokens of a law, and what they have of it


@dataclass(slots=True)
class Notes:
    """What was seen of a row so far."""

    rng: random.Random
    places: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PLACES))
    counts: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_PLACES))
    laws: deque[Chances] = field(default_factory=lambda: deque(maxlen=MOST_PLACES))
    accepted: int = 0
    judged: int = 0  # guesses up to and with the first rejected one of each step


@dataclass(frozen=True, slots=True)
class Heard:
    """A request that has ended: what is learned of it, and how its guesses fared."""

    row: DecodeState
    lessons: list[Lesson]
    accepted: int
    judged: int


class Evidence:
    """Reads steps of an engine; `read` returns the rows that ended with them."""

    def __init__(self, laws: int, window: int, accepted: float, seed: int) -> None:
        self.size, self.window, self.share, self.seed = laws, window, accepted, seed

    def read(self, step: Step, keep: bool = True) -> list[Heard]:
        """Note what a step says of every row; without `keep` no places, only how guesses fared."""
        heard = []
        for at, row in enumerate(step.rows):
            if row.rehearsal:
                continue
            notes: Notes | None = row.private.get(self)
            if notes is None:  # what is drawn follows from the prompt: a resumed run draws the same
                rng = random.Random(hash((self.seed, *row.tokens[: row.prompt_len])))
                notes = row.private[self] = Notes(rng)
            self.note(notes, step, at, keep)
            if row.finish is not None:
                lessons = parted(row.tokens, notes, self.window, row.params.temperature == 0)
                heard.append(Heard(row, lessons, notes.accepted, notes.judged))
        return heard

    def note(self, notes: Notes, step: Step, at: int, keep: bool) -> None:
        """Keep the places of one row that are learned from.

        Tokens that the request gave lie before all guesses. No draft said them, so that they are
        neither judged nor learned; where one of them was refused, no guess was reached.
        """
        row, draft, verdict = step.rows[at], step.drafts[at], step.verdicts[at]
        given, emitted = draft.given, len(step.emitted[at]) - draft.given
        if len(verdict.path) < given:
            return
        tree, path = guessed(draft), guessed_path(draft, verdict.path)
        saying = [0, *path]  # saying[i] says the i-th token behind those given
        refused = emitted > len(path) and was_refused(tree, saying[-1])
        accepted = max(min(len(path), emitted), 0)
        notes.accepted += accepted
        notes.judged += accepted + refused
        kept = [i for i in range(accepted) if self.share and notes.rng.random() < self.share]
        kept += [len(path)] if refused else []
        if kept and keep:
            first = len(row.tokens) - emitted
            notes.places.extend(first + i for i in kept)
            notes.counts.extend(1.0 / self.share if i < accepted else 1.0 for i in kept)
            logits = step.scores[at].logits
            size = min(self.size, logits.shape[-1])
            for node in (given + saying[i] for i in kept):  # plain numbers: between two steps
                [best], [chances] = best_columns(logits[node : node + 1], size)
                notes.laws.append((best, chances))


def was_refused(tree: TokenTree, node: int) -> bool:
    """Whether something was guessed behind a node: a bonus token behind a leaf is no error."""
    return node in tree.parents


def parted(tokens: Sequence[int], notes: Notes, window: int, greedy: bool = False) -> list[Lesson]:
    """A text in parts of at most `window` tokens, each place behind half a window or all there is.

    The first token of a text is said by none.
    """
    laws, counts, lessons = list(notes.laws), list(notes.counts), []
    left = [(place, i) for i, place in enumerate(notes.places) if place > 0]
    while left:
        end = left[-1][0] + 1
        begin = max(0, end - window)
        reach = begin + window // 2 if begin else 1
        mine = [(place, i) for place, i in left if place >= reach]
        left = left[: len(left) - len(mine)]
        lessons.append(
            Lesson(
                torch.tensor(tokens[begin:end], dtype=torch.int32),
                torch.tensor([place - begin for place, _ in mine], dtype=torch.int32),
                joined([laws[i] for _, i in mine]),
                torch.tensor([counts[i] for _, i in mine]),
                greedy,
            )
        )
    return lessons[::-1]


def joined(laws: Sequence[Chances]) -> Laws:
    """Several laws in one."""
    tokens = torch.tensor([best for best, _ in laws], dtype=torch.int32)
    return Laws(tokens, torch.tensor([chances for _, chances in laws]).log().half())


def collated(lessons: Sequence[Lesson]) -> dict[str, Tensor]:
    """Lessons as a batch of `objectives.sparse_laws`: rows padded on the right, which causal
    attention never looks at, and weight 1 at the tokens that are said.
    """
    longest = max(len(lesson.tokens) for lesson in lessons)
    ids = torch.zeros(len(lessons), longest, dtype=torch.long)
    weights = torch.zeros(len(lessons), longest)
    for i, lesson in enumerate(lessons):
        ids[i, : len(lesson.tokens)] = lesson.tokens
        weights[i, lesson.places.long()] = 1.0
    laws = Laws.joined([lesson.laws for lesson in lessons])
    return {
        "input_ids": ids, "weights": weights, "laws": laws.tokens, "log_probs": laws.log_probs,
    }  # fmt: skip

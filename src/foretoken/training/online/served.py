"""Drafts that serve while others learn: copies of one draft, a row goes to that of its topic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.opening import open_draft
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.views.few_rows import FewRows, NarrowRows
from foretoken.lm.views.mapped_tokens import MappedTokens
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.lm.views.view import TargetView
from foretoken.training.online.topics import Router
from foretoken.trees.growing import Grown, GrowthRule, grows_trees
from foretoken.types import DecodeState, Draft, Ragged, Rows, Scores, Taps

R = TypeVar("R")


class RoutedDrafts(TargetView):
    """The LanguageModel protocol over several drafts of one kind, a row being of one of them.

    `before` is the draft whose place they take, which is closed with them.
    """

    def __init__(self, drafts: Sequence[Any], topic_of: Router, before: Any) -> None:
        super().__init__(drafts[0])
        self.drafts, self.topic_of, self.before = tuple(drafts), topic_of, before
        self.topics: dict[int, int] = {}  # of rows that are held, by uid

    def take(self, topic: int, weights: Iterable[Tensor], rows: Rows) -> None:
        """Serve with other weights from here on; the cache of `rows` is made anew from them.

        ConfigError for weights that are no numbers: then the draft stays as it is.
        """
        draft, weights = self.drafts[topic], list(weights)
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            raise ConfigError(
                "weights that a draft has learned were to serve.",
                "some of them are no numbers.",
                "pass a smaller rate.",
            )
        with torch.no_grad():
            for mine, theirs in zip(whole_model(draft).parameters(), weights, strict=True):
                mine.copy_(theirs)
        draft.refresh()
        held = [row for row in rows if self.topics.get(row.uid) == topic]
        if held:
            draft.free(held)
            draft.prefill(held)

    def routed(self, row: DecodeState) -> int:
        """The topic of a row, kept from when it is first seen until it is freed."""
        found = self.topics[row.uid] = self.topic(row)
        return found

    def topic(self, row: DecodeState) -> int:
        """The topic of a row, whether its draft was ever asked or not."""
        found = self.topics.get(row.uid)
        if found is None:
            found = 0 if row.rehearsal else self.topic_of(row.tokens[: row.prompt_len])
            if found not in range(len(self.drafts)):
                raise ConfigError(
                    f"a router sent a prompt to topic {found!r}.",
                    f"there are {len(self.drafts)} drafts, 0 to {len(self.drafts) - 1}.",
                    "pass as many topics as the router knows.",
                )
        return found

    def each(self, rows: Rows, ask: Callable[[Any, list[int]], Sequence[R]]) -> list[R]:
        """What the draft of every row says of it, in the order of the rows."""
        topics = [self.routed(row) for row in rows]
        if len(set(topics)) == 1:
            return list(ask(self.drafts[topics[0]], list(range(len(rows)))))
        found: dict[int, R] = {}
        for topic in sorted(set(topics)):
            places = [i for i, other in enumerate(topics) if other == topic]
            found |= zip(places, ask(self.drafts[topic], places), strict=True)
        return [found[i] for i in range(len(rows))]

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Tensor | None = None
    ) -> list[Grown | None]:
        def asked(draft: Any, places: list[int]) -> list[Grown | None]:
            some = [rows[i] for i in places]
            if not grows_trees(draft):
                return [None] * len(some)
            return draft.grow_trees(some, [rules[i] for i in places], names)

        return self.each(rows, asked)

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        return self.each(
            rows,
            lambda lm, some: lm.prefill([rows[i] for i in some], taps, limit=limit, last=last),
        )

    def missing(self, row: DecodeState) -> int:
        """Of a row whose topic nobody has asked for, all of its text: whichever draft is asked says
        so, no router learns of it, and `take` leaves it to be read when it is drafted for.
        """
        found: int = self.drafts[self.topics.get(row.uid, 0)].missing(row)
        return found

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        return self.each(
            rows,
            lambda lm, some: lm.score([rows[i] for i in some], [drafts[i] for i in some], taps),
        )

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        return self.each(
            rows,
            lambda lm, some: lm.grow(
                [rows[i] for i in some], [tokens[i] for i in some], [parents[i] for i in some], taps
            ),
        )

    def commit(self, rows: Rows, paths: Ragged) -> None:
        def one(lm: Any, some: list[int]) -> list[None]:
            lm.commit([rows[i] for i in some], [paths[i] for i in some])
            return [None] * len(some)

        self.each(rows, one)

    def free(self, rows: Rows) -> None:
        for row in rows:
            topic = self.topics.pop(row.uid, None)
            if topic is not None:
                self.drafts[topic].free([row])

    def self_check(self, row: DecodeState) -> None:
        self.drafts[self.routed(row)].self_check(row)

    def check_usable(self) -> None:
        for draft in self.drafts:
            draft.check_usable()

    def refresh(self, full: bool = False) -> int:
        return sum(draft.refresh(full=full) for draft in self.drafts)

    def close(self) -> None:
        for draft in (*self.drafts, self.before):
            draft.close()


def whole_model(draft: Any) -> Any:
    """The transformers model behind an opened draft, all rows of its output layer included."""
    if isinstance(draft, MappedTokens):
        raise CapabilityError(
            "learning while it serves was asked of a draft with another tokenizer.",
            "the target's laws are over other tokens than those this draft says.",
            "use a draft with the target's tokenizer; `foretoken train draft` makes one.",
        )
    if isinstance(draft, NarrowRows):
        raise CapabilityError(
            "learning while it serves was asked of a draft with fewer tokens than its target.",
            f"this draft has the ids below {draft.known}, and texts may hold others.",
            "use a draft as wide as the target; `foretoken train draft` makes one.",
        )
    if isinstance(draft, RoutedDrafts):
        raise ConfigError(
            "learning was asked of a draft that learns already.",
            "one OnlineDraft serves a session at a time.",
            "close the other one first.",
        )
    if isinstance(draft, SortedExits) or isinstance(getattr(draft, "lm", None), SortedExits):
        raise CapabilityError(
            "learning while it serves was asked of a sorted draft that is left at its exits.",
            "what is learned is the law behind all its layers; earlier exits would forget theirs.",
            'pass draft_thresholds="off", --set draft_thresholds=off: it then runs all its layers.',
        )
    if isinstance(draft, FewRows):
        return draft.whole
    if isinstance(draft, CachedLM):
        return draft.model
    raise CapabilityError(
        f"learning while it serves was asked of {type(draft).__name__}.",
        "weights are learned of transformers models alone.",
        "load the session with a draft model: method chain or tree, draft=DIR.",
    )


@torch.no_grad()
def twin(model: Any, dtype: torch.dtype) -> Any:
    """A model of the same weights in memory of its own, without kernels that others put in."""
    made: Any = type(model)(copy.deepcopy(model.config))
    made.load_state_dict(model.state_dict())
    made.set_attn_implementation("sdpa")
    return made.eval().requires_grad_(False).to(model.device, dtype)


def opened_twin(draft: Any) -> Any:
    """A draft of the same weights and tokens, opened on its own."""
    model = whole_model(draft)
    rows: OutputRows | None = draft.output_rows if isinstance(draft, FewRows) else None
    return open_draft(twin(model, model.dtype), rows)

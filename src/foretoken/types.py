"""The nouns of the engine.

Shape legend, used everywhere: `B` rows, `N` nodes of one tree with its root, `A` accepted nodes,
`V` vocabulary, `H` hidden, `L` tapped layers, `S` committed tokens. `p` is the target's law, `q`
the drafter's. Two invariants: node 0 of a tree repeats the row's last committed token, and a cache
holds every committed token of a row but the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from foretoken.asking import endless as endless
from foretoken.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from foretoken.coins import Coins

# A tap: what the output head reads, behind the last norm. Others count decoder layers.
NORMED = 1 << 16


class Draw(Enum):
    """How the children of a node were chosen; a verifier's rule is exact for some of these only."""

    POINT = "point"  # no proposal law: top-k, n-gram, retrieval, or the argmax at temperature 0
    IID = "iid"  # independent draws from q
    DISTINCT = "distinct"  # draws from q without replacement, in node order
    MIXED = "mixed"  # at most one child sampled, from q; the others fixed, and q is zero on them
    JOINT = "joint"  # independent draws from one law over (beam, token) pairs


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Candidate continuations of one row. A chain is a tree; "no draft" is the root alone.

    Plain tuples: a tree has at most some dozens of nodes, and host integers are what masks, tries
    and verdicts are made from.
    """

    tokens: tuple[int, ...]  # node 0 repeats the row's last committed token
    parents: tuple[int, ...]  # parents[0] == -1 and parents[i] < i

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self) -> list[list[int]]:
        """Children of each node in node order, which is draw order."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    def path(self, node: int) -> list[int]:
        """Nodes from the root (excluded) down to `node` (included)."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree, how its children were chosen, and the laws they came from."""

    tree: TokenTree
    draw: Draw
    # q[i] [V]: law the children of node i came from (None at a leaf); None as a whole iff POINT
    q: tuple[Tensor | None, ...] | None = None
    arm: int = 0  # which of its own drafters made it, where a drafter has several


class Laws(Protocol):
    """The warped law of every node of a tree, computed when a verifier first asks for a node."""

    greedy: bool  # temperature 0: every law is a point mass

    def __getitem__(self, node: int) -> Float[Tensor, "V"]: ...
    def draw(self, node: int, coins: Coins) -> int:
        """A token from the law of `node`; at temperature 0 the argmax, without using a coin."""
        ...


@dataclass(slots=True)
class Scores:
    """What one target forward says about one row."""

    logits: Float[Tensor, "N V"]
    hidden: Float[Tensor, "N L H"] | None = None  # only if the drafter declared taps
    p: Laws | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier keeps of a draft. Every verdict advances its row by at least one token."""

    path: tuple[int, ...]  # accepted nodes below the root, in order; may be empty
    next_token: int  # correction or bonus


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose for one row. Zero nodes means plain decoding.

    Prices are in expected tokens: what the time would bring otherwise. Only drafters that value
    their own nodes look at them: they draft what is worth more than it costs.
    """

    depth: int  # longest path below the root
    nodes: int  # nodes below the root
    level_price: float = 0.0  # of one more draft forward
    node_prices: tuple[float, ...] = ()  # [n]: of scoring n nodes; empty: they are free
    step_price: float = 0.0  # of a step that drafts nothing; 0: nothing is priced
    arm: int = 0  # which of its own drafters a drafter with several lets draft
    bar: float = 0.0  # worth above its price from which arm 0 drafts instead, whose worth is known


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a row ended."""

    reason: str  # "stop" (end token, stop text, stopping criterion) or "length"
    stop_text: str | None = None  # the stop text that matched


_uids = itertools.count()


@dataclass(slots=True, eq=False)
class DecodeState:
    """One row of a ragged batch; the only mutable per-request object."""

    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    coins: Coins  # its own, so neighbours never change a row's output
    warp: Any  # foretoken.warp.Warp built from params
    ended: Callable[[DecodeState], Finish | None] | None = None  # asked after every single token
    finish: Finish | None = None
    draft: Any = None  # private to the drafter
    control: Any = None  # private to the controller
    uid: int = field(default_factory=lambda: next(_uids))

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.params.max_new_tokens - (len(self.tokens) - self.prompt_len)

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens one by one up to an end token, a stop or the cap; returns the kept ones."""
        kept: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            kept.append(token)
            if token in self.params.eos:
                self.finish = Finish("stop")
            elif self.ended is not None and (finish := self.ended(self)) is not None:
                self.finish = finish
            elif self.room <= 0:
                self.finish = Finish("length")
            if self.finish is not None:
                break
        return kept


@dataclass(frozen=True, slots=True)
class Caps:
    """What a language model's cache allows."""

    tree: str = "mask"  # "mask": any tree in one forward; "chain": chains only
    ragged: bool = True  # rows of different lengths in one forward
    taps: bool = True  # hidden layers can be read
    why: str = ""  # the reason for a limit, for messages


class LanguageModel(Protocol):
    """A causal LM with a cache that can score a tree and take it back (`lm.cached`, `lm.table`)."""

    caps: Caps
    vocab_size: int
    hidden_size: int  # of one tapped feature
    max_length: int | None  # longest sequence the positions allow

    def prefill(
        self, row: DecodeState, taps: tuple[int, ...] = ()
    ) -> Float[Tensor, "S L H"] | None:
        """Cache all of the row's tokens but the last; tapped features of what was fed, if asked."""
        ...

    def score(
        self, rows: Sequence[DecodeState], drafts: Sequence[Draft], taps: tuple[int, ...] = ()
    ) -> list[Scores]:
        """One forward over every row's tree. Uncached committed tokens are fed along."""
        ...

    def grow(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> list[Float[Tensor, "n V"]]:
        """Append nodes to each row's open tree and return their logits (drafting).

        Parents index the row's open tree; the first node fed is the root (parent -1).
        """
        ...

    def grow_scores(
        self,
        rows: Sequence[DecodeState],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        taps: tuple[int, ...],
    ) -> list[Scores]:
        """As `grow`, with the tapped features of the nodes."""
        ...

    def commit(self, rows: Sequence[DecodeState], paths: Sequence[Sequence[int]]) -> None:
        """Keep the root and `path` of each row's open tree as cached tokens, forget the rest."""
        ...

    def free(self, rows: Sequence[DecodeState]) -> None:
        """Forget rows; unknown rows are ignored."""
        ...


KeepGoing = Callable[..., int]  # of a row, a law and, if asked for, hidden layers: see Controller


class Drafter(Protocol):
    """Guesses continuations of rows."""

    draws: frozenset[Draw]
    taps: tuple[int, ...]  # hidden layers it wants to see; negative counts from the last
    trees: bool  # emits trees that are no chains
    valued: bool  # knows the chance of each of its nodes, and honours the prices of a budget
    sparing: bool  # a valued one that spends nothing where no node promises to pay
    arms: int  # drafters it chooses from, as a budget says
    memoryless: bool  # a proposal follows from the row's text, the budget and coins alone
    # The model whose hidden layers it hands to a `keep_going` marked as `reading`; None: to nobody.
    hidden_from: LanguageModel | None
    shared: bool  # how much is drawn for a row depends on what was learned from other rows

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        """The constant budget for what was asked of it (None: nothing was).

        A drafter with a shape of its own says here how large it is, and refuses to be cut where
        that shape was asked for. None leaves the budget to the controller.
        """
        ...

    def start(self, row: DecodeState, seen: Tensor | None) -> None: ...
    def propose(
        self, rows: Sequence[DecodeState], budgets: Sequence[Budget], keep_going: KeepGoing
    ) -> list[Draft]: ...
    def observe(
        self,
        rows: Sequence[DecodeState],
        drafts: Sequence[Draft],
        scores: Sequence[Scores],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Called after the rows were extended: learn, roll back."""
        ...

    def finish(self, row: DecodeState) -> None: ...


@runtime_checkable
class Remembers(Protocol):
    """A drafter that learns across requests and can keep that in a file."""

    def save(self) -> None:
        """Write it to the file the options name; without one, do nothing."""
        ...


@runtime_checkable
class Reports(Protocol):
    """A drafter with something to tell beside its drafts, such as what a search took."""

    def report(self) -> str:
        """One line for a reader of results; empty while there is nothing to tell."""
        ...


class ValuedDrafter(Drafter, Protocol):
    """A drafter that knows the chance of each node of a draft it has just made, and lets others
    choose among them: what it then observes is the smaller tree."""

    def values(self, row: DecodeState) -> list[float]:
        """The chance of every node of the row's draft, the root's (1) first."""
        ...

    def keep(self, row: DecodeState, nodes: Sequence[int]) -> None:
        """Only these nodes of the row's draft, the root among them, go to the target."""
        ...


@runtime_checkable
class KeepsIds(Protocol):
    """A drafter whose guesses are ids written down elsewhere, for some tokenizer."""

    def check_words(self, words: Mapping[str, int]) -> None:
        """Refuse a tokenizer, token to id, that gives those ids another meaning."""
        ...


class Verifier(Protocol):
    """Decides which candidates stand. An empty `exact_for` is lossy by design, and says so."""

    exact_for: frozenset[Draw]
    chains_only: bool

    def verify(self, draft: Draft, scores: Scores, coins: Coins) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step and what they were spent on."""

    rows: int
    nodes: int  # scored in the target forward, roots included
    context: int  # longest row
    draft: float
    target: float
    other: float  # warp, verify, commit, bookkeeping
    hidden: float = 0.0  # of these, what a device for each model would have run at the same time


@dataclass(frozen=True, slots=True)
class CostTable:
    """What an engine's forwards cost on this machine, measured when it is quiet."""

    target: Mapping[int, float]  # seconds of one target forward by nodes scored, one row
    draft: Mapping[int, float]  # seconds of a whole draft by depth (0 is absent)
    overhead: float = 0.0  # seconds of a step outside both


class Controller(Protocol):
    """Chooses how much to draft: before (`budgets`), during (`keep_going`), after (`update`)."""

    needs_costs: (
        bool  # the engine measures a CostTable and hands it to `learn` before the first step
    )

    def learn(self, costs: CostTable) -> None: ...
    def budgets(self, rows: Sequence[DecodeState]) -> list[Budget]: ...
    def keep_going(
        self, row: DecodeState, law: Tensor, hidden: Float[Tensor, "L H"] | None = None
    ) -> int:
        """Asked before each further draft token: 0 no, 1 yes, `asking.LAST` the last one.

        May look at laws and earlier draws only. `hidden` belongs to the token fed last, the one
        before the token asked for; given if the rule is marked as `reading` it. Drafters that know
        no LAST ask again, and then the answer has to be no. A rule marked as reading `branches` is
        handed the laws [n V] and hidden layers [n L H] of a whole level by drafters of trees.
        """
        ...

    def update(self, row: DecodeState, draft: Draft, verdict: Verdict) -> None: ...
    def timed(self, times: StepTimes) -> None: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as listeners see it."""

    rows: tuple[DecodeState, ...]
    drafts: tuple[Draft, ...]
    verdicts: tuple[Verdict, ...]
    emitted: tuple[list[int], ...]  # tokens each row really gained, after stops and caps
    times: StepTimes

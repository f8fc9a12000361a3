"""The nouns of the engine.

Shape legend, used everywhere: `B` rows, `N` nodes of one tree with its root, `A` accepted nodes,
`V` vocabulary, `H` hidden, `L` tapped layers, `S` committed tokens. `p` is the target's law, `q`
the drafter's. Two invariants: node 0 of a tree repeats the row's last committed token, and a KV
cache holds every committed token of a row but the last.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.costs import CostTable as CostTable
from foretoken.sampling import Finish as Finish
from foretoken.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from foretoken.coins import Coins


@dataclass(frozen=True, slots=True)
class Embedding:
    """A tap on the input embeddings, before the first layer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A tap on the output of one decoder layer; a negative index counts from the last."""

    index: int


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A tap on what the output head reads, behind the last norm."""


Tap = Embedding | Layer | FinalNorm  # where hidden states are read
Taps = tuple[Tap, ...]
Ragged = Sequence[Sequence[int]]  # integers by row: tokens, parents, nodes of a path


class Draw(Enum):
    """How the children of a node were chosen; a verifier's rule is exact for some of these only."""

    POINT = "point"  # no proposal law: top-k, n-gram, retrieval, or the argmax at temperature 0
    IID = "iid"  # independent draws from q
    DISTINCT = "distinct"  # draws from q without replacement, in node order
    MIXED = "mixed"  # at most one child sampled, from q; the others fixed, and q is zero on them
    JOINT = "joint"  # independent draws from one law over (beam, token) pairs
    TARGET = "target"  # a first layer drawn from the target's own law, below it draws from q


class Shape(Enum):
    """What a drafter's trees look like."""

    CHAIN = "chain"
    TREE = "tree"


class Memory(Enum):
    """What a proposal follows from, beside the row's text, the budget and coins."""

    NOTHING = "nothing"
    ROW = "row"  # what was learned from earlier steps of the row
    ENGINE = "engine"  # what was learned from other rows as well


@dataclass(frozen=True, slots=True)
class Traits:
    """What a drafter is; engine, controllers, audit and docs read it."""

    draws: frozenset[Draw] = frozenset({Draw.POINT})
    shape: Shape = Shape.CHAIN
    taps: Taps = ()  # hidden states of the target that it reads, in this order
    context: int | None = None  # last prompt tokens whose hidden states it reads; None: all
    memory: Memory = Memory.ROW
    prices: bool = False  # its drafts say the chance of each node, and keep to prices

    @property
    def fixed(self) -> bool:
        """Whether all its candidates are fixed: then a seed's text does not depend on drafts."""
        return self.draws == {Draw.POINT}


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

    def ranks(self) -> list[int]:
        """Place of each node among its siblings, in node order."""
        ranks, born = [0], [0] * len(self.tokens)
        for parent in self.parents[1:]:
            ranks.append(born[parent])
            born[parent] += 1
        return ranks

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
    """A tree, how its children were chosen, and the laws or chances they came with."""

    tree: TokenTree
    draw: Draw
    # q[i] [V]: law the children of node i came from (None at a leaf); None as a whole iff POINT
    q: tuple[Tensor | None, ...] | None = None
    # of every node, the root's 1 first: how likely its path is accepted, as the drafter believes
    chances: tuple[float, ...] | None = None
    origin: tuple[int, ...] | None = None  # of a pruned draft: its nodes in the one proposed
    given: int = 0  # nodes of a chain from the root on that the request gave, and nobody guessed

    def keep(self, nodes: Sequence[int]) -> Draft:
        """The draft cut to `nodes`, ascending, the root first, a tree again.

        Only fixed candidates may be chosen again after they were made: of others this would change
        the law.
        """
        assert self.draw is Draw.POINT, "candidates that were drawn are judged as they were drawn"
        place = {node: i for i, node in enumerate(nodes)}
        tree = self.tree
        kept = TokenTree(
            tuple(tree.tokens[node] for node in nodes),
            tuple(place.get(tree.parents[node], -1) for node in nodes),
        )
        chances = None if self.chances is None else tuple(self.chances[node] for node in nodes)
        origin = nodes if self.origin is None else [self.origin[node] for node in nodes]
        return Draft(kept, self.draw, chances=chances, origin=tuple(origin))


class Laws(Protocol):
    """The warped law of every node of a tree, computed when a verifier first asks for a node."""

    greedy: bool  # temperature 0: every law is a point mass

    def __getitem__(self, node: int) -> Float[Tensor, "V"]: ...
    def draw(self, node: int, coins: Coins) -> int:
        """A token from the law of `node`; at temperature 0 the argmax, without using a coin."""
        ...


@dataclass(frozen=True, slots=True)
class Few:
    """The finite part of logits: what a draft of a reduced vocabulary says about its own tokens."""

    logits: Float[Tensor, "N n"]
    tokens: Int[Tensor, "n"]  # ids of the columns
    width: int  # of all tokens, V

    def spread(self) -> Float[Tensor, "N V"]:
        """Logits over all tokens: -inf where no column stands for one."""
        whole = self.logits.new_full((len(self.logits), self.width), -inf)
        return whole.index_copy_(1, self.tokens, self.logits)


@dataclass(slots=True)
class Scores:
    """What one forward says about the nodes of one row."""

    said: Float[Tensor, "N V"] | Few  # logits of all tokens, or what is finite of them
    hidden: Float[Tensor, "N L H"] | None = None  # of the taps that were asked for
    p: Laws | None = None
    share: float = 1.0  # of a whole forward that this one took: part of the layers may have run

    @property
    def few(self) -> Few | None:
        """All that is finite of the logits, where that is known to be little."""
        return self.said if isinstance(self.said, Few) else None

    @property
    def logits(self) -> Float[Tensor, "N V"]:
        """Over all tokens; spread when first asked for, as who only ranks needs the few alone."""
        if not isinstance(self.said, Few):
            return self.said
        if self._spread is None:
            self._spread = self.said.spread()
        return self._spread

    _spread: Tensor | None = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier keeps of a draft. Every verdict advances its row by at least one token."""

    path: tuple[int, ...]  # accepted nodes below the root, in order; may be empty
    next_token: int  # correction or bonus


@dataclass(frozen=True, slots=True)
class Prices:
    """What time costs, in expected tokens: those it would bring if it were spent otherwise."""

    level: float  # one more forward of the draft model
    nodes: tuple[float, ...]  # [n]: scoring n nodes below the root
    step: float  # a target forward that drafts nothing
    second: float = 0.0  # a second of anything else
    # Made of these once. The least that a node can cost, however many are; -1: it is not known
    cheapest: float = field(init=False, compare=False)
    table: array[float] = field(init=False, compare=False, repr=False)  # `nodes`, for C

    def __post_init__(self) -> None:
        first, *others = self.nodes or (0.0,)
        least = min([(price - first) / n for n, price in enumerate(others, 1)], default=-1.0)
        object.__setattr__(self, "cheapest", least)
        object.__setattr__(self, "table", array("d", self.nodes))

    def one_more(self, drafted: int) -> float:
        """A draft forward for one node more than `drafted`, and scoring it; inf: no more may be."""
        if drafted + 1 >= len(self.nodes):
            return inf
        return self.level + self.nodes[drafted + 1] - self.nodes[drafted]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose for one row. Zero nodes means plain decoding."""

    depth: int  # longest path below the root
    nodes: int  # nodes below the root
    prices: Prices | None = None  # None: nothing is priced
    # chance below which no node can pay, where somebody else does the pricing; None: nobody does
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a tree under way, as a stopping rule sees it before anything is drawn there."""

    laws: Float[Tensor, "n V"]  # of the branches that may go on, the draft model's own
    hidden: Float[Tensor, "n L H"] | None = None  # the rule's taps, at the tokens fed last


class Go(Enum):
    """A stopping rule's answer about one more level."""

    ON = "on"
    LAST = "last"  # draw this level: its laws are paid for; ask the draft model for no further one
    STOP = "stop"  # draw nothing more


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
    error: BaseException | None = None  # what ended it, where that was an exception
    longest: int | None = None  # tokens, prompt included, that the model's positions allow
    fresh: bool = False  # it begins an answer, and goes on from no words of its prompt
    prefill: float = 0.0  # seconds that its prompt took
    reused: dict[str, int] = field(default_factory=dict)  # tokens of earlier texts, by model
    aside: float = 0.0  # seconds of the rounds it sat out before its last one
    rehearsal: bool = False  # written to be timed: nothing is learned of it for other rows
    guesses: int | None = None  # most nodes drafted for it in a step; None: as many as may be
    priority: int = 0  # the lower, the sooner it gets a place in the batch
    # whose texts it is one of: places are shared evenly among these, caches are not
    owner: str = ""
    requester: str = ""  # whom of the owner's it is for: its places are shared evenly among these
    prediction: Any = None  # what its caller expects (`drafters.parts.prediction.Prediction`)
    private: dict[Any, Any] = field(default_factory=dict)  # of every part, keyed by the part itself
    uid: int = field(default_factory=itertools.count().__next__)
    limit: tuple[int, str] = field(init=False)  # most new tokens, and why: "length" or "context"

    def __post_init__(self) -> None:
        self.limit = self.params.max_new_tokens, "length"
        if self.longest is not None and self.longest - self.prompt_len < self.limit[0]:
            self.limit = self.longest - self.prompt_len, "context"

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.limit[0] - (len(self.tokens) - self.prompt_len)

    def fail(self, error: BaseException) -> None:
        """End by an exception, which the row's owner gets unchanged."""
        self.error, self.finish = error, Finish("error")

    @property
    def repeatable(self) -> bool:
        """Whether its seed has to give the same sampled text again, alone and in company."""
        return self.params.seed is not None and self.params.temperature > 0.0

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens one by one up to an end token, a stop or the cap; returns the kept ones."""
        before, room = len(self.tokens), self.room
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.params.eos:
                self.finish = Finish("stop")
            elif self.ended is not None and (finish := self.ended(self)) is not None:
                self.finish = finish
            elif self.params.grammar is not None and self.params.grammar.complete(self.tokens):
                self.finish = Finish("stop")
            elif count >= room:
                self.finish = Finish(self.limit[1])
            if self.finish is not None:
                break
        return self.tokens[before:]


Rows = Sequence[DecodeState]


@dataclass(frozen=True, slots=True)
class Caps:
    """What a language model's cache allows."""

    tree: str = "mask"  # "mask": any tree in one forward; "chain": chains only
    ragged: bool = True  # rows of different lengths in one forward
    taps: bool = True  # hidden layers can be read
    why: str = ""  # the reason for a limit, for messages


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step and what they were spent on."""

    rows: int
    nodes: int  # scored in the target forward, roots included
    context: int  # longest row
    draft: float
    target: float
    other: float  # warp, verify, commit, bookkeeping
    hidden: float = 0.0  # of these, what a device for each model would have run at the same time
    prefill: float = 0.0  # prompts fed before the step

    @property
    def whole(self) -> float:
        """All but the prompts."""
        return self.draft + self.target + self.other


@dataclass(frozen=True, slots=True)
class Step:
    """One round of the engine, as drafters, controllers and listeners see it."""

    rows: tuple[DecodeState, ...]  # extended by now
    drafts: tuple[Draft, ...]
    scores: tuple[Scores, ...]
    verdicts: tuple[Verdict, ...]
    emitted: tuple[list[int], ...]  # tokens each row really gained, after stops and caps
    times: StepTimes
    # where one of several drafters is shown its own nodes alone: the step as it was, whose hidden
    # states, of what it taps, are those of the whole text
    whole: Step | None = None

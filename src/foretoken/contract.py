"""The contract between engine, models, drafters, rules and controllers.

A published method is a row of METHODS: what guesses (a `DraftModel`, a `BlockModel` or a look-up),
the grower that makes trees of its guesses, the rule that judges them, and the controller that
decides how much is guessed. Each part sees the types of `types.py` and nothing else of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from foretoken.types import (
    Budget,
    Caps,
    CostTable,
    DecodeState,
    Draft,
    Draw,
    Go,
    Level,
    Ragged,
    Rows,
    Scores,
    Shape,
    Step,
    Taps,
    Traits,
    Verdict,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The `Config` of a part that leaves nothing to choose."""


Features = Float[Tensor, "S L H"]  # hidden states of the taps that were asked for


class LayerCache(Protocol):
    """The keys and values that one attention layer keeps of cached tokens, as it reads them."""

    heads: int  # of keys and values: fewer than of queries where these share them
    size: int  # of one head
    rotary: bool  # keys are rotated by their positions

    def keys_values(
        self, row: DecodeState
    ) -> tuple[Float[Tensor, "heads S size"], Float[Tensor, "heads S size"]]:
        """Keys and values of the row's S cached tokens, those of its open tree left out.

        They may lie in the cache itself: read them before the row is fed, committed or freed.
        """
        ...

    def rotated(
        self, states: Float[Tensor, "n any size"], positions: Int[Tensor, "n"]
    ) -> Float[Tensor, "n any size"]:
        """Queries or keys rotated as the layer does at these positions; as they are if it does not.

        Gradients pass.
        """
        ...


class LanguageModel(Protocol):
    """A causal LM with a KV cache that can score a tree and take it back."""

    caps: Caps
    vocab_size: int
    hidden_size: int  # of one tapped feature
    layers: int  # decoder layers
    max_length: int | None  # longest sequence the positions allow
    lossless: bool  # False: a view whose scores are not the target's own law

    @property
    def verified(self) -> float:
        """Tokens up to which its logits are known to be right; `self_check` rows beyond."""
        ...

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Features | None]:
        """Cache up to `limit` more committed tokens of each row (None: all), never the last one.

        A row is known from its first call on. Returns the tapped features of what was fed now, of
        the `last` tokens of the row alone where that is given; None per row without taps.
        """
        ...

    def missing(self, row: DecodeState) -> int:
        """Committed tokens that are not cached yet, the last one aside."""
        ...

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        """One forward over every row's tree. Uncached committed tokens are fed along."""
        ...

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Append nodes to each row's open tree and score them.

        Parents index the row's open tree; the first node fed is the root (parent -1).
        """
        ...

    def commit(self, rows: Rows, paths: Ragged) -> None:
        """Keep the root and `path` of each row's open tree as cached tokens, forget the rest."""
        ...

    def free(self, rows: Rows) -> None:
        """Forget rows; unknown rows are ignored."""
        ...

    def self_check(self, row: DecodeState) -> None:
        """CapabilityError where the logits behind a row's committed tokens are wrong."""
        ...

    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n H"]:
        """Input embeddings."""
        ...

    def unembed(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Logits of states that passed the last norm."""
        ...

    def layer_cache(self, layer: int) -> LayerCache:
        """What layer `layer` (from 0) keeps of cached tokens; CapabilityError where it keeps no
        keys and values of one size, or rotates them in a way that is not known.
        """
        ...


class DraftModel(Protocol):
    """Whatever guesses token by token: an ordinary model, an early exit, a feature head."""

    taps: Taps  # features of the target that it reads
    context: int | None  # last prompt tokens whose features it reads; None: all
    vocab_size: int
    hidden_size: int  # of the features it shows to stopping rules
    max_length: int | None  # longest sequence its positions allow

    def open(self, row: DecodeState, features: Features | None) -> bool:
        """Take in a prompt; False: this row does not fit, and is written without guesses."""
        ...

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        """Append nodes to each row's open tree and score them; a parent of -1 opens a new one."""
        ...

    def keep(
        self, rows: Rows, paths: Sequence[Sequence[int] | None], features: Sequence[Features | None]
    ) -> None:
        """Follow the target: the nodes of each open tree that stand (None: none was open).

        Where it has taps, `features` are those of the root and of every accepted node.
        """
        ...

    def close(self, row: DecodeState) -> None:
        """Forget a row; unknown ones are ignored."""
        ...


@runtime_checkable
class ReadsLate(Protocol):
    """A draft model, of levels or of blocks, that may be told of several steps at once: only when
    it is asked again does it matter what was committed meanwhile.
    """

    reads_late: bool


@runtime_checkable
class ReadsTexts(Protocol):
    """A draft model that reads a text when it is first asked to guess in it."""

    def to_read(self, row: DecodeState) -> float:
        """Seconds until this row can be drafted for."""


@runtime_checkable
class Shallow(Protocol):
    """A draft model that guesses so many levels and no more."""

    deepest: int


class BlockModel(Protocol):
    """Whatever guesses several depths at once: Medusa heads, CTC, block diffusion."""

    taps: Taps
    context: int | None
    vocab_size: int
    depth: int  # most depths it guesses

    def open(self, row: DecodeState, features: Features | None) -> bool: ...
    def laws(self, rows: Rows, depth: int) -> list[Float[Tensor, "depth V"]]:
        """Logits of the tokens 1 to `depth` places behind the next one, `[0]` being the next."""
        ...

    def keep(self, rows: Rows, features: Sequence[Features | None]) -> None:
        """Follow the target: features of the root and of every accepted node."""
        ...

    def close(self, row: DecodeState) -> None: ...


class StoppingRule(Protocol):
    """When a draft ends early. A controller without one never stops a draft."""

    taps: Taps  # hidden states of the draft model that it reads
    branches: bool  # judges all branches of a level together; others see one chain only

    def after(self, row: DecodeState, level: Level) -> Go:
        """Asked before anything is drawn at a level. May look at laws and earlier draws only."""
        ...


class Drafter(Protocol):
    """Guesses continuations of rows."""

    traits: Traits

    def start(self, row: DecodeState, seen: Features | None) -> None:
        """Take in a prompt and the target's features of it."""
        ...

    def propose(
        self, rows: Rows, budgets: Sequence[Budget], stop: StoppingRule | None = None
    ) -> list[Draft]: ...

    def reading(self) -> Taps:
        """Hidden states it reads of the forward that scores what it has just proposed: those of
        its traits, or none in a step in which nobody would look at them.
        """
        ...

    def observe(self, step: Step) -> None:
        """Called after the rows were extended: learn, roll back."""
        ...

    def finish(self, row: DecodeState) -> None: ...

    def fitting(self, depth: int | None, nodes: int | None) -> Budget | None:
        """The constant budget for what was asked of it (None: nothing was).

        A drafter with a shape of its own says here how large it is, and refuses to be cut where
        that shape was asked for. None leaves the budget to the controller.
        """
        ...


@runtime_checkable
class Guided(Protocol):
    """A drafter that grows its drafts with a draft model, whose states stopping rules may read."""

    model: DraftModel


@runtime_checkable
class Views(Protocol):
    """A drafter that scores through a view of the target: the engine scores through it too."""

    view: LanguageModel


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


@runtime_checkable
class Retires(Protocol):
    """A drafter that may find out, once, that it can never pay on its target."""

    hopeless: bool


@runtime_checkable
class Rehearses(Protocol):
    """A draft model that may find out when a session loads that it can never pay on its target."""

    def rehearsed(
        self, row: DecodeState, seen: Features | None, right: int, asked: int, price: float
    ) -> None:
        """In `row`, a text of the target's own, single guesses were made so often, and so many were
        right, where one costs `price` plain steps at least. `seen` is what it reads of the text.
        """
        ...


@runtime_checkable
class KeepsIds(Protocol):
    """A drafter whose guesses are ids written down elsewhere, for some tokenizer."""

    def check_vocabulary(self, vocabulary: Mapping[str, int]) -> None:
        """Refuse a tokenizer, token to id, that gives those ids another meaning."""
        ...


class Verifier(Protocol):
    """Decides which candidates stand."""

    exact_for: frozenset[Draw]  # candidates whose judged text follows the target's law
    lossy_for: frozenset[Draw]  # others that it judges as well, and the text follows another law
    shape: Shape  # CHAIN: reads chains only

    def verify(
        self, rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[Verdict]: ...


class Controller(Protocol):
    """Chooses how much to draft: before a step (`budgets`) and during it (`stop`)."""

    needs_costs: bool  # a CostTable is measured and handed to `learn` before the first step
    stop: StoppingRule | None

    def bind(self, drafter: Any) -> None:
        """Meet the drafter it will control, once, before the first step; may refuse it."""
        ...

    def learn(self, costs: CostTable) -> None: ...
    def lacks(self, rows: int) -> bool:
        """Whether it wants to `learn` what a batch of so many rows costs before it decides."""
        ...

    def budgets(self, rows: Rows) -> list[Budget]: ...
    def admit(self, rows: Rows, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """What of the proposals is scored. Of fixed (POINT) candidates only may some be left out:
        others would follow another law than the one they were drawn from.
        """
        ...

    def observe(self, step: Step) -> None: ...

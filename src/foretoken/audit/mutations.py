"""Bugs put in on purpose. An audit that cannot find them proves nothing by passing.

Each mutation replaces one real part by a broken subclass and runs a check of this audit on it,
then the same check on the sound part: caught means that the first fails and the second passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from foretoken.audit import broken
from foretoken.audit.cache import cache_difference
from foretoken.audit.drawn_trees import DrawnTree
from foretoken.audit.greedy import compare_greedy
from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import neighbour_differences, seed_differences
from foretoken.audit.sorted_draws import LastExitsLaw, LeavesEarly
from foretoken.contract import Verifier
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.nothing import Nothing
from foretoken.engine.engine import Engine
from foretoken.errors import PairingError
from foretoken.lm.table import TableLM
from foretoken.types import DecodeState, Draw, SamplingParams
from foretoken.verifiers.block import Block
from foretoken.verifiers.k_sequential import KSequential
from foretoken.verifiers.mixed import Mixed
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal
from foretoken.warp import Warp

Measure = Callable[[bool], float]

CHAIN, PAIR, FORK, BUSH = (1, 1), (2,), (1, 2), (2, 2)
PROMPTS = ((0, 1, 2), (2, 0, 0, 1), (1,), (2, 2, 1, 0, 1, 2))


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug, and a number that must stay within `bound` without it and leave it with it."""

    name: str
    what: str
    measure: Measure  # called with True for the broken part, False for the sound one
    bound: float = BOUND


@dataclass(frozen=True, slots=True)
class Finding:
    """What the audit saw of one mutation."""

    name: str
    what: str
    sound: float
    broken: float
    bound: float

    @property
    def caught(self) -> bool:
        return self.broken > self.bound >= self.sound


def find(mutation: Mutation) -> Finding:
    """Run the check on the sound part and on the broken one."""
    return Finding(
        mutation.name,
        mutation.what,
        mutation.measure(False),
        mutation.measure(True),
        mutation.bound,
    )


def vocabulary(widths: Sequence[int]) -> int:
    """Three tokens, or four where siblings matter: with three the last one has no choice left."""
    return 4 if max(widths) > 1 else 3


def target(widths: Sequence[int], table: type[TableLM] = TableLM) -> TableLM:
    return table.random(vocabulary(widths), seed=11)


def build(
    widths: Sequence[int],
    draw: Draw,
    verifier: Callable[[], Verifier],
    drafter: type[DrawnTree] = DrawnTree,
    declared: Draw | None = None,
    table: type[TableLM] = TableLM,
) -> Engine:
    """An engine over tables with a tree of this shape."""
    guess = drafter(TableLM.random(vocabulary(widths), seed=12), widths, draw, declared)
    depth = Fixed(Fixed.Config(depth=len(widths), nodes=64))
    return Engine(target(widths, table), guess, verifier(), depth)


def variation(
    widths: Sequence[int],
    draw: Draw,
    verifier: type[Any],
    drafter: type[DrawnTree] = DrawnTree,
    declared: Draw | None = None,
    row_class: type[DecodeState] = DecodeState,
    warp_class: type[Warp] = Warp,
    **options: Any,
) -> float:
    """Total variation from the target's own law at temperature 1."""
    gap = law_gap(
        partial(build, widths, draw, verifier, drafter, declared),
        target(widths),
        {"temperature": 1.0, **options},
        tokens=len(widths) + 1,
        row_class=row_class,
        warp_class=warp_class,
    )
    return gap.variation


def rule(
    widths: Sequence[int], draw: Draw, sound: type[Any], mutant: type[Any], bad: bool
) -> float:
    """A verifier against its mutant."""
    return variation(widths, draw, mutant if bad else sound)


def drafting(
    mutant: type[DrawnTree], widths: Sequence[int], verifier: type[Any], bad: bool
) -> float:
    """A drafter of independent children against its mutant."""
    return variation(widths, Draw.IID, verifier, mutant if bad else DrawnTree)


def left_early(bad: bool) -> float:
    """A sorted draft, judged by the law of the exit taken or of the last one."""
    return variation(CHAIN, Draw.IID, Block, LastExitsLaw if bad else LeavesEarly)


def few_words(widths: Sequence[int], draw: Draw, verifier: type[Any], bad: bool) -> float:
    """A draft of a reduced vocabulary, judged by its own law or by the law over all tokens."""
    return variation(widths, draw, verifier, broken.WordsOfAll if bad else broken.FewWords)


def siblings(mutant: type[DrawnTree], draw: Draw, verifier: type[Any], bad: bool) -> float:
    """Two drawn siblings against siblings that were tampered with."""
    return variation(PAIR, draw, verifier, mutant if bad else DrawnTree)


def declared(widths: Sequence[int], drawn: Draw, claim: Draw, bad: bool) -> float:
    """Children drawn one way and declared another."""
    return variation(widths, drawn, Recursive, declared=claim if bad else None)


def mixed(bad: bool) -> float:
    """The best child fixed and one drawn from the rest, against both taken for drawn ones."""
    if bad:
        return variation(PAIR, Draw.MIXED, Recursive, broken.WholeQ, Draw.DISTINCT)
    return variation(PAIR, Draw.MIXED, Mixed)


def row(mutant: type[DecodeState], bad: bool) -> float:
    """A row that ends where it should against one that does not, after good guesses."""
    kind = mutant if bad else DecodeState
    return variation(CHAIN, Draw.IID, Block, row_class=kind, eos=frozenset({2}))


def penalties(mutant: type[Warp], bad: bool) -> float:
    """Penalties along the path against penalties that see something else."""
    return variation(
        CHAIN,
        Draw.IID,
        Block,
        warp_class=mutant if bad else Warp,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
    )


def cached(mutant: type[TableLM], bad: bool) -> float:
    """Logits over the cache against logits recomputed from nothing."""
    make = partial(build, BUSH, Draw.POINT, Point, table=mutant if bad else TableLM)
    return cache_difference(make, PROMPTS, 12).relative


def neighbours(bad: bool) -> float:
    make = partial(build, CHAIN, Draw.IID, Block)
    params = SamplingParams(max_new_tokens=24, temperature=1.0)
    return neighbour_differences(make, PROMPTS, params, broken.rows_of_one_coin if bad else None)


def seeds(bad: bool) -> float:
    make = partial(build, CHAIN, Draw.IID, Block)
    params = SamplingParams(max_new_tokens=24, temperature=1.0)
    return seed_differences(make, PROMPTS, params, broken.rows_without_seed if bad else None)


def greedy(bad: bool) -> float:
    def plain() -> Engine:
        return Engine(target(BUSH), Nothing(), Point(), Fixed())

    method = partial(build, BUSH, Draw.POINT, broken.ParentsRow if bad else Point)
    return len(compare_greedy(plain, method, PROMPTS, 24).errors)


def pairing(bad: bool) -> float:
    """1 if a pairing is refused."""
    try:
        build(CHAIN, Draw.DISTINCT if bad else Draw.IID, Block)
    except PairingError:
        return 1.0
    return 0.0


IID, DISTINCT, POINT = Draw.IID, Draw.DISTINCT, Draw.POINT

MUTATIONS = (
    Mutation(
        "wrong q: flattened",
        "q is reported at another temperature than it was drawn at",
        partial(drafting, broken.FlattenedQ, CHAIN, Block),
    ),
    Mutation(
        "wrong q: argmax",
        "the likeliest token is taken, and reported as drawn from q",
        partial(drafting, broken.ArgmaxAsDrawn, CHAIN, Recursive),
    ),
    Mutation(
        "length by the drawn token",
        "a token is dropped after its draw because it is unlikely",
        partial(drafting, broken.DropsUnlikely, CHAIN, Block),
    ),
    Mutation(
        "residual without P",
        "block verification corrects with relu(p - q) instead of relu(P p - q)",
        partial(rule, CHAIN, IID, Block, broken.ResidualWithoutP),
    ),
    Mutation(
        "no residual",
        "the correction is drawn from p itself",
        partial(rule, CHAIN, IID, Block, broken.NoResidual),
    ),
    Mutation(
        "unnormalised residual",
        "the second child is judged by a residual that does not sum to one",
        partial(rule, PAIR, IID, Recursive, broken.UnnormalisedResidual),
    ),
    Mutation(
        "first failed coin",
        "block verification stops at the first failure instead of the longest success",
        partial(rule, CHAIN, IID, Block, broken.FirstFailure),
    ),
    Mutation(
        "P in place of h",
        "a prefix is kept with its whole chance, as if longer ones had not been tried",
        partial(rule, CHAIN, IID, Block, broken.WholeChance),
    ),
    Mutation(
        "bonus from the wrong row",
        "after full acceptance the bonus is drawn one row too early",
        partial(rule, CHAIN, IID, Block, broken.EarlyBonus),
    ),
    Mutation(
        "greedy from the wrong row",
        "the walk reads the parent's logits",
        greedy,
        bound=0.0,
    ),
    Mutation(
        "siblings: distinct as independent",
        "children drawn without replacement are judged as independent ones",
        partial(declared, PAIR, DISTINCT, IID),
    ),
    Mutation(
        "siblings: q keeps a tried token",
        "q is not renormalised after a distinct sibling was rejected",
        partial(rule, PAIR, DISTINCT, Recursive, broken.KeepsTried),
    ),
    Mutation(
        "siblings: sorted",
        "distinct siblings are judged in the order of their likelihood",
        partial(siblings, broken.SortsSiblings, DISTINCT, Recursive),
    ),
    Mutation(
        "siblings: repeats dropped",
        "equal tries are counted once, so k-sequential selection sees too few",
        partial(siblings, broken.DropsRepeats, IID, KSequential),
    ),
    Mutation(
        "k tries: undivided",
        "k-sequential selection accepts with p/q, so its residual is no law",
        partial(rule, PAIR, IID, KSequential, broken.Undivided),
    ),
    Mutation(
        "k tries: residual of one",
        "k-sequential selection corrects with relu(p - q)",
        partial(rule, PAIR, IID, KSequential, broken.OneTryResidual),
    ),
    Mutation(
        "siblings: fixed as drawn",
        "the likeliest child, which was fixed, is judged as if it had been drawn",
        mixed,
    ),
    Mutation(
        "residual without what is owed",
        "traversal corrects below the root with relu(p - q), as if all of p were still owed",
        partial(rule, FORK, IID, Traversal, broken.NothingOwed),
    ),
    Mutation(
        "mispaired draws",
        "the k likeliest tokens are declared as independent draws",
        partial(declared, PAIR, POINT, IID),
    ),
    Mutation(
        "wrong pairing",
        "a rule is built for children it is not exact for (must be refused)",
        pairing,
        bound=0.0,
    ),
    Mutation(
        "stop inside a block",
        "only the last token of a step is asked whether the text ends",
        partial(row, broken.LooksAtLast),
    ),
    Mutation(
        "tokens before the end lost",
        "an end token inside an accepted path loses the tokens before it",
        partial(row, broken.LosesBlock),
    ),
    Mutation(
        "penalties at block ends",
        "penalties do not see the drafted path",
        partial(penalties, broken.BlockEnds),
    ),
    Mutation(
        "penalties see rejected tokens",
        "penalties count every candidate of the tree",
        partial(penalties, broken.CountsCandidates),
    ),
    Mutation(
        "one cache column off",
        "the last column kept by a commit is lost",
        partial(cached, broken.LosesColumn),
        bound=1e-12,
    ),
    Mutation(
        "reduced law of a chain judged whole",
        "tokens of a reduced draft vocabulary are judged by the law over all tokens",
        partial(few_words, CHAIN, Draw.IID, Block),
    ),
    Mutation(
        "reduced law of siblings judged whole",
        "distinct siblings of a reduced draft vocabulary are judged by the law over all tokens",
        partial(few_words, PAIR, Draw.DISTINCT, Recursive),
    ),
    Mutation(
        "law of another exit",
        "tokens drawn at an early exit of a sorted draft are judged by the law of its last exit",
        left_early,
    ),
    Mutation(
        "mask leak",
        "a node sees its left sibling instead of its parent",
        partial(cached, broken.SeesSibling),
        bound=1e-12,
    ),
    Mutation(
        "one coin for all rows",
        "rows share their randomness, so neighbours change a text",
        neighbours,
        bound=0.0,
    ),
    Mutation(
        "seed ignored",
        "the same seed does not give the same text",
        seeds,
        bound=0.0,
    ),
)


@torch.inference_mode()
def find_all(told: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Every mutation, in order; `told` hears the name of each before it runs."""
    findings = []
    for mutation in MUTATIONS:
        told(mutation.name)
        findings.append(find(mutation))
    return findings

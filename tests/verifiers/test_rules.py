"""Every rule by enumeration: exact on each kind of children, and as good as its paper says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from two_tables import pair

from foretoken.audit.drawn_trees import DrawnTree, rule_gap
from foretoken.audit.law import BOUND
from foretoken.coins import Coins, SeededCoins, enumerate_outcomes
from foretoken.contract import Verifier
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.methods import VERIFIERS, resolve
from foretoken.native.library import NARROW
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import Budget, Draft, Draw, SamplingParams, Scores, Shape, TokenTree, Verdict
from foretoken.verifiers.block import Block, all_at_once, keepable, one_by_one
from foretoken.verifiers.point import Point, beside, met, walk, walk_together
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.target_first import TargetFirst
from foretoken.verifiers.traversal import Traversal
from foretoken.warp import Warp

HOT = {"temperature": 1.0}
RULES = [rule for place in VERIFIERS.values() if Draw.POINT in (rule := resolve(place)).exact_for]


def case(draw: Draw, widths: tuple[int, ...], vocab: int) -> tuple[Draw, tuple[int, ...], int]:
    return draw, widths, vocab


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    ("draw", "widths", "vocab"),
    [
        case(Draw.IID, (2, 1), 3),
        case(Draw.IID, (1, 2), 3),
        case(Draw.IID, (2, 2), 2),
        case(Draw.IID, (3, 1), 2),
        case(Draw.IID, (3,), 3),
        case(Draw.DISTINCT, (2, 1), 3),
        case(Draw.DISTINCT, (1, 2), 3),
        case(Draw.DISTINCT, (2, 2), 2),
        case(Draw.DISTINCT, (3, 1), 2),
        case(Draw.DISTINCT, (3,), 4),
        case(Draw.POINT, (2, 1), 3),
        case(Draw.POINT, (1, 2), 3),
        case(Draw.POINT, (2, 2), 3),
        case(Draw.POINT, (3, 1), 3),
    ],
)
def test_recursive_is_exact(draw: Draw, widths: tuple[int, ...], vocab: int, holes: bool) -> None:
    target, guess = pair(vocab, 5, holes)
    gap = rule_gap(Recursive(), draw, widths, target, guess, HOT)
    assert gap.law.accepted > 0
    assert gap.variation <= BOUND


@pytest.mark.parametrize("widths", [(2, 1), (2, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("holes", [False, True])
def test_point_is_exact(widths: tuple[int, ...], holes: bool) -> None:
    target, guess = pair(3, 5, holes)
    assert rule_gap(Point(), Draw.POINT, widths, target, guess, HOT).variation <= BOUND


@pytest.mark.parametrize("draw", [Draw.IID, Draw.POINT])
@pytest.mark.parametrize(("vocab", "depth"), [(2, 3), (3, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("holes", [False, True])
def test_block_is_exact(draw: Draw, vocab: int, depth: int, holes: bool) -> None:
    target, guess = pair(vocab, 9, holes)
    assert rule_gap(Block(), draw, (1,) * depth, target, guess, HOT).variation <= BOUND


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.7, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.3, "min_p": 0.3},
    ],
)
def test_rules_stay_exact_where_warps_make_zeros(setting: dict[str, float]) -> None:
    target, guess = pair(4, 3)
    for rule, draw, widths in (
        (Block(), Draw.IID, (1, 1)),
        (Recursive(), Draw.IID, (2,)),
        (Recursive(), Draw.DISTINCT, (2,)),
        (Point(), Draw.POINT, (2, 1)),
    ):
        assert rule_gap(rule, draw, widths, target, guess, setting).variation <= BOUND


def constant(*probabilities: float) -> TableLM:
    """A table that says the same after every token."""
    law = torch.tensor(probabilities, dtype=torch.float64).log()
    return TableLM(law.repeat(len(probabilities), 1))


def accepted(rule: Block | Recursive, depth: int, target: TableLM, guess: TableLM) -> float:
    """Expected accepted tokens of one step with a full chain."""
    params = SamplingParams(temperature=1.0)
    warp = Warp(params, 1, target.vocab_size)
    total = 0.0

    def run(coins: Coins) -> Verdict:
        tokens, laws = [0], []
        for _ in range(depth):
            laws.append(warp.law(tokens, guess.after(tokens)))
            tokens.append(coins.draw(laws[-1]))
        tree = chain(0, tokens[1:])
        logits = torch.stack([target.after(tokens[: i + 1]) for i in range(depth + 1)])
        scores = Scores(logits, p=warp.laws([0], tree, logits))
        return rule.judge_row(Draft(tree, Draw.IID, (*laws, None)), scores, coins)

    for verdict, probability in enumerate_outcomes(run):
        total += probability * len(verdict.path)
    return total


def test_the_papers_worked_example() -> None:
    target, guess = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    assert accepted(Recursive(), 2, target, guess) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted(Block(), 2, target, guess) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("vocab", "depth"), [(2, 2), (3, 2), (2, 3), (3, 1)])
def test_block_keeps_at_least_what_the_token_rule_keeps(vocab: int, depth: int, seed: int) -> None:
    target, guess = pair(vocab, 100 + 2 * seed)
    block = accepted(Block(), depth, target, guess)
    token = accepted(Recursive(), depth, target, guess)
    assert block >= token - 1e-12
    if depth == 1:
        assert block == pytest.approx(token, abs=1e-12)

    # Expected accepted tokens are the chances that each prefix can be kept, summed.
    def chances(table: TableLM, text: tuple[int, ...]) -> list[float]:
        laws = [table.after([0, *text[:i]]).softmax(-1) for i in range(depth)]
        return [float(law[token]) for law, token in zip(laws, text, strict=True)]

    promised = 0.0
    for text in itertools.product(range(vocab), repeat=depth):
        p, q = chances(target, text), chances(guess, text)
        keep = keepable(p, q, 1.0)
        promised += math.prod(q) * sum(keep[1:])
    assert block == pytest.approx(promised, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fast_block_rule_equals_the_printed_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for trial in range(300):
        depth, vocab = 1 + trial % 6, 3 + trial % 17
        if trial % 5 == 0:
            vocab += NARROW  # from so many on by operations in C
        sharp = (0.3, 1.0, 3.0)[trial % 3]
        p = torch.randn(depth + 1, vocab, generator=generator, dtype=dtype) * sharp
        q = p[:depth] + 0.7 * torch.randn(depth, vocab, generator=generator, dtype=dtype)
        if trial % 4 == 0:
            p = p.masked_fill(p < p.mean(-1, keepdim=True), -math.inf)
        laws_q = q.softmax(-1)
        draws = SeededCoins(trial)
        tokens = [draws.draw(law) for law in laws_q]
        draft = Draft(chain(0, tokens), Draw.IID, (*laws_q, None))
        laws = Warp(SamplingParams(temperature=1.0), 1, vocab).laws([0], draft.tree, p)
        fast = all_at_once(draft, laws, SeededCoins(-trial))
        slow = one_by_one(draft, laws, SeededCoins(-trial))
        assert fast[0] == slow[0]
        torch.testing.assert_close(fast[1], slow[1], rtol=1e-5, atol=1e-6)
        assert float(fast[1].sum()) == pytest.approx(1.0, abs=1e-5)
        lengths.add((fast[0], depth))
    assert {(0, 3), (1, 3), (2, 3), (3, 3)} <= lengths


def test_a_perfect_draft_is_kept_whole() -> None:
    target, _ = pair(4, 1)
    for rule in (Block(), Recursive()):
        assert accepted(rule, 3, target, target) == pytest.approx(3.0, abs=1e-9)


def test_at_temperature_zero_every_rule_follows_the_argmax_without_a_coin() -> None:
    class NoCoins:
        def flip(self, p: float) -> bool:
            raise AssertionError("a coin was used")

        def draw(self, law: torch.Tensor) -> int:
            raise AssertionError("a coin was used")

    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    warp = Warp(SamplingParams(), 1, 3)
    for rule in (Point(), Recursive(), Block()):
        for drafted, path, token in (([1, 0], (1, 2), 2), ([1, 2], (1,), 0), ([0, 0], (), 1)):
            tree = chain(0, drafted)
            scores = Scores(logits, p=warp.laws([0], tree, logits))
            assert rule.judge_row(Draft(tree, Draw.POINT), scores, NoCoins()) == Verdict(
                path, token
            )


def test_an_exhausted_q_offers_no_further_children() -> None:
    """A q of two tokens has two distinct children, not three; the rule never divides by zero."""
    target, guess = pair(4, 3)
    setting = {"temperature": 1.0, "top_k": 2}
    gap = rule_gap(Recursive(), Draw.DISTINCT, (3,), target, guess, setting)
    assert gap.variation <= BOUND
    warp = Warp(SamplingParams(**setting), 1, 4)
    q = warp.law([0], guess.after([0]))
    assert len(DrawnTree(guess, (3,), Draw.DISTINCT).children(q, 3, SeededCoins(0))) == 2


def ragged_batch(draw: Draw, temperature: float, chains: bool = False):
    """Rows with drafts of several sizes, their scores, and coins that were used before."""
    rows, drafts, scores = [], [], []
    for seed in range(12):
        target, guess = pair(4, 2 * seed)
        params = SamplingParams(temperature=temperature)
        row = make_row([seed % 4, 1], params, SeededCoins(seed), 4)
        row.coins.skip(seed % 3)
        widths = [(), (1,), (1, 1), (1, 1, 1)] if chains else [(), (2,), (2, 1), (1, 2, 1)]
        drafter = DrawnTree(guess, widths[seed % 4] or (1,), draw)
        draft = drafter.propose_one(row, Budget(len(widths[seed % 4]), 64))
        tree = draft.tree
        paths = [[tree.tokens[n] for n in tree.path(end)] for end in range(len(tree))]
        logits = torch.stack([target.after([*row.tokens, *path]) for path in paths])
        rows.append(row)
        drafts.append(draft)
        scores.append(Scores(logits, p=row.warp.laws(row.tokens, tree, logits)))
    return rows, drafts, scores


def coins_left(rows) -> list[list[int]]:
    return [[row.coins.flip(0.5) for _ in range(8)] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_drawn_for_together_are_walked_as_they_would_be_alone(temperature: float) -> None:
    """What a device does, with the same coins: the verdicts, and the coins that are left."""
    one, other = (ragged_batch(Draw.POINT, temperature) for _ in range(2))
    alone = [walk(draft, score, row.coins) for row, draft, score in zip(*one, strict=True)]
    assert walk_together(*other) == alone
    assert len({len(verdict.path) for verdict in alone}) > 1
    assert coins_left(one[0]) == coins_left(other[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Rule() for Rule in RULES], ids=lambda rule: type(rule).__name__)
def test_a_batch_is_judged_as_its_rows_are(rule: Verifier, temperature: float) -> None:
    for draw in rule.exact_for:
        one, other = (ragged_batch(draw, temperature, rule.shape is Shape.CHAIN) for _ in range(2))
        alone = [
            rule.judge_row(draft, score, row.coins) for row, draft, score in zip(*one, strict=True)
        ]
        assert rule.verify(*other) == alone
        assert coins_left(one[0]) == coins_left(other[0])


def test_laws_of_a_draft_go_to_the_targets_device() -> None:
    law = torch.tensor([0.5, 0.5])
    draft = Draft(TokenTree((0, 1), (-1, 0)), Draw.IID, q=(law, None))
    assert beside(draft, law.device) is draft
    moved = beside(draft, torch.device("meta"))
    assert moved.q is not None and moved.q[0].device.type == "meta" and moved.q[1] is None


def test_a_walk_that_meets_a_law_of_nan_is_refused() -> None:
    assert met([4, -1], 0) == 4
    with pytest.raises(ConfigError, match="no numbers"):
        met([4, -1], 1)


@pytest.mark.parametrize("option", [{}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("vocab", [8, NARROW])
def test_nan_behind_a_guess_ends_no_greedy_text_that_says_another_token(option, vocab) -> None:
    """float16 may overflow there, and plain decoding never looks."""
    row = make_row([0], SamplingParams(**option), SeededCoins(0), vocab)
    logits = torch.zeros(2, vocab)
    logits[0, 3], logits[1] = 2.0, math.nan

    def judged(by, guess: int) -> list[Verdict]:
        draft = Draft(chain(0, [guess]), Draw.POINT)
        laws = row.warp.laws(row.tokens, draft.tree, logits)
        return by([row], [draft], [Scores(logits, p=laws)])

    for by in (Point().verify, walk_together):
        assert judged(by, 5) == [Verdict((), 3)]
        with pytest.raises(ConfigError, match="no numbers"):
            judged(by, 3)


@pytest.mark.parametrize("rule", [Block(), Traversal()], ids=lambda rule: type(rule).__name__)
def test_no_drafted_token_is_accepted_by_a_law_of_nan(rule: Block | Traversal) -> None:
    """The text is refused where it gets there, and nowhere else."""
    q = torch.tensor([0.5, 0.5, 0.0])
    flat, nan = torch.zeros(3), torch.full((3,), math.nan)
    two = torch.tensor([-math.inf, -math.inf, 0.0])  # says that token alone

    def judged(*logits: torch.Tensor) -> Verdict:
        tree = chain(0, [1] * (len(logits) - 1))
        scores = torch.stack(logits)
        laws = Warp(SamplingParams(temperature=1.0), 1, 3).laws([0], tree, scores)
        draft = Draft(tree, Draw.IID, (*[q] * (len(logits) - 1), None))
        fast, slow = (f(draft, laws, SeededCoins(0)) for f in (all_at_once, one_by_one))
        assert fast[0] == slow[0]
        torch.testing.assert_close(fast[1], slow[1], equal_nan=True)
        return rule.judge_row(draft, Scores(scores, p=laws), SeededCoins(0))

    with pytest.raises(ConfigError, match="no numbers"):
        judged(nan, flat)
    assert judged(two, nan, flat) == Verdict((), 2)


@pytest.mark.parametrize("guesses", [[], [2]])
def test_a_first_layer_from_a_law_of_nan_is_refused(guesses: list[int]) -> None:
    tree = chain(0, guesses)
    logits = torch.zeros(len(tree), 4)
    laws = Warp(SamplingParams(), 1, 4).laws([0], tree, logits)
    draft = Draft(tree, Draw.TARGET, (torch.full((4,), math.nan), *[None] * len(guesses)))
    with pytest.raises(ConfigError, match="no numbers"):
        TargetFirst().judge_row(draft, Scores(logits, p=laws), SeededCoins(0))


def test_a_guess_behind_a_law_of_nan_lengthens_no_path_of_a_target_first_tree() -> None:
    tree = TokenTree((0, 1, 2, 3), (-1, 0, 1, 0))
    logits = torch.zeros(4, 4)
    logits[1] = math.nan
    laws = Warp(SamplingParams(temperature=1.0), 1, 4).laws([0], tree, logits)
    flat = torch.full((4,), 0.25)
    draft = Draft(tree, Draw.TARGET, (flat, flat, None, None))
    judged = TargetFirst().judge_row(draft, Scores(logits, p=laws), SeededCoins(0))
    assert judged == Verdict((), 1)

"""The warps against transformers' own, token for token, ties included."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.coins import SeededCoins
from foretoken.drafters.growers.tree_growth import ranking
from foretoken.errors import ConfigError
from foretoken.row import make_row, place_processors
from foretoken.trees.build import from_paths
from foretoken.types import SamplingParams
from foretoken.warp import Warp, cuts
from foretoken.warp.best import best_on_device, best_tokens
from foretoken.warp.cuts import keep_min_p, keep_top_k, keep_top_p
from foretoken.warp.joint import joint_law


def rows(seed: int, vocab: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Logits with and without ties: normal, coarse (many ties), flat, and peaked."""
    generator = torch.Generator().manual_seed(seed)
    normal = 3 * torch.randn(vocab, generator=generator, dtype=torch.float64)
    peaked = normal.clone()
    peaked[seed % vocab] = 40.0
    return [r.to(dtype) for r in (normal, normal.round(), torch.zeros(vocab), peaked)]


def survivors(scores: torch.Tensor) -> set[int]:
    return set((scores > -math.inf).nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab", [7, 300, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_tokens_survive_as_in_transformers(vocab: int, seed: int) -> None:
    for logits in rows(seed, vocab):
        for k in (1, 3, 50, vocab + 5):
            theirs = TopKLogitsWarper(k)(None, logits[None])[0]
            assert survivors(keep_top_k(logits, k)) == survivors(theirs)
        for top_p in (0.05, 0.3, 0.5, 0.9, 0.95, 0.999):
            theirs = TopPLogitsWarper(top_p)(None, logits[None])[0]
            assert survivors(keep_top_p(logits, top_p)) == survivors(theirs)
        for min_p in (0.01, 0.1, 0.7, 1.0):
            theirs = MinPLogitsWarper(min_p)(None, logits[None])[0]
            assert survivors(keep_min_p(logits, min_p)) == survivors(theirs)


@pytest.mark.parametrize("seed", range(4))
def test_all_options_together_give_the_law_of_transformers(seed: int) -> None:
    vocab, prompt, text = 97, [1, 5, 5, 9], [3, 3, 7]
    params = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        min_new_tokens=5,
        eos=frozenset({2, 11}),
    )
    mine = Warp(params, len(prompt), vocab)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(len(prompt), 5, [2, 11]),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    for logits in rows(seed, vocab):
        for extra in ([], [11, 2, 2]):
            tokens = prompt + text + extra
            expected = theirs(torch.tensor([tokens]), logits[None].clone()).softmax(-1)[0]
            assert torch.equal(mine.law(tokens, logits), expected)


def test_a_nucleus_of_no_numbers_stays_that() -> None:
    """It is refused where a token is chosen from it, and does not break before."""
    scores = torch.full((2, 4096), math.nan)
    scores[1] = torch.arange(4096.0)
    kept = keep_top_p(scores, 0.5)
    assert kept[0].isnan().all() and survivors(kept[1]) == {4095}


def test_the_shortcut_to_the_nucleus_equals_the_full_sort_and_is_really_taken() -> None:
    taken = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = (1 + seed % 5) * torch.randn(3, 5000, generator=generator)
        logits[1, seed] = 30.0  # one token holds nearly everything
        for top_p in (0.3, 0.9, 0.95):
            full = cuts.nucleus_from_full_sort(logits, top_p)
            assert torch.equal(full, TopPLogitsWarper(top_p)(None, logits))
            assert torch.equal(cuts.nucleus_from_candidates(logits, top_p), full)
            taken += int(cuts.nucleus_floor(logits.softmax(-1), top_p, 512)[1].sum())
    assert taken >= 80


def test_laws_of_a_tree_are_the_laws_along_its_paths() -> None:
    vocab = 11
    tree = from_paths(4, [[1, 2, 2], [1, 3], [5]])
    tokens = [3, 1, 4, 4]
    logits = torch.randn(len(tree), vocab, generator=torch.Generator().manual_seed(0))
    options = [
        {},
        {"top_p": 0.8},
        {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"min_new_tokens": 4, "eos": frozenset({2})},
        {"processors": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])},
        {"logit_bias": {3: 2.0}, "banned_tokens": frozenset({1})},
    ]
    for temperature in (0.0, 0.8):
        for option in options:
            warp = Warp(SamplingParams(temperature=temperature, **option), 2, vocab)
            alone = Warp(SamplingParams(temperature=temperature, **option), 2, vocab)
            laws = warp.laws(tokens, tree, logits)
            for node in reversed(range(len(tree))):
                context = tokens + [tree.tokens[i] for i in tree.path(node)]
                expected = alone.law(context, logits[node])
                torch.testing.assert_close(laws[node], expected, rtol=1e-6, atol=1e-7)
                assert expected.sum() == pytest.approx(1.0, abs=1e-6)
                if temperature == 0.0:
                    token = laws.draw(node, SeededCoins(0))
                    assert token == alone.choose(context, logits[node]) == int(expected.argmax())


def test_penalties_follow_a_growing_row() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.5)
    warp = Warp(params, 2, 6)
    logits = torch.zeros(1, 6, dtype=torch.float64)
    tokens = [0, 1]
    for new in (2, 3, 3, 1):
        tokens.append(new)
        law = warp.laws(tokens, from_paths(tokens[-1], []), logits)[0]
        counts = Counter(tokens[2:])
        amount = [-(0.7 + 0.5 * counts[t]) if counts[t] else 0.0 for t in range(6)]
        torch.testing.assert_close(law, torch.tensor(amount, dtype=torch.float64).softmax(-1))


def test_dtypes() -> None:
    warp = Warp(SamplingParams(temperature=0.5), 1, 4)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert warp.law([1], logits.double()).dtype == torch.float64
    assert warp.law([1], logits.bfloat16()).dtype == torch.float32
    assert warp.law([1], logits).dtype == torch.float32


def test_plain_options_never_read_the_tokens() -> None:
    class Unreadable(list):  # type: ignore[type-arg]
        def __iter__(self):
            raise AssertionError("tokens were copied")

        __getitem__ = __iter__  # type: ignore[assignment]

    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=3, logit_bias={1: 1.0})
    warp = Warp(params, 1, 4)
    assert not warp.path_dependent
    warp.law(Unreadable([1]), torch.zeros(4))
    warp.laws(Unreadable([1]), from_paths(1, [[2]]), torch.zeros(2, 4))[1]


def test_bad_tokens_and_impossible_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="token 9"):
        Warp(SamplingParams(logit_bias={9: 1.0}), 1, 4)
    with pytest.raises(ConfigError, match="banned_tokens names token -1"):
        Warp(SamplingParams(banned_tokens=frozenset({-1})), 1, 4)
    with pytest.raises(ConfigError, match="every token"):
        Warp(SamplingParams(banned_tokens=frozenset(range(4))), 1, 4)
    with pytest.raises(ConfigError, match="finite"):
        Warp(SamplingParams(logit_bias={1: math.inf}), 1, 4)
    params = SamplingParams(banned_tokens=frozenset({0, 1, 2}), min_new_tokens=2, eos={3})
    with pytest.raises(ConfigError, match="forbid every token"):
        Warp(params, 1, 4).law([1], torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, -100.0])
def test_the_best_token_is_the_first_of_the_largest(dtype: torch.dtype, shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(9, 500, generator=generator).round() + shift).to(dtype)  # many ties
    scores[3] = scores[3].clamp(max=0.0)
    scores[3, :5] = -0.0
    scores[4] = -math.inf
    scores[5, 77] = math.inf
    wide = scores.float()
    first = [int((row == row.max()).nonzero()[0]) for row in wide]
    assert best_tokens(scores) == first
    assert best_tokens(scores[1]) == first[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_number_is_never_a_token(dtype: torch.dtype, sign: float) -> None:
    scores = torch.arange(300.0).repeat(3, 1).to(dtype)
    scores[1, 20] = math.nan
    bits = scores.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    if sign < 0:
        bits[1, 20] |= torch.iinfo(bits.dtype).min  # what products of infinities leave
    assert scores[1, 20].isnan() and bool(scores[1, 20].signbit()) == (sign < 0)
    with pytest.raises(ConfigError):
        best_tokens(scores)
    assert best_tokens(scores, strict=False) == [299, -1, 299]
    with pytest.raises(ConfigError):
        best_tokens(scores[1])


def test_processors_are_not_asked_what_follows_an_end() -> None:
    """Nothing is told behind one, and a constraint may have no answer there."""
    asked = []

    def constrained(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(ids[0].tolist())
        if 3 in asked[-1]:
            raise ValueError("nothing is allowed behind the end")
        return scores

    params = SamplingParams(eos=frozenset({3}), processors=constrained)
    tree = from_paths(0, [[1, 3], [2]])
    laws = Warp(params, 1, 4).laws([0], tree, torch.randn(len(tree), 4))
    for node in range(len(tree)):
        assert laws[node].sum() == pytest.approx(1.0)
    assert sorted(asked) == [[0], [0, 1], [0, 2]]


@pytest.mark.gpu
def test_processors_are_called_where_their_own_tensors_are() -> None:
    """Of a target on the CPU whose draft is elsewhere, and the other way round."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    logits = torch.randn(4, dtype=torch.float64)
    for own, other in (("cpu", "cuda"), ("cuda", "cpu")):
        table = torch.linspace(0.0, 2.0, 4, dtype=torch.float64, device=own)

        def shifted(
            ids: torch.Tensor, scores: torch.Tensor, table: torch.Tensor = table
        ) -> torch.Tensor:
            return scores + table[ids[:, -1:]] * table

        params = SamplingParams(temperature=1.0, processors=shifted)
        row = make_row([2], params, SeededCoins(0), 4)
        place_processors(row, torch.device(own))
        expected = row.warp.law(row.tokens, logits.to(own))
        found = row.warp.law(row.tokens, logits.to(other))
        assert found.device.type == other
        torch.testing.assert_close(found.cpu(), expected.cpu())


def test_where_processors_lie_is_no_option_and_known_where_candidates_are_ranked() -> None:
    params = SamplingParams(processors=lambda ids, scores: scores)
    row = make_row([2], params, SeededCoins(0), 4)
    place_processors(row, torch.device("cpu"))
    assert row.params is params and row.warp.greedy
    assert row.warp.device == ranking(row).device == torch.device("cpu")


def test_the_best_of_nan_is_refused_where_torch_looks_for_it_as_well() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 0.0]])
    assert best_on_device(scores) == best_tokens(scores) == [1, 0]
    scores[1, 2] = float("nan")
    with pytest.raises(ConfigError, match="no numbers"):
        best_on_device(scores)
    for best in (best_on_device, best_tokens):
        assert best(scores, strict=False) == [1, -1], "one row says nothing of another"


class Counting(TorchFunctionMode):
    """Counts what is asked of torch, and the Python numbers that become tensors."""

    calls = numbers = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        made = func(*args, **(kwargs or {}))
        if func == torch.tensor:
            self.numbers += made.numel()
        return made


class Read(list):  # type: ignore[type-arg]
    """Tokens, and how many of them were looked at."""

    looked = 0

    def __iter__(self):
        self.looked += len(self)
        return super().__iter__()

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.looked += len(found) if isinstance(place, slice) else 1
        return found


def test_a_bias_of_many_tokens_is_placed_at_once() -> None:
    vocab = 3000
    bias = {token: token / 8 - 5 for token in range(0, vocab, 2)}
    banned = frozenset(range(0, vocab, 3))
    with Counting() as counting:
        warp = Warp(SamplingParams(logit_bias=bias, banned_tokens=banned), 1, vocab)
    assert counting.calls < 50
    wanted = [-math.inf if t in banned else bias.get(t, 0.0) for t in range(vocab)]
    assert warp.biased(torch.zeros(vocab)).tolist() == wanted


@pytest.mark.parametrize("option", [{}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("vocab", [8, 300])
def test_scores_of_nan_are_refused_at_the_node_asked_for_alone(option: dict, vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[0, 3], logits[1] = 2.0, math.nan
    laws = Warp(SamplingParams(**option), 1, vocab).laws([0], from_paths(0, [[5]]), logits)
    for _ in range(2):  # as it is found, and as it is remembered
        assert laws.choice(0) == 3 and laws[0].argmax() == 3
        for asked in (laws.choice, laws.__getitem__):
            with pytest.raises(ConfigError, match="no numbers"):
                asked(1)


def test_a_text_is_read_for_options_that_ask_for_it_and_once_by_beams() -> None:
    text = Read(range(1000))
    Warp(SamplingParams(min_new_tokens=9, eos=frozenset({3})), 1000, 4).law(text, torch.zeros(4))
    assert text.looked == 0
    Warp(SamplingParams(processors=lambda ids, scores: scores), 1000, 4).law(text, torch.zeros(4))
    assert text.looked == 1000

    beams, text = Warp(SamplingParams(repetition_penalty=1.5), 1000, 4), Read(range(1000))
    for _ in range(2):
        joint_law(beams, text, [[1], [2]], [0.0, 0.0], torch.randn(2, 4))
    assert text.looked == 1000


def test_used_tokens_become_a_tensor_once_and_cost_what_they_did() -> None:
    vocab, tokens, penalty = 20_003, list(range(20_000)), 1.3
    options = {"repetition_penalty": penalty, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    warp = Warp(SamplingParams(temperature=1.0, **options), 10, vocab)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    warp.follow(tokens)
    with Counting() as counting:
        for token in (5, 6, 7, 7):
            warp.law(tokens, logits, [token])
            tokens.append(token)
    assert counting.numbers < 50

    used = torch.arange(vocab) < 20_000
    repeated = torch.where(logits < 0, logits * penalty, logits / penalty).where(used, logits)
    for back in (0, 2):  # the text may go back
        del tokens[len(tokens) - back :]
        uses = Counter(tokens[10:])
        amount = torch.tensor([0.5 + 0.1 * uses[t] if t in uses else 0.0 for t in range(vocab)])
        expected = Warp(SamplingParams(temperature=1.0), 10, vocab).law(tokens, repeated - amount)
        assert torch.equal(warp.law(tokens, logits), expected)


def test_processors_see_the_whole_text_of_which_only_the_new_is_read() -> None:
    told = []

    def noting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told.append(ids)
        return scores

    warp, tree = Warp(SamplingParams(processors=noting), 3, 8), from_paths(0, [[1, 2], [3], [4]])
    paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(5)]

    def expect(new: int) -> None:
        text.looked = 0
        laws = warp.laws(text, tree, torch.zeros(5, 8))
        with Counting() as counting:
            assert [laws.choice(node) for node in range(5)] == [0] * 5
        assert text.looked == new and counting.numbers < 50
        assert [ids.tolist() for ids in told] == [[[*text, *path]] for path in paths]
        while told:
            told.pop().zero_()  # it is the processor's own

    text = Read(range(50_000))
    expect(50_000)
    text.extend([1, 2])
    expect(2)
    del text[-3:]
    expect(49_999)
    text.append(5)
    expect(1)
    fork = [*text, 7]
    warp.law(fork, torch.zeros(8), [6])
    assert told.pop().tolist() == [[*fork, 6]]
    expect(0)

"""Left-padded batches write what every prompt writes alone, and would not with the usual bugs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from small_models import SHAPE, small
from transformers import GPT2Config, GPT2LMHeadModel

import foretoken
from foretoken.audit.rows import seeded_rows, write
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.realigned import RealignedChain, RealignedPair
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.aligned import AlignedLM
from foretoken.lm.views.few_rows import FewRows
from foretoken.lm.views.realigned import Realigned
from foretoken.types import SamplingParams
from foretoken.verifiers.block import Block

VOCAB = SHAPE["vocab_size"]
LENGTHS = (23, 1, 9, 31, 3, 17, 17, 2)
PROMPTS = [
    [(7 * i * i + 3 * i + 5 * row) % VOCAB for i in range(n)] for row, n in enumerate(LENGTHS)
]
GREEDY = SamplingParams(max_new_tokens=16)
HOT = SamplingParams(max_new_tokens=16, temperature=1.0)
ROWS = ("eqspec", "exspec")


def made(family: str):
    if family != "gpt2":
        return small(family)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=512, n_embd=64, n_layer=4, n_head=4, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def disturbed(model, noise: float):
    """A draft that agrees with its target sometimes."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft


def opened(family: str, dtype=torch.float32, noise: float = 0.15):
    target = made(family).to(dtype)
    return open_lm(target), open_lm(disturbed(target, noise), name="draft")


@pytest.fixture(scope="module")
def pair():
    return opened("llama")


@pytest.fixture(scope="module")
def alone(pair):
    """Greedy texts of the prompts, one by one and plain."""
    return texts_alone(pair[0])


def texts_alone(target, params=GREEDY):
    plain = assemble("plain", target)
    return [write(plain, seeded_rows([prompt], params, VOCAB))[0] for prompt in PROMPTS]


def texts(engine, batch: int, params=GREEDY):
    return write(engine, seeded_rows(PROMPTS, params, VOCAB), batch)


def accepted_somewhere(engine, batch: int) -> bool:
    """Whether drafts were neither always right nor always wrong, or nothing would be shown."""
    alignment = engine.target.alignment
    return batch == 1 or 0 < alignment.realigned <= alignment.rounds


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_greedy_text_is_each_prompts_own(family, dtype):
    lms = opened(family, dtype)
    right = texts_alone(lms[0])
    for batch, depth, window in ((1, 4, None), (3, 1, 4), (3, 5, None), (8, 3, 40)):
        for engine in (
            assemble("eqspec", *lms, depth=depth),
            assemble("exspec", *lms, depth=depth, window=window, sort_prompts=window == 4),
        ):
            assert texts(engine, batch) == right
            assert accepted_somewhere(engine, batch)


@pytest.mark.parametrize("method", ROWS)
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_of_eight_tokens_are_no_hindrance(family, method):
    lms = opened(family)
    assert texts(assemble(method, *lms, depth=3), 3) == texts_alone(lms[0])


@pytest.mark.parametrize("method", ROWS)
def test_a_model_that_is_not_captured_writes_the_same(method, alone):
    target = made("llama")
    lms = [open_lm(model, compile="off") for model in (target, disturbed(target, 0.15))]
    assert lms[0].lean is None
    assert texts(assemble(method, *lms, depth=3), 3) == alone


@pytest.mark.parametrize("method", ROWS)
def test_a_seeded_text_is_the_one_its_prompt_has_alone(method):
    lms = opened("llama", torch.float64)
    rows = [seeded_rows([prompt], HOT, VOCAB, seed=seed)[0] for seed, prompt in enumerate(PROMPTS)]
    single = assemble(method, *lms, depth=3)
    right = [write(single, [row])[0] for row in rows]
    assert texts(assemble(method, *lms, depth=3), 3, HOT) == right
    assert right != texts_alone(lms[0]), "seeds were of no effect"


# What goes wrong elsewhere.


class PositionsOfColumns(AlignedLM):
    """Positions counted from the first column, pads included."""

    def place(self, feed):
        pad = self.alignment.pads.get(self._slots[feed.memory.slot], 0)
        super().place(feed)
        feed.positions = [position + pad for position in feed.positions]


class ColumnsLeftBehind(AlignedLM):
    """Tokens are padded anew, and their keys and values stay where they were."""

    def move(self, moves):
        return None


class RejectedStayInPlace(AlignedLM):
    """Rejected tokens are hidden and keep their places: positions run on behind them.

    Whether their columns are there and hidden, or not there, makes no difference to what is seen.
    """

    def __init__(self, lm):
        super().__init__(lm)
        self.places = {}

    def commit(self, rows, paths):
        for row, path in zip(rows, paths, strict=True):
            rejected = len(self._memory(row).tokens) - 1 - len(path)
            self.places[row.uid] = self.places.get(row.uid, 0) + rejected
        super().commit(rows, paths)

    def place(self, feed):
        super().place(feed)
        more = self.places.get(self._slots[feed.memory.slot], 0)
        feed.positions = [position + more for position in feed.positions]


class PadsSeen(AlignedLM):
    """Pads are zeros, which nobody hides: each takes part in every softmax."""

    def place(self, feed):
        super().place(feed)
        feed.seen = [(2 << feed.start - feed.base + i) - 1 for i in range(len(feed.tokens))]


def engine_of(pair, kind: type[AlignedLM]) -> Engine:
    """The parts of eqspec over this kind of cache."""
    models = RealignedPair(*pair)
    models.view, models.lm = (Realigned(lm, kind) for lm in pair)
    return Engine(models.view, RealignedChain(models), Block(), Fixed(Fixed.Config(depth=4)))


@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize("kind", [AlignedLM, PositionsOfColumns, ColumnsLeftBehind,
                                  RejectedStayInPlace, PadsSeen])  # fmt: skip
def test_the_usual_bugs_change_texts(pair, alone, kind, batch):
    found = texts(engine_of(pair, kind), batch)
    assert (found == alone) == (kind is AlignedLM)
    if kind is PositionsOfColumns:  # without pads there is nothing wrong with it
        engine = engine_of(pair, kind)
        assert texts(engine, 1) == alone


# What is told, and what is refused.


def test_a_report_tells_rounds_and_seconds(pair):
    engine = assemble("eqspec", *pair, depth=3)
    assert engine.drafter.report() == ""
    texts(engine, 4)
    alignment = engine.target.alignment
    assert alignment.seconds > 0.0
    assert f"{alignment.realigned} of {alignment.rounds} rounds" in engine.drafter.report()


def test_a_draft_with_a_reduced_vocabulary_is_realigned_below_it(pair, alone):
    target = made("llama")
    with foretoken.load(
        target, "exspec", disturbed(target, 0.15), draft_vocabulary=list(range(0, VOCAB, 2)),
        depth=3, max_rows=3,
    ) as session:  # fmt: skip
        guesser = session.engine.drafter.model.lm
        assert isinstance(session.draft, FewRows) and isinstance(guesser, FewRows)
        found = session.generate(PROMPTS, 16)
        assert [result.tokens for result in found] == alone
        assert session.using("chain", depth=3).generate(PROMPTS[0], 16).tokens == alone[0]
        assert guesser.alignment.rounds > 0 and not guesser.rows_held


@pytest.mark.parametrize("method", ROWS)
def test_a_target_that_cannot_be_padded_is_refused_at_the_door(method):
    target = made("llama")
    with pytest.raises(CapabilityError, match="left-padded batch of llama"):
        foretoken.load(target, method, disturbed(target, 0.1), exact_bits=True)


def test_a_window_of_nothing_is_refused(pair):
    with pytest.raises(ConfigError, match="window=0"):
        assemble("exspec", *pair, window=0)


def test_rows_of_different_room_draft_as_far_as_each_may(pair):
    """A row that is nearly done shortens its own draft and nobody else's."""
    rooms = (3, 16, 11)
    rows = [
        seeded_rows([prompt], replace(GREEDY, max_new_tokens=room), VOCAB)[0]
        for prompt, room in zip(PROMPTS, rooms, strict=False)
    ]
    engine = assemble("eqspec", *pair, depth=4)
    for row in rows:
        engine.submit(row)
    step = engine.step()
    assert [len(draft.tree) - 1 for draft in step.drafts] == [2, 4, 4]
    engine.close()


@pytest.mark.parametrize("method", ROWS)
def test_measured_costs_decide_where_nobody_says_a_size(method, alone):
    target = made("llama")
    with foretoken.load(target, method, disturbed(target, 0.15), max_rows=3) as session:
        assert [result.tokens for result in session.generate(PROMPTS, 16)] == alone
        assert session.engine.target.rows_held == session.engine.drafter.model.lm.rows_held == 0

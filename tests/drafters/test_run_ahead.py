"""A chain that grows on behind tokens nobody has judged: its cache, and the ordinary loop."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest

from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows, write
from foretoken.controllers.fixed import Fixed
from foretoken.drafters import run_ahead
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.run_ahead import RunAhead
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine, decode
from foretoken.engine.overlap import OverlapEngine
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.types import Go, SamplingParams
from foretoken.verifiers.block import Block

EMULATED = RunAhead.Config(overlap="emulated")
HOT = {"temperature": 1.0}


def ahead(lm):
    return Chain(RunAhead(lm, EMULATED))


@dataclass
class Hesitant(Fixed):
    """Stops drafting where the draft model is unsure: the last token drafted was fed then."""

    depth: int = 3

    def __post_init__(self):
        super().__init__(Fixed.Config(depth=self.depth))

        self.stop = self

    taps = ()
    branches = False

    def after(self, row, level):
        return Go.ON if float(level.laws.max()) > 0.55 else Go.STOP


@pytest.mark.parametrize("controller", [Fixed, Hesitant])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_the_ordinary_loop_it_is_a_chain_model(pair, prompts, temperature, controller):
    target, draft = pair
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    texts = [
        write(Engine(target, drafter, Block(), controller()), seeded_rows(prompts, params, 12), 2)
        for drafter in (Chain(OrdinaryModel(draft)), ahead(draft))
    ]
    assert texts[0] == texts[1]
    assert target.rows_held == draft.rows_held == 0


def test_a_controller_that_stops_a_draft_keeps_the_law():
    lms = TableLM.random(2, seed=21), TableLM.random(2, seed=22)

    def build():
        target, draft = (copy.copy(lm) for lm in lms)
        return OverlapEngine(target, ahead(draft), Block(), Hesitant())

    assert law_gap(build, lms[0], HOT, tokens=5).variation <= BOUND


def test_running_ahead_feeds_each_token_once(pair, prompts, monkeypatch):
    """One node per forward while guesses stand; only a tree that grew too long is fed anew."""
    target, _ = pair
    draft = TableLM(target.logits)
    fed = []
    grow = TableLM.grow

    def watched(lm, rows, tokens, parents, taps=()):
        if lm is draft:
            fed.append(len(tokens[0]))
        return grow(lm, rows, tokens, parents, taps)

    monkeypatch.setattr(TableLM, "grow", watched)
    monkeypatch.setattr(run_ahead, "LONGEST", 30)
    engine = assemble("pearl", target, draft, depth=4, overlap="emulated")
    [row] = seeded_rows(prompts[:1], SamplingParams(max_new_tokens=101, temperature=1.0), 12)
    records = list(decode([row], engine))
    assert len(records) <= 27
    assert set(fed) == {1, 4} and 3 <= fed.count(4) <= 4
    assert sum(fed) < 101 + 4 * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_real_model_running_ahead_is_never_wrong_about_itself(make_llama, temperature):
    """Draft and target are the same model, so every token stands, or the draft's cache is wrong."""
    model = make_llama(61, seed=3).double()
    lms = [open_lm(m, kernels="dense") for m in (model, copy.deepcopy(model))]
    engine = assemble("pearl", *lms, depth=3, overlap="emulated", verifier="recursive")
    params = SamplingParams(max_new_tokens=100, temperature=temperature)
    rows = seeded_rows([[5, 7, 1], [9]], params, 61)
    sizes = [[len(d.tree) for d in record.drafts] for record in decode(rows, engine)]
    assert all(now == [3, 3] for now in sizes[1:-2]) and len(sizes) <= 36
    assert lms[0].rows_held == lms[1].rows_held == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_real_models_write_the_same_in_threads(make_llama, temperature):
    target = open_lm(make_llama(61, seed=3), kernels="dense")
    draft = open_lm(make_llama(61, seed=3, num_hidden_layers=1), kernels="dense")
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    prompts = [[5, 7, 1], [9], [3] * 20]
    texts = [
        write(
            assemble("pearl", target, draft, depth=3, overlap=how),
            seeded_rows(prompts, params, 61),
            2,
        )
        for how in ("threads", "emulated")
    ]
    assert texts[0] == texts[1]


def test_a_prompt_beyond_the_draft_models_positions_is_decoded_plainly(pair, prompts):
    target, draft = pair
    draft.max_length = 12
    params = SamplingParams(max_new_tokens=20)
    expected = write(assemble("plain", target), seeded_rows(prompts, params, 12))
    engine = assemble("pearl", target, draft, depth=4, overlap="emulated")
    assert write(engine, seeded_rows(prompts, params, 12)) == expected

"""Given text: what a prediction brings, what a wrong one costs, and who learns of it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest

import foretoken
from foretoken.audit.law import Steady
from foretoken.coins import SeededCoins
from foretoken.drafters.parts.prediction import Prediction
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.record import Recorder
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, needs_draft
from foretoken.row import make_row
from foretoken.types import CostTable, SamplingParams, Shape

VOCAB, LENGTH = 40, 60
PROMPT = [3, 1, 4, 1, 5]
METHODS_HERE = ("chain", "tree", "prompt-lookup", "token-recycling", "auto", "hybrid", "mcsd")


def engine_of(method: str, controller: str = "cost_model") -> Any:
    """An engine over a pair of tables that agree now and then."""
    draft = TableLM.random(VOCAB, seed=22) if needs_draft(METHODS[method]) else None
    engine = assemble(method, TableLM.random(VOCAB, seed=21), draft, controller=controller)
    engine.controller = Steady(engine.controller)
    return engine


def run(engine: Any, *predictions: Sequence[int] | None, **options: Any) -> tuple[Any, Recorder]:
    """Rows with these predictions, decoded together; what they did."""
    options = {"temperature": 0.0, "max_new_tokens": LENGTH, **options}
    rows = []
    for i, prediction in enumerate(predictions):
        row = make_row([*PROMPT, i], SamplingParams(**options), SeededCoins(7), VOCAB)
        row.prediction = None if prediction is None else Prediction(prediction, len(row.tokens))
        rows.append(row)
    recorder = Recorder(rows)
    for step in decode(rows, engine):
        recorder(step)
    assert engine.target.rows_held == 0
    return rows, recorder


def text_of(method: str = "plain", i: int = 0) -> list[int]:
    controller = "fixed" if method == "plain" else "cost_model"
    rows, _ = run(engine_of(method, controller), *[None] * (i + 1))
    return rows[i].new_tokens


@pytest.mark.parametrize("method", METHODS_HERE)
def test_a_right_prediction_gives_many_tokens_a_step(method: str) -> None:
    truth = text_of()
    [row], recorder = run(engine_of(method), truth)
    stats = recorder.stats[row.uid]
    assert row.new_tokens == truth
    assert stats.mean_accepted_length > 7.0
    assert stats.accepted_prediction > 0.8 * LENGTH and stats.rejected_prediction == 0


@pytest.mark.parametrize("method", METHODS_HERE)
def test_a_wrong_prediction_costs_next_to_nothing(method: str) -> None:
    """Counted in forwards and nodes: a guess at the beginning, and matches by chance."""
    truth = text_of()
    pairs = {*itertools.pairwise(truth)}
    strange = next(t for t in range(VOCAB) if t != truth[0] and (t, t) not in pairs)
    chance = [(7 * i * i + 3) % VOCAB for i in range(200)]  # one in eight pairs is in there
    [alone], without = run(first := engine_of(method), None)
    for wrong, steps, nodes in (([strange] * 200, 3, 40), (chance, 4, LENGTH)):
        [row], recorder = run(second := engine_of(method), wrong)
        assert row.new_tokens == alone.new_tokens == truth
        stats, before = recorder.stats[row.uid], without.stats[alone.uid]
        assert stats.target_steps <= before.target_steps + steps
        assert stats.rejected_prediction <= nodes
        assert second.target.forwards <= first.target.forwards + steps


def test_an_edit_in_the_middle_is_found_again() -> None:
    truth = text_of()
    for expected in (
        [*truth[:20], *truth[26:]],  # the answer has more
        [*truth[:20], 39, 38, 37, 36, *truth[20:]],  # the answer leaves something out
        [*truth[:20], 39, 38, 37, *truth[24:]],
    ):
        [row], recorder = run(engine_of("prompt-lookup"), expected)
        stats = recorder.stats[row.uid]
        assert row.new_tokens == truth
        assert stats.accepted_prediction > 0.6 * LENGTH
        assert stats.mean_accepted_length > 3.5


@pytest.mark.parametrize("method", METHODS_HERE)
def test_rows_with_and_without_predictions_in_one_batch(method: str) -> None:
    truths = [text_of(i=i) for i in range(4)]
    rows, recorder = run(engine_of(method), truths[0], None, truths[1], truths[3][::-1])
    assert [row.new_tokens for row in rows] == truths
    right, free, _, _ = (recorder.stats[row.uid] for row in rows)
    assert right.mean_accepted_length > 7.0 and free.accepted_prediction == 0


@pytest.mark.parametrize("method", ["token-recycling", "lookahead", "fused"])
def test_what_is_cut_of_a_row_without_a_prediction_is_what_its_drafter_sees(method: str) -> None:
    """Nodes are dear from the fourth on: who proposed more beside a prediction is cut."""
    engine = assemble(method, TableLM.random(VOCAB, seed=21), controller="smartspec")
    dear = {n: 1.0 + 0.02 * n + max(n - 3, 0) * 0.1 for n in (1, 2, 3, 4, 6, 8, 16, 32, 64)}
    engine.controller = Steady(engine.controller, CostTable(dear, {1: 0.01, 8: 0.08}, 0.01))
    cut = []
    engine.listeners.append(
        lambda step: cut.extend(
            draft.origin is not None and any(other.given for other in step.drafts)
            for draft in step.drafts
        )
    )
    truths = [text_of(i=i) for i in range(2)]
    rows, _ = run(engine, truths[0], None)
    assert [row.new_tokens for row in rows] == truths
    assert any(cut)


def test_sampled_text_with_a_seed_is_that_of_no_prediction_where_candidates_are_fixed() -> None:
    options = {"temperature": 1.0, "seed": 5}
    [free], _ = run(engine_of("prompt-lookup"), None, **options)
    [row], recorder = run(engine_of("prompt-lookup"), free.new_tokens, **options)
    assert row.new_tokens == free.new_tokens
    assert recorder.stats[row.uid].mean_accepted_length > 4.0


@pytest.mark.parametrize("method", ["chain", "mcsd", "auto"])
def test_a_seeds_text_with_a_prediction_is_the_same_in_company(method: str) -> None:
    options = {"temperature": 1.0, "seed": 5}
    expected = text_of()
    [alone], _ = run(engine_of(method), expected, **options)
    engine = engine_of(method)
    run(engine, None, expected[::-1], temperature=0.0)  # what others taught the parts
    together, _ = run(engine, expected, expected[10:], None, **options)
    assert together[0].new_tokens == alone.new_tokens


def test_the_drafter_takes_over_where_it_brings_more() -> None:
    """Of a prediction that is right every third token or so, little is tried."""
    truth = text_of()
    poor = [token if i % 3 else (token + 1) % VOCAB for i, token in enumerate(truth)]
    perfect = assemble(
        "chain", TableLM.random(VOCAB, seed=21), TableLM.random(VOCAB, seed=21),
        controller="fixed", depth=6,
    )  # fmt: skip
    [row], recorder = run(perfect, poor)
    assert row.new_tokens == truth
    assert recorder.stats[row.uid].mean_accepted_length > 5.0


def test_a_policy_learns_nothing_from_given_text() -> None:
    engine = engine_of("chain")
    run(engine, text_of())
    policy = engine.controller.inner.shared
    before = [policy.costs[1].draft.at(depth) for depth in (1, 4, 8)]
    assert policy.pricing.pace.steps <= 2, "hardly a step shows what the draft is worth"
    untouched = engine_of("chain").controller.inner.shared
    assert before == pytest.approx([untouched.costs[1].draft.at(d) for d in (1, 4, 8)], rel=0.3)


def test_a_row_that_wants_few_guesses_or_none_gets_no_more() -> None:
    truth = text_of()
    for most in (0, 2):
        engine = engine_of("prompt-lookup")
        params = SamplingParams(max_new_tokens=LENGTH)
        row = make_row([*PROMPT, 0], params, SeededCoins(7), VOCAB)
        row.prediction, row.guesses = Prediction(truth, len(row.tokens)), most
        drafted = [len(step.drafts[0].tree) - 1 for step in decode([row], engine)]
        assert row.new_tokens == truth and max(drafted) == most


def test_nobody_guesses_in_plain_decoding() -> None:
    truth = text_of()
    [row], recorder = run(engine_of("plain", "fixed"), truth)
    assert row.new_tokens == truth and recorder.stats[row.uid].drafted == 0


@pytest.mark.parametrize(
    ("method", "used"),
    [("plain", False), ("pearl", False), ("mcsd-target-init", False), ("chain", True)],
)
def test_a_prediction_that_is_not_used_is_told_of_once(
    method: str, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    truth, engine = text_of(), engine_of(method, "fixed")
    with caplog.at_level(logging.WARNING, "foretoken"):
        run(engine, None)
        assert not caplog.records
        for _ in range(2):
            [row], recorder = run(engine, truth)
            assert (recorder.stats[row.uid].accepted_prediction > 0) == used
    assert [record.name for record in caplog.records] == ["foretoken.engine.engine"] * (not used)
    assert used or "a prediction was passed" in caplog.text


def test_given_text_is_a_chain_for_rules_that_read_chains() -> None:
    engine = engine_of("chain")
    [_], recorder = run(engine, text_of())
    assert engine.given.traits.shape is Shape.CHAIN
    assert all(step.drafted == step.depth for steps in recorder.steps.values() for step in steps)


def test_predictions_of_a_session(tiny_pair, byte_tokenizer) -> None:
    target, draft = tiny_pair
    session = foretoken.load(
        target, "chain", draft=draft, tokenizer=byte_tokenizer, kernels="dense", compile="off",
        controller="fixed",
    )  # fmt: skip
    prompts = ["the cat is in the ", "on and on"]
    plain = session.using("plain").generate(prompts, 40)
    asked = [plain[0].tokens, plain[1].text + " and more"]
    found = session.generate(prompts, 40, prediction=asked)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    told = found[0].stats.to_dict()
    assert told["accepted_prediction"] > 20 and told["rejected_prediction"] == 0
    assert found[0].stats.target_steps < 10
    stream = session.stream(prompts[0], 40, prediction=plain[0].tokens)
    assert [token for piece in stream for token in piece.tokens] == plain[0].tokens
    assert stream.result.stats.accepted_prediction == told["accepted_prediction"]
    for bad in ("", [], [10**6], b"bytes", 5, ["a", "b", "c"]):
        with pytest.raises(ConfigError):
            session.generate(prompts, 8, prediction=bad)

"""Sessions of beams: results, batches, options, and what is refused."""

import asyncio
import copy
import json
import threading
import time
from contextlib import suppress

import pytest
import torch

import foretoken
from foretoken.coins import SeededCoins
from foretoken.engine import beam_session
from foretoken.engine.assemble import assemble
from foretoken.engine.beam import decode
from foretoken.engine.beam_session import BeamSession
from foretoken.engine.scheduling import held
from foretoken.engine.session import Session
from foretoken.errors import CapabilityError, ConfigError, PairingError
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.forest import BeamRow
from foretoken.types import Caps, SamplingParams

PROMPT = "the cat is in the "
HOT = {"temperature": 1.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def spec(tiny_pair, byte_tokenizer):
    target, draft = tiny_pair
    session = foretoken.load(
        target, method="dsbd", draft=draft, tokenizer=byte_tokenizer, kernels="dense",
        num_beams=3, depth=3,
    )  # fmt: skip
    yield session
    session.close()


@pytest.mark.parametrize("method", ["dsbd", "beam-sampling"])
def test_texts_come_scored_and_best_first(spec, method):
    session = spec.using(method, num_beams=3)
    found = session.generate(PROMPT, seed=1, **HOT)
    assert 1 <= len(found.sequences) <= 3
    assert found.scores == sorted(found.scores, reverse=True) and max(found.scores) < 0
    assert len(found.texts) == len(found.finish_reasons) == len(found.scores)
    assert found.tokens == found.sequences[0] and found.text == found.texts[0]
    assert len({tuple(tokens) for tokens in found.sequences}) == len(found.sequences)
    if found.finish_reasons[0] == "length":
        assert len(found.tokens) == 12
        assert found.text == session.tokenizer.decode(found.tokens)


def test_results_are_plain_values_and_a_line(spec):
    found = spec.using("beam-sampling", num_beams=3).generate("ab", 6, seed=1)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["texts"] == found.texts and told["scores"] == found.scores
    assert told["lossless"] is True and "beam" in told["law"]
    assert found.finish_reason == found.finish_reasons[0]
    assert repr(found).startswith("BeamResult(") and len(repr(found)) < 300


def test_counts_add_up(spec):
    stats = spec.generate(PROMPT, seed=1, **HOT).stats
    assert stats.grown == 12 == sum(stats.widths.values())
    assert stats.target_forwards < 12 and stats.mean_accepted_length > 1.0
    assert 0 < stats.accepted <= stats.drafted
    assert stats.seconds > 0 and stats.to_dict()["mean_width"] == stats.mean_width
    plain = spec.using("beam-sampling").generate(PROMPT, seed=1, num_beams=2, **HOT).stats
    assert plain.target_forwards == 12 and plain.drafted == 0 and set(plain.widths) == {2}


def test_a_batch_is_each_prompt_alone(spec):
    prompts = [PROMPT, "a", "on and on and on"]
    together = spec.generate(prompts, seed=5, **HOT)
    alone = [spec.generate(p, seed=5 + i, **HOT) for i, p in enumerate(prompts)]
    assert [r.sequences for r in together] == [r.sequences for r in alone]
    assert together[0].scores == pytest.approx(alone[0].scores, abs=1e-4)


def test_the_greedy_text_is_plains(spec):
    found = spec.generate(PROMPT, 20)
    assert found.sequences == [spec.using("plain").generate(PROMPT, 20).tokens]


def test_methods_bring_their_sessions(spec):
    assert type(spec.using("chain")) is Session and type(spec) is BeamSession


def test_the_one_call_door_takes_beams(tiny_pair, byte_tokenizer):
    target, draft = tiny_pair
    options = {"tokenizer": byte_tokenizer, "kernels": "dense", "num_beams": 2, **HOT}
    found = foretoken.generate(target, PROMPT, "dsbd", draft, seed=2, **options)
    again = foretoken.generate(target, PROMPT, "dsbd", draft, seed=2, **options)
    assert found.sequences == again.sequences


def test_what_beams_cannot_do_is_refused_with_the_way_out(spec):
    for asked, way in (
        (lambda: spec.stream(PROMPT), "use generate"),
        (lambda: spec.generate(PROMPT, stop="x"), "chain"),
        (lambda: spec.generate(PROMPT, num_beams=0), "num_beams=4"),
        (lambda: spec.generate(PROMPT, num_beams=10**6), "num_beams=4"),
        (lambda: spec.using("dsbd", num_beams=0), "num_beams=4"),
        (lambda: spec.using("dsbd", nodes=8), "num_beams"),
        (lambda: spec.using("dsbd", controller="cost_model"), "controller='fixed'"),
        (lambda: foretoken.custom_generate("beam-sampling"), "foretoken.load"),
    ):
        with pytest.raises(ConfigError) as refused:
            asked()
        assert way in refused.value.do


def test_verifiers_of_one_text_are_refused_and_the_other_way_round():
    lm, draft = TableLM.random(4), TableLM.random(4)
    for method, models, verifier in (
        ("dsbd", (lm, draft), "recursive"),
        ("dsbd", (lm, draft), "point"),
        ("beam-sampling", (lm,), "block"),
        ("chain", (lm, draft), "beams"),
    ):
        with pytest.raises(PairingError) as refused:
            assemble(method, *models, verifier=verifier)
        assert "beams" in refused.value.do or method == "chain"


def test_a_target_that_scores_chains_only_is_refused():
    chains = TableLM.random(4)
    chains.caps = Caps(tree="chain", why="it counts places")
    with pytest.raises(CapabilityError, match="counts places"):
        assemble("beam-sampling", chains)


def test_at_temperature_0_the_one_beam_there_is_stands_whatever_min_width_says():
    engine = assemble(
        "dsbd", TableLM.random(5, seed=1), TableLM.random(5, seed=1),
        num_beams=4, min_width=4, depth=3,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=16)
    row = BeamRow(make_row([1, 2], params, SeededCoins(0), 5), 4)
    rounds = [record.rounds[0] for record in decode([row], engine)]
    assert [done.grown for done in rounds] == [4, 4, 4, 4]


def test_fewer_draws_than_beams_that_must_stand_are_refused():
    models = TableLM.random(5, seed=1), TableLM.random(5, seed=2)
    with pytest.raises(ConfigError, match="samples=1 was asked for with min_width=2") as refused:
        assemble("dsbd", *models, samples=1, min_width=2)
    assert "samples=2 or more" in refused.value.do
    assemble("dsbd", *models, samples=2, min_width=2)


class Noting(list):
    """Complete texts, and a note of every one that was ever among them."""

    def __init__(self):
        super().__init__()
        self.every = []

    def append(self, text):
        self.every.append(text)
        super().append(text)


def test_no_more_complete_texts_are_kept_than_are_shown():
    law = torch.tensor([0.3, 0.2, 0.1, 0.06, 0.04, 0.3])
    engine = assemble("beam-sampling", TableLM(law.log().expand(6, 6)), num_beams=4)
    params = SamplingParams(max_new_tokens=300, temperature=1.0, eos=frozenset({5}))
    rows = [BeamRow(make_row([1], params, SeededCoins(seed), 6), 4) for seed in range(4)]
    for row in rows:
        row.written = Noting()
    for _ in decode(rows, engine):
        assert all(len(row.written) <= 4 for row in rows)
    assert sum(len(row.written.every) for row in rows) > 40
    for row in rows:
        best = sorted(row.written.every, key=lambda text: text.score, reverse=True)
        assert list(row.written) == best[:4]


def test_widths_are_within_the_vocabulary():
    session = BeamSession(assemble("beam-sampling", TableLM.random(4)), method="beam-sampling")
    with pytest.raises(ConfigError, match="num_beams=8"):
        session.generate([1, 2], 3)
    assert session.generate([1, 2], 3, num_beams=4, temperature=1.0, seed=0).sequences


def test_a_session_gives_the_random_state_back(spec):
    before = torch.random.get_rng_state()
    spec.generate(PROMPT, seed=1, **HOT)
    assert torch.equal(before, torch.random.get_rng_state())


def test_stop_strings_of_the_config_are_refused_as_asked_ones_are(tiny_pair, byte_tokenizer):
    target = copy.deepcopy(tiny_pair[0])
    target.generation_config.stop_strings = ["x"]
    with foretoken.load(
        target, "beam-sampling", tokenizer=byte_tokenizer, kernels="dense", num_beams=2
    ) as beams:
        with pytest.raises(ConfigError, match="stop_strings"):
            beams.generate(PROMPT, 4)
        assert beams.generate(PROMPT, 4, stop=[]).sequences, "none was asked for"


def test_beams_end_with_their_grammar_where_there_are_two_end_tokens(tiny_pair, byte_tokenizer):
    target = copy.deepcopy(tiny_pair[0])
    ends = [byte_tokenizer.eos_token_id, byte_tokenizer.convert_tokens_to_ids("<turn>")]
    target.generation_config.eos_token_id = ends
    words = ["red", "green", "blue sky"]
    with foretoken.load(
        target, "beam-sampling", tokenizer=byte_tokenizer, kernels="dense", num_beams=3
    ) as beams:
        assert beams.eos == set(ends)
        for seed in range(3):
            options = {"temperature": 1.0, "seed": seed, "guided": {"choice": words}}
            found = beams.generate(PROMPT, 20, **options)
            assert set(found.texts) <= set(words) and set(found.finish_reasons) == {"stop"}


@pytest.mark.parametrize("method", ["beam-sampling", "dsbd"])
def test_beams_keep_to_their_grammar_where_its_end_is_forbidden(tiny_pair, byte_tokenizer, method):
    """A short text may not end yet: another one is written, or nothing is left of the beams."""
    target, draft = tiny_pair
    with foretoken.load(
        target, method, draft=draft, tokenizer=byte_tokenizer, kernels="dense", num_beams=3
    ) as beams:
        choices, written = {"choice": ["red", "green", "blue sky and more"]}, []
        for seed in range(12):
            hot = {"temperature": 1.0, "seed": seed}
            with suppress(ConfigError):
                found = beams.generate(PROMPT, 30, guided=choices, min_new_tokens=8, **hot)
                written += found.texts
            with pytest.raises(ConfigError):
                beams.generate(PROMPT, 30, guided=choices, banned_tokens=list(beams.eos), **hot)
        assert set(written) == {"blue sky and more"}


def test_the_best_of_nan_is_no_beam(spec):
    beams = spec.using("beam-sampling", num_beams=2)
    with pytest.raises(ConfigError, match="no numbers"):
        beams.generate(PROMPT, 4, processors=lambda ids, scores: scores * torch.nan)


def test_a_model_set_to_training_mode_ends_its_beams(make_llama):
    target = make_llama(61)

    def switch(ids, scores):
        target.train()
        return scores

    hot = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1}
    with foretoken.load(target, "beam-sampling", kernels="dense", num_beams=2) as beams:
        with pytest.raises(ConfigError, match="training mode"):
            beams.generate([5, 9, 2], processors=switch, **hot)
        target.eval()
        assert beams.generate([5, 9, 2], **hot).sequences


def test_beams_that_wait_for_their_turn_see_a_session_closed(make_llama, monkeypatch):
    beams = foretoken.load(make_llama(61), "beam-sampling", kernels="dense", num_beams=2)
    checked, told, make_rows = threading.Event(), [], beams.beam_rows

    def noted(*given, **options):
        rows = make_rows(*given, **options)
        checked.set()
        return rows

    def wait():
        try:
            beams.generate([5, 9, 2], 8, temperature=1.0, seed=1)
        except ConfigError as error:
            told.append(str(error))

    monkeypatch.setattr(beams, "beam_rows", noted)
    thread = threading.Thread(target=wait)
    with held(beams.scheduler.turns):
        thread.start()
        assert checked.wait(30)
        beams.close()
    thread.join(30)
    assert len(told) == 1 and "closed" in told[0]


def test_beams_over_anothers_models_leave_them_open(spec):
    with spec.using("beam-sampling", num_beams=2) as beams:
        assert beams.generate(PROMPT, 2).sequences
    assert spec.generate(PROMPT, 2).sequences


def test_a_task_that_is_cancelled_ends_its_beams(spec, monkeypatch):
    """Else the other sessions over this model wait for texts that nobody reads."""
    rounds, started = [], threading.Event()

    def watched(rows, engine):
        for record in decode(rows, engine):
            rounds.append(1)
            started.set()
            time.sleep(0.01)
            yield record

    monkeypatch.setattr(beam_session, "decode", watched)
    beams = spec.using("beam-sampling", num_beams=2)

    async def left():
        task = asyncio.create_task(beams.agenerate(PROMPT, 200, ignore_eos=True))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await beams.agenerate([PROMPT], 3)

    [found] = asyncio.run(left())
    assert 1 <= len(found.tokens) <= 3 and len(rounds) < 100

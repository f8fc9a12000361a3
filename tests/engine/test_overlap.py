"""Draft and target at the same time: the law, the schedule, the threads."""

from __future__ import annotations

import itertools
import math
import threading
from functools import partial

import pytest
import torch

from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows, write
from foretoken.coins import SeededCoins
from foretoken.engine import overlap
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.overlap import OverlapEngine
from foretoken.engine.record import Recorder
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.table import TableLM
from foretoken.row import make_row
from foretoken.trees.build import chain
from foretoken.types import Draft, SamplingParams

PROMPTS = ((0, 1, 2, 0, 1), (2, 2, 1, 2, 2), (1,), (0, 2, 1, 1, 0, 2, 1))
HOT = {"temperature": 1.0}
both_ways = pytest.mark.parametrize("how", ["threads", "emulated"])


def pair(vocab=12, noise=0.7):
    """A target and a draft that agrees with it most of the time."""
    target = TableLM.random(vocab, seed=1)
    generator = torch.Generator().manual_seed(2)
    spread = torch.randn(target.logits.shape, generator=generator, dtype=torch.float64)
    return target, TableLM(target.logits + noise * spread)


def pearl(target, draft, depth, how="emulated", **parts):
    return assemble("pearl", target, draft, depth=depth, overlap=how, **parts)


def unlike(target):
    """A draft that is always wrong."""
    return TableLM(-target.logits)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before, torch_threads = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == torch_threads


# The law. Texts are long enough that drafting goes on behind pending tokens, and is thrown away.


@pytest.mark.parametrize("verifier", ["block", "recursive"])
@pytest.mark.parametrize(
    ("how", "vocab", "depth", "tokens", "setting"),
    [
        ("threads", 2, 2, 5, HOT),
        ("emulated", 2, 2, 5, HOT),
        ("emulated", 2, 3, 5, HOT),
        ("emulated", 3, 1, 3, HOT),
        ("emulated", 3, 2, 4, {**HOT, "eos": frozenset({2}), "repetition_penalty": 1.4}),
    ],
)
def test_the_law_is_the_targets(how, verifier, vocab, depth, tokens, setting):
    def tables():
        return TableLM.random(vocab, seed=21), TableLM.random(vocab, seed=22)

    def build():
        return pearl(*tables(), depth, how, verifier=verifier)

    gap = law_gap(build, tables()[0], setting, tokens=tokens, prompt=(0, 1))
    assert gap.variation <= BOUND
    assert (gap.law.accepted > 0) == (depth > 1)
    assert gap.law.outcomes > 60


def test_enumeration_sees_a_first_token_that_is_not_judged(monkeypatch):
    """Only the pending tokens are verified, and the first new one takes the bonus's place."""

    def careless(held: Draft, ahead: Draft, laws):
        judged, laws = overlap_behind(held, ahead, laws)
        if judged is held or judged.q is None:
            return judged, laws
        return Draft(
            judged.tree, judged.draw, (*judged.q[:-2], laws[len(held.tree) - 1], None)
        ), laws

    overlap_behind = overlap.behind
    monkeypatch.setattr(overlap, "behind", careless)
    build = partial(pearl, TableLM.random(2, seed=21), TableLM.random(2, seed=22), 2)
    gap = law_gap(build, TableLM.random(2, seed=21), HOT, tokens=4)
    assert gap.variation > 0.01


def test_enumeration_sees_a_rejected_token_that_is_tried_again(monkeypatch):
    """What was drafted ahead, kept as pending behind a correction with the law it was drawn from.

    The first of these tokens may have been judged: given that it was rejected it has another law.
    """
    advance, both, made = OverlapEngine.advance, OverlapEngine.both, []

    def watched(engine, propose, score):
        made.append(both(engine, propose, score))
        return made[0]

    def careless(engine, rows):
        made.clear()
        step = advance(engine, rows)
        [row] = rows
        if row.uid not in engine.pending and row.finish is None and made:
            [ahead] = made[0].ahead
            tree = chain(row.tokens[-1], ahead.tree.tokens[1:])
            engine.pending[row.uid] = Draft(tree, ahead.draw, ahead.q)
        return step

    monkeypatch.setattr(OverlapEngine, "both", watched)
    monkeypatch.setattr(OverlapEngine, "advance", careless)

    def build():
        return pearl(TableLM.random(2, seed=21), TableLM.random(2, seed=22), 2)

    assert law_gap(build, TableLM.random(2, seed=21), HOT, tokens=4).variation > 0.001


# Threads and emulation, plain text, neighbours.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_threads_write_what_the_emulation_writes(depth, temperature):
    params = SamplingParams(max_new_tokens=50, temperature=temperature)
    texts = [
        write(pearl(*pair(), depth, how), seeded_rows(PROMPTS, params, 12), max_rows=3)
        for how in ("threads", "emulated")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("draft", ["close", "always wrong", "the target itself"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 6])
def test_greedy_text_is_plains(depth, draft):
    target, close = pair()
    guess = {"close": close, "always wrong": unlike(target)}.get(draft, TableLM(target.logits))
    params = SamplingParams(max_new_tokens=40)
    expected = write(assemble("plain", target), seeded_rows(PROMPTS, params, 12))
    assert write(pearl(target, guess, depth), seeded_rows(PROMPTS, params, 12), 3) == expected


def test_rows_of_a_batch_are_in_different_modes():
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    rows = seeded_rows(PROMPTS, params, 12)
    sizes = [[len(d.tree) for d in r.drafts] for r in decode(rows, pearl(*pair(), 4))]
    assert any(1 in now and 4 in now for now in sizes)


# The schedule.


def run_one(engine, tokens, temperature=0.0, seed=0):
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    row = make_row((0, 1), params, SeededCoins(seed), 12)
    return row, list(decode([row], engine))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_perfect_draft_is_never_rejected(depth, temperature):
    target, _ = pair()
    row, records = run_one(pearl(target, TableLM(target.logits), depth), 101, temperature)
    assert len(row.new_tokens) == 101
    assert len(records) <= math.ceil(100 / depth) + 2  # the first step, and the last tokens' own
    assert [len(r.drafts[0].tree) for r in records[1:-2]] == [depth] * (len(records) - 3)


def test_a_draft_that_is_always_wrong_costs_one_target_forward_per_token():
    target, _ = pair()
    row, records = run_one(pearl(target, unlike(target), 4), 30)
    assert len(records) == target.forwards == len(row.new_tokens) == 30
    assert all(len(r.drafts[0].tree) == 1 for r in records)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_target_reads_one_token_or_as_many_as_are_drafted(depth):
    _, records = run_one(pearl(*pair(), depth), 80, temperature=1.0)
    sizes = {len(r.drafts[0].tree) for r in records[:-2]}
    assert sizes == {1, depth}
    assert all(r.times.nodes == len(r.drafts[0].tree) for r in records)


def accepted_runs(depth):
    """Mean number of drafted tokens that stand between two corrections."""
    engine = pearl(*pair(), depth, verifier="recursive")
    stood = corrections = 0
    for seed in range(4):
        _, records = run_one(engine, 400, temperature=1.0, seed=seed)
        for now, after in itertools.pairwise(records):
            goes_on = len(after.drafts[0].tree) > 1  # the first new token stood as well
            stood += len(now.verdicts[0].path) + goes_on
            corrections += not goes_on
    return stood / corrections


def test_accepted_runs_do_not_end_with_the_draft():
    target, draft = pair()
    runs = [accepted_runs(depth) for depth in (2, 4, 8)]
    assert max(runs) / min(runs) < 1.25
    chain_engine = assemble("chain", target, draft, depth=4, verifier="recursive")
    _, records = run_one(chain_engine, 400, temperature=1.0)
    assert runs[1] >= sum(len(r.verdicts[0].path) for r in records) / len(records)


@both_ways
def test_emulation_models_the_time_of_two_devices(how):
    row = make_row((0, 1), SamplingParams(max_new_tokens=30, temperature=1.0), SeededCoins(0), 12)
    recorder, hidden = Recorder([row]), 0.0
    for record in decode([row], pearl(*pair(), 4, how)):
        recorder(record)
        times = record.times
        if how == "emulated" and len(row.tokens) < 24:  # near the end nothing is drafted
            assert times.hidden == min(times.draft, times.target) > 0.0
        hidden += times.hidden
    stats = recorder.stats[row.uid]
    assert stats.modelled_seconds == stats.seconds - hidden
    assert (hidden > 0.0) == (how == "emulated")
    assert stats.to_dict()["modelled_seconds"] == stats.modelled_seconds


# Threads.


class Meeting(TableLM):
    """Answers only when the other model is at work as well."""

    barrier: threading.Barrier

    def grow(self, *args):
        self.barrier.wait(timeout=60)
        return super().grow(*args)


def test_both_models_are_at_work_at_once():
    target, draft = (Meeting(lm.logits) for lm in pair())
    target.barrier = draft.barrier = threading.Barrier(2)
    params = SamplingParams(max_new_tokens=50, temperature=1.0)
    records = decode(seeded_rows(PROMPTS[:2], params, 12), pearl(target, draft, 1, "threads"))
    for _ in range(5):  # a step is one forward of each; nothing would come if they took turns
        next(records)
    records.close()


class Counting(TableLM):
    """Remembers how many threads torch would use, and where."""

    def grow(self, *args):
        self.seen = threading.current_thread().name, torch.get_num_threads()
        return super().grow(*args)


def test_each_worker_has_half_of_torchs_threads_and_gives_them_back():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        target, draft = (Counting(lm.logits) for lm in pair())
        records = decode(seeded_rows(PROMPTS, PARAMS, 12), pearl(target, draft, 2, "threads"))
        next(records)
        assert target.seen == ("foretoken-target_0", 2)
        assert draft.seen == ("foretoken-draft_0", 2)
        assert torch.get_num_threads() == 4
        records.close()
        fresh = []
        asked = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        asked.start()
        asked.join()
        assert fresh == [4] == [torch.get_num_threads()]
    finally:
        torch.set_num_threads(before)


PARAMS = SamplingParams(max_new_tokens=50, temperature=1.0)


class Failing(TableLM):
    """Breaks down in its seventh forward."""

    def grow(self, *args):
        if self.forwards == 6:
            raise RuntimeError("the seventh forward failed")
        return super().grow(*args)


@both_ways
@pytest.mark.parametrize("who", ["target", "draft"])
def test_an_error_in_a_worker_surfaces_and_frees_the_rows(who, how):
    lms = dict(zip(("target", "draft"), pair(), strict=True))
    lms[who] = Failing(lms[who].logits)
    with pytest.raises(RuntimeError, match="seventh forward"):
        write(pearl(lms["target"], lms["draft"], 3, how), seeded_rows(PROMPTS, PARAMS, 12))
    assert lms["target"].rows_held == lms["draft"].rows_held == 0


@both_ways
def test_closing_early_joins_the_workers_and_frees_the_rows(how):
    target, draft = pair()
    records = decode(seeded_rows(PROMPTS, PARAMS, 12), pearl(target, draft, 3, how))
    for _ in range(3):
        next(records)
    assert target.rows_held == draft.rows_held == len(PROMPTS)
    names = {thread.name for thread in threading.enumerate()}
    assert ("foretoken-draft_0" in names) == (how == "threads")
    records.close()
    assert target.rows_held == draft.rows_held == 0


# What is refused.


def test_another_schedule_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="threads or emulated"):
        pearl(*pair(), 2, "processes")


def test_threads_are_refused_where_both_models_share_a_gpu():
    target, draft = pair()
    target.device = draft.device = torch.device("cuda", 0)
    with pytest.raises(CapabilityError, match="emulated"):
        write(pearl(target, draft, 2, "threads"), seeded_rows(PROMPTS, PARAMS, 12))
    draft.device = torch.device("cuda", 1)
    assert write(pearl(target, draft, 2, "threads"), seeded_rows(PROMPTS, PARAMS, 12))


def test_nothing_is_asked_behind_the_end_of_a_text():
    """A constraint may have no answer there, and the text would end by its error."""
    target, _ = pair()
    texts = {}
    for method in ("pearl", "plain"):
        engine = pearl(target, TableLM(target.logits), 3)
        engine = engine if method == "pearl" else assemble("plain", target)

        def end(ids, scores):
            if int(ids[0, -1]) == 7:
                raise ValueError("nothing may follow")
            return scores.index_fill(1, torch.tensor([7]), 5.0) if ids.shape[1] > 6 else scores

        params = SamplingParams(max_new_tokens=30, processors=end, eos=frozenset({7}))
        row = make_row((0, 1), params, SeededCoins(0), 12)
        list(decode([row], engine))
        texts[method] = row.new_tokens, row.finish.reason
    assert texts["pearl"] == texts["plain"] and texts["plain"][1] == "stop"

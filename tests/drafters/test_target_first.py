"""A first layer of the target's own: exact for one candidate, lossy and longer for more."""

import pytest

from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows, write
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.promise import promise_of_row
from foretoken.errors import PairingError
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS
from foretoken.types import SamplingParams

PROMPTS = ((0, 1, 2, 0, 1), (2, 2, 1), (1,))


def engine(k, vocab=3, **options):
    models = TableLM.random(vocab, seed=21), TableLM.random(vocab, seed=22)
    return assemble("mcsd-target-init", *models, k=k, **options)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.4, "eos": frozenset({2})},
        {"temperature": 1.0, "frequency_penalty": 1.5},
        {"temperature": 1.0, "min_new_tokens": 3, "eos": frozenset({2})},
    ],
    ids=str,
)
@pytest.mark.parametrize("depth", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_candidate_keeps_the_law(setting, depth):
    gap = law_gap(lambda: engine((1,) * depth), TableLM.random(3, seed=21), setting, tokens=4)
    assert gap.variation <= BOUND


def test_two_candidates_change_it():
    """Nobody may call this row lossless."""
    gap = law_gap(
        lambda: engine((2, 1)), TableLM.random(3, seed=21), {"temperature": 1.0}, tokens=4
    )
    assert gap.variation > 0.01
    assert not promise_of_row(METHODS["mcsd-target-init"]).lossless


def test_greedy_text_of_one_candidate_is_plains():
    params = SamplingParams(max_new_tokens=40)
    target = TableLM.random(4, seed=21)
    plain = write(assemble("plain", target), seeded_rows(PROMPTS, params, 4))
    for k in ((1,), (1, 1, 1), (1, 3, 2)):
        assert write(engine(k, 4), seeded_rows(PROMPTS, params, 4)) == plain


def test_a_step_ends_behind_a_scored_token_and_drafts_from_there():
    built = engine((2, 2, 1), 4)
    steps = []
    for row in seeded_rows(PROMPTS, SamplingParams(max_new_tokens=60, temperature=1.0), 4):
        for record in decode([row], built):
            steps.append((record.drafts[0], record.verdicts[0]))
    known = [(draft, verdict) for draft, verdict in steps if draft.draw.value == "target"]
    assert len(known) > len(steps) / 2
    for draft, verdict in known:
        if len(draft.tree) > 1:
            last = verdict.path[-1] if verdict.path else 0
            children = draft.tree.children()[last]
            assert verdict.next_token in [draft.tree.tokens[n] for n in children]


def test_more_candidates_are_accepted_longer():
    means = []
    for width in (1, 2, 4):
        built = engine((width, 1, 1, 1), 8)
        emitted = steps = 0
        for row in seeded_rows(PROMPTS * 12, SamplingParams(max_new_tokens=60, temperature=1.0), 8):
            for record in decode([row], built):
                emitted, steps = emitted + len(record.emitted[0]), steps + 1
        means.append(emitted / steps)
    assert means == sorted(means) and means[-1] > 1.1 * means[0]


def test_the_rule_takes_no_other_drafts():
    """An ordinary first layer would be believed untested."""
    models = TableLM.random(3, seed=21), TableLM.random(3, seed=22)
    with pytest.raises(PairingError, match="target candidates only"):
        assemble("mcsd", *models, verifier="target_first")

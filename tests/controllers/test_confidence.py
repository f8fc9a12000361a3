"""Lengths by the draft's own confidence."""

import pytest
import torch

from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.types import SamplingParams

VOCAB = 4


def engine(method="chain", **options):
    models = TableLM.random(VOCAB, seed=21), TableLM.random(VOCAB, seed=22)
    return assemble(method, *models, controller="confidence", **options)


def rounds(built, temperature=1.0, tokens=80):
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    [row] = seeded_rows([(0, 1, 2)], params, VOCAB)
    found, before = [], list(row.tokens)
    for record in decode([row], built):
        if tokens - (len(before) - 3) > built.controller.config.depth:
            found.append((before, record.drafts[0].tree))
        before = list(row.tokens)
    return found


def entropy(law):
    return float(torch.distributions.Categorical(law).entropy())


@pytest.mark.parametrize(
    ("measure", "threshold", "doubtful"),
    [
        ("probability", 0.6, lambda law: float(law.max()) < 0.6),
        ("entropy", 0.9, lambda law: entropy(law) > 0.9),
    ],
)
def test_the_first_doubtful_token_is_the_last(measure, threshold, doubtful):
    built = engine(measure=measure, threshold=threshold, depth=6)
    lengths = set()
    for before, tree in rounds(built):
        tokens = tree.tokens[1:]
        doubts = [
            doubtful(built.drafter.model.lm.after([*before, *tokens[:i]]).softmax(-1))
            for i in range(len(tokens))
        ]
        assert not any(doubts[:-1])
        assert doubts[-1] or len(tokens) == 6
        lengths.add(len(tokens))
    assert len(lengths) > 1


def test_a_tree_takes_no_level_beyond_the_doubtful_one():
    """The tree drafter knows no last token and asks again; the answer is no."""
    sure = [max(tree.depths()) for _, tree in rounds(engine("tree", threshold=0.0, nodes=8))]
    wary = [max(tree.depths()) for _, tree in rounds(engine("tree", threshold=1.0, nodes=8))]
    assert set(wary) == {1} and max(sure) > 1


def test_lengths_that_follow_the_law_leave_the_text_alone():
    target = TableLM.random(VOCAB, seed=21)
    for method in ("chain", "tree"):
        gap = law_gap(
            lambda m=method: engine(m, threshold=0.6, depth=3), target, {"temperature": 1.0}
        )
        assert gap.variation <= BOUND


@pytest.mark.parametrize("option", [{"measure": "hope"}, {"threshold": -1.0}, {"depth": -1}])
def test_values_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        engine(**option)

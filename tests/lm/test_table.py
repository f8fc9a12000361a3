"""TableLM keeps the protocol, and refuses whoever does not."""

from __future__ import annotations

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain, from_paths, root
from foretoken.types import DecodeState, Draft, Draw, FinalNorm, Layer, SamplingParams
from foretoken.warp import Warp


def row(tokens: list[int], vocab: int = 4) -> DecodeState:
    params = SamplingParams()
    return DecodeState(tokens, len(tokens), params, SeededCoins(0), Warp(params, 1, vocab))


def draft(tree) -> Draft:
    return Draft(tree, Draw.POINT)


@pytest.mark.parametrize("order", [1, 2])
def test_scores_of_a_tree_are_the_table_along_its_paths(order: int) -> None:
    lm = TableLM.random(4, order=order, seed=1)
    text = row([2, 3, 1])
    lm.prefill([text])
    tree = from_paths(1, [[0, 2], [0, 3], [3]])
    [scores] = lm.score([text], [draft(tree)])
    for node in range(len(tree)):
        context = [2, 3, 1, *(tree.tokens[i] for i in tree.path(node))]
        assert torch.equal(scores.logits[node], lm.after(context))
        assert torch.equal(lm.after(context), lm.logits[tuple(context[-order:])])


def test_missing_context_is_token_zero() -> None:
    lm = TableLM.random(3, order=2, seed=2)
    assert torch.equal(lm.after([1]), lm.logits[0, 1])
    assert torch.equal(lm.after([]), lm.logits[0, 0])


def test_commit_keeps_root_and_path_and_forgets_the_rest() -> None:
    lm = TableLM.random(4, seed=3)
    text = row([0, 1])
    lm.prefill([text])
    lm.score([text], [draft(from_paths(1, [[2, 3], [3, 0]]))])
    lm.commit([text], [(3, 4)])
    text.tokens += [3, 0, 2]
    assert lm.cached(text) == text.tokens[:-1]
    [scores] = lm.score([text], [draft(root(2))])
    assert torch.equal(scores.logits[0], lm.after(text.tokens))


def test_growing_a_tree_equals_scoring_it_and_catches_up_first() -> None:
    lm = TableLM.random(4, seed=4)
    text = row([0, 1])
    lm.prefill([text])
    text.tokens += [2, 3]  # committed elsewhere
    parts = [
        lm.grow([text], [tokens], [parents])[0].logits
        for tokens, parents in (([3], [-1]), ([0, 1], [0, 0]), ([2], [2]))
    ]
    tree = from_paths(3, [[0], [1, 2]])
    fresh = row(list(text.tokens))
    lm.prefill([fresh])
    [scores] = lm.score([fresh], [draft(tree)])
    assert torch.equal(torch.cat(parts), scores.logits)
    lm.commit([text], [(2, 3)])
    assert lm.cached(text) == [0, 1, 2, 3, 1, 2]


def test_rows_are_strangers_and_free_forgets() -> None:
    lm = TableLM.random(4, seed=5)
    one, two = row([0, 1]), row([3, 2, 2, 1])
    for text in (one, two):
        lm.prefill([text])
    together = lm.score([one, two], [draft(chain(1, [2])), draft(chain(1, [3, 0]))])
    assert [len(scores.logits) for scores in together] == [2, 3]
    lm.free([one, two, row([1])])  # unknown rows are ignored
    assert lm.rows_held == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda lm, text: lm.prefill([text]),
        lambda lm, text: lm.score([text], [draft(root(3))]),
        lambda lm, text: lm.score([row([0])], [draft(root(0))]),
        lambda lm, text: lm.commit([text], [()]),
        lambda lm, text: lm.grow([text], [[1]], [[0]]),
        lambda lm, text: lm.grow([text], [[1, 9]], [[-1, 0]]),
        lambda lm, text: lm.grow([text], [[1, 2]], [[-1, 1]]),
        lambda lm, text: lm.score([text, text], [draft(root(1)), draft(root(1))]),
        lambda lm, text: (lm.grow([text], [[1]], [[-1]]), lm.commit([text], [(1,)])),
        lambda lm, text: (lm.grow([text], [[1, 2, 3]], [[-1, 0, 0]]), lm.commit([text], [(1, 2)])),
        lambda lm, text: (text.tokens.insert(0, 2), lm.score([text], [draft(root(1))])),
    ],
    ids=[
        "prefill twice",
        "wrong root",
        "row never prefilled",
        "commit without tree",
        "root with a parent",
        "token outside the vocabulary",
        "parent after child",
        "one row twice",
        "commit of an unknown node",
        "commit of a path that is none",
        "cache of another text",
    ],
)
def test_misuse_is_an_error(misuse) -> None:
    lm = TableLM.random(4, seed=6)
    text = row([0, 1])
    lm.prefill([text])
    with pytest.raises(AssertionError):
        misuse(lm, text)


def test_a_tables_last_features_are_its_logits() -> None:
    lm = TableLM.random(4, seed=6)
    text = row([0, 1, 2])
    [seen] = lm.prefill([text], taps=(FinalNorm(), Layer(0)))
    assert torch.equal(seen[:, 0], torch.stack([lm.after([0]), lm.after([0, 1])]))
    [score] = lm.score([text], [draft(chain(2, [3]))], taps=(Layer(0),))
    assert score.hidden.shape == (2, 1, 4) and not torch.equal(score.hidden[:, 0], score.logits)
    [grown] = lm.grow([text], [[1]], [[1]], (FinalNorm(), Layer(-1)))
    assert torch.equal(grown.hidden, grown.logits[:, None].expand(1, 2, 4))
    assert lm.prefill([row([1])], taps=(Layer(0),))[0].shape == (0, 1, 4)

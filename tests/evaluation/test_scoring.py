"""Log-likelihoods through trees are those of a plain forward over context and continuation."""

import random

import pytest
import torch

from foretoken.evaluation import scoring
from foretoken.evaluation.scoring import batches, questions_of, score
from foretoken.lm.opening import open_lm


@pytest.fixture(scope="module")
def lm(tiny_pair):
    with open_lm(tiny_pair[0], kernels="dense") as opened:
        yield opened


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=count)


def plainly(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    wanted = torch.tensor(continuation)
    chances = logits.log_softmax(-1).gather(1, wanted[:, None])
    return float(chances.sum()), bool((logits.argmax(-1) == wanted).all())


def greedy(model, context: list[int], count: int) -> list[int]:
    written = list(context)
    for _ in range(count):
        with torch.no_grad():
            written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
    return written[len(context) :]


@pytest.fixture(scope="module")
def pairs(tiny_pair):
    """Choices that share a context and beginnings, single ones, repeated ones, greedy ones."""
    first, second = tokens(40, 0), tokens(7, 1)
    best = greedy(tiny_pair[0], first, 5)
    return [
        (first, [3, 4, 5]),
        (second, tokens(9, 2)),
        (first, [3, 4, 6, 7]),
        (first, [3]),
        (first, best),
        (first, [*best[:-1], best[-1] + 1]),
        ([9], tokens(30, 3)),
        (first, [3, 4, 5]),
    ]


@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_those_of_a_plain_forward(lm, pairs, tiny_pair, rows) -> None:
    told: dict[int, tuple[float, bool]] = {}
    found = score(lm, pairs, rows, told=told.__setitem__)
    assert found == [told[number] for number in range(len(pairs))]
    for (context, continuation), (chance, best) in zip(pairs, found, strict=True):
        expected, is_best = plainly(tiny_pair[0], context, continuation)
        assert chance == pytest.approx(expected, abs=1e-4) and best is is_best
    assert [best for _, best in found].count(True) == 1
    assert lm.rows_held == 0


def test_a_long_continuation_is_read_in_pieces(lm, tiny_pair, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "NODES", 8)
    asked = [(tokens(5, 4), tokens(count, count)) for count in (7, 8, 9, 16, 25)]
    found = score(lm, asked, 2)
    for (context, continuation), (chance, _) in zip(asked, found, strict=True):
        assert chance == pytest.approx(plainly(tiny_pair[0], context, continuation)[0], abs=1e-4)


def test_choices_of_a_context_are_one_question_and_it_is_read_once(pairs) -> None:
    asked = questions_of(pairs, trees=True)
    assert [sorted(one.continuations) for one in asked] == [[0, 2, 3, 4, 5, 7], [6], [1]]
    assert [len(one.continuations) for one in questions_of(pairs, trees=False)] == [1] * len(pairs)


def test_a_batch_keeps_to_its_rows_and_to_its_nodes(monkeypatch) -> None:
    asked = questions_of([([n], tokens(10, n)) for n in range(7)], trees=True)
    assert [len(batch) for batch in batches(asked, 3)] == [3, 3, 1]
    monkeypatch.setattr(scoring, "NODES", 20)
    assert [len(batch) for batch in batches(asked, 3)] == [2, 2, 2, 1]


def test_a_target_that_fails_keeps_no_rows(lm, monkeypatch) -> None:
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm, "score", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        score(lm, [([1, 2, 3], [4, 5])])
    assert lm.rows_held == 0

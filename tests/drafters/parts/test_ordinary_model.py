"""When a draft model reads a text, and what that counts as."""

import pytest

from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.lm.table import TableLM

VOCAB = 8


class Failing(TableLM):
    """A table whose prefill ends in an error once it has taken the rows in."""

    broken = True

    def prefill(self, rows, *given, **options):
        fed = super().prefill(rows, *given, **options)
        if self.broken:
            raise RuntimeError("out of memory")
        return fed


def test_a_text_is_read_when_it_is_first_drafted_for(row):
    lm = TableLM.random(vocab=VOCAB, seed=0)
    model, rows = OrdinaryModel(lm), [row([1, 2, 3], VOCAB), row([4, 5], VOCAB)]
    for one in rows:
        assert model.open(one, None)
    assert lm.rows_held == 0 and all(one.prefill == 0.0 for one in rows)
    rows[0].tokens.append(6)  # written without a draft
    model.grow(rows[:1], [[6]], [[-1]])
    assert lm.rows_held == 1 and rows[0].prefill > 0.0 and rows[1].prefill == 0.0
    read = rows[0].prefill
    model.keep(rows[:1], [()], [None])
    rows[0].tokens.append(7)
    model.grow(rows[:1], [[7]], [[-1]])
    assert rows[0].prefill == read, "it is read once"
    assert model.to_read(rows[0]) == 0.0 < model.to_read(rows[1])
    for one in rows:
        model.close(one)
    assert lm.rows_held == 0 and not model.unread


def test_texts_are_read_anew_after_a_failure(row):
    lm = Failing.random(vocab=VOCAB, seed=0)
    model, one = OrdinaryModel(lm), row([1, 2, 3], VOCAB)
    model.open(one, None)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.grow([one], [[3]], [[-1]])
    assert lm.rows_held == 0
    lm.broken = False
    [score] = model.grow([one], [[3]], [[-1]])
    assert score.logits[0].equal(lm.after([1, 2, 3]).to(score.logits.dtype))

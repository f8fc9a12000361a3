"""When a head reads a text, and that waiting changes nothing it says."""

from dataclasses import replace

import pytest
import torch

from foretoken.drafters.parts.state_reader import FEW, LEAST_READ, StateReader, read_back
from foretoken.drafters.parts.trained_head import HeadOptions
from foretoken.heads import store
from foretoken.heads.eagle3 import Eagle3
from foretoken.lm.opening import open_lm
from foretoken.native.library import operation
from tests.lm.families import tied

VOCAB, TAPS = 97, (0, 1)


@pytest.fixture
def reader(tmp_path):
    """A random head beside a small target, both anew."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "vocab_size": VOCAB, "width": 64, "tokens": VOCAB}
    at = store.save(tmp_path / "head", "eagle3", Eagle3(Eagle3.Config(**sizes, taps=TAPS)), {})
    return lambda: StateReader(open_lm(tied()), "eagle3", HeadOptions(draft_head=at))


def states(count, seed=0):
    """Hidden states of the target at so many tokens."""
    torch.manual_seed(seed)
    return torch.randn(count, len(TAPS), 64)


def held(model):
    """Rows that the head's decoder knows."""
    return len(model.decoder._rows)


def test_a_text_is_read_when_it_is_first_drafted_for(reader, row):
    model, rows = reader(), [row([1, 2, 3, 4], VOCAB), row([5, 6], VOCAB)]
    for one in rows:
        assert model.open(one, states(len(one.tokens) - 1))
    assert held(model) == 0 and all(one.prefill == 0.0 for one in rows)
    [first] = model.grow(rows[:1], [[4]], [[-1]])
    assert held(model) == 1 and rows[0].prefill > 0.0 == rows[1].prefill
    assert model.to_read(rows[0]) == 0.0 < model.to_read(rows[1])
    read = rows[0].prefill
    model.keep(rows[:1], [()], [states(1, 7)])
    rows[0].tokens.append(7)
    model.grow(rows[:1], [[7]], [[-1]])
    assert rows[0].prefill == read, "it is read once"
    for one in rows:
        model.close(one)
    assert held(model) == 0 and not model.unread
    assert first.logits.isfinite().any()


def test_of_a_text_longer_than_those_it_learned_from_a_head_reads_the_end(tmp_path, row):
    sizes = {"hidden_size": 64, "vocab_size": VOCAB, "width": 64, "tokens": VOCAB}
    head, tokens = Eagle3(Eagle3.Config(**sizes, taps=TAPS)), [i % VOCAB for i in range(701)]
    read = {}
    for window in (None, 128, 512):
        notes = {} if window is None else {"settings": {"window": window}}
        at = store.save(tmp_path / str(window), "eagle3", head, notes)
        model = StateReader(open_lm(tied()), "eagle3", HeadOptions(draft_head=at))
        one = row(list(tokens), VOCAB)
        assert model.open(one, states(700)) and model.recent == read_back(notes)
        [said] = model.grow([one], [[tokens[-1]]], [[-1]])
        [own] = model.decoder._rows.values()
        read[window] = own.cached
        again = row(list(tokens[:9]), VOCAB)  # a short one is read whole
        assert model.open(again, states(8)) and model.missing(again) == 8
        assert said.logits.isfinite().all()
    # Each with the state before it: of the first of those there is only the state.
    assert read == {None: 700, 128: LEAST_READ - 1, 512: 511}


def test_what_waited_says_what_is_read_at_once(reader, row):
    """Tokens that were written while nobody asked are read with the prompt."""
    late, early = reader(), reader()
    waiting, asked = row([1, 2, 3], VOCAB), row([1, 2, 3], VOCAB)
    late.open(waiting, states(2))
    early.open(asked, states(2))
    early.grow([asked], [[3]], [[-1]])
    for step, new in enumerate(([9, 11], [4])):
        seen = states(len(new), 20 + step)
        for model, one in ((late, waiting), (early, asked)):
            one.tokens += new
            model.keep([one], [() if model is early and not step else None], [seen])
    assert waiting in late.unread and asked not in early.unread
    said = [
        model.grow([one], [[4]], [[-1]])[0].logits
        for model, one in ((late, waiting), (early, asked))
    ]
    torch.testing.assert_close(*said)


def test_a_text_is_read_anew_after_a_failure(reader, row, monkeypatch):
    model, right, one, other = reader(), reader(), row([1, 2, 3], VOCAB), row([1, 2, 3], VOCAB)
    for each, text in ((model, one), (right, other)):
        each.open(text, states(2))
    prefill = model.decoder.prefill

    def broken(rows):
        prefill(rows)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.decoder, "prefill", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.grow([one], [[3]], [[-1]])
    assert held(model) == 0 and one in model.unread
    monkeypatch.undo()
    [said], [wanted] = (each.grow([text], [[3]], [[-1]]) for each, text in
                        ((model, one), (right, other)))  # fmt: skip
    torch.testing.assert_close(said.logits, wanted.logits)


@pytest.mark.skipif(operation("segment", torch.float32) is None, reason="no operations in C")
def test_few_states_enter_in_one_call(reader, row, monkeypatch):
    """As the modules and the table of the head have them."""
    model, one = reader(), row([1, 2, 3], VOCAB)
    model.open(one, states(2))
    one.tokens += [5, 8]
    seen = states(2, 4)
    right = model.read([5, 8], model.head.fused(seen))
    monkeypatch.setattr(model, "read", None)
    model.keep([one], [None], [seen])
    torch.testing.assert_close(one.private[model].entering[-2:], right)


def test_what_a_failed_call_had_cached_is_not_fed_again(reader, row, monkeypatch):
    """The decoder has read all but the root when a forward ends in an error."""
    model, right, one, other = reader(), reader(), row([1, 2, 3], VOCAB), row([1, 2, 3], VOCAB)
    for each, text in ((model, one), (right, other)):
        each.open(text, states(2))
        each.grow([text], [[3]], [[-1]])
        text.tokens += [9, 11, 4]
        each.keep([text], [()], [states(3, 20)])

    def broken(rows, *given):
        model.decoder.prefill(rows)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.laws, "grow", broken)
    monkeypatch.setattr(model.decoder, "grow", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.grow([one], [[4]], [[-1]])
    monkeypatch.undo()
    assert model.decoder.missing(one.private[model].own) == 0 < model.missing(one)
    [said], [wanted] = (each.grow([text], [[4]], [[-1]]) for each, text in
                        ((model, one), (right, other)))  # fmt: skip
    torch.testing.assert_close(said.logits, wanted.logits)


def test_many_states_enter_as_few_do(reader, row):
    """What a row's tokens become is the same number whoever shares the step."""
    model, rows = reader(), [row([1, 2, 3], VOCAB) for _ in range(5)]
    fed = states(FEW // 2, 4)
    for one in rows:
        model.open(one, states(2))
        one.tokens += [7] * len(fed)
    model.keep(rows[:1], [None], [fed])
    model.keep(rows[1:], [None] * 4, [fed] * 4)
    first, *others = [one.private[model].entering for one in rows]
    assert all(torch.equal(first, entering) for entering in others)


def test_a_text_that_was_read_keeps_no_numbers_for_its_prompt(reader, row):
    model, one = reader(), row([1] * 60, VOCAB)
    model.open(one, states(59))
    model.grow([one], [[1]], [[-1]])
    model.keep([one], [()], [states(1, 3)])
    kept = [one.private[model].entering, model.decoder._memory(one.private[model].own).supplied]
    assert all(each.untyped_storage().nbytes() <= 4 * 64 for each in kept if each is not None)


def test_a_text_that_is_not_read_whole_is_not_copied_as_it_grows(reader, row):
    model, one = reader(), row([1, 2, 3, 4, 5, 6, 7, 8], VOCAB)
    model.recent = 3
    model.open(one, states(7))
    own = model.followed(one).own.tokens
    assert own == [6, 7, 8]
    one.tokens += [9, 10]
    assert model.followed(one).own.tokens is own and own == [6, 7, 8, 9, 10]
    other = replace(one, tokens=[*one.tokens[:-1], 11, 12])
    assert model.followed(other).own.tokens == [6, 7, 8, 9, 11, 12]
    assert model.followed(one).own.tokens == [6, 7, 8, 9, 10]
    del one.tokens[-1:]
    assert model.followed(one).own.tokens == [6, 7, 8, 9]


def test_a_fork_of_a_text_that_is_read_whole_leaves_it_as_it_is(reader, row):
    model, one = reader(), row([1, 2, 3], VOCAB)
    model.open(one, states(2))
    other = replace(one, tokens=[1, 2, 3, 4])
    assert model.followed(other).own is other and one.tokens == [1, 2, 3]
    assert model.followed(one).own is one

"""Texts that begin as earlier ones did are not fed again, and are the same texts."""

import numpy as np
import pytest
import torch

import foretoken
from foretoken.audit.fixtures import random_head
from foretoken.audit.rows import seeded_rows
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.prefixes import SHORTEST, Prefix, Prefixes, in_common, keep_text
from foretoken.methods import METHODS as METHOD_ROWS
from foretoken.types import Finish, Layer, SamplingParams

SYSTEM = "there is a thin cat in the other end of the garden and it is there in the rain; "
TURNS = [SYSTEM + "what is it?", SYSTEM + "who is there?", SYSTEM + "what is in the rain?"]
METHODS = ["plain", "chain", "tree", "prompt-lookup", "auto", "layerskip", "hybrid"]


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_the_same_and_beginnings_are_not_fed_again(tiny_pair, byte_tokenizer, method):
    target, draft = tiny_pair
    with foretoken.load(
        target, method, draft, tokenizer=byte_tokenizer, kernels="dense", compile="off"
    ) as spec:
        options = {"max_new_tokens": 16, "temperature": 0.0}
        alone = [spec.generate(turn, **options).tokens for turn in TURNS]
        spec.keep_prefixes(1 << 24)
        fed = []
        run = spec.target._run if hasattr(spec.target, "_run") else spec.target.base._run
        base = getattr(spec.target, "base", spec.target)
        base._run = lambda feeds, *rest: (
            fed.append(sum(len(feed.tokens) for feed in feeds)),
            run(feeds, *rest),
        )[1]
        again = [spec.generate(turn, **options).tokens for turn in TURNS]
        together = [result.tokens for result in spec.generate(TURNS, **options)]
        shared = len(byte_tokenizer(SYSTEM)["input_ids"])
        assert again == alone == together
        assert base.prefixes.reused >= 4 * shared
        del base._run


@pytest.mark.parametrize("method", ["eagle", "medusa", "eagle3"])
def test_heads_draft_as_if_all_had_been_fed(make_llama, byte_tokenizer, method):
    """Their hidden states are kept beside keys and values, so that drafts are the same."""
    target = make_llama(len(byte_tokenizer), num_hidden_layers=4)
    head = random_head(METHOD_ROWS[method].head, len(byte_tokenizer), 64)
    with foretoken.load(
        target, method, tokenizer=byte_tokenizer, kernels="dense", draft_head=head, depth=3
    ) as spec:
        alone = [spec.generate(turn, max_new_tokens=12, temperature=0.0) for turn in TURNS]
        spec.keep_prefixes(1 << 24)
        for _ in range(2):
            again = [spec.generate(turn, max_new_tokens=12, temperature=0.0) for turn in TURNS]
            assert [one.tokens for one in again] == [one.tokens for one in alone]
            assert [one.steps for one in again] == [one.steps for one in alone]
        assert spec.target.prefixes.reused > 4 * SHORTEST


def test_the_next_turn_of_a_chat_begins_where_the_last_one_ended(tiny_pair, byte_tokenizer):
    target, draft = tiny_pair
    with foretoken.load(
        target, "chain", draft, tokenizer=byte_tokenizer, kernels="dense", compile="off"
    ) as spec:
        spec.keep_prefixes(1 << 24)
        ids = byte_tokenizer(SYSTEM)["input_ids"]
        first = spec.generate(ids, max_new_tokens=24, temperature=0.0)
        before = spec.target.prefixes.reused
        longer = [*ids, *first.tokens, *byte_tokenizer(" and then?")["input_ids"]]
        second = spec.generate(longer, max_new_tokens=24, temperature=0.0)
        assert spec.target.prefixes.reused - before == len(ids) + 24 - 1
        spec.keep_prefixes(0)
        assert second.tokens == spec.generate(longer, max_new_tokens=24, temperature=0.0).tokens


def test_changed_weights_forget_what_was_kept(make_llama, byte_tokenizer):
    target = make_llama(len(byte_tokenizer))
    with foretoken.load(target, "plain", tokenizer=byte_tokenizer, kernels="dense") as spec:
        spec.keep_prefixes(1 << 24)
        spec.generate(SYSTEM, max_new_tokens=4)
        assert len(spec.target.prefixes) == 1
        with torch.no_grad():
            target.model.layers[0].mlp.down_proj.weight.data *= 1.5
        changed = spec.generate(SYSTEM, max_new_tokens=8).tokens
    with foretoken.load(target, "plain", tokenizer=byte_tokenizer, kernels="dense") as spec:
        assert spec.generate(SYSTEM, max_new_tokens=8).tokens == changed


def test_a_text_that_failed_is_not_kept(tiny_pair, byte_tokenizer):
    def processor(ids, scores):
        if ids.shape[1] > 100:
            raise ValueError("too far")
        return scores

    with foretoken.load(
        tiny_pair[0], "plain", tokenizer=byte_tokenizer, kernels="dense", compile="off"
    ) as spec:
        spec.keep_prefixes(1 << 24)
        with pytest.raises(ValueError, match="too far"):
            spec.generate(SYSTEM, max_new_tokens=80, processors=processor, ignore_eos=True)
        assert len(spec.target.prefixes) == 0


@pytest.mark.parametrize("limit", [0, 1 << 24])
def test_texts_that_a_draft_was_never_asked_about_are_let_go(tiny_pair, byte_tokenizer, limit):
    """Prompts of one token, for one token: the draft's cache has no room for them yet."""
    target, draft = tiny_pair
    ids = [byte_tokenizer(letter)["input_ids"] for letter in "abe"]
    with foretoken.load(
        target, "chain", draft, byte_tokenizer, kernels="dense", compile="off", controller="fixed"
    ) as spec:
        spec.keep_prefixes(limit)
        spec.generate(SYSTEM, max_new_tokens=8)  # room for one text
        texts = spec.generate(ids, max_new_tokens=1)
        assert [text.tokens for text in texts] == [
            spec.generate(one, max_new_tokens=1).tokens for one in ids
        ]
        assert spec.draft.rows_held == spec.target.rows_held == 0


def a_prefix(tokens, width=4, owner=""):
    part = torch.zeros(1, 1, len(tokens), width)
    return Prefix(np.asarray(tokens), [(part, part.clone())], owner)


def test_the_bytes_held_keep_within_the_limit_and_the_longest_unused_goes_first():
    size = a_prefix(range(100)).bytes
    kept = Prefixes(3 * size)
    texts = [[n, *range(1, 100)] for n in range(3)]
    for text in texts:
        kept.keep(a_prefix(text))
    assert len(kept) == 3 and kept.held == 3 * size
    assert kept.find(texts[0], 100, ()) is not None  # used: it stays
    kept.keep(a_prefix([9, *range(1, 100)]))
    assert kept.held <= kept.limit and len(kept) == 3
    assert kept.find(texts[0], 100, ()) is not None
    assert kept.find(texts[1], 100, ()) is None


def test_a_text_takes_the_place_of_what_it_continues():
    kept = Prefixes(1 << 20)
    kept.keep(a_prefix(range(40)))
    kept.keep(a_prefix(range(60)))
    assert len(kept) == 1
    prefix, shared = kept.find([*range(50), 99, 98], 51, ())
    assert shared == 50 and len(prefix.tokens) == 60
    assert kept.covers(range(30)) and not kept.covers(range(61))


def test_each_owner_has_texts_of_their_own():
    kept = Prefixes(1 << 20)
    kept.keep(a_prefix(range(40), owner="a"))
    assert kept.find([*range(40), 99], 40, (), "b") is None and not kept.covers(range(30), "b")
    assert kept.find([*range(40), 99], 40, ()) is None and kept.reused == 0
    kept.keep(a_prefix(range(60), owner="b"))
    assert len(kept) == 2  # nothing of another's is continued
    assert kept.find([*range(40), 99], 40, (), "a")[1] == 40 and kept.covers(range(60), "b")


def test_few_common_tokens_are_fed():
    kept = Prefixes(1 << 20)
    kept.keep(a_prefix(range(40)))
    assert kept.find([*range(SHORTEST - 1), 99], 40, ()) is None
    assert kept.find([*range(SHORTEST), 99], 40, ())[1] == SHORTEST


def test_tokens_in_common():
    assert in_common(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert in_common(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert in_common(np.array([], dtype=int), np.array([1])) == 0


@pytest.mark.parametrize("changed", [True, False])
def test_what_was_made_of_other_weights_is_never_kept(make_llama, byte_tokenizer, changed):
    """A text is under way while the weights change a little, and ends behind the change."""
    target = make_llama(len(byte_tokenizer))
    ids = byte_tokenizer(SYSTEM)["input_ids"][:20]  # shorter than what the target checks itself at
    with foretoken.load(target, "plain", tokenizer=byte_tokenizer, kernels="dense") as spec:
        spec.keep_prefixes(1 << 24)
        stream = spec.stream(ids, max_new_tokens=8, ignore_eos=True)
        next(stream)
        if changed:
            with torch.no_grad():
                target.model.layers[0].mlp.down_proj.weight.data *= 1.01
        spec.generate("another text", max_new_tokens=4)  # it looks at the weights
        list(stream)
        assert spec.target.prefixes.covers(ids) != changed
        spec.generate(ids, max_new_tokens=4)
        assert spec.target.prefixes.covers(ids)


def test_without_memory_for_copies_texts_go_on(tiny_pair, byte_tokenizer, monkeypatch, caplog):
    with foretoken.load(
        tiny_pair[0], "plain", tokenizer=byte_tokenizer, kernels="dense", compile="off"
    ) as spec:
        alone = [spec.generate(turn, max_new_tokens=n + 4).tokens for n, turn in enumerate(TURNS)]
        spec.keep_prefixes(1 << 24)

        def full(*_):
            raise RuntimeError("not enough memory: you tried to allocate 1 byte")

        monkeypatch.setattr(spec.target.cache, "copied", full)
        rows = [spec.stream(turn, max_new_tokens=n + 4) for n, turn in enumerate(TURNS)]
        for row in rows:
            list(row)
        assert [row.result.tokens for row in rows] == alone
        assert spec.target.rows_held == 0 and len(spec.target.prefixes) == 0
        assert "nothing is kept" in caplog.text


def test_nothing_is_copied_that_may_not_be_kept(tiny_pair, byte_tokenizer, monkeypatch):
    with foretoken.load(
        tiny_pair[0], "plain", tokenizer=byte_tokenizer, kernels="dense", compile="off"
    ) as spec:
        spec.keep_prefixes(1 << 24)
        spec.generate(SYSTEM, max_new_tokens=4)
        [kept] = spec.target.prefixes
        spec.keep_prefixes(int(1.5 * kept.bytes))
        copied, copy = [], spec.target.cache.copied
        prefixes = spec.target.prefixes

        def copies(slot, columns):
            copied.append((columns, prefixes.held))
            return copy(slot, columns)

        monkeypatch.setattr(spec.target.cache, "copied", copies)
        spec.generate(SYSTEM[::-1], max_new_tokens=4)
        spec.generate(SYSTEM, max_new_tokens=4)
        assert [held for _, held in copied] == [0, 0], "others make room before the copy"
        spec.generate(SYSTEM * 2, max_new_tokens=4)
        assert len(copied) == 2 and len(prefixes) == 1


def test_a_refresh_that_was_asked_for_forgets_what_was_kept(make_llama, byte_tokenizer):
    """Few numbers were written to, past whatever counts writes: nothing else would notice."""
    target = make_llama(len(byte_tokenizer))
    with foretoken.load(target, "plain", tokenizer=byte_tokenizer, kernels="dense") as spec:
        spec.keep_prefixes(1 << 24)
        spec.generate(SYSTEM, max_new_tokens=4)
        assert len(spec.target.prefixes) == 1
        target.model.layers[0].mlp.down_proj.weight.data[3, 5:9] += 0.5
        spec.refresh()
        assert len(spec.target.prefixes) == 0


def test_states_of_a_prompt_that_was_begun_before_are_not_kept(make_llama, byte_tokenizer):
    """They would be those of other tokens."""
    target = make_llama(len(byte_tokenizer), num_hidden_layers=4)
    with open_lm(target, kernels="dense") as lm:
        ids, taps = byte_tokenizer(SYSTEM)["input_ids"], (Layer(0), Layer(2))
        row, other = seeded_rows([ids, ids + [5, 6]], SamplingParams(), len(byte_tokenizer))
        with torch.inference_mode():
            lm.prefill([row], taps, limit=20)
            lm.keep_prefixes(1 << 24)
            lm.prefill([row], taps)
            row.finish = Finish("stop")
            lm.free([row])
            [states] = lm.prefill([other], taps)
            lm.keep_prefixes(0)
            lm.free([other])
            [again] = seeded_rows([ids + [5, 6]], SamplingParams(), len(byte_tokenizer))
            [right] = lm.prefill([again], taps)
            lm.free([again])
    torch.testing.assert_close(states, right, atol=1e-4, rtol=0.0)


def listening(make_llama, limit):
    """A model that keeps texts, and a row of 40 tokens whose hidden states were listened to."""
    lm = open_lm(make_llama(50), kernels="dense", compile="off")
    lm.keep_prefixes(1 << 24)
    lm.prefixes.allow(limit)
    [row] = seeded_rows([[*range(1, 41)]], SamplingParams(), 50)
    lm.prefill([row], (Layer(0), Layer(1)))
    lm.grow([row], [[40]], [[-1]])  # from the second forward on there is something to copy
    return lm, row


def test_no_states_are_held_where_no_text_may_be_kept(make_llama):
    """As under a budget of memory that has nothing left for them."""
    lm, row = listening(make_llama, 0)
    assert not lm._memory(row).fed
    lm, row = listening(make_llama, 1 << 24)
    assert sum(map(len, lm._memory(row).fed)) == 39
    lm.keep_text(row)
    [kept] = lm.prefixes
    assert kept.features.shape == (39, 2, lm.hidden_size) and not kept.features.is_meta
    assert lm.prefixes.held == kept.bytes


def test_states_are_put_together_only_once_there_is_room_for_them(make_llama, monkeypatch):
    lm, row = listening(make_llama, 1 << 24)
    lm.keep_text(row)
    [kept] = lm.prefixes
    lm.prefixes.clear()
    lm.prefixes.allow(kept.bytes - 1)
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("states were copied"))
    keep_text(row, lm._memory(row), lm.cache, lm.prefixes)
    assert len(lm.prefixes) == 0


def test_no_states_are_held_of_a_text_that_is_too_long_to_be_kept(make_llama):
    """Of its limit, keys and values take their part; and it is not begun anew in the middle."""
    lm, row = listening(make_llama, 1 << 24)
    lm.keep_text(row)
    [kept] = lm.prefixes
    lm, row = listening(make_llama, kept.features.nbytes + 1000)
    assert lm._rows[row.uid].fed == []
    lm.keep_text(row)
    assert not len(lm.prefixes) and not lm.prefixes.covers(row.tokens[:39]), "nobody could use it"
    lm = open_lm(make_llama(50), kernels="dense", compile="off")
    lm.keep_prefixes(kept.bytes // 2)
    [row], held = seeded_rows([[*range(1, 41)]], SamplingParams(), 50), []
    for _ in range(3):
        lm.prefill([row], (Layer(0), Layer(1)), limit=13)
        held.append(sum(map(len, lm._rows[row.uid].fed)))
    assert held == [13, 0, 0]


def test_a_text_is_compared_with_those_alone_that_begin_as_it_does(monkeypatch):
    kept, compared = Prefixes(1 << 20), []

    def text(n):
        return Prefix(np.asarray([1, n, *range(SHORTEST)]), [])

    for n in range(5000):
        kept.keep(text(n))
    assert len(kept) == 5000

    def counted(one, other):
        compared.append(one)
        return in_common(one, other)

    monkeypatch.setattr("foretoken.lm.runtime.prefixes.in_common", counted)
    assert kept.find([1, 7, *range(SHORTEST), 9], SHORTEST + 3, ())[1] == SHORTEST + 2
    assert kept.covers([1, 8, *range(SHORTEST)]) and not kept.covers([2, 8, *range(SHORTEST)])
    assert kept.make_room(text(5000), 100) and len(kept) == 5000
    assert len(compared) == 2, "one to be found, one to be covered"
    kept.keep(Prefix(np.asarray([1, 7, *range(SHORTEST), 9]), []))
    assert len(kept) == 5000 and len(compared) == 3, "what it continues was given up"

"""A left-padded batch in the slot cache: its rectangle, its invariants, what it refuses."""

from __future__ import annotations

import random

import pytest
import torch
from play import closeness, fresh_tree, point, random_chain, random_tokens, row_of
from transformers import DynamicCache

from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.aligned import AlignedLM
from foretoken.lm.runtime.alignment import Alignment, told
from foretoken.lm.table import TableLM
from foretoken.lm.views.realigned import Realigned, TableRealigned, realigned
from foretoken.lm.views.view import TargetView, innermost, keeper
from foretoken.types import Layer

LENGTHS = (7, 1, 19, 2)
CLOSE = 1e-5


class Watched(AlignedLM):
    """Looks at what is fed."""

    def __init__(self, lm):
        super().__init__(lm)
        self.fed = []

    def _run(self, feeds, taps, part=None):
        ran = super()._run(feeds, taps, part)
        self.fed.append(feeds)
        return ran


@pytest.fixture(scope="module", params=["auto", "off"])
def lm(request, make_tiny):
    with open_lm(make_tiny("llama"), compile=request.param) as found:
        yield found


def begun(lm, lengths=LENGTHS, seed=0, kind=AlignedLM):
    """Rows of different lengths, cached and not scored yet."""
    dice = random.Random(seed)
    rows = [row_of(random_tokens(dice, length)) for length in lengths]
    view = Realigned(lm, kind)
    with torch.inference_mode():
        view.prefill(rows)
    return dice, rows, view


@torch.inference_mode()
def play_round(dice, rows, view, widest=6, taps=()):
    """Score a random chain per row, keep a random part of each; the drafts and what was said."""
    drafts = [point(random_chain(dice, row.tokens[-1], dice.randint(1, widest))) for row in rows]
    texts = [list(row.tokens) for row in rows]
    scores = view.score(rows, drafts, taps)
    paths = [tuple(range(1, 1 + dice.randint(0, len(draft.tree) - 1))) for draft in drafts]
    view.commit(rows, paths)
    for row, draft, path in zip(rows, drafts, paths, strict=True):
        row.extend([*(draft.tree.tokens[node] for node in path), dice.randrange(97)])
    return texts, drafts, scores


@torch.inference_mode()
def keys_values_apart(model, view, row):
    """Largest difference of the row's stored columns from those of a forward without company,
    relative to the largest number of their layer."""
    cached, cache = len(row.tokens) - 1, DynamicCache()
    if cached == 0:
        return 0.0
    model(input_ids=torch.tensor([row.tokens[:-1]]), past_key_values=cache, use_cache=True)
    apart = 0.0
    for layer in range(view.layers):
        ours = view.aligned.columns(row, layer)
        theirs = cache.layers[layer].keys[0], cache.layers[layer].values[0]
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape, "a row has the columns of its tokens and no more"
            apart = max(apart, closeness(one, other))
    return apart


def test_rows_of_a_forward_are_a_rectangle_with_positions_of_their_own(lm):
    dice, rows, view = begun(lm, kind=Watched)
    for _ in range(6):
        texts, drafts, _ = play_round(dice, rows, view)
        feeds = view.aligned.fed[-1]
        assert len({feed.start for feed in feeds}) == 1, "the last tokens share a column"
        assert {len(feed.tokens) for feed in feeds} == {max(len(d.tree) for d in drafts)}
        assert [feed.scored for feed in feeds] == [len(feed.tokens) for feed in feeds]
        for feed, text, draft in zip(feeds, texts, drafts, strict=True):
            count = len(draft.tree)
            assert feed.positions[:count] == list(range(len(text) - 1, len(text) - 1 + count))
            assert set(feed.positions[count:]) <= {feed.positions[count - 1]}


def test_stored_columns_are_those_of_each_row_alone_after_every_round(lm):
    dice, rows, view = begun(lm, seed=1)
    for _ in range(6):
        play_round(dice, rows, view)
        assert all(view.missing(row) == 0 for row in rows)
        assert max(keys_values_apart(lm.model, view, row) for row in rows) < CLOSE
    assert view.alignment.realigned and view.alignment.moved > view.alignment.realigned


def test_scores_are_those_of_each_row_alone(lm):
    dice, rows, view = begun(lm, seed=2)
    for _ in range(6):
        for text, draft, score in zip(*play_round(dice, rows, view), strict=True):
            assert score.logits.shape[0] == len(draft.tree)
            assert closeness(score.logits, fresh_tree(lm.model, text, draft.tree)) < CLOSE


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "qwen3"])
def test_windows_and_places_are_counted_from_the_first_token(family, make_tiny):
    """Windows are of 8 tokens, and pads are up to 18."""
    with open_lm(make_tiny(family)) as lm:
        dice, rows, view = begun(lm, seed=3)
        for _ in range(5):
            for text, draft, score in zip(*play_round(dice, rows, view), strict=True):
                assert closeness(score.logits, fresh_tree(lm.model, text, draft.tree)) < CLOSE


def test_hidden_states_are_cut_to_the_nodes_asked_for(lm):
    dice, rows, view = begun(lm, seed=4)
    for _ in range(3):
        _, drafts, scores = play_round(dice, rows, view, taps=(Layer(1),))
        assert [len(score.hidden) for score in scores] == [len(draft.tree) for draft in drafts]


def test_what_lies_under_pads_is_never_seen(lm):
    said = []
    for junk in (0.0, 1e4):
        dice, rows, view = begun(lm, seed=5)
        play_round(dice, rows, view)
        with torch.inference_mode():
            view.aligned.move(view.alignment.align(rows))
            pads = [view.alignment.pad(row) for row in rows]
            assert min(pads) == 0 < max(pads)
            for group in view.aligned.cache.groups:
                for buffer in (group.keys, group.values):
                    for row, pad in zip(rows, pads, strict=True):
                        buffer[:, view.aligned._rows[row.uid].slot, :, :pad] = junk
        _, _, scores = play_round(dice, rows, view)
        said.append(torch.cat([score.logits for score in scores]))
    assert torch.equal(*said)


def test_a_draft_that_lacks_its_last_guess_in_some_rows_feeds_two_tokens_for_all(lm):
    dice, rows, view = begun(lm, lengths=(6, 9, 4), seed=6, kind=Watched)
    with torch.inference_mode():
        roots = [[row.tokens[-1]] for row in rows]
        view.grow(rows, roots, [[-1]] * 3)
        view.grow(rows, [[5], [6], [7]], [[0]] * 3)
        view.commit(rows, [(1,), (), (1,)])
        for row, new in zip(rows, ([5, 1, 8], [3], [7, 1, 2]), strict=True):
            row.extend(new)  # one more guess stood in two rows, and was never fed
        assert [view.missing(row) for row in rows] == [1, 0, 1]
        scores = view.grow(rows, [[row.tokens[-1]] for row in rows], [[-1]] * 3)
    assert {len(feed.tokens) for feed in view.aligned.fed[-1]} == {2}
    for row, score in zip(rows, scores, strict=True):
        chain = random_chain(dice, row.tokens[-1], 1)
        assert closeness(score.logits, fresh_tree(lm.model, row.tokens, chain)) < CLOSE


@pytest.mark.parametrize("lengths", [(40, 3), (40, 1)])
def test_a_row_that_lacks_more_catches_up_alone(lm, lengths):
    dice, rows, view = begun(lm, lengths=lengths, seed=7, kind=Watched)
    late = rows[0]
    late.extend(random_tokens(dice, 9))
    with torch.inference_mode():
        scores = view.grow(rows, [[row.tokens[-1]] for row in rows], [[-1]] * 2)
    assert {len(feed.tokens) for feed in view.aligned.fed[-1]} == {1}, "the others waited"
    for row, score in zip(rows, scores, strict=True):
        chain = random_chain(dice, row.tokens[-1], 1)
        assert closeness(score.logits, fresh_tree(lm.model, row.tokens, chain)) < CLOSE


def test_rows_that_leave_take_nothing_from_those_that_stay(lm):
    dice, rows, view = begun(lm, seed=8)
    play_round(dice, rows, view)
    gone, *others = rows
    before = [list(row.tokens) for row in others]
    view.free([gone])
    assert gone.uid not in view.alignment.pads and view.rows_held == len(others)
    assert before == [row.tokens for row in others]
    joined = [row_of(random_tokens(dice, 30))]
    with torch.inference_mode():
        view.prefill(joined)
    for text, draft, score in zip(*play_round(dice, [*others, *joined], view), strict=True):
        assert closeness(score.logits, fresh_tree(lm.model, text, draft.tree)) < CLOSE


def test_the_models_own_cache_is_left_alone(lm):
    dice, rows, view = begun(lm, seed=9)
    play_round(dice, rows, view)
    assert lm.rows_held == 0 and view.rows_held == len(rows)
    assert innermost(view) is lm and keeper(view) is view.aligned and keeper(lm) is lm
    assert view.caps.tree == "chain" and lm.caps.tree == "mask"


def test_trees_are_refused(lm):
    _, rows, view = begun(lm, seed=10)
    with torch.inference_mode(), pytest.raises(CapabilityError, match="chains only"):
        view.grow(rows[:1], [[rows[0].tokens[-1], 1, 2]], [[-1, 0, 0]])


@pytest.mark.parametrize(
    ("family", "why"), [("bloom", "by place in the cache"), ("phi3_longrope", "longrope scales")]
)
def test_models_whose_rows_cannot_be_moved_are_refused_by_name(family, why, make_tiny):
    with open_lm(make_tiny(family)) as lm, pytest.raises(CapabilityError, match=why) as caught:
        realigned(lm)
    assert "method chain" in caught.value.do


def test_exact_bits_are_refused(make_tiny):
    with (
        open_lm(make_tiny("llama"), exact_bits=True) as lm,
        pytest.raises(CapabilityError, match="exact_bits"),
    ):
        realigned(lm)


def test_other_views_are_refused(lm):
    with pytest.raises(CapabilityError, match="TargetView"):
        realigned(TargetView(lm))


def test_rows_are_padded_anew_only_where_they_do_not_end_together():
    rows = [row_of(range(length)) for length in (4, 9, 6)]
    found = Alignment()
    assert told([found]) == ""
    assert found.align(rows[:1]) == [] and found.rounds == 0, "a row alone is no batch"
    moves = found.align(rows)
    assert [(move.row, move.source, move.target) for move in moves] == [
        (rows[0], 0, 5),
        (rows[2], 0, 3),
    ]
    assert {found.stored(row) for row in rows} == {9}
    for row in rows:
        row.extend([1, 2])
    assert found.align(rows) == []
    rows[1].extend([3])
    assert len(found.align(rows)) == 2
    found.forget(rows[1:2])
    assert found.align([rows[0], rows[2]]) == [], "the pads of both are one too many"
    assert (found.rounds, found.realigned, found.moved) == (4, 2, 4)
    assert "2 of 4 rounds" in told([found]) and "50%" in told([found])


def test_a_table_is_padded_as_a_model_is():
    table = realigned(TableLM.random(4))
    assert isinstance(table, TableRealigned) and table.caps.tree == "chain"


@torch.inference_mode()
def test_a_row_that_could_not_be_moved_lies_where_it_lay(lm, monkeypatch):
    """Its pads are those before, so that it is read right when it goes on alone."""
    _, rows, view = begun(lm)
    cache = view.aligned.cache

    def refused(*given):
        raise MemoryError("no room")

    monkeypatch.setattr(cache, "shift", refused)
    drafts = [point(random_chain(random.Random(1), row.tokens[-1], 2)) for row in rows]
    with pytest.raises(MemoryError, match="no room"):
        view.score(rows, drafts)
    assert not any(view.alignment.pads.values())
    monkeypatch.undo()
    [said] = view.score(rows[:1], drafts[:1])
    [right] = lm_scores(lm, rows[0], drafts[0])
    torch.testing.assert_close(said.logits, right.logits, atol=CLOSE, rtol=0.0)
    view.free(rows)


def lm_scores(lm, row, draft):
    """What the model says of a row by itself."""
    alone = row_of(list(row.tokens))
    lm.prefill([alone])
    found = lm.score([alone], [draft])
    lm.free([alone])
    return found


@torch.inference_mode()
def test_a_row_that_was_moved_in_part_is_read_anew(lm, monkeypatch):
    """Its keys lie where its values do not: it goes on as a row alone does."""
    _, rows, view = begun(lm, lengths=(9, 12), seed=11)
    cache = view.aligned.cache

    def torn(slot, source, target, count):
        row = cache.groups[0].keys[:, slot]
        row[:, :, target : target + count] = row[:, :, source : source + count].clone()
        raise MemoryError("no room")

    drafts = [point(random_chain(random.Random(1), row.tokens[-1], 3)) for row in rows]
    right = [lm_scores(lm, *pair)[0].logits.clone() for pair in zip(rows, drafts, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(cache, "shift", torn)
        with pytest.raises(MemoryError, match="no room"):
            view.score(rows, drafts)
    assert [view.missing(row) for row in rows] == [8, 0] and not any(view.alignment.pads.values())
    for some in (rows[:1], rows):
        for score, wanted in zip(view.score(some, drafts[: len(some)]), right, strict=False):
            torch.testing.assert_close(score.logits, wanted, atol=10 * CLOSE, rtol=0.0)
    view.free(rows)

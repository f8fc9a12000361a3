"""Leaving the target's stack early: who may, where, with what, and that nothing stays half done."""

import logging
from collections import deque
from dataclasses import replace

import pytest
import torch
from small_models import flat_above, small

from foretoken.drafters.early_leave import EarlyLeave, Schedule
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.errors import ConfigError
from foretoken.heads import made_for, store
from foretoken.heads.exits import ExitPredictors
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.views.early_exit_scoring import Leave
from foretoken.lm.views.wrapping import early_exit_scoring
from foretoken.trees.build import chain, root, undrafted
from foretoken.types import Budget, Draft, Draw, TokenTree, Verdict
from foretoken.verifiers.point import Point

K = 4


@pytest.fixture
def folder(tmp_path):
    """Predictors that always fire, or never, by the bias of their last unit; tables are as wide as
    their vocabulary.
    """

    def make(bias, vocab=61, layers=range(3), often=None, width=None, **notes):
        width = width or (64 if vocab == 61 else vocab)
        sizes = {"hidden_size": width, "vocab_size": vocab, "candidates": K, "hidden": 8}
        head = ExitPredictors(ExitPredictors.Config(**sizes, layers=tuple(layers), often=often))
        with torch.no_grad():
            for weight in head.parameters():
                weight.zero_()
            for layer in layers:
                head.predictors[str(layer)][2].bias.fill_(bias)
        return str(store.save(tmp_path / f"{bias}-{vocab}", "exits", head, notes))

    return make


class Watched(EarlyLeave):
    """Keeps the schedules of rows that ended."""

    def finish(self, row):
        self.ended = [*getattr(self, "ended", []), row.private[self]]
        super().finish(row)


def pair(family="llama", depth=4):
    model = flat_above(small(family), depth)
    return open_lm(model, kernels="dense"), open_lm(flat_above(model, 1), kernels="dense")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("shape", ["nothing", "chain", "tree"])
def test_predictors_that_never_fire_change_nothing(family, shape, folder, row, run, plain, prompts):
    target, draft = pair(family)
    make = lambda: [row(p, 61, max_new_tokens=20) for p in prompts]  # noqa: E731
    for options in ({"predictors": folder(-9.0)}, {"predictors": folder(9.0), "sure_above": 1.5}):
        drafter = Watched(target, draft, EarlyLeave.Config(shape=shape, **options))
        found, records = run(target, drafter, make(), verifier=Point(), depth=3, nodes=7)
        sizes = {len(one.tree) - 1 for record in records for one in record.drafts}
        assert max(sizes) == {"nothing": 0, "chain": 3, "tree": 7}[shape]
        assert found == plain(target, make())
        assert all(one.layers == 4 * one.rounds for one in drafter.ended)
    assert target.rows_held == draft.rows_held == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("shape", ["nothing", "chain", "tree"])
def test_flat_upper_layers_are_left_out_and_the_text_is_the_same(
    family, shape, folder, row, run, plain, prompts
):
    """Exits behind layer 2 on, above which nothing changes; tokens are fed again where needed."""
    target, _ = pair(family, depth=2)
    draft = open_lm(flat_above(target.model, 2), kernels="dense")
    head = folder(9.0, layers=[1, 2])
    options = EarlyLeave.Config(predictors=head, shape=shape, most_behind=5)
    make = lambda: [row(p, 61, max_new_tokens=30) for p in prompts]  # noqa: E731
    alone = []
    for one in make():
        drafter = Watched(target, draft, options)
        alone += run(target, drafter, [one], verifier=Point(), depth=2, nodes=6)[0]
        assert drafter.ended[0].layers < 3 * drafter.ended[0].rounds
    rows = make()
    drafter = EarlyLeave(target, draft, options)
    together, _ = run(target, drafter, rows, verifier=Point(), depth=2, nodes=6)
    assert alone == together == plain(target, make())


def test_a_token_leaves_as_a_candidate_that_the_whole_vocabulary_confirms(folder, row, prompts):
    """Predictors that always fire: what is written is the argmax behind the recorded layer."""
    model = small("llama", seed=2)
    target = open_lm(model, kernels="dense")
    draft = open_lm(flat_above(model, 2), kernels="dense")
    engine = assemble("specee", target, draft, predictors=folder(9.0), controller="fixed", depth=1)
    one = row(prompts[1], 61, max_new_tokens=30)
    wishes, left = [], 0
    leave = engine.target.leave
    engine.target.leave = lambda row, wish: (wishes.append(wish), leave(row, wish))
    for record in decode([one], engine):
        before = one.tokens[: len(one.tokens) - len(record.emitted[0])]
        wish = wishes.pop() if wishes else None
        if wish is None or wish.depth == 4:
            continue
        left += 1
        token = record.emitted[0][0]
        assert token in wish.candidates[0].tolist()
        assert wish.depth - 1 in wish.active
        cut = open_lm(flat_above(model, wish.depth), kernels="dense")
        twin = row(before, 61)
        cut.prefill([twin])
        logits = cut.grow([twin], [(before[-1],)], [(-1,)])[0].logits[0]
        assert int(logits.argmax()) == token
    assert left > 5


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"banned_tokens": True}], ids=str)
def test_no_row_leaves_that_need_not_take_its_argmax(options, folder, row, plain, prompts):
    """Predictors that always fire; the last row bans what a free greedy one says."""
    model = small("llama", seed=2)
    target = open_lm(model, kernels="dense")
    draft = open_lm(flat_above(model, 2), kernels="dense")
    engine = assemble("specee", target, draft, predictors=folder(9.0), controller="fixed", depth=1)
    wishes = []
    leave = engine.target.leave
    engine.target.leave = lambda row, wish: (wishes.append(wish), leave(row, wish))
    free = row(prompts[1], 61, max_new_tokens=8)
    list(decode([free], engine))
    assert wishes
    wishes.clear()
    if "banned_tokens" in options:
        options = {"banned_tokens": frozenset(free.new_tokens)}
    one, twin = (row(prompts[1], 61, max_new_tokens=12, seed=3, **options) for _ in range(2))
    list(decode([one], engine))
    assert not wishes
    assert [one.new_tokens] == plain(target, [twin])


def test_features_are_scores_laws_and_changes():
    seen = []
    wish = Leave(
        torch.tensor([[1, 2, 3, 0]]),
        frozenset({0, 2}),
        lambda layer, features: seen.append((layer, features)) or [False],
        root(5),
    )
    for layer in (0, 2):
        wish.asks(layer, torch.tensor([[1.0, 2.0, 3.0, float(layer)]]), lambda: [0])
    (_, first), (_, second) = seen
    assert first.shape == (1, 3 * K)
    assert float(first[0, K : 2 * K].sum()) == pytest.approx(1.0)
    assert torch.equal(first[0, K : 2 * K], first[0, 2 * K :])
    torch.testing.assert_close(second[0, 2 * K :], second[0, K : 2 * K] - first[0, K : 2 * K])


def test_a_path_leaves_once_its_last_node_agrees():
    """Accepted down to the second node, where the text turns off: three nodes must fire."""
    tree = chain(9, (3, 4, 5))
    candidates = torch.tensor([[3, 1], [4, 1], [7, 1], [8, 1]])
    best = [3, 4, 7, 0]  # the third node wants 7, not the drafted 5
    for fires, leaves in (
        ([True, True, True, False], True),
        ([True, True, False, True], False),
        ([False, True, True, True], False),
    ):
        wish = Leave(candidates, frozenset({0}), lambda *_, fires=fires: fires, tree)
        assert wish.asks(0, torch.zeros(4, 2), lambda: best) == leaves
    stranger = Leave(candidates, frozenset({0}), lambda *_: [True] * 4, tree)
    assert not stranger.asks(0, torch.zeros(4, 2), lambda: [2, 4, 7, 0])


def test_a_tree_leaves_once_the_path_it_would_accept_agrees():
    """Two branches; the path of the second is settled, and what the first one says is nobody's."""
    tree = TokenTree((9, 3, 4, 5, 6), (-1, 0, 0, 1, 2))
    candidates = torch.tensor([[3, 1], [5, 1], [6, 1], [0, 1], [7, 1]])
    best = [4, 5, 6, 0, 7]  # through 4 and 6, whose children are no candidates of their parents
    for fires, leaves in (
        ([True, False, True, False, True], True),
        ([True, True, True, True, False], False),
        ([True, True, False, True, True], False),
    ):
        wish = Leave(candidates, frozenset({0}), lambda *_, fires=fires: fires, tree)
        assert wish.asks(0, torch.zeros(5, 2), lambda: best) == leaves
    turning = Leave(candidates, frozenset({0}), lambda *_: [True] * 5, tree)
    assert not turning.asks(0, torch.zeros(5, 2), lambda: [4, 5, 6, 0, 2])


def test_a_tree_is_that_of_method_tree_and_each_node_has_the_drafts_candidates(folder, row):
    draft = TableLM.random(12, seed=5)
    target = TableLM.random(12, layers=6)
    make = lambda: row([1, 2, 3], 12, max_new_tokens=30)  # noqa: E731
    drafts = []
    for drafter in (
        EarlyLeave(target, draft, EarlyLeave.Config(predictors=folder(-9.0, vocab=12))),
        BestFirst(OrdinaryModel(draft)),
    ):
        one = make()
        target.prefill([one])
        drafter.start(one, None)
        drafts += drafter.propose([one], [Budget(3, 9)])
        if isinstance(drafter, EarlyLeave):
            wish = one.private[drafter].wish
        draft.free([one])
        target.free([one])
    tree = drafts[0].tree
    assert tree == drafts[1].tree and len(tree) == 10 and not tree.is_chain
    for node, found in enumerate(wish.candidates):
        text = [1, 2, 3, *(tree.tokens[i] for i in tree.path(node))]
        assert set(found.tolist()) == set(draft.after(text).topk(K).indices.tolist())


def test_the_head_and_the_drafter_ask_the_same_layers(folder):
    target = TableLM.random(8, layers=16)
    head = folder(9.0, vocab=8, layers=range(15), often=[7, 9])
    drafter = EarlyLeave(target, TableLM.random(8), EarlyLeave.Config(predictors=head))
    for exits in ([3, 3, 12, 16, 16], [1, 2, 3, 4, 5], [16] * 5):
        schedule = Schedule(exits=deque(exits, maxlen=5))
        [asked] = drafter.head.asked(torch.tensor([exits]) - 1)
        assert set(asked.nonzero().flatten().tolist()) == drafter.active(schedule)


def test_active_layers_follow_the_last_exits(folder):
    target = TableLM.random(8, layers=16)
    config = EarlyLeave.Config(predictors=folder(9.0, vocab=8, layers=range(15), often=[7, 9]))
    drafter = EarlyLeave(target, TableLM.random(8), config)
    schedule = Schedule(exits=deque(maxlen=5))
    for depth in (3, 3, 12, 16):
        schedule.exits.append(depth)
        assert drafter.active(schedule) == {7, 9}
    schedule.exits.append(16)
    near = {0, 1, 2, 3, 4} | {9, 10, 11, 12, 13} | {13, 14}
    assert drafter.active(schedule) == {7, 9} | near
    assert 15 not in drafter.active(schedule)


def test_rounds_that_asked_no_predictor_are_no_exits(folder, row, step):
    target = TableLM.random(8, layers=16)
    config = EarlyLeave.Config(predictors=folder(9.0, vocab=8, layers=range(15), often=[7, 9]))
    drafter = EarlyLeave(target, TableLM.random(8), config)
    one = row([1, 2, 3], 8, max_new_tokens=30)
    drafter.start(one, None)
    for _ in range(5):
        drafter.observe(step([one], [undrafted(one)], [Verdict((), 4)]))
    schedule = one.private[drafter]
    assert drafter.active(schedule) == drafter.often == {7, 9}
    assert (schedule.rounds, schedule.layers) == (5, 80)


def test_early_words_shorten_the_work_on_tables(folder, row, run):
    table, draft = TableLM.random(12, layers=6), TableLM.random(12, seed=0)
    drafter = Watched(table, draft, EarlyLeave.Config(predictors=folder(9.0, vocab=12)))
    rows = [row([1, 2], 12, max_new_tokens=30, seed=i) for i in (0, 1)]
    run(table, drafter, rows, verifier=Point(), depth=1)
    assert all(len(one.new_tokens) == 30 for one in rows)
    assert all(one.layers < 6 * one.rounds for one in drafter.ended)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("shape", ["nothing", "chain", "tree"])
def test_sampled_and_penalised_rows_run_whole(shape, options, folder, row, run, plain):
    table, draft = TableLM.random(12, layers=6), TableLM.random(12, seed=0)
    config = EarlyLeave.Config(predictors=folder(9.0, vocab=12), shape=shape)
    drafter = Watched(table, draft, config)

    def make():
        return [row([1, 2], 12, max_new_tokens=30, seed=i, **options) for i in (0, 1)]

    found, records = run(table, drafter, make(), verifier=Point(), depth=2, nodes=5)
    sizes = {len(one.tree) - 1 for record in records for one in record.drafts}
    assert max(sizes) == {"nothing": 0, "chain": 2, "tree": 5}[shape]
    assert found == plain(table, make())
    assert all(one.layers == 6 * one.rounds and not one.exits for one in drafter.ended)
    assert table.rows_held == draft.rows_held == 0


def test_what_is_missing_or_does_not_fit_is_told(folder):
    table = TableLM.random(12)
    with pytest.raises(ConfigError, match="foretoken train exits"):
        EarlyLeave(table, table)
    with pytest.raises(ConfigError, match="tree, chain, nothing"):
        EarlyLeave(table, table, EarlyLeave.Config(predictors=folder(9.0), shape="bush"))
    with pytest.raises(ConfigError, match="61 tokens"):
        EarlyLeave(table, table, EarlyLeave.Config(predictors=folder(9.0)))


def test_predictors_of_a_target_of_other_layers_are_refused(folder):
    """Those that training made have one for every layer but the last."""
    trained = EarlyLeave.Config(predictors=folder(9.0, vocab=12, layers=range(5), settings={}))
    EarlyLeave(TableLM.random(12, layers=6), TableLM.random(12), trained)
    for layers in (4, 9):
        with pytest.raises(ConfigError, match=f"trained on 6 layers, the target has {layers}"):
            EarlyLeave(TableLM.random(12, layers=layers), TableLM.random(12), trained)
    wide = EarlyLeave.Config(predictors=folder(9.0, vocab=12, width=64))
    with pytest.raises(ConfigError, match="hidden size is 12"):
        EarlyLeave(TableLM.random(12), TableLM.random(12), wide)


def test_predictors_of_another_model_are_told(folder, caplog):
    target, draft = TableLM.random(12), TableLM.random(12)
    with caplog.at_level(logging.WARNING, "foretoken"):
        own = folder(9.0, vocab=12, **made_for.notes_of(target))
        EarlyLeave(target, draft, EarlyLeave.Config(predictors=own))
        assert not caplog.records
        foreign = folder(9.0, vocab=12, identity="another")
        EarlyLeave(target, draft, EarlyLeave.Config(predictors=foreign))
    [record] = caplog.records
    assert "another model: its exits change more of the text" in record.getMessage()


def test_rows_in_forwards_of_their_own_leave_on_their_own(row):
    """One of them ended early, the other did not: only the other's new tokens are cached."""
    lm = open_lm(flat_above(small("llama"), 1), kernels="dense")
    lm.plan = replace(lm.plan, ragged=False)
    view = early_exit_scoring(lm)
    rows = [row([5, 6, 7, 8], 61), row([9, 8, 7], 61)]
    view.prefill(rows)
    drafts = [Draft(root(one.tokens[-1]), Draw.POINT) for one in rows]
    for one, fires in zip(rows, (True, False), strict=True):
        every, layers = torch.arange(61)[None], frozenset({0, 1})
        view.leave(one, Leave(every, layers, lambda *_, said=fires: [said], root(one.tokens[-1])))
    early, whole = view.score(rows, drafts)
    assert early.share < whole.share == 1.0
    view.commit(rows, [(), ()])
    for one, score in zip(rows, (early, whole), strict=True):
        one.tokens.append(int(score.logits[0].argmax()))
    assert [view.missing(one) for one in rows] == [1, 0]
    fresh = open_lm(lm.model, kernels="dense")
    for one in rows:
        [score] = view.score([one], [Draft(root(one.tokens[-1]), Draw.POINT)])
        twin = row(one.tokens, 61)
        fresh.prefill([twin])
        [wanted] = fresh.grow([twin], [(twin.tokens[-1],)], [(-1,)])
        torch.testing.assert_close(score.logits, wanted.logits, rtol=1e-4, atol=1e-4)

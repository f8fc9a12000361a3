"""Depths by a decision model: asked before a level is drawn, about all its branches at once."""

import pytest
import torch

from foretoken.audit.fixtures import random_acceptance, random_decision
from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows, write
from foretoken.coins import SeededCoins
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.promise import promise_of_row
from foretoken.errors import CheckpointError, ConfigError, PairingError
from foretoken.heads import decision, store
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS
from foretoken.row import make_row
from foretoken.trees.masks import ancestors
from foretoken.types import Budget, Draw, FinalNorm, Go, SamplingParams, TokenTree

VOCAB = 4
THRESHOLDS = (0.4, 0.5, 0.55, 0.6, 0.65, 0.7)
PROMPTS = ((0, 1, 2, 0, 1), (2, 2, 1), (1,), (3, 0))


def tables(vocab=VOCAB):
    return TableLM.random(vocab, seed=21), TableLM.random(vocab, seed=22)


def engine(model="soft", method="mcsd-dynamic", vocab=VOCAB, **options):
    if options.get("controller", "decision") == "decision":
        options = {"head": random_decision(vocab, vocab, model), "threshold": 0.5} | options
    return assemble(method, *tables(vocab), **options)


def rounds(built, temperature=1.0, tokens=60):
    """(tokens before the round, its draft) of every round that the cap did not shorten."""
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    found = []
    for row in seeded_rows(PROMPTS, params, built.target.vocab_size):
        before = list(row.tokens)
        for record in decode([row], built):
            if tokens - (len(before) - row.prompt_len) > built.controller.config.depth:
                found.append((before, record.drafts[0]))
            before = list(row.tokens)
    return found


def depth_of(draft):
    return max(draft.tree.depths())


def expected_depth(before, draft, lm, head, threshold, longest):
    """From the table alone: level n is the last if no node of level n - 1 gives hope."""
    levels = draft.tree.depths()
    for level in range(int(draft.draw is Draw.TARGET), longest):
        states = torch.stack(
            [
                lm.after([*before, *[draft.tree.tokens[m] for m in draft.tree.path(node)]])
                for node in range(len(levels))
                if levels[node] == level
            ]
        )
        seen = states if head.model == "soft" else decision.certainty(states.softmax(-1))
        if not bool((head.likely(seen) > threshold).any()):
            return level + 1
    return longest


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", decision.MODELS)
def test_the_depth_is_what_the_levels_before_it_say(model, temperature):
    head, _ = store.load(random_decision(VOCAB, VOCAB, model), "decision")
    depths = set()
    for threshold in THRESHOLDS:
        built = engine(model, k=2, threshold=threshold)
        for before, draft in rounds(built, temperature):
            known = (built.drafter.model.lm, head, threshold, built.controller.config.depth)
            assert depth_of(draft) == expected_depth(before, draft, *known)
            depths |= {depth_of(draft)} if draft.draw is Draw.TARGET else set()
    if temperature:  # greedy texts of a table run in circles, and may show one depth only
        assert len(depths) > 2, "the head never decided anything"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_level_is_asked_for_while_it_is_not_there(temperature):
    built = engine(k=3)
    params = SamplingParams(max_new_tokens=9, temperature=temperature)
    row = make_row((0, 1), params, SeededCoins(0), VOCAB)
    for record in decode([row], built):
        if record.drafts[0].draw is Draw.TARGET:
            break
    seen = []

    class Asked:
        taps = (FinalNorm(),)
        branches = True

        def after(self, row, level):
            growth = row.private[drafter].growth
            tree = TokenTree(tuple(growth.tokens), tuple(growth.parents))
            seen.append((growth.level, max(tree.depths()), len(level.laws), len(level.hidden)))
            return Go.LAST if len(seen) == 3 else Go.ON

    other = make_row(tuple(row.tokens), params, SeededCoins(1), VOCAB)
    drafter = built.drafter
    drafter.start(other, None)
    other.private[drafter].pending = torch.full((VOCAB,), 1.0 / VOCAB, dtype=torch.float64)
    [draft] = drafter.propose([other], [Budget(6, 24)], Asked())
    assert seen == [(1, 1, 3, 3), (2, 2, 3, 3), (3, 3, 3, 3)]
    assert depth_of(draft) == 4, "the last level that was paid for is drawn"


def test_no_forward_is_spent_on_a_level_that_is_not_drawn():
    built = engine(k=2)
    spent = 0
    for row in seeded_rows(PROMPTS, SamplingParams(max_new_tokens=50, temperature=1.0), VOCAB):
        for record in decode([row], built):
            draft = record.drafts[0]
            if len(draft.tree) > 1:
                spent += depth_of(draft) - (draft.draw is Draw.TARGET)
    assert built.drafter.model.lm.forwards == spent


def test_thresholds_of_nothing_and_of_everything():
    assert {depth_of(d) for _, d in rounds(engine(threshold=0.0))} == {6}
    last = rounds(engine(threshold=1.0))
    assert {depth_of(d) for _, d in last if d.draw is Draw.TARGET} == {2}
    assert {depth_of(d) for _, d in last if d.draw is not Draw.TARGET} == {1}


def test_always_going_on_is_the_fixed_tree_token_for_token():
    params = SamplingParams(max_new_tokens=50, temperature=1.0)
    ours = write(engine(threshold=0.0, k=3, depth=4), seeded_rows(PROMPTS, params, VOCAB))
    fixed = engine(controller="fixed", k=3, depth=4, nodes=12)
    assert ours == write(fixed, seeded_rows(PROMPTS, params, VOCAB))


@pytest.mark.parametrize(("depth", "nodes"), [(1, 4), (2, 8), (5, 7), (3, 2), (0, 0)])
def test_the_budget_is_never_exceeded(depth, nodes):
    for _, draft in rounds(engine(threshold=0.1, depth=depth, nodes=nodes)):
        assert depth_of(draft) <= depth and len(draft.tree) - 1 <= nodes


def test_a_tree_that_stopped_is_the_beginning_of_the_whole_one():
    """One topology for all depths: the mask of any of them is a corner of the whole tree's."""
    whole = [-1, 0, 0, *range(1, 11)]  # two chains, six deep
    sight, sizes = ancestors(whole), set()
    for threshold in THRESHOLDS:
        for _, draft in rounds(engine(k=2, threshold=threshold)):
            if draft.draw is Draw.TARGET and len(draft.tree.children()[0]) == 2:
                n = len(draft.tree)
                assert list(draft.tree.parents) == whole[:n]
                assert ancestors(draft.tree.parents) == sight[:n]
                sizes.add(n)
    assert len(sizes) > 2


@pytest.mark.parametrize("model", decision.MODELS)
@pytest.mark.parametrize(
    "setting", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=str
)
def test_one_candidate_keeps_the_law(model, setting):
    """The depth follows what is drawn, and never the token about to be drawn."""
    depths = set()
    built = engine(model, vocab=3, k=1, depth=3, nodes=3)
    built.listeners.append(lambda record: depths.add(len(record.drafts[0].tree)))
    gap = law_gap(lambda: built, tables(3)[0], setting, tokens=4)
    assert gap.variation <= BOUND
    assert {3, 4} <= depths, "the head decided"


def test_more_candidates_change_it_and_the_table_of_methods_says_so():
    built = engine(vocab=3, k=2, depth=2, nodes=4)
    gap = law_gap(lambda: built, tables(3)[0], {"temperature": 1.0}, tokens=4)
    assert gap.variation > 0.01
    row = METHODS["mcsd-dynamic"]
    assert not promise_of_row(row).lossless and "only for k=1" in row.summary


@pytest.mark.parametrize("verifier", ["recursive", "traversal"])
def test_a_lossless_tree_stays_lossless_under_it(verifier):
    sizes = set()
    built = engine(
        method="mcsd", controller="decision", vocab=3, verifier=verifier, k=(2, 1), nodes=4
    )
    built.listeners.append(lambda record: sizes.add(len(record.drafts[0].tree)))
    gap = law_gap(lambda: built, tables(3)[0], {"temperature": 1.0})
    assert gap.variation <= BOUND
    assert {3, 5} <= sizes, "the head decided"


def test_chains_have_one_branch():
    built = engine(method="chain", controller="decision", depth=8)
    assert len({depth_of(draft) for _, draft in rounds(built)}) > 2


def test_heads_of_another_kind_or_size_and_none_are_refused():
    with pytest.raises(ConfigError, match="without a head") as caught:
        engine(head="")
    assert "foretoken train decision" in caught.value.do
    with pytest.raises(CheckpointError, match="kind 'acceptance'") as caught:
        engine(head=random_acceptance(VOCAB, VOCAB))
    assert "foretoken train decision" in caught.value.do
    with pytest.raises(CheckpointError, match="kind 'decision'"):
        assemble("specdec++", *tables(), head=random_decision(VOCAB, VOCAB))
    for model in decision.MODELS:
        with pytest.raises(ConfigError, match="hidden size is 4"):
            engine(head=random_decision(5, VOCAB, model))
        with pytest.raises(ConfigError, match="vocabulary is 4"):
            engine(head=random_decision(VOCAB, 7, model))


def test_a_rule_for_chains_is_refused_on_trees():
    with pytest.raises(PairingError, match="one chain"):
        engine(controller="acceptance_head", head=random_acceptance(VOCAB, VOCAB))


@pytest.mark.parametrize("option", [{"threshold": 1.5}, {"depth": -1}, {"nodes": -1}])
def test_bounds_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        engine(**option)


def test_both_models_come_back_from_their_folders(tmp_path):
    torch.manual_seed(0)
    for model, seen in (("soft", 9), ("hard", 6)):
        shape = decision.DecisionHead.Config(hidden_size=9, vocab_size=5, model=model)
        head = decision.DecisionHead(shape)
        store.save(tmp_path / model, "decision", head, {})
        loaded, card = store.load(tmp_path / model, "decision")
        states = torch.randn(7, seen)
        assert torch.equal(loaded.likely(states), head.likely(states))
        assert (card.hidden_size, card.vocab_size, loaded.model) == (9, 5, model)
    paper = decision.DecisionHead(decision.DecisionHead.Config(hidden_size=768, vocab_size=5))
    assert [layer.out_features for layer in paper.layers[::2]] == [512, 256, 1]

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.engine import Engine, decode
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw, Go
from foretoken.verifiers.block import Block
from foretoken.verifiers.recursive import Recursive


def chain_of(lm):
    return Chain(OrdinaryModel(lm))


@pytest.mark.parametrize("verifier", [Block, Recursive])
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_greedy_text_equals_plain_text_in_a_ragged_batch(
    pair, prompts, row, run, plain, verifier, depth
):
    target, draft = pair
    options = [
        {"max_new_tokens": 40},
        {"max_new_tokens": 33, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"max_new_tokens": 60, "eos": frozenset({5}), "min_new_tokens": 20},
    ]
    make = lambda: [row(p, 12, **o) for p, o in zip(prompts, options, strict=True)]  # noqa: E731
    expected = plain(target, make())
    drafter = chain_of(draft)
    found, records = run(target, drafter, make(), verifier=verifier(), depth=depth)
    assert found == expected
    assert target.rows_held == draft.rows_held == 0
    if depth >= 3:
        assert target.forwards and len(records) < 60  # some guesses were accepted


def test_a_budget_of_zero_never_calls_the_draft_model(pair, prompts, row, run):
    target, draft = pair
    rows = [row(prompt, 12, max_new_tokens=20) for prompt in prompts]
    run(target, chain_of(draft), rows, verifier=Recursive(), depth=0)
    assert draft.forwards == 0


def test_one_draft_forward_per_depth_serves_the_whole_batch(pair, prompts, row):
    _, draft = pair
    rows = [row(prompt, 12, max_new_tokens=30) for prompt in prompts]
    drafter = chain_of(draft)
    for one in rows:
        drafter.start(one, None)
    budgets = [Budget(0, 0), Budget(2, 2), Budget(5, 5)]
    drafts = drafter.propose(rows, budgets)
    assert draft.forwards == 5
    assert [len(d.tree) - 1 for d in drafts] == [0, 2, 5]
    for one, d in zip(rows, drafts, strict=True):
        text = list(one.tokens)
        for token in d.tree.tokens[1:]:
            assert token == int(draft.after(text).argmax())
            text.append(token)


def test_sampled_children_carry_the_law_they_were_drawn_from(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=0.7, top_k=5, presence_penalty=0.5, seed=4)
    drafter = chain_of(draft)
    drafter.start(one, None)
    (found,) = drafter.propose([one], [Budget(4, 4)])
    assert found.draw is Draw.IID and len(found.q) == len(found.tree) == 5
    assert found.q[-1] is None
    twin = SeededCoins(4)
    text = list(one.tokens)
    for law, token in zip(found.q[:-1], found.tree.tokens[1:], strict=True):
        torch.testing.assert_close(law, one.warp.law(text, draft.after(text)))
        assert token == twin.draw(law)
        text.append(token)


def test_stopping_is_asked_before_the_draw(pair, row):
    """No coin is used for a token that is not drafted."""
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=9)
    drafter = chain_of(draft)
    drafter.start(one, None)
    seen = []

    class Twice:
        taps = ()
        branches = False

        def after(self, row, level):
            seen.append(level.laws[0])
            return Go.ON if len(seen) <= 2 else Go.STOP

    (found,) = drafter.propose([one], [Budget(6, 6)], Twice())
    assert len(found.tree) == 3 and len(seen) == 3
    twin = SeededCoins(9)
    assert [twin.draw(law) for law in seen[:2]] == list(found.tree.tokens[1:])
    assert twin.flip(0.5) == one.coins.flip(0.5)
    torch.testing.assert_close(found.q[1], seen[1])


def test_no_node_follows_an_end_token(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30)
    drafter = chain_of(draft)
    drafter.start(one, None)
    (free,) = drafter.propose([one], [Budget(6, 6)])
    end = free.tree.tokens[3]
    drafter.finish(one)
    other = row([1, 2], 12, max_new_tokens=30, eos=frozenset({end}))
    drafter.start(other, None)
    (cut,) = drafter.propose([other], [Budget(6, 6)])
    first = free.tree.tokens.index(end, 1)
    assert cut.tree.tokens == free.tree.tokens[: first + 1]


def test_a_row_that_sat_out_catches_up(pair, row):
    """The draft cache may lag by any number of tokens; TableLM checks what it is fed."""
    target, draft = pair
    one = row([1, 2, 3], 12, max_new_tokens=40)
    engine = Engine(target, chain_of(draft), Block(), Fixed())
    lags = []
    for step, _ in enumerate(decode([one], engine)):
        engine.controller = Fixed(Fixed.Config(depth=3 if step % 5 == 4 else 0))
        if one.finish is None:
            lags.append(len(one.tokens) - 1 - len(draft.cached(one)))
    assert max(lags) >= 4 and 0 in lags


def test_short_draft_positions_end_the_drafting_and_nothing_else(pair, row, run, plain):
    target, draft = pair
    draft.max_length = 12
    rows = lambda: [row([1] * 5, 12, max_new_tokens=30), row([2] * 20, 12, max_new_tokens=9)]  # noqa: E731
    expected = plain(target, rows())
    found, records = run(target, chain_of(draft), rows(), verifier=Block(), depth=4)
    assert found == expected
    for record in records:
        for drafted, one in zip(record.drafts, record.rows, strict=True):
            assert len(one.tokens) < 40 and (one.prompt_len < 20 or len(drafted.tree) == 1)


def test_seeds_reproduce_and_neighbours_do_not_matter(pair, prompts, row, run):
    target, draft = pair
    options = {"max_new_tokens": 25, "temperature": 1.0, "seed": 7}
    alone = [run(target, chain_of(draft), [row(p, 12, **options)], verifier=Block())[0][0]
             for p in prompts]  # fmt: skip
    together, _ = run(
        target, chain_of(draft), [row(p, 12, **options) for p in prompts], verifier=Block()
    )
    assert together == alone


def test_a_path_that_nothing_may_follow_ends_the_draft_and_not_the_text(row, run, plain, dead_ends):
    """The target's own choices avoid odd tokens, so only the draft ever stands on one."""
    logits = TableLM.random(vocab=12, order=1, seed=5).logits
    logits[:, ::2] += 4.0
    target = TableLM(logits)
    draft = TableLM.random(vocab=12, order=1, seed=6, scale=4.0)
    make = lambda: [row([2, 4], 12, max_new_tokens=40, processors=dead_ends)]  # noqa: E731
    expected = plain(target, make())
    found, records = run(target, chain_of(draft), make(), verifier=Block(), depth=4)
    assert found == expected
    ends = [record.drafts[0].tree for record in records if len(record.drafts[0].tree) < 5]
    assert any(tree.tokens[-1] % 2 for tree in ends)

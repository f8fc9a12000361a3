import pytest
import torch

from foretoken.controllers.fixed import Fixed
from foretoken.drafters.lookahead import Lookahead, ends
from foretoken.engine.engine import Engine, decode
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.build import from_paths
from foretoken.types import Budget, Draft, Draw, Prices, Verdict
from foretoken.verifiers.point import Point

ROOMY = Budget(20, 200)


def counting(vocab):
    """A target that counts round and round."""
    logits = torch.zeros(vocab, vocab, dtype=torch.float64)
    for token in range(vocab):
        logits[token, (token + 1) % vocab] = 8.0
    return TableLM(logits)


def started(row, tokens, vocab=20, **config):
    drafter = Lookahead(Lookahead.Config(**config))
    one = row(tokens, vocab, max_new_tokens=500)
    drafter.start(one, None)
    return drafter, one


def path_tokens(tree, node):
    return [tree.tokens[i] for i in tree.path(node)]


def test_a_window_token_sees_the_first_tokens_before_it_and_its_own_column(row):
    drafter, one = started(row, list(range(17)), window=4, ngram=4, guesses=2)
    columns = [list(column) for column in one.private[drafter].columns]
    tree = drafter.propose_one(one, ROOMY).tree
    assert list(ends(tree, columns)) == [0, 1, 2, 3]
    for j, node in ends(tree, columns).items():
        firsts = [column[0] for column in columns[: j + 1]]
        assert path_tokens(tree, node) == firsts + columns[j][1:]
        assert tree.depths()[node] == 1 + j + 2, "position L + 1 + r + j"


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]])
def test_every_entry_of_the_pool_ends_in_what_the_target_said(row, step, prompt):
    target = TableLM.random(vocab=20, order=2, seed=4)
    drafter, one = started(row, prompt, from_text=False, window=3, ngram=4, guesses=9)
    target.prefill([one])
    for _ in range(12):
        draft = drafter.propose_one(one, ROOMY)
        scores = target.score([one], [draft])
        expected = []
        columns = one.private[drafter].columns
        for node, column in zip(ends(draft.tree, columns).values(), columns, strict=True):
            context = one.tokens + path_tokens(draft.tree, node)
            said = int(target.after(context).argmax())
            expected.append((column[0], (*column[1:], said)))
        target.commit([one], [()])
        token = int(scores[0].logits[0].argmax())
        one.extend([token])
        drafter.observe(step([one], [draft], [Verdict((), token)], scores))
        for key, rest in expected:
            assert rest in one.private[drafter].pool[key]
        assert [column[-1] for column in one.private[drafter].columns] == [
            rest[-1] for _, rest in expected
        ]


def test_accepted_tokens_move_the_window_on(row, step):
    target = counting(20)
    drafter, one = started(row, list(range(17)), window=4, ngram=4, guesses=2)
    target.prefill([one])
    draft = drafter.propose_one(one, ROOMY)
    before = [column[1:] for column in one.private[drafter].columns]
    scores = target.score([one], [draft])
    target.commit([one], [()])
    one.extend([17, 18, 19])
    drafter.observe(step([one], [draft], [Verdict((1, 2), 19)], scores))
    after = one.private[drafter].columns
    assert len(after) == 4
    assert [column[:2] for column in after[:2]] == before[2:]
    assert all(len(column) == 3 for column in after)


def test_the_pool_keeps_the_newest_and_follows_the_text(row):
    drafter, one = started(row, [1, 5, 1, 6, 1, 7, 1, 5, 1], window=0, ngram=2, guesses=2)
    assert one.private[drafter].pool[1] == [(5,), (7,)]
    assert drafter.propose_one(one, ROOMY).tree.tokens == (1, 5, 7)


def test_a_loop_is_followed_as_far_as_an_entry_reaches(row, run):
    target = counting(9)
    drafter = Lookahead(Lookahead.Config(window=3, ngram=5, guesses=3))
    one = row([0], 9, max_new_tokens=90)
    _, records = run(target, drafter, [one], depth=10, nodes=40)
    lengths = [len(record.emitted[0]) for record in records]
    after = next(i for i in range(len(lengths)) if sum(lengths[:i]) >= 14)
    assert min(lengths[after:-1]) >= 5


def test_without_window_and_text_nothing_is_drafted(row):
    drafter, one = started(row, [1, 2, 1, 2, 1], window=0, from_text=False)
    assert len(drafter.propose_one(one, ROOMY).tree) == 1
    drafter, one = started(row, [1, 2, 1, 2, 1], window=0, guesses=0)
    assert len(drafter.propose_one(one, ROOMY).tree) == 1


def test_every_budget_is_kept_and_columns_ride_whole_or_not_at_all(row):
    drafter, one = started(row, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 3)
    for depth in (0, 1, 3, 4, 6, 10, 30):
        for nodes in (0, 1, 4, 9, 30, 56, 200):
            tree = drafter.propose_one(one, Budget(depth, nodes)).tree
            assert len(tree) - 1 <= nodes and max(tree.depths()) <= depth
            columns = one.private[drafter].columns
            newest = ends(tree, columns)
            for at, node in newest.items():
                assert path_tokens(tree, node)[-3:] == columns[at][1:]
            assert len(newest) <= max(depth - 3, 0)
    tree = drafter.propose_one(one, Budget(10, 56)).tree
    assert len(ends(tree, columns)) == 7


def test_a_column_that_another_tree_left_out_waits(row, step):
    """A fusion may score a part of the window only, at other nodes."""
    target = counting(20)
    drafter, one = started(row, list(range(17)), window=2, ngram=3, guesses=2)
    target.prefill([one])
    drafter.propose_one(one, ROOMY)
    first, second = (list(column) for column in one.private[drafter].columns)
    cut = Draft(from_paths(16, [[3, 3], [first[0], second[0], second[1]]]), Draw.POINT)
    scores = target.score([one], [cut])
    target.commit([one], [()])
    one.extend([17])
    drafter.observe(step([one], [cut], [Verdict((), 17)], scores))
    said = (second[1] + 1) % 20
    assert one.private[drafter].columns == [first, [second[1], said]]


@pytest.mark.parametrize("config", [{}, {"window": 2, "ngram": 2, "guesses": 1}])
def test_greedy_text_is_plains(prompts, row, run, plain, config):
    target = TableLM.random(vocab=12, order=2, seed=3)
    make = lambda: [row(p, 12, max_new_tokens=50 + 7 * i) for i, p in enumerate(prompts)]  # noqa: E731
    drafter = Lookahead(Lookahead.Config(**config))
    found, records = run(target, drafter, make(), depth=10, nodes=56)
    assert found == plain(target, make())
    assert len(records) < 64


def priced(node, nodes=56):
    return Budget(10, nodes, Prices(0.0, tuple(node * n for n in range(nodes + 1)), 1.0, 1.0))


def test_with_prices_neither_guesses_nor_window_ride_where_they_do_not_pay(row, run):
    """Random text: no guess comes true, and the window is asked for in short bursts only."""
    target = TableLM.random(vocab=60, order=2, seed=5, scale=0.1)
    drafter = Lookahead()
    one = row(list(range(40)), 60, max_new_tokens=1500, temperature=1.0, seed=1)
    engine = Engine(target, drafter, Point(), Fixed())
    engine.controller.budget = priced(0.1)
    nodes = [step.times.nodes - 1 for step in decode([one], engine)]
    assert sum(nodes[100:]) / len(nodes[100:]) < 0.5
    assert max(nodes[100:]) > 0, "now and then it is looked for again"


def test_a_window_that_brings_tokens_rides_again_and_is_renewed(row, step):
    drafter, one = started(row, list(range(17)), window=3, ngram=3)
    stale = [list(column) for column in one.private[drafter].columns]
    one.tokens.extend([7, 9, 8, 7])
    drafter.upkeep.brought, drafter.upkeep.ridden = 50.0, 50.0
    tree = drafter.propose_one(one, priced(0.05)).tree
    columns = one.private[drafter].columns
    assert list(ends(tree, columns)) == [0, 1, 2] and columns != stale
    drafter.upkeep.brought, drafter.upkeep.ridden = 0.0, 900.0
    drafter.propose_one(one, priced(0.05))
    assert one.private[drafter].rode == 0


def test_what_the_window_alone_had_shown_is_its_merit(row, step):
    drafter, one = started(row, [1, 2, 3, 4, 5], ngram=3, window=1, from_text=False)
    drafter.keep(one, [5, 6, 7], seen=True)
    for known, brought in ((False, 2), (True, 0)):
        if known:  # the text has said it since
            drafter.keep(one, [5, 6, 7])
        draft = drafter.propose_one(one, priced(0.0))
        before = drafter.upkeep.brought
        drafter.judged(one, [6, 7, 1])
        assert drafter.upkeep.brought - before == pytest.approx(brought, abs=0.1)
        assert draft.tree.tokens[:3] == (5, 6, 7)


@pytest.mark.parametrize("options", [{"ngram": 1}, {"window": -1}, {"guesses": -1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Lookahead(Lookahead.Config(**options))


def test_a_step_in_which_no_column_rides_charges_none(row, step):
    drafter, one = started(row, list(range(17)), window=3, ngram=3)
    drafter.upkeep.brought, drafter.upkeep.ridden = 50.0, 50.0
    drafter.propose_one(one, priced(0.05))
    assert one.private[drafter].rode
    drafter.judged(one, [3])
    ridden = drafter.upkeep.ridden
    drafter.propose_one(one, Budget(0, 0))
    drafter.judged(one, [3])
    assert one.private[drafter].rode == 0 and drafter.upkeep.ridden == ridden

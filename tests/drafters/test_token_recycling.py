import pytest
import torch

from foretoken.drafters.parts.adjacency import EDGES, UNKNOWN
from foretoken.drafters.token_recycling import PAPER, RankShapes, TokenRecycling
from foretoken.engine.assemble import assemble
from foretoken.engine.measure import measure_batches, measure_costs
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.trees.templates import Template, level_order
from foretoken.types import Budget, Draft, Draw, Prices, Scores, TokenTree, Verdict

pytestmark = pytest.mark.usefixtures("way")

WHOLE = Budget(6, 80)


def cycle(period, vocab, jitter=0.0, seed=0):
    """A target that counts round and round; `jitter` lets other tokens come close."""
    noise = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
    logits = jitter * noise.double()
    for token in range(vocab):
        logits[token, (token + 1) % period] += 8.0
    return TableLM(logits)


def test_the_papers_template_has_80_nodes_in_the_right_levels():
    parents, _ = level_order(Template(PAPER))
    depths = TokenTree(tuple(range(81)), tuple(parents)).depths()
    assert [depths.count(d) for d in range(8)] == [1, 8, 21, 25, 15, 8, 3, 0]
    assert len(set(PAPER)) == 80
    assert all(parent < node for node, parent in enumerate(parents))
    assert len(set(range(81)) - set(parents)) == 40, "leaves"
    assert all(path[:-1] in PAPER for path in PAPER if len(path) > 1)


@pytest.mark.parametrize("content", ["nothing", "noise", "warm"])
@pytest.mark.parametrize("template", [None, (3, 2, 1), ((0,), (2,), (2, 1), (2, 1, 0))])
def test_greedy_text_is_plains_for_any_matrix(prompts, row, run, plain, content, template):
    target = TableLM.random(vocab=12, order=2, seed=3)
    make = lambda: [row(p, 12, max_new_tokens=40 + 7 * i) for i, p in enumerate(prompts)]  # noqa: E731
    drafter = TokenRecycling(target, TokenRecycling.Config(template=template))
    if content == "noise":
        generator = torch.Generator().manual_seed(5)
        for token in range(12):
            drafter.known.put(token, torch.randperm(12, generator=generator)[:8].tolist())
    if content == "warm":
        run(target, drafter, make(), depth=6, nodes=80)
    found, _ = run(target, drafter, make(), depth=6, nodes=80)
    assert found == plain(target, make())


def test_after_a_step_the_rows_of_scored_tokens_are_the_targets_top(row, step):
    target = TableLM.random(vocab=40, order=1, seed=2)
    drafter = TokenRecycling(target, TokenRecycling.Config(from_prompt=False))
    one = row([3, 4], 40, max_new_tokens=9)
    tree = TokenTree((4, 7, 9, 7, 30, 30), (-1, 0, 0, 1, 2, 3))
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    drafter.start(one, None)
    drafter.propose_one(one, WHOLE)
    draft = Draft(tree, Draw.POINT)
    drafter.observe(step([one], [draft], [Verdict((1,), 5)], [Scores(logits)]))
    top = logits.topk(8).indices.tolist()
    assert drafter.known.followers(4) == top[0]
    assert drafter.known.followers(9) == top[2]
    assert drafter.known.followers(7) == top[3], "of several nodes the last is believed"
    assert drafter.known.followers(30) == top[5]
    assert drafter.known.followers(8) == []


def test_a_period_is_followed_as_deep_as_the_template_goes(row, run):
    target = cycle(period=9, vocab=30, jitter=0.3)
    drafter = TokenRecycling(target, TokenRecycling.Config(from_prompt=False))
    one = row([0], 30, max_new_tokens=100)
    _, records = run(target, drafter, [one], depth=6, nodes=80)
    lengths = [len(record.emitted[0]) for record in records]
    after = next(i for i in range(len(lengths)) if sum(lengths[:i]) >= 9)
    assert set(lengths[after + 1 : -1]) == {7}
    assert lengths[0] == 1


def test_a_warm_matrix_is_no_slower_and_rows_share_it(row, run):
    target = TableLM.random(vocab=50, order=2, seed=8, scale=2.0)
    drafter = TokenRecycling(target)
    make = lambda: row([1, 2, 3], 50, max_new_tokens=60)  # noqa: E731
    cold = len(run(target, drafter, [make()], depth=6, nodes=80)[1])
    warm = len(run(target, drafter, [make()], depth=6, nodes=80)[1])
    assert warm <= cold
    other = TokenRecycling(target)
    batch = len(run(target, other, [make() for _ in range(3)], depth=6, nodes=80)[1])
    assert batch <= cold


def test_a_prompt_says_what_follows_tokens_never_scored(row):
    drafter = TokenRecycling(TableLM.random(20))
    one = row([1, 2, 3, 1, 4, 1], 20, max_new_tokens=9)
    drafter.start(one, None)
    assert drafter.known.followers(1) == [4, 2], "the latest leads"
    tree = drafter.propose_one(one, WHOLE).tree
    assert set(tree.tokens[1:3]) == {4, 2}
    silent = TokenRecycling(TableLM.random(20), TokenRecycling.Config(from_prompt=False))
    silent.start(one, None)
    assert len(silent.propose_one(one, WHOLE).tree) == 1, "nothing known, nothing drafted"


def test_nothing_follows_an_end_token(row):
    drafter = TokenRecycling(TableLM.random(20))
    one = row([1, 2, 3, 1], 20, max_new_tokens=9, eos=frozenset({2}))
    drafter.start(one, None)
    assert drafter.propose_one(one, WHOLE).tree.tokens == (1, 2)


def test_every_budget_is_kept(row):
    target = cycle(period=20, vocab=20)
    for config in (TokenRecycling.Config(), TokenRecycling.Config(free=True)):
        drafter = TokenRecycling(target, config)
        for token in range(20):
            drafter.known.put(token, [(token + i) % 20 for i in range(1, 9)])
        one = row([0], 20, max_new_tokens=9)
        sizes = []
        for budget in (
            Budget(0, 0),
            Budget(0, 80),
            Budget(6, 0),
            Budget(1, 80),
            *(Budget(depth, nodes) for depth in (2, 6, 9) for nodes in (1, 5, 16, 79, 80, 200)),
        ):
            tree = drafter.propose_one(one, budget).tree
            assert len(tree) - 1 <= budget.nodes and max(tree.depths()) <= budget.depth
            sizes.append(len(tree) - 1)
        assert sizes[:4] == [0, 0, 0, 8]
        assert max(sizes) == (200 if config.free else 80)


def test_small_budgets_go_to_the_ranks_that_were_accepted():
    template = Template(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    wide, deep = ([-1, 0, 0], [-1, 0, 1]), ([-1, 0, 1], [-1, 0, 0])
    tree = TokenTree((9, 5, 6), (-1, 0, 0))
    shapes = RankShapes(template, 8)
    for _ in range(320):
        shapes.update(tree, [-1, 0, 1], (5, 9))
    assert shapes.within(Budget(2, 2)) == deep, "rank 0 is always right"
    shapes = RankShapes(template, 8)
    for step in range(320):
        shapes.update(tree, [-1, 0, 1], (5 + step % 2, 9))
    assert shapes.within(Budget(2, 2)) == wide, "rank 0 and rank 1 take turns"


def priced(node, nodes=80):
    return Budget(6, nodes, Prices(0.0, tuple(node * n for n in range(nodes + 1)), 1.0, 1.0))


def test_what_is_too_unlikely_to_pay_is_not_drafted(row):
    drafter = TokenRecycling(cycle(period=20, vocab=20))
    for token in range(20):
        drafter.known.put(token, [(token + i) % 20 for i in range(1, 9)], [10, 2, *[1] * 6])
    one = row([0], 20, max_new_tokens=9)
    sizes = [
        len(drafter.propose_one(one, priced(node)).tree) for node in (0.0, 0.02, 0.1, 0.3, 0.6)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 40 and sizes[-1] == 1
    assert drafter.propose_one(one, priced(0.3)).tree.tokens == (0, 1), "the surest one alone"


def test_a_template_is_followed_where_one_was_named_or_nothing_is_priced(row):
    named = TokenRecycling.Config(template=((0,), (1,), (1, 0)))
    for config, budget, size in ((named, priced(0.0), 4), (None, WHOLE, 81)):
        drafter = TokenRecycling(cycle(period=20, vocab=20), config)
        for token in range(20):
            drafter.known.put(token, [(token + i) % 20 for i in range(1, 9)], [11] * 8)
        one = row([0], 20, max_new_tokens=9)
        assert len(drafter.propose_one(one, budget).tree) == size


def test_how_sure_the_target_was_tells_what_is_drafted_once_that_came_true(row, step):
    """Sure followers come true here, unsure ones never do."""
    drafter = TokenRecycling(TableLM.random(40))
    one = row([1], 40, max_new_tokens=500)
    drafter.start(one, None)
    followers = list(range(10, 18))
    for turn in range(60):
        sure = turn % 2 == 0
        drafter.known.put(1, followers, [10 if sure else 3, *[0] * 7])
        draft = drafter.propose_one(one, priced(0.01))
        token = followers[0] if sure else 30
        drafter.observe(
            step([one], [draft], [Verdict((), token)], [Scores(torch.zeros(len(draft.tree), 40))])
        )
    first = [drafter.trust.chance(share, 1.0, True) for share in range(len(EDGES) + 1)]
    assert first[10] > 0.75 and first[3] < 0.15


def test_rows_that_were_not_asked_cost_nothing_and_teach_nothing(row, step):
    drafter = TokenRecycling(TableLM.random(20))
    one = row([1], 20, max_new_tokens=9)
    drafter.start(one, None)
    draft = drafter.propose_one(one, Budget(0, 0))
    drafter.observe(step([one], [draft], [Verdict((), 5)], [Scores(torch.randn(1, 20))]))
    assert len(draft.tree) == 1 and set(drafter.known.ids) == {UNKNOWN}


def test_a_template_may_ask_for_more_ranks_than_there_are_tokens(row):
    drafter = TokenRecycling(cycle(3, 3), TokenRecycling.Config(template=((3,), (0,))))
    drafter.known.put(1, [2, 0, 1])
    one = row([1], 3, max_new_tokens=9)
    assert drafter.propose_one(one, WHOLE).tree.tokens == (1, 2)


def test_a_template_wider_than_what_is_kept_is_refused():
    for keep, template in ((2, ((3,), (0,))), (8, (16,)), (8, ())):
        with pytest.raises(ConfigError, match="template"):
            TokenRecycling(cycle(5, 5), TokenRecycling.Config(keep=keep, template=template))
    TokenRecycling(cycle(5, 5), TokenRecycling.Config(keep=2))  # nobody named the paper's


def test_the_matrix_is_small_and_impossible_options_are_refused():
    known = TokenRecycling(TableLM(torch.zeros(600, 600)), TokenRecycling.Config()).known
    assert known.ids.itemsize == 4 and len(known.ids) == 600 * 8
    assert known.ids.itemsize * 8 * 32_000 < 2_000_000
    assert set(known.ids) == {UNKNOWN}
    with pytest.raises(ConfigError, match="keep"):
        TokenRecycling(TableLM.random(4), TokenRecycling.Config(keep=0))


def test_what_steps_cost_is_measured_without_a_trace_in_the_matrix(tmp_path):
    """Also of one that was loaded: it is what it was, and drafts are timed all the same."""
    target = cycle(period=20, vocab=20)
    known = TokenRecycling(target).known
    for token in range(20):
        known.put(token, [(3 * token + i) % 20 for i in range(8)], [4] * 8)
    known.save(tmp_path / "memory")
    for memory in (None, str(tmp_path / "memory")):
        engine = assemble("token-recycling", target, controller="cost_model", memory=memory)
        matrix = engine.drafter.known
        before = [*matrix.ids], [*matrix.sure]
        assert (memory is None) == (set(matrix.ids) == {UNKNOWN})
        costs = measure_costs(engine, seconds=0.0)
        engine.controller.learn(costs)
        measure_batches(engine)
        assert ([*matrix.ids], [*matrix.sure]) == before
        assert max(costs.draft) >= 4, "what is read and said in the scratch text is followed there"

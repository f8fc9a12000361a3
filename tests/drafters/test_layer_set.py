"""Drafting with sublayers left out: exact for every set, widths as told, a search that improves."""

import random
from functools import partial

import pytest
import torch
from small_models import FAMILIES, small

from foretoken.audit import law
from foretoken.drafters.layer_set import LayerSet, width
from foretoken.drafters.parts import skip_search
from foretoken.drafters.parts.bayesian import Process
from foretoken.drafters.parts.skip_search import SkipSearch, odd_layers
from foretoken.engine.assemble import assemble
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.views.table_views import TableSkippedLayers
from foretoken.types import Budget, Draw, Prices
from foretoken.verifiers.recursive import Recursive

SETS = [(), (1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [*SETS, None])
def test_greedy_text_is_plains_for_every_set(family, skip, row, run, plain, prompts):
    lm = open_lm(small(family), kernels="dense")
    make = lambda: [row(p, 61, max_new_tokens=24) for p in prompts]  # noqa: E731
    config = LayerSet.Config(skip=skip, window=4, stop_below=0.1, search_share=1e9)
    drafter = LayerSet(lm, config)
    found, _ = run(lm, drafter, make(), verifier=Recursive(), depth=6, nodes=16)
    assert found == plain(lm, make())
    assert drafter.layers.shared.cost.passes == drafter.layers.shared.tries
    assert (drafter.layers.shared.tries > 0) == (skip is None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_skips_every_chain_is_accepted_and_matches(temperature, row, run, prompts):
    lm = open_lm(small("llama"), kernels="dense")
    drafter = LayerSet(lm, LayerSet.Config(skip=(), stop_below=0.0))
    rows = [row(p, 61, max_new_tokens=24, temperature=temperature, seed=2) for p in prompts]
    _, records = run(lm, drafter, rows, verifier=Recursive(), depth=5)
    assert len(records) == 4
    for record in records:
        for draft, verdict in zip(record.drafts, record.verdicts, strict=True):
            assert len(verdict.path) == len(draft.tree) - 1 == 5
            assert draft.draw is (Draw.DISTINCT if temperature else Draw.POINT)
    one = row(prompts[1], 61, max_new_tokens=24)
    judged = LayerSet(lm, LayerSet.Config(window=8, skip_ratio=0.0))
    run(lm, judged, [one], verifier=Recursive(), depth=3)
    lm.prefill([one])
    assert judged.layers.shared.judge(one, frozenset()) == 1.0


@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.7, top-p 0.8"])
def test_the_law_of_wide_and_deep_drafts_is_the_targets(setting):
    """The catalogue's law test stops early drafts; here confidence never stops them."""
    build = partial(
        assemble, "swift", TableLM.random(3, seed=4), controller="fixed", depth=2, nodes=4,
        stop_below=0.0, skip=(0, 3),
    )  # fmt: skip
    gap = law.law_gap(build, TableLM.random(3, seed=4), law.SETTINGS[setting])
    assert gap.variation <= law.BOUND
    assert gap.law.drafted > gap.law.accepted > 0


def test_widths_follow_confidence():
    for sure, greedy, sampled in (
        (0.96, 3, 1),
        (0.95, 5, 3),
        (0.7, 8, 5),
        (0.5, 10, 10),
        (0, 10, 10),
    ):
        assert (width(sure, True), width(sure, False)) == (greedy, sampled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_siblings_fill_the_budget_where_the_draft_was_least_sure(temperature, row):
    table = TableLM.random(24, scale=2.0, layers=6)
    drafter = LayerSet(table, LayerSet.Config(skip=(), stop_below=0.0))
    one = row([1, 2, 3], 24, max_new_tokens=30, temperature=temperature, seed=0)
    table.prefill([one])
    drafter.start(one, None)
    engine = assemble("swift", table, controller="fixed", depth=3, nodes=9)
    (draft,) = drafter.propose([one], engine.controller.budgets([one]))
    children = draft.tree.children()
    assert len(draft.tree) - 1 == 9
    backbone, node = [], 0
    while children[node]:
        backbone.append(node)
        node = children[node][0]
    assert len(backbone) == 3
    laws = [table.after([1, 2, 3, *path_tokens(draft, node)]).softmax(-1) for node in backbone]
    sure = [
        float(p[draft.tree.tokens[children[n][0]]]) for p, n in zip(laws, backbone, strict=True)
    ]
    wanted = [width(value, temperature == 0.0) - 1 for value in sure]
    left, order = 6, sorted(range(3), key=lambda i: sure[i])
    for i in order:
        assert len(children[backbone[i]]) - 1 == min(wanted[i], left)
        left -= min(wanted[i], left)
    for node, p in zip(backbone, laws, strict=True):
        tokens = [draft.tree.tokens[child] for child in children[node]]
        assert len(set(tokens)) == len(tokens)
        if temperature == 0.0:
            assert tokens == p.argsort(descending=True)[: len(tokens)].tolist()


def path_tokens(draft, node):
    return [draft.tree.tokens[i] for i in draft.tree.path(node)]


def test_a_draft_ends_with_the_token_it_was_not_sure_of(row):
    table = TableLM.random(12, scale=4.0, layers=6)
    for threshold in (0.3, 0.6, 0.9):
        drafter = LayerSet(table, LayerSet.Config(skip=(), stop_below=threshold))
        one = row([1, 2, 3], 12, max_new_tokens=40)
        table.prefill([one])
        drafter.start(one, None)
        engine = assemble("swift", table, controller="fixed", depth=25, nodes=25)
        (draft,) = drafter.propose([one], engine.controller.budgets([one]))
        nodes, node = [], 0
        while draft.tree.children()[node]:
            node = draft.tree.children()[node][0]
            nodes.append(node)
        text, sure = [1, 2, 3], []
        for node in nodes:
            sure.append(float(table.after(text).softmax(-1)[draft.tree.tokens[node]]))
            text.append(draft.tree.tokens[node])
        assert all(value >= threshold for value in sure[:-1])
        assert sure[-1] < threshold or len(nodes) == 25
        table.free([one])


def test_a_search_keeps_its_best_and_ends(row, run):
    table = TableLM(TableLM.random(24).logits, layers=12, disturbance=6.0)
    config = LayerSet.Config(window=8, patience=12, skip_ratio=0.45, search_share=1e9)
    drafter = LayerSet(table, config)
    search = drafter.layers.shared
    assert search.skipped == frozenset(odd_layers(20)) and search.size == 9
    best, ended_at = [], None
    for seed in range(24):
        one = row([seed, 2, 3], 24, max_new_tokens=14)
        run(table, drafter, [one], verifier=Recursive(), depth=4)
        best.append(search.best)
        if search.done and ended_at is None:
            ended_at = search.cost.passes
    assert best == sorted(best) and 0 < best[0] < best[-1] <= 1
    assert len(search.skipped) == 9 and search.skipped <= set(range(20))
    assert ended_at == search.cost.passes == search.tries, "no pass after the end"
    assert search.cost.tokens == 8 * search.tries and search.cost.seconds > 0
    assert f"{search.tries} tries, and has ended" in drafter.report()


def test_the_tree_widens_by_default_where_the_draft_stops_early(row):
    """Siblings are counted from what was drafted, not from what might have been."""
    table = TableLM.random(24, scale=2.0, layers=6)
    engine = assemble("swift", table, controller="fixed", skip=(), depth=6, nodes=6)
    one = row([1, 2, 3], 24, max_new_tokens=40)
    table.prefill([one])
    engine.drafter.start(one, None)
    (draft,) = engine.drafter.propose([one], engine.controller.budgets([one]))
    assert max(draft.tree.depths()) < 6, "this draft is unsure of itself"
    assert len(draft.tree) - 1 == 6


def test_the_papers_setting_has_room_for_every_sibling(row):
    """A chain of 25 tokens, each sure enough for three children."""
    laws = torch.full((24, 24), 0.04 / 23)
    laws[torch.arange(24), (torch.arange(24) + 1) % 24] = 0.96
    table = TableLM(laws.log(), layers=6)
    engine = assemble("swift", table, preset="paper", skip=())
    one = row([1, 2, 3], 24, max_new_tokens=40)
    table.prefill([one])
    engine.drafter.start(one, None)
    (draft,) = engine.drafter.propose([one], engine.controller.budgets([one]))
    below = [len(children) for children in draft.tree.children() if children]
    assert below == [3] * 25 and max(draft.tree.depths()) == 25


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_prices_length_and_width_are_what_pays(temperature, row):
    table = TableLM.random(24, scale=2.0, layers=6)
    drafter = LayerSet(table, LayerSet.Config(skip=()))
    sizes = []
    for price in (0.001, 0.05, 0.2, 10.0):
        one = row([1, 2, 3], 24, max_new_tokens=40, temperature=temperature, seed=0)
        table.prefill([one])
        drafter.start(one, None)
        prices = Prices(price, tuple(price * n for n in range(41)), 1.0)
        (draft,) = drafter.propose([one], [Budget(20, 40, prices)])
        assert all(chance >= price for chance in draft.chances[1:] if temperature == 0.0)
        sizes.append(len(draft.tree) - 1)
        table.free([one])
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 15
    assert sizes[-1] == (0 if temperature == 0.0 else 1), "what was drawn is scored"


def test_confidence_that_is_never_borne_out_ends_the_drafts(row, run):
    """A draft that is sure and wrong: calibrated chances fall until one token is too dear."""
    table = TableLM(TableLM.random(24, scale=4.0).logits, layers=6, disturbance=24.0)
    drafter = LayerSet(table, LayerSet.Config(skip=(0, 1, 2, 3), stop_below=0.0))
    rows = [row([1, i], 24, max_new_tokens=60) for i in range(4)]
    run(table, drafter, rows, verifier=Recursive(), depth=6)
    known = drafter.shared
    assert known.share < 0.5
    assert known.calibration.chance(0.9, 0, True) < 0.5


def test_tries_keep_to_their_share_of_the_time():
    view = TableSkippedLayers(TableLM.random(8, layers=6))
    search = SkipSearch(view, LayerSet.Config(search_share=0.1))
    search.rounds, search.cost.beside = 5, 10.0
    assert search.due()
    search.cost.passes, search.cost.seconds = 4, 0.8
    assert search.due()
    search.cost.seconds = 0.9
    assert not search.due()
    own = SkipSearch(view, LayerSet.Config(), counted=True)
    own.cost.seconds = 1e9
    due = [own.due() for own.rounds in range(1, 97)]
    assert [i + 1 for i, one in enumerate(due) if one] == [32, 64, 96]


def test_a_pause_during_a_try_does_not_end_the_search(row, run, monkeypatch):
    """One try of ten seconds among some of 20 ms: the next one is due as if it had taken 40."""
    view = TableSkippedLayers(TableLM.random(24, layers=6))
    search = SkipSearch(view, LayerSet.Config(window=4, good_enough=2.0, most_tries=99))
    times = iter([t for at in range(10) for t in (at, at + (10.0 if at == 9 else 0.02))])
    monkeypatch.setattr(skip_search, "perf_counter", lambda: next(times))
    monkeypatch.setattr(search, "judge", lambda row, candidate: 0.5)
    for _ in range(10):
        search.step(None)
    assert search.cost.seconds == pytest.approx(9 * 0.02 + 0.04)
    search.rounds, search.cost.beside = search.config.search_interval, 20.0
    assert search.due()


def test_a_search_gives_up_where_no_set_can_pay(row, run):
    """Every sublayer that is missing ruins this draft."""
    table = TableLM(TableLM.random(24).logits, layers=12, disturbance=200.0)
    config = LayerSet.Config(window=16, hopeless_after=6, search_share=1e9)
    drafter = LayerSet(table, config)
    for seed in range(3):
        run(table, drafter, [row([seed, 2], 24, max_new_tokens=40)], verifier=Recursive(), depth=2)
    search = drafter.layers.shared
    assert search.done and search.tries == 6 and search.best < 0.5
    assert "no draft of it can pay" in drafter.report()
    search.best = 0.9
    assert search.promise > 1.2


def test_the_papers_search_goes_on_where_no_set_can_pay_yet(monkeypatch):
    table = TableLM.random(8, layers=6)
    config = assemble("swift", table, preset="paper").drafter.config
    search = SkipSearch(TableSkippedLayers(table), config)
    monkeypatch.setattr(search, "judge", lambda row, candidate: 0.1)
    for _ in range(60):
        search.step(None)
    assert search.promise < 1.0 and not search.done


def test_a_gaussian_process_finds_good_sets_sooner_than_chance():
    """Twelve units, of which four harm: mean tries until a set without them is met."""

    def tries(every, seed):
        process, chance = Process(12, seed), random.Random(seed)
        for count in range(1, 400):
            if every and count > 4:
                one = process.suggest(5)
            else:
                one = frozenset(chance.sample(range(12), 5))
            if not one & {1, 4, 7, 9}:
                return count
            process.register(one, 1.0 - 0.25 * len(one & {1, 4, 7, 9}))
        return 400

    found = {every: sum(tries(every, seed) for seed in range(12)) / 12 for every in (0, 1)}
    assert found[1] < 0.6 * found[0], found


def test_short_texts_are_never_searched_on(row, run):
    table = TableLM.random(24, layers=6)
    drafter = LayerSet(table)
    run(table, drafter, [row([1, 2], 24, max_new_tokens=33)], verifier=Recursive(), depth=4)
    assert drafter.layers.shared.tries == 0 and drafter.report() == ""


def test_random_middle_layers_that_add_nothing_are_found(row, run):
    """Half the sublayers are idle: every set of idle ones matches wholly, and one is found."""
    model = small("llama", layers=8)
    idle = [0, 1, 4, 5, 8, 9]
    with torch.no_grad():
        for unit in idle:
            layer = model.base_model.layers[1 + unit // 2]
            (layer.mlp.down_proj if unit % 2 else layer.self_attn.o_proj).weight.zero_()
    lm = open_lm(model, kernels="dense")
    config = LayerSet.Config(
        skip_ratio=0.2, window=8, good_enough=0.99, stop_below=0.0, search_share=1e9
    )
    drafter = LayerSet(lm, config)
    for seed in range(4):
        one = row([seed, 5, 7], 61, max_new_tokens=60)
        run(lm, drafter, [one], verifier=Recursive(), depth=3)
    assert drafter.layers.shared.size == 2
    assert drafter.layers.shared.best > 0.99 and drafter.layers.shared.done


def test_a_gaussian_process_suggests_sets_of_the_same_size(row, run):
    table = TableLM(TableLM.random(24).logits, layers=8, disturbance=6.0)
    config = LayerSet.Config(window=8, bayes_interval=4, most_tries=3, search_share=1e9)
    drafter = LayerSet(table, config)
    run(table, drafter, [row([1, 2], 24, max_new_tokens=40)], verifier=Recursive(), depth=4)
    search = drafter.layers.shared
    assert search.tries == sum(map(len, search.model.scores.values())) == 4
    assert len(search.model.suggest(search.size)) == search.size == int(12 * 0.45)


def test_what_makes_no_sense_is_refused():
    table = TableLM.random(4, layers=6)
    for wrong in ({"skip_ratio": 1.0}, {"skip": (8,)}, {"window": 0}, {"search_interval": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LayerSet(table, LayerSet.Config(**wrong))


def test_exact_bits_take_a_known_set_only(row, run, plain, prompts):
    lm = open_lm(small("llama"), exact_bits=True)
    with pytest.raises(CapabilityError, match="exact_bits"):
        LayerSet(lm)
    drafter = LayerSet(lm, LayerSet.Config(skip=(1, 2)))
    make = lambda: [row(p, 61, max_new_tokens=16) for p in prompts]  # noqa: E731
    found, _ = run(lm, drafter, make(), verifier=Recursive(), depth=4)
    assert found == plain(lm, make())


def test_a_seeded_text_has_a_search_of_its_own(row, run):
    """Its sampled text must not depend on what was found on the texts of others."""
    table = TableLM(TableLM.random(24).logits, layers=12, disturbance=6.0)
    make = lambda: row([1, 2, 3], 24, max_new_tokens=40, temperature=1.0, seed=5)  # noqa: E731
    config = LayerSet.Config(window=4, search_share=1e9, good_enough=1.0)
    alone = run(table, LayerSet(table, config), [make()], verifier=Recursive(), depth=4)[0]
    drafter = LayerSet(table, config)
    for seed in range(6):
        one = row([seed, 2, 3], 24, max_new_tokens=40)
        run(table, drafter, [one], verifier=Recursive(), depth=4)
    shared = drafter.layers.shared
    assert shared.tries > 0 and shared.skipped != frozenset(odd_layers(shared.view.units))
    tries = shared.tries
    together = [make(), row([4, 4], 24, max_new_tokens=40)]
    found, _ = run(table, drafter, together, verifier=Recursive(), depth=4)
    assert found[0] == alone[0]
    assert shared.tries > tries, "greedy rows go on searching for all"

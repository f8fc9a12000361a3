"""Exits chosen by what all layers would have said: its counts, its choices, and what they cost."""

import math

import pytest
import torch
from small_models import FAMILIES, flat_above, small

from foretoken.drafters.dynamic_exit import Counts, DynamicExit, considered, read_at_once
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.errors import ConfigError
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.lm.views.layer_predictions import LayerPredictions
from foretoken.lm.views.wrapping import early_exits
from foretoken.types import Budget, Prices, Scores, Verdict
from foretoken.verifiers.block import Block

ALL = range(1, 8)
FREE = Budget(18, 18)  # nothing has a price: the paper's rule


def counts(**config) -> Counts:
    view = early_exits(TableLM.random(4, layers=8), ALL)
    return Counts(view, DynamicExit.Config(**config))


def priced(speed: float, node: float) -> Budget:
    """Where a plain step's time is worth `speed` tokens, and a node's `node` of them."""
    prices = tuple(node * n for n in range(18))
    return Budget(17, 17, Prices(0.0, prices, speed))


def predicted(right: list[list[int]], sure: float = 0.5) -> LayerPredictions:
    """One line per place, one number per exit: 1 where it says what the last layer says, 7."""
    tokens = torch.tensor([[7 if hit else 3 for hit in line] + [7] for line in right])
    return LayerPredictions(tokens, torch.full(tokens.shape, sure))


def counts_of(engine) -> list[Counts]:
    """The counts of each row that is started from now on, kept beyond its end."""
    exits, kept = engine.drafter.exits, []
    opened = exits.open

    def watched(row, features):
        fits = opened(row, features)
        kept.append(exits.counts(row))
        return fits

    exits.open = watched
    return kept


def hidden_states(model, text):
    """[S, L, H] behind every layer, of a forward without a cache."""
    layers = []
    note = lambda _, __, output: layers.append(output)  # noqa: E731
    hooks = [layer.register_forward_hook(note) for layer in model.base_model.layers]
    model(text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(layers, dim=2)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow), 18])
@pytest.mark.parametrize("confident", [True, False])
def test_greedy_text_is_plains(family, most, confident, row, run, plain, prompts):
    lm = open_lm(small(family), kernels="dense")
    make = lambda: [row(p, 61, max_new_tokens=24) for p in prompts]  # noqa: E731
    drafter = DynamicExit(lm, DynamicExit.Config(most=most, confident=confident))
    found, _ = run(lm, drafter, make(), verifier=Block(), depth=18)
    assert found == plain(lm, make())


def test_without_acceptance_nothing_is_drafted_and_with_it_as_much_as_can_be():
    never = counts()
    never.learn(predicted([[0] * 7] * 4))
    never.choose(FREE)
    assert never.length == 0
    first = counts()
    first.learn(predicted([[1] * 7] * 4))
    first.choose(FREE)
    assert (first.exit, first.length) == (1, 17)
    third = counts(most=10)
    third.learn(predicted([[0, 0, 1, 1, 1, 1, 1]] * 4))
    third.choose(FREE)
    assert (third.exit, third.length) == (3, 9)


def test_the_choice_is_the_best_of_all_exits_and_lengths():
    """Against the definition, written out."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        known = counts(most=6)
        known.learn(predicted(torch.randint(0, 2, (9, 7), generator=generator).tolist()))
        known.choose(FREE)
        share = (known.counted[0] / known.counted[:2].sum(0)).tolist()
        promised = {
            (depth, length): sum(share[depth - 1] ** i for i in range(length + 1))
            / (length * depth + 8)
            for depth in range(1, 8)
            for length in range(6)
        }
        assert promised[known.exit, known.length] == pytest.approx(max(promised.values()))


def test_the_exit_is_the_best_for_lengths_that_may_be_drafted():
    """One token behind layer 1 is worth more than one behind layer 8; of several it is not."""
    view = early_exits(TableLM.random(4, layers=32), (1, 8))
    known = Counts(view, DynamicExit.Config())
    known.learn(predicted([[int(n < 6), int(n < 9)] for n in range(10)]))
    known.choose(FREE)
    assert known.exit == 8 and known.length > 1
    for budget in (Budget(1, 1), Budget(18, 1), Budget(1, 18)):
        known.choose(budget)
        assert (known.exit, known.length) == (1, 1)
    known.choose(Budget(1, 1, Prices(0.0, (0.0, 0.01, 0.02, 0.03), 1.0)))
    assert known.length == 1, "nor under prices of more nodes"


def test_prices_choose_what_is_worth_most_above_them():
    """Against the definition, written out; and prices that nothing can pay end all drafting."""
    generator = torch.Generator().manual_seed(1)
    for speed, node in ((1.0, 0.05), (2.0, 0.1), (1.5, 0.3)):
        known = counts()
        known.learn(predicted((torch.rand(20, 7, generator=generator) < 0.7).long().tolist()))
        known.choose(priced(speed, node))
        share = (known.counted[0] / known.counted[:2].sum(0)).tolist()
        worth = {
            (depth, length): sum(share[depth - 1] ** i for i in range(length + 1))
            - length * (speed * depth / 8 + node)
            for depth in ALL
            for length in range(18)
        }
        assert worth[known.exit, known.length] == pytest.approx(max(worth.values()))
    known.choose(priced(1.0, 2.0))
    assert known.length == 0


def test_a_priced_draft_ends_where_the_next_token_no_longer_pays():
    known = counts(candidates=(2,))
    known.learn(predicted([[1] * 7] * 30 + [[0] * 7] * 10, sure=0.9))
    known.choose(priced(1.0, 0.1))
    assert known.length > 1 and known.stops
    steps, reached = 1, known.chance(0.9)
    while known.go_on(steps, 0.9, reached):
        steps, reached = steps + 1, reached * known.chance(0.9)
    assert steps == known.length, "unvarying confidence: the same length as without looking at it"
    known.choose(priced(1.0, 0.1))
    assert not known.go_on(1, 0.01, known.chance(0.01)), "an unlikely token ends the draft"


def test_counts_fade_and_the_threshold_lies_between_right_and_wrong():
    known = counts(decay=0.5)
    known.learn(predicted([[1] * 7] * 4, sure=0.9))
    known.choose(FREE)
    assert known.threshold == -math.inf, "never wrong so far: nothing to stop for"
    known.learn(predicted([[1] + [0] * 6, [0] * 7], sure=0.3))
    known.choose(FREE)
    assert known.counted[:2, 0].tolist() == [0.5 * 4 + 1, 1]
    assert known.exit == 1
    assert known.threshold == pytest.approx(((0.5 * 4 * 0.9 + 0.3) / 3 + 0.3) / 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_predictions_are_the_drafts_and_the_targets_own_tokens(family, row, prompts):
    """And hidden states are those of a forward over the same text without any cache or exit."""
    model = small(family)
    lm = open_lm(model, kernels="dense")
    engine = assemble("del", lm, controller="fixed", confident=False, depth=3, candidates=(1, 2, 3))
    drafter, target, taps = engine.drafter, engine.target, engine.drafter.traits.taps
    rows = [row(p, 61, max_new_tokens=16) for p in prompts]
    seen = []
    for one in rows:
        drafter.start(one, target.prefill([one], taps, last=drafter.traits.context)[0])
        seen.append(1 + len(seen) % 3)  # an exit of its own each: those before were never right
        right = [layer >= seen[-1] for layer in (1, 2, 3)]
        known = drafter.exits.counts(one)
        known.prompt = None
        known.learn(predicted([right] * 9))
    with torch.inference_mode():
        budgets = engine.controller.budgets(rows)
        drafts = drafter.propose(rows, budgets)
        scores = target.score(rows, drafts, taps)
        found = drafter.view.predictions([score.hidden for score in scores])
        for one, draft, score, said, exit_layer in zip(
            rows, drafts, scores, found, seen, strict=True
        ):
            drafted = draft.tree.tokens[1:]
            assert len(drafted) == 3
            assert said.tokens[:-1, exit_layer - 1].tolist() == list(drafted)
            assert said.tokens[:, -1].tolist() == score.logits.argmax(-1).tolist()
            text = torch.tensor([[*one.tokens, *drafted]])
            fresh = hidden_states(model, text)[-4:]
            scale = float(fresh.abs().max())
            assert float((score.hidden - fresh).abs().max()) < 1e-5 * scale


def test_looking_at_all_layers_runs_none_of_them(row, prompts, layers_run):
    """Layers run: those of the drafts, and every layer once per round."""
    model = small("llama")
    lm = open_lm(model, kernels="dense")
    engine = assemble("del", lm, controller="fixed", depth=5)
    one = row(prompts[1], 61, max_new_tokens=30)
    layers_run.clear()
    expected, kept = 4, counts_of(engine)  # the prompt
    for record in decode([one], engine):
        expected += kept[0].exit * (len(record.drafts[0].tree) - 1) + 4
    assert len(layers_run) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_flat_upper_layers_give_more_tokens_per_layer_than_plain(
    temperature, row, run, prompts, layers_run
):
    lm = open_lm(flat_above(small("llama"), 1), kernels="dense")
    layers_run.clear()
    drafter = DynamicExit(lm)
    one = row(prompts[2], 61, max_new_tokens=60, temperature=temperature, seed=1)
    _, records = run(lm, drafter, [one], verifier=Block(), depth=18)
    assert len(records) <= 5
    assert 60 / len(layers_run) > 2 * 1 / 4


def test_hopeless_layers_come_down_to_plain_decoding(row, run):
    table = TableLM(TableLM.random(64).logits, layers=8, disturbance=100.0)
    drafter = DynamicExit(table)
    one = row(range(20), 64, max_new_tokens=30)
    _, records = run(table, drafter, [one], verifier=Block(), depth=18)
    assert len(records) == 30 and table.layers_run == 8 * 30


def test_a_seed_and_its_neighbours_do_not_change_what_was_counted(row, prompts):
    """Counts belong to a text: they start anew with each."""
    table = TableLM.random(12, layers=6)
    engine = assemble("del", table, controller="fixed", depth=6)
    kept = counts_of(engine)
    first = row(prompts[2], 12, max_new_tokens=20)
    for _ in decode([first], engine):
        pass
    again = row(prompts[2], 12, max_new_tokens=20)
    for _ in decode([again], engine):
        pass
    assert kept[0].learned and torch.equal(kept[0].counted, kept[1].counted)


def test_senseless_numbers_are_refused():
    for wrong in ({"decay": 0.0}, {"most": 0}, {"look_back": 0}, {"look_every": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DynamicExit(TableLM.random(4), DynamicExit.Config(**wrong))


@pytest.mark.parametrize("prices", [None, Prices(0.0, tuple(0.02 * n for n in range(12)), 1.0)])
def test_drafts_say_how_likely_each_node_is_reached(prices, row, prompts):
    table = TableLM(TableLM.random(12, scale=3.0).logits, layers=6, disturbance=0.3)
    drafter = DynamicExit(table)
    one = row(prompts[2], 12, max_new_tokens=20)
    (seen,) = drafter.view.prefill([one], drafter.traits.taps, last=drafter.traits.context)
    drafter.start(one, seen)
    (draft,) = drafter.propose([one], [Budget(8, 8, prices)])
    assert len(draft.tree) == len(draft.chances) > 2
    assert draft.chances[0] == 1.0
    assert list(draft.chances) == sorted(draft.chances, reverse=True)


@pytest.mark.parametrize("every", [False, True])
def test_the_papers_form_looks_behind_every_layer_in_every_round(every, row, run, plain, prompts):
    lm = open_lm(small("llama"), kernels="dense")
    drafter = DynamicExit(lm, DynamicExit.Config(every_exit=every, look_every=1 if every else 4))
    assert drafter.exits.view.depths == ((1, 2, 3) if every else (1, 2))
    looks = []
    learn = Counts.learn
    seen = lambda self, said: (looks.append(said.tokens.shape[1]), learn(self, said))  # noqa: E731
    make = lambda: [row(prompts[1], 61, max_new_tokens=24)]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counts, "learn", seen)
        found, records = run(lm, drafter, make(), verifier=Block(), depth=18)
    assert found == plain(lm, make())
    if every:
        drafted = sum(len(record.drafts[0].tree) > 1 for record in records)
        assert drafted <= len(looks) - 1 <= len(records), "the prompt, then every round asked"
        assert set(looks) == {4}


def shown(row, drafter, right, places=40, **params):
    """A row whose prompt's states agree with the last layer's in a share of all places."""
    layers = len(drafter.traits.taps)
    states = torch.zeros(places, layers, 4)
    states[:, :, 0] = 9.0
    states[: int(right * places), :-1, :] = torch.tensor([0.0, 9.0, 0.0, 0.0])
    states[: int(right * places), -1, :] = torch.tensor([0.0, 9.0, 0.0, 0.0])
    states[int(right * places) :, :-1, :] = torch.tensor([0.0, 0.0, 9.0, 0.0])
    one = row([0, 1, 2, 3], 4, max_new_tokens=60, **params)
    drafter.start(one, states[torch.randperm(places, generator=torch.Generator().manual_seed(0))])
    return one


def test_exits_that_are_never_right_are_given_up_for_good_and_for_every_drafter(row):
    target = TableLM.random(4, layers=8)
    drafter = DynamicExit(target)
    assert not drafter.hopeless
    one = shown(row, drafter, right=0.0)
    assert drafter.hopeless and DynamicExit(target).hopeless, "remembered by model"
    assert not DynamicExit(TableLM.random(4, layers=8)).hopeless, "not of another model"
    [draft] = drafter.propose([one], [priced(1.0, 0.0)])
    assert len(draft.tree) == 1 and drafter.reading() == ()
    seeded = shown(row, drafter, right=0.0, temperature=1.0, seed=1)
    drafter.propose([seeded], [priced(1.0, 0.0)])
    assert drafter.reading() == drafter.traits.taps, "a seed repeats its text whatever was found"


def test_exits_that_are_right_now_and_then_are_not_given_up(row):
    drafter = DynamicExit(TableLM.random(4, layers=8))
    shown(row, drafter, right=0.4)
    assert drafter.exits.evidence.complete and not drafter.hopeless


def test_an_exit_has_to_be_right_as_often_as_it_costs_itself(row):
    """All exits are right in three of ten places: the first one pays so, the last one alone not."""
    target = TableLM.random(4, layers=8)
    deep = DynamicExit(target, DynamicExit.Config(candidates=(4,)))
    shown(row, deep, right=0.3)
    assert deep.exits.prices == [0.5] and deep.hopeless
    every = DynamicExit(target)
    shown(row, every, right=0.3)
    assert every.exits.prices[0] == 0.125 and not every.hopeless, "of these exits nothing was known"


def test_few_exits_of_the_first_half_are_considered_by_default():
    assert considered(28, False) == (4, 7, 11, 14) and considered(12, False) == (2, 3, 5, 6)
    assert considered(6, False) == (1, 2, 3) and considered(1, False) == considered(1, True) == (1,)
    assert considered(6, True) == (1, 2, 3, 4, 5)


def test_the_end_of_a_prompt_is_read_in_about_a_plain_step_and_in_eight_places_at_least():
    """Heads as dear as eight layers are those of small models with large vocabularies."""
    assert read_at_once(28, 8.0, 5) == 8 and read_at_once(32, 4.0, 5) == 14
    assert read_at_once(4, 0.1, 3) == read_at_once(8, 0.0, 5) == 32
    table = TableLM.random(4, layers=8)
    assert DynamicExit(table).exits.looked_back == 32
    asked = DynamicExit(table, DynamicExit.Config(look_back=3)).exits
    assert asked.looked_back == 3 and asked.context == 24, "what is looked at once needs more"


def test_the_papers_setting_drafts_behind_any_exit(row):
    target = TableLM.random(4, layers=8)
    drafter = DynamicExit(target)
    one = shown(row, drafter, right=0.0)
    drafter.exits.counts(one).learn(predicted([[1] * (len(drafter.traits.taps) - 1)] * 9))
    target.prefill([one])
    [draft] = drafter.propose([one], [FREE])
    assert drafter.hopeless and len(draft.tree) > 1


def test_one_look_at_a_few_places_decides(row):
    drafter = DynamicExit(TableLM.random(4, layers=8))
    looks, predictions = [], drafter.exits.view.predictions

    def watched(states):
        looks.append([tuple(one.shape[:2]) for one in states])
        return predictions(states)

    drafter.exits.view.predictions = watched
    for _ in range(3):
        shown(row, drafter, right=0.5)
    assert looks == [[(24, 5)]], "all exits and the last layer, of the first prompt"


def test_a_row_that_repeats_its_text_is_looked_at_alone(row, step):
    """What others bring to a product may change its last bits."""
    drafter = DynamicExit(TableLM.random(4, layers=8))
    seeded = [shown(row, drafter, right=0.5, temperature=1.0, seed=seed) for seed in (1, 2)]
    rows = [*seeded, *(shown(row, drafter, right=0.5) for _ in range(2))]
    drafter.view.prefill(rows)
    drafts = drafter.propose(rows, [FREE] * 4)
    looks, predictions = [], drafter.exits.view.predictions

    def watched(states):
        looks.append(len(states))
        return predictions(states)

    drafter.exits.view.predictions = watched
    states = [
        Scores(torch.zeros(len(one.tree), 4), torch.zeros(len(one.tree), 5, 4)) for one in drafts
    ]
    drafter.observe(step(rows, drafts, [Verdict((), 1)] * 4, states))
    assert looks == [1, 1, 2]

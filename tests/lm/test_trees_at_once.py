"""A tree grown in one call in C is the one grown level by level; so is what it leaves behind."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import pkgutil
import random

import pytest
import torch
from play import change_weight, random_tokens

import foretoken
from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.priced_chain import PricedChain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.drafters.parts.trained_head import HeadOptions
from foretoken.engine.engine import Engine, decode
from foretoken.heads import store
from foretoken.heads.eagle3 import Eagle3
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.kernels import position_tables, segmented
from foretoken.lm.kernels.linears import can_pack
from foretoken.lm.opening import open_draft
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.trees_at_once import TreesAtOnce
from foretoken.lm.views.view import TargetView
from foretoken.native import library as native
from foretoken.native.growth import Forward, Growth
from foretoken.row import make_row
from foretoken.training.online.served import RoutedDrafts
from foretoken.types import Budget, Prices, SamplingParams
from foretoken.verifiers.recursive import Recursive
from tests.heads.eagle3_kinds import KINDS

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or isinstance(native.library(), native.Unavailable),
    reason="no oneDNN, no C compiler or no OpenMP here",
)
FAMILIES = ("llama", "qwen2", "qwen3")  # whose forward is one call
PRICES = Prices(0.08, tuple(0.02 * n for n in range(40)), 1.0)
STEEP = Prices(0.02, tuple(0.004 * n**1.5 for n in range(40)), 1.0)
VOCAB = 576  # so many that both ways look for the best by one operation
RULES = {
    "tree": (BestFirst, {"min_gain": 0.0}, Budget(5, 12)),
    "narrow tree": (BestFirst, {"branch": 2, "calibrate": False}, Budget(4, 9)),
    "priced tree": (BestFirst, {}, Budget(8, 30, PRICES)),
    "steep prices": (BestFirst, {}, Budget(6, 30, STEEP)),
    "level gain": (
        BestFirst,
        {"min_gain": 0.0, "calibrate": False, "level_gain": 0.1},
        Budget(6, 12),
    ),
    "chain": (PricedChain, None, Budget(6, 6)),
    "priced chain": (PricedChain, None, Budget(8, 8, Prices(0.02, (0.0,) * 20, 1.0))),
}


class LevelByLevel(OrdinaryModel):
    """A draft model that is asked about every level."""

    def grow_trees(self, rows, rules, names=None):
        return [None] * len(rows)


class Granted(Fixed):
    """The same budget in every step."""

    def __init__(self, budget):
        super().__init__()
        self.granted = budget

    def budgets(self, rows):
        return [self.granted] * len(rows)


@pytest.fixture
def grown(monkeypatch):
    """What every tree that was to grow in one call came to: None, unfinished or whole."""
    seen = []
    own = TreesAtOnce.grow

    def noting(self, *given):
        found = own(self, *given)
        seen.extend(None if one is None else one.whole for one in found)
        return found

    monkeypatch.setattr(TreesAtOnce, "grow", noting)
    return seen


def words(count):
    """A text of so many tokens."""
    return tuple(token % VOCAB for token in random_tokens(random.Random(count), count))


def read_something(lm):
    row = make_row(list(words(9)), SamplingParams(), SeededCoins(0), VOCAB)
    lm.prefill([row])
    lm.free([row])


@pytest.fixture
def pair(made):
    """A draft whose laws are neither flat nor certain, and a target."""

    def make(family, dtype=torch.float32, alike=False):
        lively = {"vocab_size": VOCAB, "initializer_range": 0.3}
        torch.manual_seed(1)
        draft, _ = made(family, dtype, **lively)
        torch.manual_seed(1 if alike else 2)
        target, _ = made(family, dtype, **lively)
        read_something(draft)  # buffers of a cache are made by its first forward
        return draft, target

    return make


def played(target, draft, kind, grower, prompts=((5, 9, 2, 41),), between=None, **options):
    """New tokens and drafts of texts that a drafter writes with, all rows together."""
    make, config, budget = grower
    drafter = make(kind(draft), None if config is None else make.Config(**config))
    engine = Engine(target, drafter, Recursive(), Granted(budget))
    params = SamplingParams(**{"max_new_tokens": 40, **options})
    rows = [make_row(list(p), params, SeededCoins(3 + i), VOCAB) for i, p in enumerate(prompts)]
    trees = []
    for step in decode(rows, engine):
        trees += [
            (draft.tree.tokens, draft.tree.parents, draft.chances, drawn_from(draft))
            for draft in step.drafts
        ]
        if between is not None:
            between(len(trees))
    return [(row.new_tokens, row.coins.used) for row in rows], trees, learned(drafter)


def drawn_from(draft):
    """The laws of a draft, bit by bit."""
    return [None if law is None else law.numpy().tobytes() for law in draft.q or ()]


def learned(drafter):
    """What a drafter made of its trees: experience with confidence, and with levels."""
    if isinstance(drafter, PricedChain):
        return drafter.shared.calibration.hits, drafter.shared.calibration.promised
    known, decline = drafter.ranker.calibration, drafter.ranker.decline
    counts = None if known is None else (known.hits, known.promised)
    return counts, decline.last, decline.following


def both(target, draft, grower, **options):
    """Texts and drafts in one call and level by level."""
    return [
        played(target, draft, kind, grower, **options) for kind in (OrdinaryModel, LevelByLevel)
    ]


@pytest.mark.parametrize(("name", "kind"), [("growth", Growth), ("forward", Forward)])
def test_c_and_python_agree_on_what_a_tree_is_made_of(name, kind):
    size = getattr(ctypes.CDLL(str(native.library().path)), f"{name}_bytes")
    size.restype = ctypes.c_int64
    assert ctypes.sizeof(kind) == size()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_tree_grown_level_by_level(family, rule, pair, grown):
    draft, target = pair(family)
    for prompt in ((5, 9, 2, 41), (7,), words(30)):
        once, by_level = both(target, draft, RULES[rule], prompts=(prompt,))
        assert once == by_level
    assert grown and all(grown)
    assert len({len(tokens) for tokens, *_ in once[1]}) > 1 or rule == "chain"


@pytest.mark.parametrize("rule", ["tree", "priced tree", "chain", "priced chain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_every_type_and_at_every_temperature(dtype, rule, pair, grown):
    draft, target = pair("llama", dtype)
    for temperature in (0.0, 0.6, 1.0, 2.5):
        once, by_level = both(target, draft, RULES[rule], temperature=temperature, seed=1)
        assert once == by_level
    assert all(grown) and len(grown) >= 60


def test_a_drawn_token_without_a_chance_by_the_logits_alone_stays(pair, grown):
    """Of temperature 1, which confidence is told of, its probability is zero by rounding."""
    draft, target = pair("llama")
    with torch.no_grad():
        draft.model.lm_head.weight.mul_(60.0)
    draft.refresh()
    once, by_level = both(target, draft, RULES["priced chain"], temperature=40.0, seed=1)
    assert once == by_level and all(grown)
    ended = [chances for _, _, chances, _ in once[1] if chances[-1] == 0.0]
    assert ended and min(map(len, ended)) > 1


@pytest.mark.parametrize("rule", ["chain", "priced chain"])
def test_laws_that_are_no_numbers_end_a_drawn_chain(rule, pair, grown):
    draft, target = pair("llama")
    with torch.no_grad():
        draft.model.lm_head.weight[:7] = 3e38  # finite, which logits are not
    draft.refresh()
    once, by_level = both(target, draft, RULES[rule], temperature=1.0, seed=1)
    assert once == by_level and all(grown)
    assert {len(tokens) for tokens, *_ in once[1]} == {1}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_chains_of_rows_grow_together(temperature, pair, grown):
    """Each with coins of its own, however many rows it shares forwards with."""
    draft, target = pair("llama")
    prompts = ((5, 9, 2, 41), (7, 3), words(30), (1, 2, 3))
    options = {"temperature": temperature, "seed": 1}
    for rule in ("chain", "priced chain"):
        once, by_level = both(target, draft, RULES[rule], prompts=prompts, **options)
        assert once == by_level
    assert grown.count(True) > 60 and all(grown)


def test_the_cache_holds_what_the_path_says(pair, grown):
    """Logits behind a text whose trees grew in one call are those of a forward of its own."""
    draft, target = pair("llama", alike=True)
    make, config, budget = RULES["tree"]
    drafter = make(OrdinaryModel(draft), make.Config(**config))
    row = make_row([5, 9, 2, 41], SamplingParams(max_new_tokens=30), SeededCoins(0), VOCAB)
    lengths = []
    for step in decode([row], Engine(target, drafter, Recursive(), Granted(budget))):
        lengths.append(len(step.verdicts[0].path))
        if row.finish is None:
            draft.self_check(row)
    assert max(lengths) > 2 and all(grown)


def test_end_tokens_end_their_branches(pair, grown):
    draft, target = pair("llama")
    [(text, _)], *_ = played(target, draft, LevelByLevel, RULES["tree"])
    ends = frozenset(range(0, VOCAB, 3)) - set(text[:20])
    once, by_level = both(target, draft, RULES["tree"], eos=ends)
    assert once == by_level and all(grown)
    assert ends & {token for tokens, *_ in once[1] for token in tokens}


def test_a_full_buffer_is_gone_on_from(pair, grown):
    """Columns run out in the middle of a tree: the rest is grown level by level, in larger ones."""
    draft, target = pair("llama")
    prompt = words(100)
    once, by_level = both(target, draft, RULES["tree"], prompts=(prompt,), max_new_tokens=60)
    assert once == by_level
    assert False in grown and grown.count(True) > 10


def test_a_chain_that_outgrows_its_buffer_is_gone_on_from(pair, grown):
    draft, target = pair("llama")
    for rule, temperature in itertools.product(("chain", "priced chain"), (0.0, 1.0)):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 1}
        for length in range(119, 127):
            once, by_level = both(target, draft, RULES[rule], prompts=(words(length),), **options)
            assert once == by_level
            draft.reset()
            read_something(draft)
    assert False in grown and grown.count(True) > 10


def test_a_tree_larger_than_its_memory_is_gone_on_from(pair, grown):
    """Wide levels of many children make more nodes than are kept room for."""
    draft, target = pair("llama")
    draft.lean.reach = 64
    rule = (BestFirst, {"min_gain": 0.0, "branch": 60}, Budget(6, 60))
    once, by_level = both(target, draft, rule, max_new_tokens=12)
    assert once == by_level
    assert False in grown


def test_budgets_beyond_one_call_are_asked_for_by_level(pair, grown):
    draft, target = pair("llama")
    rule = (BestFirst, {}, Budget(3, 70))
    once, by_level = both(target, draft, rule, max_new_tokens=12)
    assert once == by_level and not any(grown)


def test_a_table_of_positions_that_is_too_short_is_gone_on_from(pair, grown, monkeypatch):
    """The look-up beyond it does nothing; the level's forward makes a longer one."""
    monkeypatch.setattr(position_tables, "FIRST", 64)
    draft, target = pair("llama")
    draft.cache.reserve([0], [1000])
    once, by_level = both(target, draft, RULES["tree"], max_new_tokens=300)
    assert once == by_level and grown.count(True) > 50
    assert set(grown) - {True}, "no tree met the end of the table"


def test_weights_put_in_place_of_others_are_followed(pair, grown):
    draft, target = pair("llama")
    layer = draft.model.model.layers[1]
    before = layer.mlp.down_proj.weight

    def change(step):
        if step == 3:
            change_weight(layer, "parameter")
            draft.refresh()

    once = played(target, draft, OrdinaryModel, RULES["tree"], between=change)
    layer.mlp.down_proj.weight = before
    draft.refresh()
    plain = played(target, draft, OrdinaryModel, RULES["tree"])
    by_level = played(target, draft, LevelByLevel, RULES["tree"], between=change)
    assert once == by_level and once[1] != plain[1] and all(grown)


def test_a_draft_of_few_rows_names_the_targets_tokens(pair, grown):
    whole, target = pair("llama")
    words = OutputRows.of_tokens(range(1, VOCAB, 2), VOCAB)
    draft = open_draft(whole.model, rows=words)
    draft.lm.lean.reach = 32
    read_something(draft)
    for rule, temperature in itertools.product(("tree", "priced tree", "chain"), (0.0, 1.0)):
        once, by_level = both(target, draft, RULES[rule], temperature=temperature)
        assert once == by_level
        drafted = {token for tokens, *_ in once[1] for token in tokens[1:]}
        assert drafted and drafted <= set(words.tokens.tolist())
    assert grown and all(grown)


@pytest.mark.parametrize("rule", RULES)
def test_rows_grow_together(rule, pair, grown):
    """Of any lengths, some of which end before others: each as level by level."""
    draft, target = pair("llama")
    prompts = ((5, 9, 2, 41), (7, 3), words(30), (1, 2, 3))
    once, by_level = both(target, draft, RULES[rule], prompts=prompts)
    assert once == by_level
    alone = [played(target, draft, OrdinaryModel, RULES[rule], prompts=(p,))[0] for p in prompts]
    assert once[0] == [text for [text] in alone]
    assert grown.count(True) > 60


def test_rows_too_many_for_one_forward_are_gone_on_from(pair, grown):
    draft, target = pair("llama")
    draft.lean.reach = 20
    prompts = [words(n) for n in (3, 5, 8, 13, 21)]
    once, by_level = both(target, draft, RULES["tree"], prompts=prompts)
    assert once == by_level
    assert False in grown and True in grown


def test_one_row_that_is_full_leaves_the_others_growing(pair, grown):
    """Columns end for the longest alone: it goes on level by level, the others are whole."""
    draft, target = pair("llama")
    prompts = [words(n) for n in (122, 5, 8)]
    once, by_level = both(target, draft, RULES["tree"], prompts=prompts, max_new_tokens=8)
    assert once[:2] == by_level[:2]  # what levels gain is learned in another order
    assert False in grown and grown.count(True) > 2


def test_each_row_grows_by_the_draft_of_its_topic(pair, grown):
    """Rows of two drafts in one batch, given back in their order."""
    (one, target), (other, _) = pair("llama"), pair("llama", alike=True)
    with torch.no_grad():
        other.model.lm_head.weight.copy_(other.model.lm_head.weight.roll(7, 0))
    other.refresh()
    routed = RoutedDrafts([one, other], lambda prompt: prompt[0] % 2, one)
    prompts = [(5, 9, 2), (8, 3), (1, 2, 3, 4), (6,)]
    once, by_level = both(target, routed, RULES["tree"], prompts=prompts)
    assert once[:2] == by_level[:2]  # what levels gain is learned draft by draft
    assert grown.count(True) > 40
    assert once[1] != played(target, one, OrdinaryModel, RULES["tree"], prompts=prompts)[1]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.8, "top_k": 5}, {"repetition_penalty": 1.3}, {"banned_tokens": {5, 7}}],
)
def test_laws_that_options_cut_are_asked_for_by_level(options, pair, grown):
    draft, target = pair("llama")
    once, by_level = both(target, draft, RULES["tree"], seed=1, **options)
    assert once == by_level and not grown


def test_one_without_c_is_asked_level_by_level(pair, grown, monkeypatch):
    monkeypatch.setattr(segmented, "operation", lambda *_: None)
    draft, target = pair("llama")
    once, by_level = both(target, draft, RULES["tree"])
    assert once == by_level and not any(grown) and grown


def provider(kind, name):
    """The class in which a method is written, as its distance from `kind`."""
    return next(i for i, one in enumerate(kind.__mro__) if name in vars(one))


def descendants(kind):
    below = kind.__subclasses__()
    return [kind, *itertools.chain.from_iterable(map(descendants, below))]


@pytest.mark.parametrize("base", [TargetView, OrdinaryModel, CachedLM, StateReader])
def test_whoever_changes_what_is_said_of_levels_says_so_of_trees(base):
    """Else its model would grow trees by other scores."""
    for module in pkgutil.walk_packages(foretoken.__path__, "foretoken."):
        if {"lm", "drafters", "audit", "training"} & {*module.name.split(".")}:
            importlib.import_module(module.name)
    kinds = [kind for kind in descendants(base) if "test_" not in kind.__module__]
    assert len(kinds) > 1 or base is StateReader
    for kind in kinds:
        of_trees = provider(kind, "grow_trees")
        refuses = vars(kind.__mro__[of_trees])["grow_trees"] is vars(TargetView)["grow_trees"]
        names = ("grow", "_advance", "_run", "read", "said")
        changed = [name for name in names if hasattr(kind, name)]
        assert refuses or all(of_trees <= provider(kind, name) for name in changed), kind


@pytest.fixture
def head(tmp_path):
    """A folder with a random head for a target, which reads two of its layers."""

    def make(target, dtype=torch.float32, **options):
        torch.manual_seed(4)
        config = Eagle3.Config(
            hidden_size=target.hidden_size, vocab_size=VOCAB, taps=(0, 2), width=128, layers=2,
            heads=2, inner=192, tokens=VOCAB - 64, **options,
        )  # fmt: skip
        made = Eagle3(config)
        for weight in made.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.25)
        made.scored.copy_(torch.arange(VOCAB - 64) + 9)
        return store.save(tmp_path / f"{dtype}{len(options)}", "eagle3", made.to(dtype), {})

    return make


def by_head(target, folder, grower, kind, **options):
    """What is written and drafted with a head, its trees grown whole or asked level by level."""

    def opened(at):
        reader = kind(target, "eagle3", HeadOptions(draft_head=at))
        reader.decoder.lean.reach = 32
        reader.decoder.reset()  # sessions share it
        read_something_entered(reader.decoder)
        return reader

    return played(target, folder, opened, grower, **options)


def both_by_head(target, folder, grower, **options):
    """In one call and level by level, behind a first run: kernels of a head settle in it."""
    by_head(target, folder, grower, HeadByLevel, **options)
    return [by_head(target, folder, grower, kind, **options) for kind in (StateReader, HeadByLevel)]


def read_something_entered(lm):
    row = make_row(list(words(3)), SamplingParams(), SeededCoins(0), VOCAB)
    lm.supply(row, torch.zeros(2, lm.hidden_size, dtype=lm.model.dtype))
    lm.prefill([row])
    lm.free([row])


class HeadByLevel(StateReader):
    """A head that is asked about every level."""

    def grow_trees(self, rows, rules):
        return [None] * len(rows)


@pytest.mark.parametrize("rule", ["tree", "priced tree", "chain"])
@pytest.mark.parametrize("which", KINDS)
def test_a_heads_trees_are_those_grown_level_by_level(which, rule, pair, head, grown):
    _, target = pair("llama")
    folder = head(target, **KINDS[which])
    for prompts in (((5, 9, 2, 41),), ((7,),), (words(30), (7, 3), (1, 2, 3))):
        once, by_level = both_by_head(target, folder, RULES[rule], prompts=prompts)
        assert once == by_level
    assert len(grown) > 60 and all(grown)
    assert len({len(tokens) for tokens, *_ in once[1]}) > 1 or rule == "chain"


def test_a_heads_trees_in_bfloat16_and_at_temperatures(pair, head, grown):
    _, target = pair("llama", torch.bfloat16)
    folder = head(target, torch.bfloat16, **KINDS["and outputs made of them"])
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 1}
        for rule in ("tree", "priced chain"):
            once, by_level = both_by_head(target, folder, RULES[rule], **options)
            assert once == by_level
    assert len(grown) > 60 and all(grown)


def test_a_heads_tree_that_finds_no_room_is_gone_on_from(pair, head, grown):
    """What its decoder said at nodes fed so far is what the next level goes on with."""
    _, target = pair("llama")
    folder = head(target)
    options = {"prompts": (words(100),), "max_new_tokens": 60}
    once, by_level = both_by_head(target, folder, RULES["tree"], **options)
    assert once == by_level
    assert False in grown and grown.count(True) > 10


def test_a_heads_row_that_is_full_leaves_the_others_growing(pair, head, grown):
    _, target = pair("llama")
    options = {"prompts": [words(n) for n in (122, 5, 8)], "max_new_tokens": 8}
    once, by_level = both_by_head(target, head(target), RULES["tree"], **options)
    assert once[:2] == by_level[:2]  # what levels gain is learned in another order
    assert False in grown and grown.count(True) > 2

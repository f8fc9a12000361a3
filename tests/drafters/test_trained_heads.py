"""Heads as draft models: a new module and its rows run under every rule, alone and in company."""

import sys
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from foretoken.audit import law
from foretoken.audit.fixtures import random_head
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.product import Product
from foretoken.drafters.growers.sampled_tree import SampledTree
from foretoken.drafters.parts.parallel_heads import ParallelHeads
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.engine.engine import Engine
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads.decoder_layer import DecoderLayer, causal
from foretoken.heads.llama import llama_of
from foretoken.heads.table import HEADS, Head, HeadConfig
from foretoken.lm import draft_vocabulary
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.types import FinalNorm, Layer
from foretoken.verifiers.block import Block
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive

VOCAB = 5


class ToyFeature(nn.Module):
    """A decoder layer over the sum of embedding and state."""

    begins, goes_on, scored, adds_tokens = 0, Layer(-1), None, False

    def reads_of(self, layers):
        return (FinalNorm(),)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(HeadConfig):
        heads: int = 1

    def __init__(self, config):
        super().__init__()
        self.config, self.width = config, config.hidden_size
        self.layer = DecoderLayer(config.hidden_size, config.heads, 8)

    def fused(self, states):
        return states[..., 0, :]

    def entering(self, tokens, before, embed):
        return 3 * embed(tokens) + before

    def decoder(self, positions):
        return llama_of([self.layer], None, None, positions)


class ToyParallel(nn.Module):
    """A linear map per place."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(HeadConfig):
        depth: int = 3

    def __init__(self, config):
        super().__init__()
        self.config, self.depth = config, config.depth
        self.scored = torch.arange(config.vocab_size)
        self.out = nn.Linear(config.hidden_size, config.depth * config.vocab_size)

    def forward(self, states):
        return self.out(states).unflatten(-1, (self.depth, -1))


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Rows for the heads of this file, which stands where their module files would."""
    monkeypatch.setitem(sys.modules, "foretoken.heads.toys", sys.modules[__name__])
    for name, module in (("toy-feature", "ToyFeature"), ("toy-parallel", "ToyParallel")):
        row = Head(name=name, summary="a toy", module=f"heads.toys:{module}", serves="chain")
        monkeypatch.setitem(HEADS, name, row)
    random_head.cache_clear()


def head_of(cls, target, kind):
    folder = random_head(kind, target.vocab_size, target.hidden_size)
    return cls(target, kind, cls.Config(draft_head=folder))


def feature(target):
    return head_of(StateReader, target, "toy-feature")


def parallel(target):
    return head_of(ParallelHeads, target, "toy-parallel")


def opened(model, target, row):
    [features] = target.prefill([row], (FinalNorm(),))
    assert model.open(row, features)
    target.free([row])
    return row


def laws_along(model, row, path):
    """Logits after the root and after each token of a chain below it."""
    found, above = [], -1
    for token in (row.tokens[-1], *path):
        [score] = model.grow([row], [[token]], [[above]])
        found.append(score.logits[0])
        above += 1
    return torch.stack(found)


@pytest.fixture
def target():
    return TableLM.random(VOCAB, seed=1)


def test_a_layer_with_memory_says_what_it_says_at_once():
    torch.manual_seed(0)
    layer = DecoderLayer(6, 2, 10)
    x, places = torch.randn(2, 5, 6), torch.arange(5).expand(2, -1)
    none = torch.zeros(2, 0, layer.memory_size)
    whole, kept = layer(x, places, causal(5).expand(2, -1, -1), none)
    first, memory = layer(x[:, :3], places[:, :3], causal(3).expand(2, -1, -1), none)
    rest, _ = layer(x[:, 3:], places[:, 3:], causal(5)[:, 3:].expand(2, -1, -1), memory)
    assert torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-6)
    assert torch.allclose(memory, kept[:, :3])
    changed = x.clone()
    changed[:, -1] += 1.0
    later, _ = layer(changed, places, causal(5).expand(2, -1, -1), none)
    assert torch.allclose(later[:, :-1], whole[:, :-1], atol=1e-6), "nobody sees what is to come"


def test_positions_count_from_each_other():
    torch.manual_seed(0)
    layer = DecoderLayer(6, 2, 10)
    x, none = torch.randn(1, 4, 6), torch.zeros(1, 0, layer.memory_size)
    here, far, mixed = (
        layer(x, torch.tensor([places]), causal(4), none)[0]
        for places in ([0, 1, 2, 3], [7, 8, 9, 10], [3, 1, 0, 2])
    )
    assert torch.allclose(here, far, atol=1e-5)
    assert not torch.allclose(here, mixed, atol=1e-3)


def test_each_node_of_a_tree_sees_its_own_path_only(target, row):
    model = feature(target)
    one = opened(model, target, row([1, 2, 0, 3], VOCAB))
    root = model.grow([one], [[3]], [[-1]])[0].logits
    level = model.grow([one], [[0, 4, 2]], [[0, 0, 0]])[0].logits
    below = model.grow([one], [[1, 1]], [[2, 1]])[0].logits
    for path, said in (
        ((4, 1), (root[0], level[1], below[0])),
        ((0, 1), (root[0], level[0], below[1])),
    ):
        alone = opened(model, target, row([1, 2, 0, 3], VOCAB))
        assert torch.allclose(laws_along(model, alone, path), torch.stack(said), atol=1e-5)
    assert not torch.allclose(below[0], below[1], atol=1e-3), "the same token on two paths"


def test_rows_of_different_lengths_and_levels_share_a_forward(target, row):
    model, texts = feature(target), ([2], [1, 2, 0, 3], [0, 4, 4, 1, 2, 3, 1])
    rows = [opened(model, target, row(text, VOCAB)) for text in texts]
    roots = model.grow(rows, [[r.tokens[-1]] for r in rows], [[-1]] * 3)
    nodes = model.grow(rows, [[1, 3], [2], [4, 0, 1]], [[0, 0], [0], [0, 0, 0]])
    for i, text in enumerate(texts):
        alone = opened(model, target, row(text, VOCAB))
        said = laws_along(model, alone, [[1, 2, 4][i]])
        together = torch.stack([roots[i].logits[0], nodes[i].logits[0]])
        assert torch.allclose(said, together, atol=1e-5)


def test_a_text_followed_is_a_text_taken_in_whole(target, row):
    model, grown = feature(target), row([1, 2, 0], VOCAB)
    opened(model, target, grown)
    for tree, accepted in ((True, [4, 3]), (False, [0]), (True, [])):
        path = None
        if tree:
            laws_along(model, grown, [4, 3])
            path = range(1, 1 + len(accepted))
        contexts = [grown.tokens + accepted[:n] for n in range(len(accepted) + 1)]
        states = torch.stack([target.after(tokens) for tokens in contexts])[:, None]
        grown.tokens += [*accepted, 2]
        model.keep([grown], [path], [states])
    fresh = opened(model, target, row(grown.tokens, VOCAB))
    both = [laws_along(model, one, [1, 0]) for one in (grown, fresh)]
    assert torch.allclose(*both, atol=1e-5)
    again = laws_along(model, grown, [1, 0])
    assert torch.allclose(both[0], again, atol=1e-5), "a tree opened twice, as after a failed step"
    model.close(grown)
    assert model not in grown.private


def test_parallel_heads_read_the_state_behind_which_the_last_token_was_said(target, row):
    model = parallel(target)
    rows = [opened(model, target, row(text, VOCAB)) for text in ([3], [1, 2, 0], [4, 4])]
    laws = model.laws(rows, 2)
    assert [len(one) for one in laws] == [0, 2, 2], "one token: nothing was said before it"
    state = target.after([1, 2])[None]
    assert torch.allclose(laws[1], model.head(state)[0, :2])
    model.keep(rows[:1], [torch.stack([target.after([3]), target.after([3, 1])])[:, None]])
    state = target.after([3, 1])[None]
    assert torch.allclose(model.laws(rows[:1], 3)[0], model.head(state)[0])


@pytest.mark.parametrize(
    ("grower", "rule"), [(Chain, Block), (SampledTree, Recursive), (BestFirst, Point)]
)
def test_the_law_is_the_targets_whatever_grows_trees_of_a_feature_head(grower, rule):
    def build():
        lm = TableLM.random(3, seed=21)
        return Engine(lm, grower(feature(lm)), rule(), Fixed(Fixed.Config(depth=2, nodes=3)))

    gap = law.law_gap(build, TableLM.random(3, seed=21), {"temperature": 0.8})
    assert gap.variation <= law.BOUND and gap.law.drafted > 0


def reduced(target, tokens):
    """A feature head whose folder lists the tokens that it scores."""
    folder = random_head("toy-feature", target.vocab_size, target.hidden_size)
    draft_vocabulary.write(folder / draft_vocabulary.NAME, tokens, target.vocab_size)
    return StateReader(target, "toy-feature", StateReader.Config(draft_head=folder))


@pytest.mark.parametrize(
    ("grower", "rule"), [(Chain, Block), (SampledTree, Recursive), (BestFirst, Point)]
)
def test_the_law_is_the_targets_where_a_head_scores_some_tokens_only(grower, rule):
    def build():
        lm = TableLM.random(3, seed=21)
        return Engine(
            lm, grower(reduced(lm, [0, 2])), rule(), Fixed(Fixed.Config(depth=2, nodes=3))
        )

    gap = law.law_gap(build, TableLM.random(3, seed=21), {"temperature": 0.8})
    assert gap.variation <= law.BOUND and gap.law.drafted > 0


def test_a_reduced_head_reads_rows_of_the_targets_own_layer_as_it_is_now(make_llama, row):
    model = make_llama(40)
    with open_lm(model) as target:
        whole, some = feature(target), reduced(target, [3, 7, 30])
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            expected = target.unembed(hidden)
            found = some.laws.target.unembed(hidden)
            assert torch.allclose(found[:, [3, 7, 30]], expected[:, [3, 7, 30]], atol=1e-5)
            assert found.isfinite().sum() == 15
            with torch.no_grad():
                model.lm_head.weight *= 1.5
            target.refresh()
        assert whole.laws.target.unembed(hidden).isfinite().all()


def test_the_law_is_the_targets_below_parallel_heads():
    def build():
        lm = TableLM.random(3, seed=21)
        return Engine(lm, Product(parallel(lm)), Point(), Fixed(Fixed.Config(depth=2, nodes=4)))

    gap = law.law_gap(build, TableLM.random(3, seed=21), {"temperature": 0.8})
    assert gap.variation <= law.BOUND and gap.law.drafted > 0


@pytest.mark.parametrize("make", [StateReader, ParallelHeads])
def test_a_head_that_is_missing_or_anothers_is_refused(make, target):
    kind = "toy-feature" if make is StateReader else "toy-parallel"
    other = "toy-parallel" if make is StateReader else "toy-feature"
    build = partial(make, target, kind)
    with pytest.raises(ConfigError, match="without one") as caught:
        build()
    assert f"foretoken train {kind}" in caught.value.do
    with pytest.raises(CheckpointError, match=other):
        build(make.Config(draft_head=random_head(other, VOCAB, VOCAB)))
    with pytest.raises(ConfigError, match="hidden size"):
        build(make.Config(draft_head=random_head(kind, VOCAB, VOCAB + 1)))

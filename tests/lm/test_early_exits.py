"""Early exits: right logits in front of and behind the exit, every layer run once, one cache."""

import copy
import random

import pytest
import torch
import transformers as hf
from families import CHAINS, COMMON, FURTHER, REQUIRED, ROPE, SCALED, few, sharing_keys, slowly
from play import (
    closeness,
    fresh_tree,
    point,
    random_chain,
    random_path,
    random_tokens,
    random_tree,
    row_of,
)

import foretoken
from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.family import decoder_layers
from foretoken.lm.table import TableLM
from foretoken.lm.views.wrapping import early_exits
from foretoken.types import FinalNorm, Layer

CLOSE = 2e-5
CUT_BY_CONFIG = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen2",
    "phi3",
    "granite",
    "olmo2",
)


def cut(model, depth):
    """The first layers alone, with norm and head, by the model's own configuration."""
    short = copy.deepcopy(model)
    short.config.num_hidden_layers = depth
    short.base_model.layers = short.base_model.layers[:depth]
    return short


def counted(model):
    """How often each decoder layer really ran: its attention or its whole body was called."""
    runs = []
    for index, layer in enumerate(decoder_layers(model, 4)):
        inner = next(iter(layer.children()))
        inner.register_forward_hook(lambda *_, index=index: runs.append(index))
    return runs


def drafted(view, rows, trees, known, depths):
    """Feed the first nodes of each tree, level by level as drafting does; their early logits."""
    parts = [[] for _ in rows]
    for node in range(max(known)):
        active = [i for i in range(len(rows)) if node < known[i]]
        grown = view.draft(
            [rows[i] for i in active],
            [trees[i].tokens[node : node + 1] for i in active],
            [trees[i].parents[node : node + 1] for i in active],
            [depths[i] for i in active],
        )
        for i, logits in zip(active, grown, strict=True):
            parts[i].append(logits)
    return [torch.cat(part) if part else None for part in parts]


@pytest.mark.parametrize("family", [*few(REQUIRED), *slowly(FURTHER)])
def test_scoring_goes_on_behind_the_exit(family, make_tiny):
    """Ragged rows, an exit each, trees of which some nodes, one or none were drafted."""
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    view = early_exits(lm)
    rows = [row_of(random_tokens(dice, count)) for count in (1, 23, 9)]
    for row in rows:
        lm.prefill([row])
    for turn in range(4):
        depths = [dice.randrange(1, 4) for _ in rows]
        trees = [random_tree(dice, row.tokens[-1], dice.randrange(2, 9)) for row in rows]
        known = [dice.randrange(1, len(tree) + 1) for tree in trees]
        known[turn % 3] = 0
        early = drafted(view, rows, trees, known, depths)
        scores = view.score(rows, [point(tree) for tree in trees])
        for row, tree, score in zip(rows, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
        if family in CUT_BY_CONFIG:
            for row, tree, logits, depth in zip(rows, trees, early, depths, strict=True):
                if logits is not None:
                    right = fresh_tree(cut(model, depth), row.tokens, tree)[: len(logits)]
                    assert closeness(logits, right) < CLOSE
        for row, tree in zip(rows, trees, strict=True):
            path = random_path(dice, tree)
            lm.commit([row], [path])
            row.tokens += [tree.tokens[node] for node in path] + random_tokens(dice, 1)


@pytest.mark.parametrize("family", [f for f in CHAINS if f != "mpt"])
def test_chains_of_families_that_count_places(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    view = early_exits(lm, (2,))
    rows = [row_of(random_tokens(dice, count)) for count in (3, 17)]
    for row in rows:
        lm.prefill([row])
    for _ in range(3):
        trees = [random_chain(dice, row.tokens[-1], 5) for row in rows]
        drafted(view, rows, trees, [4, 2], [2, 2])
        scores = view.score(rows, [point(tree) for tree in trees])
        for row, tree, score in zip(rows, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
            lm.commit([row], [[1, 2]])
            row.tokens += [*tree.tokens[1:3], *random_tokens(dice, 1)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_a_round_runs_every_layer_once_per_pass(family, depth, compile, make_tiny, layers_run):
    """g drafted tokens: g passes of the early layers, and one of all, in two pieces."""
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense", compile=compile)
    view = early_exits(lm, (depth,))
    row = row_of([5, 8, 13, 21])
    lm.prefill([row])
    runs = counted(model) if compile == "off" else layers_run
    runs.clear()
    tree = random_chain(random.Random(0), 21, 6)  # five drafted tokens, the last is never fed
    drafted(view, [row], [tree], [5], [depth])
    view.score([row], [point(tree)])
    assert [runs.count(layer) for layer in range(4)] == [6] * depth + [1] * (4 - depth)


def test_other_nodes_than_those_drafted_are_scored_from_the_start(make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model, kernels="dense")
    view = early_exits(lm, (2,))
    row = row_of([5, 8, 13])
    lm.prefill([row])
    dice = random.Random(1)
    drafted(view, [row], [random_chain(dice, 13, 4)], [3], [2])
    other = random_tree(dice, 13, 5)
    (score,) = view.score([row], [point(other)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, other)) < CLOSE


def test_nothing_is_held_twice(make_tiny):
    """The view has the target's own parameters and cache, and leaves its layers as they were."""
    model = make_tiny("llama")
    tree = random_chain(random.Random(0), 13, 5)
    tensors = {tensor.data_ptr() for tensor in model.parameters()}
    sizes = []
    for drafting in (False, True):
        lm = open_lm(model, kernels="dense")
        view = early_exits(lm) if drafting else None
        row = row_of([5, 8, 13])
        lm.prefill([row])
        if view is not None:
            drafted(view, [row], [tree], [4], [2])
        (view or lm).score([row], [point(tree)])
        lm.commit([row], [[1, 2]])
        sizes.append(sum(group.keys.nbytes + group.values.nbytes for group in lm.cache.groups))
    assert sizes[0] == sizes[1] > 0
    assert {layer.self_attn.q_proj.weight.data_ptr() for layer in view.stack.layers} <= tensors
    assert view.model is model
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not view._open


def test_bits_do_not_depend_on_where_the_layers_were_cut(make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model, exact_bits=True)
    view = early_exits(lm)
    row = row_of([5, 8, 13, 21])
    lm.prefill([row])
    tree = random_chain(random.Random(3), 21, 6)
    (whole,) = lm.score([row], [point(tree)])
    for depth in (1, 2, 3):
        drafted(view, [row], [tree], [4], [depth])
        (parts,) = view.score([row], [point(tree)])
        assert torch.equal(parts.logits, whole.logits)


@pytest.mark.parametrize("family", SCALED)
def test_positions_that_are_scaled_by_the_call_are_refused(family, make_tiny):
    with pytest.raises(CapabilityError, match="longrope"):
        early_exits(open_lm(make_tiny(family), kernels="dense"))


def test_an_exit_lies_inside_the_model(make_tiny):
    for lm in (open_lm(make_tiny("llama"), kernels="dense"), TableLM.random(4)):
        for depth in (0, 4):
            with pytest.raises(ConfigError, match="from 1 to 3"):
                early_exits(lm, (depth,))
    with pytest.raises(CapabilityError, match="one layer"):
        early_exits(TableLM(TableLM.random(4).logits, layers=1))


def test_a_table_refuses_other_nodes_than_those_drafted():
    table = TableLM.random(4)
    view = early_exits(table, (1,))
    row = row_of([0, 1])
    table.prefill([row])
    view.draft([row], [(1, 2)], [(-1, 0)], [1])
    with pytest.raises(AssertionError, match="not those drafted"):
        view.score([row], [point(random_chain(random.Random(0), 1, 1))])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_taps_before_and_behind_the_exit_are_the_models(family, make_tiny):
    """Also where views are stacked, rows differ, and a tap was not kept by the draft."""
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    view = early_exits(early_exits(lm, (1,)), (1, 2))
    rows = [row_of(random_tokens(dice, count)) for count in (3, 11)]
    view.prefill(rows)
    trees = [random_tree(dice, row.tokens[-1], 6) for row in rows]
    for taps in ((Layer(3), Layer(0), FinalNorm(), Layer(1)), (Layer(-1), Layer(2)), ()):
        drafted(view, rows, trees, [3, 5], [1, 2])
        found = view.score(rows, [point(tree) for tree in trees], taps)
        right = lm.score(rows, [point(tree) for tree in trees], taps)
        for one, other in zip(found, right, strict=True):
            assert closeness(one.logits, other.logits) < CLOSE
            assert (one.hidden is None) == (not taps)
            assert not taps or closeness(one.hidden, other.hidden) < CLOSE


def test_a_row_that_moves_takes_its_early_layers_along(make_tiny):
    """Another row is freed between a draft and its scores, as by another thread."""
    model = make_tiny("llama")
    lm = open_lm(model, kernels="dense")
    view = early_exits(lm, (2,))
    rows = [row_of([5, 8, 13]), row_of([3, 2, 1, 7])]
    view.prefill(rows)
    tree = random_chain(random.Random(0), 7, 5)
    drafted(view, rows[1:], [tree], [4], [2])
    lm.free(rows[:1])
    (score,) = view.score(rows[1:], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, rows[1].tokens, tree)) < CLOSE


def test_layers_whose_keys_others_read_cannot_be_left_and_the_default_does_without():
    """The last layers of Gemma 3n and Gemma 4 fail where the one that they read was not run."""
    model = sharing_keys()
    options = {"kernels": "dense", "compile": "off"}
    with pytest.raises(CapabilityError, match="cannot be left early: KeyError"):
        foretoken.load(model, "layerskip", exit_layer=3, **options)
    with foretoken.load(model, **options) as session:
        assert len(session.generate([1, 2, 3], max_new_tokens=8).tokens) == 8


def test_layers_that_a_text_does_not_run_cannot_be_left_and_the_default_does_without():
    """Mllama's layers that read images pass text by."""
    torch.manual_seed(0)
    config = hf.MllamaTextConfig(
        **COMMON | {"bos_token_id": 1}, cross_attention_layers=[1], rope_parameters=dict(ROPE)
    )
    model, ids = hf.MllamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3]])
    options = {"kernels": "dense", "compile": "off"}
    with pytest.raises(CapabilityError, match="layer 1 of MllamaForCausalLM did not run"):
        foretoken.load(model, "del", **options)
    right = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    with foretoken.load(model, **options) as session:
        assert session.generate([1, 2, 3], max_new_tokens=8).tokens == right[0, 3:].tolist()


def test_a_load_that_is_short_of_memory_says_so(make_llama, monkeypatch):
    """It tells nothing of the layers: the model could be left early where there is more room."""
    lm = open_lm(make_llama(40), kernels="dense")

    def short(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.")

    monkeypatch.setattr("foretoken.lm.views.early_exits.probe", short)
    with pytest.raises(RuntimeError, match="you tried 9 bytes"):
        early_exits(lm)
    monkeypatch.undo()
    early_exits(lm)

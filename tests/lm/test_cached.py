"""Logits from the cache are those of a forward without one, whatever was scored and kept before."""

import random

import pytest
import torch
from families import CHAINS, FURTHER, REQUIRED, UNTOLD, sharing_keys
from play import (
    VOCAB,
    closeness,
    each_node,
    fresh,
    fresh_tree,
    point,
    random_chain,
    random_path,
    random_tokens,
    random_tree,
    row_of,
)

import foretoken
from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import cached
from foretoken.lm.runtime.taps import tapping
from foretoken.row import make_row
from foretoken.types import FinalNorm, Layer, SamplingParams, TokenTree

CLOSE = 2e-5
TREES = [*REQUIRED, *FURTHER]
OWN_ATTENTION_ONLY = ("falcon", "gptj")  # their modules never ask which attention to use


def keep(lm, row, tree, path, dice):
    lm.commit([row], [path])
    row.tokens += [tree.tokens[node] for node in path] + random_tokens(dice, 1)


@pytest.mark.parametrize("family", TREES)
def test_trees_in_ragged_batches_equal_fresh_forwards(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    assert lm.caps.tree == "mask" and lm.caps.ragged and lm.vocab_size == VOCAB
    assert lm.plan.own == (family not in OWN_ATTENTION_ONLY)
    rows = [row_of(random_tokens(dice, count)) for count in (1, 23, 9)]
    for row in rows:
        lm.prefill([row])
    for turn in range(5):
        if turn == 2:  # one leaves, one joins: slots move
            lm.free([rows.pop(0)])
            rows.append(row_of(random_tokens(dice, 14)))
            lm.prefill([rows[-1]])
        dice.shuffle(rows)  # any order
        some = rows if turn != 3 else rows[:2]  # any subset
        trees = [random_tree(dice, row.tokens[-1], dice.randrange(1, 13)) for row in some]
        scores = lm.score(some, [point(tree) for tree in trees])
        for row, tree, score in zip(some, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
        for row, tree in zip(some, trees, strict=True):
            keep(lm, row, tree, random_path(dice, tree), dice)


@pytest.mark.parametrize("family", ["gptj", "falcon", *UNTOLD])
def test_a_row_alone_is_masked_where_its_attention_hears_of_the_mask_only(family, make_tiny):
    """A prompt fed at once, a token and a tree; two rows together have masks in any case."""
    dice = random.Random(family)
    named = family in ("stablelm", "nemotron")  # captured, their attention is called by us
    model = make_tiny(family, **({} if named else {"num_key_value_heads": None}))
    lm = open_lm(model, kernels="dense", compile="off" if named else "auto")
    assert lm.caps.tree == "mask" and lm.caps.ragged
    row = row_of(random_tokens(dice, 12))
    lm.prefill([row])
    for _ in range(2):
        tree = random_tree(dice, row.tokens[-1], 6)
        for scored in (TokenTree(tree.tokens[:1], (-1,)), tree):
            [score] = lm.score([row], [point(scored)])
            assert closeness(score.logits, fresh_tree(model, row.tokens, scored)) < 5 * CLOSE
        keep(lm, row, tree, random_path(dice, tree), dice)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "phi3"])
def test_a_tree_grown_in_pieces_equals_fresh_forwards(family, make_tiny):
    """Drafting: single nodes and whole levels are appended, rows stop early, tokens are missing."""
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    rows = [row_of(random_tokens(dice, count)) for count in (4, 17)]
    for row in rows:
        lm.prefill([row])
    for turn in range(4):
        trees = [
            random_tree(dice, row.tokens[-1], size) for row, size in zip(rows, (14, 9), strict=True)
        ]
        grown = [[], []]
        for start, stop in ((0, 1), (1, 2), (2, 7), (7, 9), (9, 14)):
            active = [i for i in range(2) if stop <= len(trees[i])]
            scores = lm.grow(
                [rows[i] for i in active],
                [trees[i].tokens[start:stop] for i in active],
                [trees[i].parents[start:stop] for i in active],
            )
            for i, score in zip(active, scores, strict=True):
                grown[i].append(score.logits)
        for row, tree, parts in zip(rows, trees, grown, strict=True):
            assert closeness(torch.cat(parts), fresh_tree(model, row.tokens, tree)) < CLOSE
            keep(lm, row, tree, random_path(dice, tree), dice)
        if turn == 1:  # steps without a draft: the cache falls behind and catches up
            for row in rows:
                row.tokens += random_tokens(dice, 3)


@pytest.mark.parametrize("family", CHAINS)
def test_families_without_trees_score_chains(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    assert lm.caps.tree == "chain" and not lm.caps.ragged
    assert model.config.model_type in lm.caps.why
    rows = [row_of(random_tokens(dice, count)) for count in (1, 23)]
    for row in rows:
        lm.prefill([row])
    for _ in range(4):
        trees = [random_chain(dice, row.tokens[-1], dice.randrange(1, 9)) for row in rows]
        scores = lm.score(rows, [point(tree) for tree in trees])
        for row, tree, score in zip(rows, trees, scores, strict=True):
            assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
            keep(lm, row, tree, random_path(dice, tree), dice)
    forked = TokenTree((rows[0].tokens[-1], 1, 2), (-1, 0, 0))
    with pytest.raises(CapabilityError, match="chains only"):
        lm.score(rows[:1], [point(forked)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "bloom", "gpt_oss"])
def test_long_prompts_are_fed_in_chunks(family, make_tiny):
    dice = random.Random(family)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    assert lm.plan.own == (family != "bloom")
    row = row_of(random_tokens(dice, 700))
    other = row_of(random_tokens(dice, 40))
    lm.prefill([other])
    lm.prefill([row])
    tree = random_chain(dice, row.tokens[-1], 5)
    [score] = lm.score([row], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, row.tokens, tree)) < CLOSE
    # the neighbour's columns were moved into larger buffers on the way
    tree = random_chain(dice, other.tokens[-1], 5)
    [score] = lm.score([other], [point(tree)])
    assert closeness(score.logits, fresh_tree(model, other.tokens, tree)) < CLOSE


@pytest.mark.parametrize("start", [30, 36, 39, 40, 41, 60])
def test_longrope_trees_may_cross_the_switch_of_scaling(start, make_tiny):
    """Every node's logits are those of its own text, short of position 40 or beyond it."""
    dice = random.Random(start)
    model = make_tiny("phi3_longrope")
    lm = open_lm(model, kernels="dense")
    assert not lm.caps.ragged
    rows = [row_of(random_tokens(dice, start)), row_of(random_tokens(dice, 25))]
    for row in rows:
        lm.prefill([row])
    for turn in range(4):
        trees = [random_tree(dice, row.tokens[-1], 9) for row in rows]
        if turn % 2:
            scores = lm.score(rows, [point(tree) for tree in trees])
            scored = [score.logits for score in scores]
        else:
            parts = [
                lm.grow(rows, [t.tokens[a:b] for t in trees], [t.parents[a:b] for t in trees])
                for a, b in ((0, 1), (1, 5), (5, 9))
            ]
            scored = [torch.cat([s.logits for s in own]) for own in zip(*parts, strict=True)]
        for row, tree, logits in zip(rows, trees, scored, strict=True):
            assert closeness(logits, each_node(model, row.tokens, tree)) < CLOSE
            keep(lm, row, tree, random_path(dice, tree), dice)


def test_a_longrope_prompt_beyond_the_switch_is_fed_at_once(make_tiny, monkeypatch):
    """In chunks, those before the switch would be scaled as if the text ended there."""
    monkeypatch.setattr(cached, "CHUNK", 16)
    dice = random.Random(1)
    model = make_tiny("phi3_longrope")
    lm = open_lm(model, kernels="dense")
    for count in (35, 90):
        row = row_of(random_tokens(dice, count))
        lm.prefill([row])
        [score] = lm.score([row], [point(TokenTree((row.tokens[-1],), (-1,)))])
        assert closeness(score.logits, fresh(model, row.tokens)[-1:]) < CLOSE


def test_a_cache_far_behind_catches_up(make_tiny):
    dice = random.Random(1)
    model = make_tiny("mistral")
    lm = open_lm(model, kernels="dense")
    row = row_of(random_tokens(dice, 5))
    lm.prefill([row])
    row.tokens += random_tokens(dice, 600)
    [score] = lm.grow([row], [row.tokens[-1:]], [[-1]])
    assert closeness(score.logits, fresh(model, row.tokens)[-1:]) < CLOSE


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2"])
def test_tapped_layers_are_those_of_the_model(family, make_tiny):
    """The input of layer i + 1 is the output of layer i, whatever the family calls it."""
    dice = random.Random(3)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    row = row_of(random_tokens(dice, 12))
    [seen] = lm.prefill([row], taps=(Layer(0), Layer(-2)))
    tree = random_chain(dice, row.tokens[-1], 4)
    [score] = lm.score([row], [point(tree)], taps=(Layer(0), Layer(-2)))
    assert not any(module._forward_hooks for module in model.modules())
    text = row.tokens[:-1] + list(tree.tokens)
    with torch.no_grad():
        states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    right = torch.stack([states.hidden_states[1][0], states.hidden_states[3][0]], dim=1)
    assert seen.shape == (11, 2, 64) and score.hidden.shape == (4, 2, 64)
    assert closeness(torch.cat([seen, score.hidden]), right) < CLOSE


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2"])
def test_the_normed_tap_is_what_the_head_reads(family, make_tiny):
    dice = random.Random(3)
    model = make_tiny(family)
    lm = open_lm(model, kernels="dense")
    row = row_of(random_tokens(dice, 12))
    lm.prefill([row])
    [first] = lm.grow([row], [row.tokens[-1:]], [[-1]], (FinalNorm(), Layer(-1)))
    [more] = lm.grow([row], [[5, 6]], [[0, 1]], (FinalNorm(), Layer(-1)))
    assert first.hidden.shape == (1, 2, 64) and more.hidden.shape == (2, 2, 64)
    for score in (first, more):
        with torch.inference_mode():
            logits = model.get_output_embeddings()(score.hidden[:, 0])
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = cap * torch.tanh(logits / cap) if cap else logits
        assert closeness(logits, score.logits) < CLOSE
        assert not torch.allclose(score.hidden[:, 0], score.hidden[:, 1])
    assert not any(module._forward_hooks for module in model.modules())


def test_taps_are_of_all_tokens_where_the_last_layers_read_the_keys_of_others():
    """Gemma 4 runs those for the last tokens alone where it is told how many logits are wanted."""
    model = sharing_keys(8)
    lm = open_lm(model, kernels="dense", compile="off")
    row = row_of(random_tokens(random.Random(3), 12))
    [seen] = lm.prefill([row], (Layer(0), Layer(-1), FinalNorm()))
    right, body = [], model.model
    for module in (body.layers[0], body.layers[-1], body.norm):
        module.register_forward_hook(lambda *given: right.append(given[-1][0]))
    with torch.no_grad():
        body(torch.tensor([row.tokens[:-1]]), use_cache=False)
    assert seen.shape == (11, 3, 64)
    assert closeness(seen, torch.stack(right, dim=1)) < CLOSE


class Several(torch.nn.Module):
    """Hands on several states of each token, as the layers of Gemma 3n do."""

    def forward(self, states):
        return states.expand(4, -1, -1, -1)


def test_layers_that_hand_on_several_states_of_a_token_are_refused_where_they_are_read():
    layer, refused = Several(), pytest.raises(CapabilityError, match="several states of each token")
    with refused, tapping([layer], layer, (Layer(0),)):
        layer(torch.zeros(1, 2, 3))


def test_taps_of_a_one_token_prompt_are_empty(make_tiny):
    lm = open_lm(make_tiny("llama"), kernels="dense")
    assert lm.prefill([row_of([3])], taps=(Layer(1),))[0].shape == (0, 1, 64)


def test_rows_with_nothing_to_feed_ride_along(make_tiny):
    lm = open_lm(make_tiny("llama"), kernels="dense")
    rows = [row_of([3, 4, 5]), row_of([6])]
    for row in rows:
        lm.prefill([row])
    first, none = lm.grow(rows, [[5], []], [[-1], []])
    assert first.logits.shape == (1, VOCAB) and none.logits.shape == (0, VOCAB)


def test_freed_rows_leave_nothing_and_unknown_rows_are_ignored(make_tiny):
    lm = open_lm(make_tiny("llama"), kernels="dense")
    rows = [row_of([3, 4, 5]), row_of([6, 7])]
    for row in rows:
        lm.prefill([row])
    lm.free([row_of([1])])
    lm.free(rows)
    lm.free(rows)
    assert lm.rows_held == 0
    lm.prefill([rows[0]])  # a freed row may come back


def test_misuse_is_caught(make_tiny):
    lm = open_lm(make_tiny("llama"), kernels="dense")
    row = row_of([3, 4, 5])
    with pytest.raises(AssertionError, match="never prefilled"):
        lm.grow([row], [[5]], [[-1]])
    lm.prefill([row])
    with pytest.raises(AssertionError, match="already cached"):
        lm.prefill([row])
    lm.grow([row], [[5]], [[-1]])
    with pytest.raises(AssertionError, match="never fed"):
        lm.commit([row], [[1]])


def test_the_model_is_given_back_as_it_was(make_tiny):
    model = make_tiny("llama")
    model.train()
    text = torch.tensor([[5, 6, 7, 8]])
    before = model(text).logits
    with open_lm(model, kernels="dense") as lm:
        lm.prefill([row_of([1, 2, 3])])
        assert model.config._attn_implementation == "sdpa"
        with torch.no_grad():
            assert torch.equal(model(text).logits, before)  # also between our forwards
    assert model.training and lm.rows_held == 0
    assert not any(p.is_inference() for p in model.buffers())


def test_use_inside_and_outside_inference_mode_can_be_mixed(make_tiny):
    model = make_tiny("llama")
    lm = open_lm(model, kernels="dense")
    row = row_of([5, 6, 7])
    with torch.inference_mode():
        lm.prefill([row])
    with torch.no_grad():
        lm.score([row], [point(TokenTree((7, 8), (-1, 0)))])
        lm.commit([row], [[1]])
    row.tokens += [8, 9]
    [score] = lm.grow([row], [[9]], [[-1]])
    assert closeness(score.logits, fresh(model, row.tokens)[-1:]) < CLOSE


def test_a_slot_is_given_back_without_what_failed_in_it(make_llama):
    """Numbers that are none would spoil every row that comes after, where memory stays."""
    model = make_llama(50)
    with open_lm(model, kernels="dense", compile="off") as lm, torch.inference_mode():
        lm.grant(2, 64)
        rows = [make_row(list(range(1, n)), SamplingParams(), SeededCoins(0), 50) for n in (40, 30)]
        lm.prefill(rows)
        for group in lm.cache.groups:
            group.keys[:, :2, :, :28] = float("nan")
            group.values[:, :2, :, :28] = float("nan")
        lm.free(rows)
        for group in lm.cache.groups:
            assert not group.keys.isnan().any() and not group.values.isnan().any()


@pytest.mark.parametrize("compile", ["off", "auto"])
@pytest.mark.parametrize("kernels", ["dense", "auto"])
def test_numbers_are_the_models_whatever_autocast_a_caller_has(make_llama, kernels, compile):
    model, prompt = make_llama(50), [i % 50 for i in range(150)]
    with foretoken.load(model, "plain", kernels=kernels, compile=compile) as session:
        alone = session.generate(prompt, 12, ignore_eos=True).tokens
        with torch.autocast("cpu", torch.bfloat16):
            row = session.rows([prompt], 1)[0]
            [features] = session.target.prefill([row], (Layer(0),))
            session.target.free([row])
            assert features.dtype is torch.float32
            assert session.generate(prompt, 12, ignore_eos=True).tokens == alone

"""Scoring on fixed buffers: the same logits and cache as ordinary forwards, and no blind trust.

What CUDA adds is a replay; without a GPU a capture that calls again stands in its place, so that
buckets, buffers, masks and columns are tested everywhere.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from families import COMMON, tiny
from play import fresh_tree, random_path, random_tokens, random_tree, row_of

from foretoken.lm.kernels import graphs
from foretoken.lm.kernels.bits_probe import columns
from foretoken.lm.kernels.graphs import BUCKETS, COMPARED, Captures, Graphs, bucket_of, captured
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime.rounding import error_of
from foretoken.types import Draft, Draw


def again(run):
    """A capture that calls again; its output lies in one place, as a graph's does."""
    output = run().clone()
    return lambda: output.copy_(run())


def play(lm, prompt, sizes, seed):
    """Score and commit random trees; logits and truth of every step."""
    dice = random.Random(seed)
    row = row_of(prompt)
    lm.prefill([row])
    steps = []
    for nodes in sizes:
        tree = random_tree(dice, row.tokens[-1], nodes)
        [scores] = lm.score([row], [Draft(tree, Draw.POINT)])
        path = random_path(dice, tree)
        steps.append((list(row.tokens), tree, scores.logits))
        lm.commit([row], [path])
        row.tokens += [tree.tokens[node] for node in path] + random_tokens(dice, 1)
    return steps


def test_buckets_hold_their_nodes():
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 64, 65, 128)] == [1, 2, 4, 4, 8, 64, 128, 128]
    assert bucket_of(129) is None and list(BUCKETS) == sorted(BUCKETS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gpt_neox", "gemma3"])
def test_fixed_buffers_give_the_logits_of_fresh_forwards(family):
    model = tiny(family)
    lm = open_lm(model, kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    sizes = [1, 7, 3, 1, 12, 40, 2, 5, 1, 30, 8, 60]
    prompt = random_tokens(random.Random(1), 3)
    for committed, tree, logits in play(lm, prompt, sizes, seed=5):
        right = fresh_tree(model, committed, tree)
        assert logits.shape == right.shape
        torch.testing.assert_close(logits, right, atol=2e-3, rtol=1e-3)
    assert not lm.graphs.why
    if family != "gemma3":  # whose windows leave most of these steps to ordinary forwards
        assert lm.graphs.made


def test_logits_outlive_the_next_replay():
    lm = open_lm(tiny("llama"), kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    kept = play(lm, [1, 2, 3], [4, 4, 4, 4], seed=2)
    plain = play(open_lm(tiny("llama"), kernels="dense"), [1, 2, 3], [4, 4, 4, 4], seed=2)
    for (_, _, found), (_, _, right) in zip(kept, plain, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_graphs_are_made_once_per_bucket_and_anew_when_the_cache_grows():
    lm = open_lm(tiny("llama"), kernels="dense")
    made = []
    lm.graphs = Graphs(lm, capture=lambda run: made.append(lm.cache.columns) or again(run))
    play(lm, [1, 2, 3], [4, 3, 4, 2, 2], seed=3)
    assert len(made) == 2
    play(lm, random_tokens(random.Random(0), 90), [4] * 40, seed=3)
    assert len(made) > 3 and len(set(made)) >= 2


def test_a_graph_that_ignores_new_inputs_is_noticed_and_given_up():
    lm = open_lm(tiny("llama"), kernels="dense")

    def frozen(run):
        output = run().clone()
        return lambda: output

    lm.graphs = Graphs(lm, capture=frozen)
    with pytest.warns(RuntimeWarning, match="off by"):
        steps = play(lm, [1, 2, 3], [4] * (COMPARED + 2), seed=2)
    assert lm.graphs.why and not lm.graphs.made
    for committed, tree, logits in steps:
        torch.testing.assert_close(
            logits, fresh_tree(lm.model, committed, tree), atol=2e-3, rtol=1e-3
        )


def test_masked_logits_hide_no_error_of_a_replay():
    """Chameleon gives tokens of images the least number, beside which no other would count."""
    lm = open_lm(tiny("llama"), kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    play(lm, [1, 2, 3], [4], seed=2)
    [still] = lm.graphs.made.values()
    forward = lm.model.forward

    def masked(**given):
        output = forward(**given)
        least = torch.finfo(torch.float32).min
        output.logits = output.logits.index_fill(-1, torch.arange(5), least)
        return output

    lm.model.forward = masked
    with torch.inference_mode():
        right = lm.graphs.forward(still)
        assert lm.graphs.agrees(still, right)
        wrong = right.clone()
        wrong[..., 5:] = right[..., 5:].roll(1, -1)
        with pytest.warns(RuntimeWarning, match="off by"):
            assert not lm.graphs.agrees(still, wrong)


def test_a_failing_capture_is_told_and_scoring_goes_on():
    lm = open_lm(tiny("llama"), kernels="dense")

    def failing(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    lm.graphs = Graphs(lm, capture=failing)
    with pytest.warns(RuntimeWarning, match="capture failed: operation not permitted"):
        steps = play(lm, [1, 2, 3], [4, 4], seed=2)
    committed, tree, logits = steps[1]
    torch.testing.assert_close(logits, fresh_tree(lm.model, committed, tree), atol=2e-3, rtol=1e-3)


def test_batches_of_rows_prompts_and_wide_trees_take_the_ordinary_path():
    lm = open_lm(tiny("llama"), kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    dice = random.Random(4)
    rows = [row_of(random_tokens(dice, n)) for n in (5, 9)]
    for row in rows:
        lm.prefill([row])
    trees = [random_tree(dice, row.tokens[-1], 6) for row in rows]
    scores = lm.score(rows, [Draft(tree, Draw.POINT) for tree in trees])
    assert not lm.graphs.made
    for row, tree, score in zip(rows, trees, scores, strict=True):
        right = fresh_tree(lm.model, row.tokens, tree)
        torch.testing.assert_close(score.logits, right, atol=2e-3, rtol=1e-3)
    wide = random_tree(dice, rows[0].tokens[-1], BUCKETS[-1] + 1)
    lm.score(rows[:1], [Draft(wide, Draw.POINT)])
    assert not lm.graphs.made


def test_none_are_made_on_a_cpu():
    assert open_lm(tiny("llama"), kernels="dense").graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_graphs_equal_ordinary_forwards(family, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sizes = [1, 7, 3, 1, 12, 40, 2, 5, 1, 30, 8, 60, 1, 1, 4, 4, 4]
    model = tiny(family).to("cuda", dtype)
    lm, plain, exact = open_lm(model), open_lm(model), open_lm(deepcopy(model).float())
    plain.graphs = exact.graphs = None
    steps = [
        [logits.float() for _, _, logits in play(one, [1, 2, 3], sizes, seed=5)]
        for one in (lm, plain, exact)
    ]
    assert lm.graphs is not None and not lm.graphs.why and lm.graphs.made
    if dtype is torch.float32:
        for logits, right in zip(*steps[:2], strict=True):
            torch.testing.assert_close(logits, right, atol=1e-3 * float(right.std()), rtol=1e-2)
    # Forwards of few bits differ by rounding: replays may not be further off than ordinary ones.
    found, right, truth = map(torch.cat, steps)
    off, rounding = error_of(found, truth), error_of(right, truth)
    spread = float(truth.std())
    assert float(off.mean()) <= 1.25 * float(rounding.mean()) + 1e-3 * spread
    assert float(off.max()) <= 2.0 * float(rounding.max()) + 1e-3 * spread


def test_a_budget_of_memory_turns_graphs_off():
    """Its plan knows nothing of what they take, nor of the columns of their padding."""
    model = tiny("llama")
    lm = open_lm(model, kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    lm.grant(1, 48)
    assert lm.graphs is None
    prompt = random_tokens(random.Random(1), 24)
    for committed, tree, logits in play(lm, prompt, [2, 17, 8, 1], seed=5):
        right = fresh_tree(model, committed, tree)
        torch.testing.assert_close(logits, right, atol=2e-3, rtol=1e-3)
        assert lm.cache.columns == 48


def test_layers_that_read_the_keys_of_others_have_none_to_be_asked_for():
    """As the last ones of Gemma 3n and Gemma 4."""
    config = hf.Gemma4TextConfig(
        **COMMON, head_dim=16, global_head_dim=16, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97, layer_types=["full_attention"] * 4, num_kv_shared_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    lm = open_lm(model, kernels="dense")
    lm.graphs = Graphs(lm, capture=again)
    for committed, tree, logits in play(lm, [1, 2, 3], [4, 1, 3, 4, 2], seed=3):
        right = fresh_tree(model, committed, tree)
        torch.testing.assert_close(logits, right, atol=2e-3, rtol=1e-3)
    assert [layer.keys is None for layer in lm.cache.layers] == [False, False, True, True]
    assert lm.graphs.made and not lm.graphs.why
    row = row_of([1, 2, 3, 4])
    lm.prefill([row])
    assert len(columns(lm, row, [0])) == 4, "keys and values of two layers"


def test_few_graphs_are_kept_and_only_unused_ones_make_room(monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    monkeypatch.setattr(graphs, "UNUSED", 6)
    lm = open_lm(tiny("llama"), kernels="dense")
    made = []
    lm.graphs = Graphs(lm, capture=lambda run: made.append(run) or again(run))
    sizes = [1, 2, 4, 8, 1, 2, 4, 8, 1]  # in turn: two of them, ordinary forwards for the others
    steps = play(lm, [1, 2, 3], sizes, seed=5)
    assert len(made) == 2 and [*lm.graphs.made] == [(2, 0), (1, 0)]
    lm.reset()
    steps += play(lm, [1, 2, 3], [1, 2, *[4] * 8, 2], seed=6)
    assert len(made) == 5 and [*lm.graphs.made] == [(4, 0), (2, 0)], "the last used one stays"
    for committed, tree, logits in steps:
        right = fresh_tree(lm.model, committed, tree)
        torch.testing.assert_close(logits, right, atol=2e-3, rtol=1e-3)


class FakeCuda:
    """Notes where and how graphs are captured and replayed; a capture inside another fails."""

    def __init__(self, monkeypatch):
        self.devices, self.streams, self.captures, self.replays = [None], ["usual"], [], []
        self.pools = count()
        for name in ("device", "stream", "graph", "CUDAGraph", "Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self.pools))

    @contextmanager
    def inside(self, places, place):
        places.append(place)
        yield
        places.pop()

    def device(self, place):
        return self.inside(self.devices, place)

    def stream(self, stream):
        return self.inside(self.streams, stream)

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self):
        return self.Stream()

    def CUDAGraph(self):
        owner = self

        class Graph:
            def replay(self):
                owner.replays.append(owner.devices[-1])

        return Graph()

    @contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        assert graphs.CAPTURING.locked() and stream is self.streams[-1]
        self.captures.append((self.devices[-1], pool, capture_error_mode))
        yield


def test_graphs_are_captured_and_replayed_on_their_device_in_one_pool(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    capture, place = Captures(torch.device("cuda:1")), torch.device("cuda:1")
    ran = []
    replays = [capture(lambda: ran.append(cuda.streams[-1]) or 7) for _ in range(2)]
    assert cuda.captures == [(place, 0, "thread_local")] * 2
    assert len(ran) == 6 and "usual" not in ran
    assert [replay() for replay in replays] == [7, 7] and cuda.replays == [place] * 2
    del replays  # torch gives a pool up with its last graph: it cannot be captured into again
    assert capture(lambda: 8)() == 8 and captured(lambda: 9, place)() == 9
    assert cuda.captures[2:] == [(place, 1, "thread_local"), (place, 2, "thread_local")]
    assert not graphs.CAPTURING.locked() and cuda.devices == [None]


def test_a_capture_that_fails_lets_others_go_on(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def failing():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(failing)
    assert not graphs.CAPTURING.locked()
    assert captured(lambda: 3)() == 3 and len(cuda.captures) == 1

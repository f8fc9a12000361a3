"""A sorted draft: laws of the exit taken, keys and values filled in behind it, for any tree."""

from __future__ import annotations

import copy
import json
import random
from contextlib import closing

import pytest
import torch

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.lm.draft_exits import NAME, NEVER, Exits, chosen_exits, read
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.opening import open_draft
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.row import make_row
from foretoken.types import SamplingParams

VOCAB, LAYERS = 97, (1, 2, 4)
MIXED = Exits(LAYERS, (0.22, 0.17))  # of random weights: every exit is taken
PROMPT = [5, 9, 2, 41, 9, 2]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, make_tiny):
    found = make_tiny(request.param)
    with torch.no_grad():
        found.get_output_embeddings().weight *= {"llama": 1.0, "gemma2": 0.15}[request.param]
    return found


def opened(model, exits, rows=None, compile="off"):
    return closing(open_draft(model, rows, exits=exits, kernels="dense", compile=compile))


def new_row(tokens=PROMPT):
    return make_row(list(tokens), SamplingParams(), SeededCoins(0), VOCAB)


@torch.no_grad()
def law_of(model, tokens, exit):
    """Logits after `tokens` of the first layers, norm and head: a plain forward, no cache."""
    short = copy.deepcopy(model)
    inner = short.model
    inner.layers = inner.layers[:exit]
    return short(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def played(lm, row, rng, steps=14, widest=3):
    """Random trees grown level by level, random paths committed: (text, logits, share) of nodes."""
    for _ in range(steps):
        tokens, parents, level = [row.tokens[-1]], [-1], [0]
        while level:
            [score] = lm.grow([row], [[tokens[n] for n in level]], [[parents[n] for n in level]])
            for n, logits in zip(level, score.logits, strict=True):
                path, at = [], n
                while at >= 0:
                    path.insert(0, tokens[at])
                    at = parents[at]
                yield [*row.tokens[:-1], *path], logits, score.share
            below = []
            for n in level:
                for _ in range(rng.randrange(widest) if len(tokens) < 9 else 0):
                    below.append(len(tokens))
                    tokens.append(rng.randrange(VOCAB))
                    parents.append(n)
            level = below
        path, at = [], rng.randrange(len(tokens))
        while at > 0:
            path.insert(0, at)
            at = parents[at]
        lm.commit([row], [path])
        row.tokens += [tokens[n] for n in path]
        row.tokens += [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2]))]
        memory = lm.base._memory(row)
        assert memory.cached <= len(row.tokens) - 1


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_every_law_is_that_of_the_exit_taken(model, compile):
    """With trees, rejected nodes, tokens nobody fed, states that wait across steps."""
    seen = set()
    with opened(model, MIXED, compile=compile) as lm:
        row = new_row()
        lm.prefill([row])
        for text, logits, share in played(lm, row, random.Random(1)):
            depth = round(share * 4)
            seen.add(depth)
            torch.testing.assert_close(
                logits.float(), law_of(model, text, depth), atol=2e-4, rtol=2e-4
            )
    assert seen == set(LAYERS)


def test_the_exit_is_the_first_that_is_sure_enough(model):
    with opened(model, MIXED) as lm:
        row = new_row()
        lm.prefill([row])
        for text, _, share in played(lm, row, random.Random(2), widest=2):
            sure = [law_of(model, text, depth).softmax(-1).max() for depth in LAYERS[:2]]
            taken = LAYERS.index(round(share * 4))
            # in a level of several nodes another node may have been the sure one
            assert all(p < t + 1e-4 for p, t in zip(sure[:taken], MIXED.thresholds, strict=False))


def test_columns_filled_in_later_are_those_of_full_depth(model):
    """All layers' keys and values behind mixed exits, beside a row that was never left early."""
    with opened(model, MIXED) as lm, opened(model, None) as whole:
        rows, waited = [], 0
        for seed in range(4):
            row = new_row()
            lm.prefill([row])
            for _ in played(lm, row, random.Random(seed)):
                waited = max(waited, *lm.waiting(row))
            rows.append(row)
        lm.catch_up(rows)
        for row in rows:
            assert lm.waiting(row) == [0, 0]
            memory = lm.base._memory(row)
            fresh = new_row([*row.tokens[: memory.cached], 0])
            whole.prefill([fresh])
            slot = whole._memory(fresh).slot
            for mine, theirs in zip(lm.base.cache.rows_of, whole.cache.rows_of, strict=True):
                for name in ("keys", "values"):
                    torch.testing.assert_close(
                        getattr(mine, name)[memory.slot, :, : memory.cached],
                        getattr(theirs, name)[slot, :, : memory.cached],
                        atol=1e-4, rtol=1e-4,
                    )  # fmt: skip
    assert waited > 3  # something was filled in


@pytest.mark.parametrize("exit", [0, 1, 2])
def test_at_the_ends_of_the_thresholds_it_is_one_of_its_parts(model, exit):
    """0 for the first: its first layers alone, token by token; above 1: all of them."""
    with opened(model, MIXED.only(exit)) as lm:
        row = new_row()
        lm.prefill([row])
        for text, logits, share in played(lm, row, random.Random(3), steps=4):
            assert share in (LAYERS[exit] / 4, 1.0)
            torch.testing.assert_close(
                logits.float(), law_of(model, text, LAYERS[exit]), atol=2e-4, rtol=2e-4
            )
        assert set(lm.left) == {LAYERS[exit]}


def test_rows_in_company_take_the_exits_they_take_alone(model):
    prompts = [PROMPT, [7, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
    alone, exits = [], set()
    chains = [[random.Random(n).randrange(VOCAB) for _ in range(8)] for n in range(3)]
    with opened(model, MIXED) as lm:
        for prompt, fed in zip(prompts, chains, strict=True):
            row, found = new_row(prompt), []
            lm.prefill([row])
            for n, token in enumerate([row.tokens[-1], *fed]):
                found += lm.grow([row], [[token]], [[n - 1]])
            alone.append(found)
            lm.free([row])
        rows = [new_row(prompt) for prompt in prompts]
        lm.prefill(rows)
        tokens = [[row.tokens[-1], *fed] for row, fed in zip(rows, chains, strict=True)]
        for n in range(9):
            scores = lm.grow(rows, [[one[n]] for one in tokens], [[n - 1]] * 3)
            exits.add(tuple(score.share for score in scores))
            for score, one in zip(scores, alone, strict=True):
                assert score.share == one[n].share
                torch.testing.assert_close(score.logits, one[n].logits, atol=1e-4, rtol=1e-4)
        lm.free(rows[:1])  # the last row moves into the gap, with what waits
        for row in rows[1:]:
            lm.commit([row], [range(1, 9)])
        lm.catch_up(rows[1:])
        assert lm.waiting(rows[2]) == [0, 0]
    assert any(len(set(shares)) > 1 for shares in exits)


def test_layers_per_token_fall_with_the_thresholds(model):
    def depth(threshold):
        with opened(model, Exits(LAYERS, (threshold, threshold))) as lm:
            row = new_row()
            lm.prefill([row])
            for _ in played(lm, row, random.Random(4)):
                pass
            return sum(k * n for k, n in lm.left.items()) / sum(lm.left.values())

    found = [depth(t) for t in (NEVER, 0.3, 0.2, 0.1, 0.0)]
    assert found[0] == 4.0
    assert found[-1] == 1.0
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 3


def test_few_output_rows_decide_by_their_own_law(model):
    words = torch.arange(0, VOCAB, 2)
    with opened(model, MIXED, OutputRows.of_tokens(words.tolist(), VOCAB)) as lm:
        row = new_row()
        lm.prefill([row])
        for text, logits, share in played(lm, row, random.Random(6), steps=4):
            wanted = law_of(model, text, round(share * 4))
            torch.testing.assert_close(logits[words], wanted[words], atol=2e-4, rtol=2e-4)
            assert logits[1::2].isneginf().all()


def test_hidden_states_are_those_of_all_layers(model):
    from foretoken.types import FinalNorm

    with opened(model, MIXED) as lm, opened(model, None) as whole:
        row, other = new_row(), new_row()
        lm.prefill([row])
        whole.prefill([other])
        for n, token in enumerate([row.tokens[-1], 3, 8, 4]):
            [score] = lm.grow([row], [[token]], [[n - 1]], (FinalNorm(),) if n == 3 else ())
            [right] = whole.grow([other], [[token]], [[n - 1]], (FinalNorm(),))
        torch.testing.assert_close(score.hidden, right.hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(score.logits, right.logits, atol=1e-4, rtol=1e-4)
        assert score.share == 1.0


def test_a_rows_cache_is_checked_as_any_other(model):
    with opened(model, MIXED) as lm:
        row = new_row()
        lm.prefill([row])
        lm.grow([row], [[2]], [[-1]])
        lm.self_check(row)
        assert lm.waiting(row) == [0, 0]


def test_a_file_is_read_as_it_was_written(tmp_path):
    (tmp_path / NAME).write_text(MIXED.text())
    assert read(tmp_path / NAME, 4) == MIXED
    assert chosen_exits(None, tmp_path, 4) == MIXED
    assert chosen_exits("off", tmp_path, 4) is None
    assert chosen_exits(0.7, tmp_path, 4).thresholds == (0.7, 0.7)
    assert chosen_exits((0, 2), str(tmp_path), 4).thresholds == (0.0, 2.0)
    assert chosen_exits(None, tmp_path / "none", 4) is None


@pytest.mark.parametrize("asked", [(0.5,) * 3, -0.1, "much", True, [], [0.5, "a"], float("nan")])
def test_thresholds_that_cannot_be_are_refused(tmp_path, asked):
    (tmp_path / NAME).write_text(MIXED.text())
    with pytest.raises(ConfigError, match="takes 2 of them"):
        chosen_exits(asked, tmp_path, 4)
    with pytest.raises(ConfigError, match="one exit"):
        chosen_exits(0.5, tmp_path / "none", 4)


@pytest.mark.parametrize(
    "said",
    [
        {"version": 2, "layers": [1, 4], "thresholds": [0.5]},
        {"version": 1, "layers": [1, 3], "thresholds": [0.5]},
        {"version": 1, "layers": [2, 1, 4], "thresholds": [0.5, 0.5]},
        {"version": 1, "layers": [1, 4], "thresholds": []},
        {"version": 1, "layers": [1.0, 4], "thresholds": [0.5]},
        {"version": 1, "layers": [1, 4], "thresholds": ["a"]},
        [],
    ],
)
def test_a_broken_file_is_refused(tmp_path, said):
    (tmp_path / NAME).write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="train sorted"):
        read(tmp_path / NAME, 4)


def test_exits_that_hide_others_are_never_asked():
    assert Exits((1, 2, 4), (NEVER, 0.5)).asked == Exits((2, 4), (0.5,))
    assert Exits((1, 2, 4), (0.0, 0.5)).asked == Exits((1,), ())
    assert Exits((1, 2, 4), (0.5, 0.0)).asked == Exits((1, 2), (0.5,))


def test_a_model_of_other_layers_is_refused_and_given_back(make_tiny):
    model = make_tiny("llama")
    model.train()
    with pytest.raises(CapabilityError, match="draft_thresholds"):
        open_draft(model, None, exits=Exits((1, 9), (0.5,)))
    assert model.training
    with opened(model, None) as whole:
        assert not isinstance(whole, SortedExits)

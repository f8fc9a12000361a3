"""Self-speculation behind a fixed layer, on tables and on tiny models of several families."""

import pytest
import torch
from small_models import FAMILIES, flat_above, small

from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.layer_skip import FirstLayers
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.errors import ConfigError
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.types import Budget
from foretoken.verifiers.block import Block


def behind(lm, exit_layer=None):
    return Chain(FirstLayers(lm, FirstLayers.Config(exit_layer=exit_layer)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_greedy_text_is_plains_at_every_exit(family, exit_layer, row, run, plain, prompts):
    lm = open_lm(small(family), kernels="dense")
    make = lambda: [row(p, 61, max_new_tokens=24) for p in prompts]  # noqa: E731
    expected = plain(lm, make())
    for depth in (0, 1, 4, 18):
        drafter = behind(lm, exit_layer)
        found, _ = run(lm, drafter, make(), verifier=Block(), depth=depth)
        assert found == expected
    assert lm.rows_held == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_is_accepted_where_later_layers_add_nothing(
    family, temperature, row, run, prompts
):
    lm = open_lm(flat_above(small(family), 2), kernels="dense")
    drafter = behind(lm, 2)
    rows = [row(p, 61, max_new_tokens=24, temperature=temperature, seed=3) for p in prompts]
    _, records = run(lm, drafter, rows, verifier=Block(), depth=5)
    assert len(records) == 4, "24 tokens are four rounds of six"
    for record in records:
        for draft, verdict in zip(record.drafts, record.verdicts, strict=True):
            assert len(verdict.path) == len(draft.tree) - 1 == 5


def test_the_cache_holds_all_but_the_last_token_in_every_layer(row, prompts):
    """After each round every layer's keys are those of a fresh prefill of the same tokens."""
    model = small("llama")
    lm, fresh = open_lm(model, kernels="dense"), open_lm(model, kernels="dense")
    engine = assemble("layerskip", lm, exit_layer=2, depth=3)
    rows = [row(p, 61, max_new_tokens=12, temperature=1.0, seed=5) for p in prompts]
    for record in decode(rows, engine):
        for one in record.rows:
            if one.finish is not None:
                continue
            again = row(one.tokens, 61)
            fresh.prefill([again])
            count = len(one.tokens) - 1
            assert lm._memory(one).cached == count
            for ours, right in zip(lm.cache.rows_of, fresh.cache.rows_of, strict=True):
                slots = lm._memory(one).slot, fresh._memory(again).slot
                ours, right = ours.keys[slots[0], :, :count], right.keys[slots[1], :, :count]
                torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
            fresh.free([again])


def test_a_round_costs_the_drafts_layers_and_all_layers_once(row, run):
    table = TableLM.random(12, layers=8)
    drafter = behind(table, 2)
    _, records = run(
        table, drafter, [row([1, 2], 12, max_new_tokens=30)], verifier=Block(), depth=4
    )
    drafted = sum(len(record.drafts[0].tree) - 1 for record in records)
    assert table.layers_run == 2 * drafted + 8 * len(records)


def test_a_quarter_of_the_layers_drafts_unless_told_otherwise(row):
    assert FirstLayers(TableLM.random(4, layers=12)).exit == 3
    assert FirstLayers(TableLM.random(4, layers=2)).exit == 1
    with pytest.raises(ConfigError, match="from 1 to 11"):
        FirstLayers(TableLM.random(4, layers=12), FirstLayers.Config(exit_layer=12))


def test_nothing_is_run_for_a_budget_of_zero(row):
    table = TableLM.random(12)
    drafter = behind(table)
    one = row([1, 2], 12, max_new_tokens=30)
    drafter.view.prefill([one])
    drafter.start(one, None)
    (draft,) = drafter.propose([one], [Budget(0, 0)])
    assert len(draft.tree) == 1 and table.layers_run == 0

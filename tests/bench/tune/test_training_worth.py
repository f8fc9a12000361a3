"""What training would be worth: the formula against a count, and laws read back from a table."""

import pytest
import torch

from foretoken.bench.tune.worth import certainty, needed, scoring_cost, speedup, worth
from foretoken.lm.table import TableLM
from foretoken.types import SamplingParams

FLAT = {"nodes": [1, 2, 4, 8, 16], "ratio": [1.0] * 5, "ms": [1.0] * 5, "context": 8}
STEEP = {"nodes": [1, 2, 4, 8, 16], "ratio": [1.0, 2.0, 4.0, 8.0, 16.0]}


def test_a_chain_brings_what_counting_says() -> None:
    """Depth 2 at acceptance 0.5: 1 + 0.5 + 0.25 tokens, for one forward and two of the draft."""
    cost = scoring_cost(FLAT)
    best, depth = speedup(0.5, 0.2, cost)
    by_depth = {k: sum(0.5**i for i in range(k + 1)) / (1.0 + 0.2 * k) for k in range(17)}
    assert best == pytest.approx(max(by_depth.values())) and by_depth[depth] == best


def test_where_every_node_costs_a_forward_nothing_pays() -> None:
    cost = scoring_cost(STEEP)
    assert speedup(0.9, 0.05, cost) == (1.0, 0)
    assert needed(1.0, 0.05, cost) is None


@pytest.mark.parametrize("share", [0.03, 0.1, 0.3])
def test_from_the_least_acceptance_on_the_goal_is_passed(share) -> None:
    cost = scoring_cost(FLAT)
    for goal in (1.0, 1.5, 2.0):
        least = needed(goal, share, cost)
        assert speedup(least + 0.001, share, cost)[0] > goal
        assert speedup(least - 0.002, share, cost)[0] <= goal


def test_the_table_grows_with_acceptance_and_falls_with_the_drafts_cost() -> None:
    found = worth(FLAT, None, best=1.4)
    rows = [one["speedup"] for one in found["costs"]]
    assert all(row == sorted(row) for row in rows)
    assert all(list(column) == sorted(column, reverse=True) for column in zip(*rows, strict=True))
    assert all(one["beats_best_from"] > one["pays_from"] for one in found["costs"])
    assert found["certainty"] is None and found["costs"][0]["at_certainty"] is None


def test_certainty_is_that_of_the_laws_the_tokens_were_chosen_from() -> None:
    """Beside softmaxes of the table, over an answer longer than one forward reads."""
    lm = TableLM.random(11, seed=3)
    prompt, answer = [1, 2, 3], [n % 11 for n in range(70)]
    found = certainty(lm, [(prompt, answer)], SamplingParams())
    text = [*prompt, *answer]
    laws = torch.stack(
        [torch.softmax(lm.after(text[: len(prompt) + n]).double(), -1) for n in range(70)]
    )
    assert found["tokens"] == 70
    assert found["top"] == pytest.approx(laws.amax(-1).mean().item(), abs=1e-6)
    assert found["same"] == pytest.approx(laws.square().sum(-1).mean().item(), abs=1e-6)
    assert found["sure"] == pytest.approx((laws.amax(-1) > 0.9).double().mean().item())
    assert certainty(lm, [], SamplingParams()) is None


def test_certainty_of_sampled_text_is_that_of_its_options() -> None:
    lm = TableLM.random(11, seed=3)
    prompt, answer = [1, 2, 3], [n % 11 for n in range(40)]
    found = certainty(lm, [(prompt, answer)], SamplingParams(temperature=0.5, top_k=4))
    text = [*prompt, *answer]
    logits = torch.stack([lm.after(text[: 3 + n]).double() for n in range(40)])
    laws = torch.softmax(logits.topk(4).values / 0.5, -1)
    assert found["top"] == pytest.approx(laws.amax(-1).mean().item(), abs=1e-6)
    assert found["same"] == pytest.approx(laws.square().sum(-1).mean().item(), abs=1e-6)

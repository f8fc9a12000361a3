"""A chain under prices: where it ends, what it learns, and that neighbours do not change a text."""

import pytest

from foretoken.audit.law import BOUND, SETTINGS, law_gap
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.priced_chain import PricedChain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.engine import Engine
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw, Prices, Step, StepTimes, Verdict
from foretoken.verifiers.block import Block
from foretoken.verifiers.recursive import Recursive


def budget(level: float, node: float = 0.0, depth: int = 8) -> Budget:
    """A draft forward is worth `level` tokens, and scoring a node `node` of them."""
    return Budget(depth, depth, Prices(level, tuple(node * n for n in range(depth + 1)), 1.0))


def begun(draft, rows):
    drafter = PricedChain(OrdinaryModel(draft))
    for row in rows:
        drafter.start(row, None)
    return drafter


def judged(drafter, row, made, accepted):
    """Tell the drafter that the target took the first `accepted` tokens of a draft."""
    verdict = Verdict(tuple(range(1, accepted + 1)), 0)
    score = type("Score", (), {"hidden": None})()
    emitted = [*made.tree.tokens[1 : accepted + 1], 0]
    row.extend(emitted)
    times = StepTimes(1, len(made.tree), 1, 0.0, 1.0, 0.0)
    drafter.observe(Step([row], [made], [score], [verdict], [emitted], times))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_come_until_the_next_one_costs_more_than_it_is_likely_to_bring(
    pair, row, temperature
):
    _, draft = pair
    make = lambda: row([1, 2], 12, max_new_tokens=30, temperature=temperature, seed=4)  # noqa: E731
    lengths = []
    for level in (0.0, 0.05, 0.2, 0.5, 2.0):
        one = make()
        [made] = begun(draft, [one]).propose([one], [budget(level)])
        chances, tokens = made.chances, len(made.tree) - 1
        lengths.append(tokens)
        assert len(chances) == len(made.tree) and chances[0] == 1.0
        assert list(chances) == sorted(chances, reverse=True)
        share = 0.8  # of chains that go on, before anything was seen
        assert all(chance * share >= level for chance in chances[1:-1])
        assert tokens == 8 or chances[-1] * share < level
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 8 and lengths[-1] == 1


def test_without_prices_it_is_the_plain_chain(pair, row):
    _, draft = pair
    made = []
    for kind in (Chain, PricedChain):
        one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=4)
        drafter = kind(OrdinaryModel(draft))
        drafter.start(one, None)
        made += drafter.propose([one], [Budget(5, 5)])
    assert made[0].tree == made[1].tree and made[1].draw is Draw.IID


def test_rejections_make_chains_shorter_and_a_seeded_text_does_not_hear_of_others(pair, row):
    _, draft = pair
    rows = {
        "shared": row([1, 2], 12, max_new_tokens=400),
        "seeded": row([1, 2], 12, max_new_tokens=400, temperature=1.0, seed=4),
        "twin": row([1, 2], 12, max_new_tokens=400, temperature=1.0, seed=4),
    }
    drafter = begun(draft, list(rows.values()))
    [before] = drafter.propose([rows["seeded"]], [budget(0.02)])
    lengths = []
    for _ in range(30):
        [made] = drafter.propose([rows["shared"]], [budget(0.02)])
        lengths.append(len(made.tree) - 1)
        judged(drafter, rows["shared"], made, 0)
    assert sum(lengths[-5:]) < sum(lengths[:5])
    [after] = drafter.propose([rows["twin"]], [budget(0.02)])
    assert after.tree == before.tree and after.chances == before.chances


class AtPrices(Fixed):
    """A constant budget with prices."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget


@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.7, top-p 0.8"])
@pytest.mark.parametrize("verifier", [Block, Recursive])
def test_the_law_is_the_targets_where_drawn_tokens_end_the_draft(verifier, setting):
    target, draft = TableLM.random(3, seed=21), TableLM.random(3, seed=22)
    lengths = set()

    def build():
        drafter = PricedChain(OrdinaryModel(draft))
        propose = drafter.propose

        def noted(*given):
            found = propose(*given)
            lengths.update(len(one.tree) for one in found)
            return found

        drafter.propose = noted
        return Engine(target, drafter, verifier(), AtPrices(budget(0.3, depth=3)))

    gap = law_gap(build, target, SETTINGS[setting], tokens=4)
    assert gap.variation <= BOUND
    assert {2, 3}.issubset(lengths), "some drafts ended early, others went on"

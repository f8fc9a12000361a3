"""Several drafters behind one door: each keeps its own state, all of them see every outcome."""

from math import inf

import torch

from foretoken.audit.rows import make_row, write
from foretoken.coins import SeededCoins
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.choice import Choice
from foretoken.drafters.dynamic_exit import DynamicExit
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.suffix import SuffixDecoding
from foretoken.engine.assemble import assemble
from foretoken.engine.loop import Engine
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Caps, SamplingParams
from foretoken.verifiers.point import Point
from foretoken.verifiers.recursive import Recursive

PROMPTS = ([0, 1, 2, 0, 1], [3, 3, 1], [2])


class Turns(Fixed):
    """The arms one after the other, one per step."""

    def __init__(self, arms: int) -> None:
        super().__init__(Fixed.Config(depth=4, nodes=8))
        self.arms, self.steps = arms, 0

    def budgets(self, rows):
        self.steps += 1
        return [Budget(4, 8, arm=self.steps % self.arms, bar=inf) for _ in rows]


def rows(target: TableLM, **options):
    params = SamplingParams(max_new_tokens=60, **options)
    return [
        make_row(prompt, params, SeededCoins(i), target.vocab_size)
        for i, prompt in enumerate(PROMPTS)
    ]


def test_text_is_plains_whichever_arm_drafts() -> None:
    target = TableLM.random(5, seed=3)
    drafter = Choice(PromptLookup(), SuffixDecoding(), DynamicExit(target))
    assert drafter.arms == 2 and drafter.trees
    plain = write(Engine(target, Nothing(), Point(), Fixed()), rows(target))
    seen: set[int] = set()
    engine = Engine(target, drafter, Recursive(), Turns(2))
    engine.listeners.append(lambda record: seen.update(len(draft.tree) for draft in record.drafts))
    with torch.inference_mode():
        assert write(engine, rows(target), max_rows=2) == plain
    assert max(seen) > 2, "something was drafted"
    assert target.rows_held == 0


def test_looked_up_arms_learn_while_another_one_drafts() -> None:
    target = TableLM.random(5, seed=3)
    drafter = Choice(SuffixDecoding(), DynamicExit(target))
    engine = Engine(target, drafter, Recursive(), Turns(1))
    engine.controller.budgets = lambda found: [Budget(4, 8, arm=1, bar=inf) for _ in found]
    write(engine, rows(target))
    suffix = drafter.choices[0].sources[0]
    assert len(suffix.answers) >= 180, "every answer is remembered, whoever drafted it"


def test_a_look_up_drafts_where_it_is_worth_more_than_the_bar() -> None:
    target = TableLM.random(5, seed=3)
    for bar, arm in ((0.0, 0), (3.9, 1), (inf, 1)):
        engine = Engine(target, Choice(PromptLookup(), DynamicExit(target)), Recursive(), Fixed())
        engine.controller.budgets = lambda found, bar=bar: [
            Budget(4, 8, arm=1, bar=bar) for _ in found
        ]
        seen: set[int] = set()
        engine.listeners.append(lambda record, seen=seen: seen.update(d.arm for d in record.drafts))
        write(engine, rows(target))
        assert seen == {arm}


def test_auto_leaves_out_what_a_target_cannot_carry() -> None:
    whole = assemble("auto", TableLM.random(4, seed=1))
    assert whole.drafter.arms == 2 and whole.drafter.trees
    chains = TableLM(TableLM.random(4, seed=1).logits, Caps(tree="chain", why="a test"))
    assert not assemble("auto", chains).drafter.trees

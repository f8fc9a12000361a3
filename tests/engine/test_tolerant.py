"""A drafter that raises costs its rows the speculation, and nothing else."""

import pytest

import foretoken
from foretoken.engine.tolerant import Tolerant

PROMPTS = ["the cat is in the ", "on and on and on", "a", "there is a thin one"]


class Broken(Exception):
    pass


class Breaking:
    """A drafter whose call `where` raises for rows that `bad` names, from the n-th time on."""

    def __init__(self, drafter, where, bad, after):
        self.drafter, self.where, self.bad, self.left = drafter, where, bad, after

    def __getattr__(self, name):
        return getattr(self.__dict__["drafter"], name)

    def check(self, where, rows):
        if where == self.where and any(self.bad(row) for row in rows):
            self.left -= 1
            if self.left < 0:
                raise Broken(where)

    def start(self, row, seen):
        self.check("start", [row])
        self.drafter.start(row, seen)

    def propose(self, rows, budgets, stop=None):
        self.check("propose", rows)
        return self.drafter.propose(rows, budgets, stop)

    def observe(self, step):
        self.check("observe", step.rows)
        self.drafter.observe(step)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "tree", "prompt-lookup", "auto"])
@pytest.mark.parametrize("where", ["start", "propose", "observe"])
def test_texts_go_on_by_plain_decoding(tiny_pair, byte_tokenizer, where, method, temperature):
    target, draft = tiny_pair
    options = {"max_new_tokens": 20, "temperature": temperature, "ignore_eos": True, "seed": 3}
    bad = byte_tokenizer("a")["input_ids"][0]
    with foretoken.load(
        target, method, draft, byte_tokenizer, kernels="dense", compile="off", controller="fixed"
    ) as spec:
        expected = [result.tokens for result in spec.generate(PROMPTS, **options)]
        failed = []
        broken = Breaking(spec.engine.drafter, where, lambda row: row.tokens[0] == bad, 1)
        spec.engine.drafter = Tolerant(broken, lambda row, error: failed.append(row))
        results = [spec.generate(PROMPTS, **options) for _ in range(2)]
    assert failed and {row.tokens[0] for row in failed} >= {bad}
    for texts in results:
        assert [len(result.tokens) for result in texts] == [20] * len(PROMPTS)
        if temperature == 0.0 or spec.engine.drafter.traits.fixed:
            assert [result.tokens for result in texts] == expected
    if where == "start" and method == "chain":  # who was not failed is still drafted for
        assert sum(result.stats.accepted for result in results[1][:2]) > 0


def test_what_an_option_of_the_row_raises_is_not_the_drafters(tiny_pair, byte_tokenizer):
    target, draft = tiny_pair

    def processor(ids, scores):
        raise Broken("mine")

    with foretoken.load(target, "chain", draft, tokenizer=byte_tokenizer, kernels="dense") as spec:
        failed = []
        spec.engine.drafter = Tolerant(spec.engine.drafter, lambda *told: failed.append(told))
        with pytest.raises(Broken, match="mine"):
            spec.generate("a cat", max_new_tokens=5, processors=processor)
        assert not failed
        assert spec.generate("a cat", max_new_tokens=5).tokens


def test_a_seeded_text_does_not_follow_from_a_neighbour_whose_drafting_failed(
    tiny_pair, byte_tokenizer
):
    """Coins that drafting took before it failed are given back before the next try."""
    target, draft = tiny_pair
    options = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True, "seed": 3}
    bad = byte_tokenizer("a")["input_ids"][0]

    class Late(Breaking):
        def propose(self, rows, budgets, stop=None):
            drafts = self.drafter.propose(rows, budgets, stop)
            self.check("propose", rows)
            return drafts

    with foretoken.load(
        target, "chain", draft, byte_tokenizer, kernels="dense", compile="off", controller="fixed"
    ) as spec:
        alone = [result.tokens for result in spec.generate(PROMPTS, **options)]
        failed = []
        late = Late(spec.engine.drafter, "propose", lambda row: row.tokens[0] == bad, 1)
        spec.engine.drafter = Tolerant(late, lambda row, error: failed.append(row))
        found = [result.tokens for result in spec.generate(PROMPTS, **options)]
    assert len(failed) == 1
    others = [at for at, text in enumerate(PROMPTS) if text != "a"]
    assert [found[at] for at in others] == [alone[at] for at in others]

"""Lengths by an acceptance head: where it stops, what it costs; no head changes the law."""

import itertools
import logging
import math
from functools import partial

import pytest
import torch

from foretoken.audit.fixtures import random_acceptance
from foretoken.audit.law import BOUND, law_gap
from foretoken.audit.rows import seeded_rows, write
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.errors import ConfigError, PairingError
from foretoken.heads import made_for, store
from foretoken.heads.acceptance import AcceptanceHead
from foretoken.lm.table import TableLM
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, SamplingParams

VOCAB = 4
PROMPTS = ((0, 1, 2, 0, 1), (2, 2, 1), (1,), (3, 0))


def engine(controller="acceptance_head", **options):
    target, draft = TableLM.random(VOCAB, seed=21), TableLM.random(VOCAB, seed=22, scale=1.0)
    if controller == "acceptance_head":
        options = {"head": random_acceptance(VOCAB, VOCAB)} | options
    return assemble("specdec++", target, draft, controller=controller, **options)


def rounds(built, temperature=1.0, tokens=60):
    """(tokens before the round, drafted tokens) of every round that the cap did not shorten."""
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
    found = []
    for row in seeded_rows(PROMPTS, params, VOCAB):
        before = list(row.tokens)
        for record in decode([row], built):
            if tokens - (len(before) - row.prompt_len) > built.controller.config.depth:
                found.append((before, record.drafts[0].tree.tokens[1:]))
            before = list(row.tokens)
    return found


def test_a_threshold_of_one_is_a_fixed_length_token_for_token():
    params = SamplingParams(max_new_tokens=50, temperature=1.0)
    for depth in (1, 3, 6):
        ours = write(engine(threshold=1.0, depth=depth), seeded_rows(PROMPTS, params, VOCAB))
        fixed = write(engine("fixed", depth=depth), seeded_rows(PROMPTS, params, VOCAB))
        assert ours == fixed


def test_a_threshold_of_zero_stops_at_the_first_test():
    """The first hidden layer belongs to a committed token, so the first test comes at the second
    token.
    """
    drafted = rounds(engine(threshold=0.0, shortest=1))
    assert drafted and {len(tokens) for _, tokens in drafted} == {2}
    assert {len(t) for _, t in rounds(engine(threshold=0.0, shortest=1, depth=1))} == {1}
    assert {len(t) for _, t in rounds(engine(threshold=0.0, shortest=4))} == {4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_ends_where_the_product_of_its_tokens_says(temperature):
    """Recomputed from the table alone: token n - 1 is judged when token n is drawn."""
    threshold, shortest, depth = 0.6, 2, 8
    built = engine(threshold=threshold, shortest=shortest, depth=depth)
    head, _ = store.load(random_acceptance(VOCAB, VOCAB), "acceptance")
    draft = built.drafter.model.lm
    lengths = set()
    for before, tokens in rounds(built, temperature):
        chances = [
            float(head.accepted(draft.after([*before, *tokens[: i + 1]])))
            for i in range(len(tokens))
        ]
        stops = [
            n
            for n in range(shortest, len(tokens) + 1)
            if 1.0 - math.prod(chances[: n - 1]) > threshold
        ]
        assert len(tokens) == (stops[0] if stops else depth)
        lengths.add(len(tokens))
    assert len(lengths) > 1, "the head never decided anything"


def test_judging_costs_no_forward_of_its_own():
    built = engine(threshold=0.5)
    drafted = 0
    for row in seeded_rows(PROMPTS, SamplingParams(max_new_tokens=40, temperature=1.0), VOCAB):
        drafted += sum(len(record.drafts[0].tree) - 1 for record in decode([row], built))
    assert built.drafter.model.lm.forwards == drafted


def test_lengths_grow_with_the_threshold():
    means = []
    for threshold in (0.0, 0.3, 0.6, 0.9, 1.0):
        drafted = rounds(engine(threshold=threshold, shortest=1, depth=8), tokens=120)
        means.append(sum(len(tokens) for _, tokens in drafted) / len(drafted))
    assert means == sorted(means) and means[-1] == 8.0


@pytest.mark.parametrize("verifier", ["block", "recursive"])
def test_lengths_that_follow_the_prefix_leave_the_law_alone(verifier):
    target, draft = TableLM.random(3, seed=21), TableLM.random(3, seed=22)
    head = random_acceptance(3, 3)
    lengths = set()

    built = assemble(
        "specdec++", target, draft, verifier=verifier, head=head, threshold=0.5, shortest=1
    )
    built.listeners.append(lambda record: lengths.add(len(record.drafts[0].tree) - 1))
    gap = law_gap(lambda: built, target, {"temperature": 1.0}, tokens=4)
    assert gap.variation <= BOUND
    assert {2, 3} <= lengths, "the head decided"


def test_stopping_by_the_token_about_to_be_drawn_would_change_the_law():
    """What exactness rests on: the same head asked about a drawn token, which is then dropped."""
    target, draft = TableLM.random(3, seed=21), TableLM.random(3, seed=22)
    head, _ = store.load(random_acceptance(3, 3), "acceptance")

    class DropsJudged(Chain):
        def propose(self, rows, budgets, stop=None):
            [found] = super().propose(rows, budgets, stop)
            if found.q is None:  # the last token allowed: nothing was drafted
                return [found]
            tokens = list(found.tree.tokens)
            for n in range(1, len(tokens)):
                context = [*rows[0].tokens[:-1], *tokens[: n + 1]]
                if float(head.accepted(draft.after(context))) < 0.5:
                    tokens = tokens[:n]
                    break
            q = (*found.q[: len(tokens) - 1], None)
            return [Draft(chain(tokens[0], tokens[1:]), Draw.IID, q)]

    def build():
        built = assemble("chain", target, draft, verifier="recursive", depth=2)
        built.drafter = DropsJudged(OrdinaryModel(draft))
        return built

    assert law_gap(build, target, {"temperature": 1.0}).variation > 1e-3


def test_a_head_for_other_models_or_none_is_refused():
    with pytest.raises(ConfigError, match="without a head") as caught:
        engine(head="")
    assert "foretoken train acceptance" in caught.value.do
    with pytest.raises(ConfigError, match="hidden size is 4"):
        engine(head=random_acceptance(5, VOCAB))
    with pytest.raises(ConfigError, match="vocabulary is 4"):
        engine(head=random_acceptance(VOCAB, 7))
    lookup = partial(assemble, "prompt-lookup", TableLM.random(VOCAB))
    with pytest.raises(PairingError, match="shows none"):
        lookup(controller="acceptance_head", head=random_acceptance(VOCAB, VOCAB))


def test_a_head_of_another_draft_and_texts_at_another_temperature_are_told_once(tmp_path, caplog):
    head, _ = store.load(random_acceptance(VOCAB, VOCAB), "acceptance")
    learned = {"settings": {"temperature": 1.0}}
    with caplog.at_level(logging.WARNING, "foretoken"):
        own = made_for.notes_of(TableLM.random(VOCAB, seed=22))
        engine(head=store.save(tmp_path / "own", "acceptance", head, {**learned, **own}))
        assert not caplog.records
        foreign = {**learned, "identity": "another"}
        built = engine(head=store.save(tmp_path / "foreign", "acceptance", head, foreign))
        [record] = caplog.records
        assert "another model: it judges the guesses of that one" in record.getMessage()
        caplog.clear()
        for temperature, told in ((1.0, 0), (0.5, 1), (0.7, 1)):
            params = SamplingParams(max_new_tokens=5, temperature=temperature)
            write(built, seeded_rows(PROMPTS, params, VOCAB))
            assert len(caplog.records) == told
    assert "trained at temperature 1, and a text is written at 0.5" in caplog.text


@pytest.mark.parametrize("option", [{"threshold": 1.5}, {"shortest": -1}, {"depth": -1}])
def test_values_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        engine(**option)


def test_blocks_that_share_weights_are_saved_once_and_come_back(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 6, "vocab_size": 11, "blocks": 3, "temperature": 1.5, "shift": 0.25}
    shared, own = (
        AcceptanceHead(AcceptanceHead.Config(**sizes, shared=shared)) for shared in (True, False)
    )
    count = [sum(w.numel() for w in head.parameters()) for head in (shared, own)]
    assert count[1] - count[0] == 2 * (6 * 6 + 6)
    for head in (shared, own):
        for weight in head.parameters():
            weight.data.normal_()
        store.save(tmp_path, "acceptance", head, {})
        loaded, card = store.load(tmp_path, "acceptance")
        hidden = torch.randn(5, 6)
        assert torch.equal(loaded.accepted(hidden), head.accepted(hidden))
        assert (card.hidden_size, card.vocab_size) == (6, 11)


def test_blocks_start_as_the_identity():
    head = AcceptanceHead(AcceptanceHead.Config(hidden_size=6, vocab_size=11))
    hidden = torch.randn(5, 6)
    assert torch.equal(head(hidden), head.out(hidden))


def test_every_round_starts_afresh():
    """With a head that is sure of a rejection, every round has its two tokens, not only the first
    one.
    """
    built = engine(threshold=0.9, shortest=1)
    torch.nn.init.constant_(built.controller.head.out.bias, 0.0)
    built.controller.head.out.bias.data[0] = 1e3
    assert {len(tokens) for _, tokens in rounds(built)} == {2}


def test_rows_of_a_batch_are_judged_alone():
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    together = write(engine(threshold=0.5), seeded_rows(PROMPTS, params, VOCAB))
    alone = itertools.chain.from_iterable(
        write(engine(threshold=0.5), [row]) for row in seeded_rows(PROMPTS, params, VOCAB)
    )
    assert together == list(alone)

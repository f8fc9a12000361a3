"""Drafts that others take the place of while they serve: what of a text is read, and by whom."""

import copy
import random

import pytest
import torch

import foretoken
from foretoken.engine.scheduling import held
from foretoken.training.online.draft import OnlineDraft

LONG = [random.Random(7).randrange(20) for _ in range(200)]


@pytest.fixture(scope="module")
def models(make_llama):
    """A target, a draft that agrees with it often, and what this draft learns."""
    target = make_llama(64, 0)
    found, generator = [target], torch.Generator().manual_seed(3)
    for _ in range(2):
        made = copy.deepcopy(target)
        with torch.no_grad():
            for weight in made.parameters():
                weight += 0.03 * torch.randn(weight.shape, generator=generator)
        found.append(made)
    return found


def chains(models):
    return foretoken.load(models[0], "chain", models[1], controller="fixed", depth=3)


def test_a_long_text_that_a_learning_draft_has_read_is_read(models):
    with chains(models) as session, OnlineDraft(session) as online:
        [guesser] = online.guessers
        stream = session.stream(LONG, 24, temperature=0.0)
        next(stream)
        assert not guesser.waits(stream.row) and guesser.unread.pace > 0.0
        assert guesser.to_read(stream.row) == 0.0
        stream.close()


def test_a_text_that_waits_is_read_by_the_weights_that_were_swapped_in_meanwhile(models):
    """Who asks how much is to be read has neither a router asked nor the text read in a swap."""
    asked = []
    with foretoken.load(models[0], "plain") as plain:
        wanted = plain.generate(LONG, 24, temperature=0.0).tokens
    with (
        chains(models) as session,
        OnlineDraft(session, router=lambda ids: asked.append(ids) or 0) as online,
    ):
        [guesser], [draft] = online.guessers, online.served.drafts
        [row] = session.rows([LONG], 24, temperature=0.0)
        session.scheduler.submit([row], lambda step, at: None)
        with held(session.scheduler.turns), torch.inference_mode():
            session.engine.fill()
        assert session.engine.running == [row] and guesser.waits(row)
        guesser.unread.pace = 0.01
        assert guesser.to_read(row) == pytest.approx(0.01 * (len(LONG) - 1)) and asked == []
        with held(session.scheduler.turns), torch.inference_mode(False):
            online.swap(0, models[2])
        assert draft.rows_held == 0, "nobody has drafted for it"
        session.scheduler.wait(lambda: row.finish is not None)
        assert row.error is None and row.new_tokens == wanted
        assert asked == [LONG] and not guesser.unread
        assert online.served.topics == {} and draft.rows_held == 0

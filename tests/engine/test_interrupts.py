"""Ctrl-C while a text is written: the step ends whole, and everything goes on as before."""

from __future__ import annotations

import signal

import pytest
import torch

import foretoken
from foretoken.engine.interrupts import Uninterrupted

PROMPT, OTHER = [5, 9, 2, 41, 9, 2], [7, 7, 3]


def interrupting(call, at: int):
    """`call` that is met by Ctrl-C once, just before it returns."""
    calls = []

    def told(*given, **named):
        found = call(*given, **named)
        calls.append(given)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return found

    return told


@pytest.fixture(params=["plain", "chain", "tree", "auto"])
def session(request, tiny_pair):
    draft = tiny_pair[1] if request.param in ("chain", "tree") else None
    with foretoken.load(
        tiny_pair[0], request.param, draft, kernels="dense", controller="fixed"
    ) as opened:
        opened.prepare()
        yield opened


@pytest.mark.parametrize("name", ["prefill", "score", "commit", "free"])
def test_an_interrupted_step_ends_whole(session, name, monkeypatch) -> None:
    """Wherever it comes: the texts of others are what they were, and nothing is left behind."""
    target = session.target
    wanted = session.generate(OTHER, 30).tokens
    other = session.stream(OTHER, 30)
    got = list(next(other).tokens)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupting(getattr(target, name), 1), raising=True)
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, 12)
    got += [token for piece in other for token in piece.tokens]
    assert got == wanted
    assert session.engine.idle and target.rows_held == 0
    assert session.generate(OTHER, 30).tokens == wanted


@pytest.mark.parametrize("name", ["score", "commit"])
def test_inside_generate_too(tiny_pair, name, monkeypatch) -> None:
    model, draft = tiny_pair
    faster = foretoken.custom_generate(draft=draft, kernels="dense", depth=5)
    ids = torch.tensor([PROMPT])

    def write():
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, custom_generate=faster, max_new_tokens=12, do_sample=False
        ).tolist()

    wanted = write()
    engine = faster._kept[1]
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, name, interrupting(getattr(engine.target, name), 2))
        with pytest.raises(KeyboardInterrupt):
            write()
    assert engine.idle and engine.target.rows_held == 0
    assert write() == wanted


@pytest.mark.parametrize("name", ["prefill", "prune"])
def test_beams_too(tiny_pair, name, monkeypatch) -> None:
    with foretoken.load(tiny_pair[0], "beam-sampling", kernels="dense") as session:
        wanted = session.generate(PROMPT, 12, seed=1, temperature=1.0).sequences
        target = session.target
        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupting(getattr(target, name), 1))
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT, 12, seed=1, temperature=1.0)
        assert target.rows_held == 0
        assert session.generate(PROMPT, 12, seed=1, temperature=1.0).sequences == wanted


def test_a_second_one_does_not_wait() -> None:
    """What runs may be a caller's own code that never ends."""
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), Uninterrupted() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is before

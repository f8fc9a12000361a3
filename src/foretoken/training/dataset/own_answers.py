"""Answers of a draft's own, along which the target says its laws: on-policy texts (DistillSpec).

A draft writes faster than its target, and the target reads faster than it writes, so such texts
cost less than the target's own; they show the draft what it does after its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.errors import ConfigError
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.load import load_model
from foretoken.lm.opening import open_draft


@contextmanager
def draft_session(session: Session, draft: Any) -> Iterator[Session]:
    """A session that decodes plainly with a draft of the session's target."""
    if draft is None:
        raise ConfigError(
            "answers of a draft were asked for with writer=draft.",
            "no draft was named.",
            "pass --draft DIR, or leave writer=target.",
        )
    target, width = session.target.model, session.target.vocab_size
    model = load_model(draft, device=target.device, dtype=target.dtype)
    if model.config.vocab_size != width:
        raise ConfigError(
            f"answers of the draft {draft} were asked for.",
            f"it has {model.config.vocab_size} tokens and the target {width}: the target cannot "
            "read what it writes.",
            "pass a draft with the target's vocabulary.",
        )
    with closing(open_draft(model, chosen_rows(None, draft, width))) as lm:
        engine = assemble("plain", lm, max_rows=session.max_rows)
        yield Session(engine, method="plain", tokenizer=session.tokenizer, eos=session.eos)

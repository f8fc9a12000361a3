"""Target and draft: what is refused before they are read, loaded, and checked for each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.engine.assemble import assemble, require_draft
from foretoken.engine.loop import Engine
from foretoken.errors import ConfigError
from foretoken.methods import Method
from foretoken.methods import method as method_row
from foretoken.types import KeepsIds


def check_request(method: str, draft: Any, max_rows: int) -> Method:
    """What can be refused without reading a weight."""
    row = method_row(method)
    require_draft(row, draft)
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        raise ConfigError(
            f"max_rows={max_rows!r} was asked for.",
            "max_rows counts the rows decoded together: 1 or more.",
            "pass max_rows=1 or more.",
        )
    return row


def check_tokenizers(words: Any, source: Any, load_tokenizer: Any) -> None:
    """Equal ids must mean equal text; how many there are is checked when the parts are joined."""
    if words is None or not isinstance(source, str | Path):
        return
    other = load_tokenizer(source)
    if other is not None and other.get_vocab() != words.get_vocab():
        raise ConfigError(
            f"the draft {source} has a tokenizer of its own.",
            "guesses are token ids, and these tokenizers give the same ids other meanings.",
            "use a draft trained with the target's tokenizer, or method prompt-lookup.",
        )


def check_words(engine: Engine, words: Any) -> None:
    """A drafter that keeps ids from elsewhere compares what they mean with the target's."""
    if words is not None and isinstance(engine.drafter, KeepsIds):
        engine.drafter.check_words(words.get_vocab())


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: of the generation settings, else the config, else the tokenizer."""
    for owner in (
        getattr(model, "generation_config", None),
        model.config.get_text_config(decoder=True),
        tokenizer,
    ):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def engine_over(
    model: Any,
    method: str,
    draft: Any,
    *,
    words: Any = None,
    loading: Mapping[str, Any] | None = None,
    lm_options: Mapping[str, Any] | None = None,
    **parts: Any,
) -> tuple[Engine, Any]:
    """The engine over a loaded target, and its draft (None for a method that needs none)."""
    from foretoken.lm.cached import CachedLM
    from foretoken.lm.load import load_model, load_tokenizer

    target_lm = CachedLM(model, name="target", **(lm_options or {}))
    draft_lm = None
    if method_row(method).needs_draft:
        kernels = {k: v for k, v in (lm_options or {}).items() if k == "kernels"}
        draft_lm = CachedLM(load_model(draft, **(loading or {})), name="draft", **kernels)
    engine = assemble(method, target_lm, draft_lm, **parts)
    if draft_lm is not None:
        check_tokenizers(words, draft, load_tokenizer)
    check_words(engine, words)
    return engine, draft_lm

"""Target and draft: what is refused before they are read, loaded, and checked for each other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foretoken import shipped
from foretoken.contract import KeepsIds
from foretoken.engine.assemble import assemble, require_draft
from foretoken.errors import CheckpointError, ConfigError, TokenizerError
from foretoken.methods import Method, needs_draft
from foretoken.methods import method as method_row


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


def check_tokenizers(tokenizer: Any, source: Any, load_tokenizer: Any) -> None:
    """Equal ids must mean equal text; how many there are is checked when the parts are joined."""
    if tokenizer is None or not isinstance(source, str | Path):
        return
    other = load_tokenizer(source)
    if other is not None and other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"the draft {source} has a tokenizer of its own.",
            "guesses are token ids, and these tokenizers give the same ids other meanings.",
            "use a draft trained with the target's tokenizer, or method prompt-lookup.",
        )


def check_vocabulary(engine: Any, tokenizer: Any) -> None:
    """A drafter that keeps ids from elsewhere compares what they mean with the target's."""
    if tokenizer is not None and isinstance(engine.drafter, KeepsIds):
        engine.drafter.check_vocabulary(tokenizer.get_vocab())


def end_tokens(model: Any, tokenizer: Any, given: Any = None) -> frozenset[int]:
    """The ids that end a text: of the generation config, else the config, else the tokenizer.

    They count even where the rest of the generation config is left aside (`given` is False).
    """
    for owner in (
        given,
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
    tokenizer: Any = None,
    loading: Mapping[str, Any] | None = None,
    lm_options: Mapping[str, Any] | None = None,
    draft_vocabulary: Any = None,
    draft_thresholds: Any = None,
    budget: Any = None,
    **parts: Any,
) -> tuple[Any, Any]:
    """The engine over a loaded target, and its draft (None for a method that needs none).

    A `budget` of memory (`memory.keeping`) is kept to from then on.
    """
    from foretoken.lm.load import load_model
    from foretoken.lm.opening import FORWARD_OPTIONS, open_lm
    from foretoken.lm.placing import beside

    with ExitStack() as refused:
        target_lm = open_lm(model, name="target", **(lm_options or {}))
        refused.callback(target_lm.close)
        draft_lm = None
        if needs_draft(method_row(method)):
            forward = {k: v for k, v in (lm_options or {}).items() if k in FORWARD_OPTIONS}
            draft_lm = opened_draft(
                load_model(draft, **beside(model, loading or {}, draft)),
                draft,
                draft_vocabulary,
                thresholds=draft_thresholds,
                tokenizer=tokenizer,
                width=target_lm.vocab_size,
                trusted=bool((loading or {}).get("trust_remote_code")),
                **forward,
            )
            refused.callback(draft_lm.close)
        engine = assemble(method, target_lm, draft_lm, **parts)
        check_vocabulary(engine, tokenizer)
        if budget is not None:
            budget.bind(engine, draft_lm)
        refused.pop_all()  # what was opened stays open
    return engine, draft_lm


def opened_draft(
    model: Any,
    source: Any,
    vocabulary: Any = None,
    *,
    thresholds: Any = None,
    tokenizer: Any = None,
    width: int | None = None,
    trusted: bool = False,
    **forward: Any,
) -> Any:
    """A loaded draft, opened with the tokens it is to score (`lm.draft_vocabulary`), and with the
    exits of a sorted one (`lm.draft_exits`), at these thresholds.

    `tokenizer` and `width` are the target's: a draft that gives ids other meanings, or has another
    number of them, is told what they stand for. Code that its tokenizer brings is run if `trusted`.
    """
    from foretoken.lm.draft_exits import chosen_exits
    from foretoken.lm.draft_vocabulary import chosen_rows
    from foretoken.lm.opening import open_draft

    words = model.get_output_embeddings()
    size = 0 if words is None else words.weight.shape[0]
    rows = chosen_rows(vocabulary, shipped.resolve(source), size) if size else None
    tokens = None
    if width is not None and size:
        tokens = translation(tokenizer, source, width, size, trusted)
    if tokens is not None:
        rows = tokens.rows.among(rows)
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    exits = chosen_exits(thresholds, shipped.resolve(source), layers)
    return open_draft(model, rows, tokens, exits, **forward)


def translation(tokenizer: Any, source: Any, width: int, size: int, trusted: bool) -> Any:
    """How ids of the target are told to a draft; None where they are the same."""
    from foretoken.lm.token_map import map_tokens, same_tokens

    other = None if tokenizer is None else draft_tokenizer(source, trusted)
    if other is None:
        return None
    if other.get_vocab() == tokenizer.get_vocab():
        return None if width == size else same_tokens(width, size)
    name = str(source) if isinstance(source, str | Path) else type(source).__name__
    return map_tokens(tokenizer, other, width, size, name)


def draft_tokenizer(source: Any, trusted: bool) -> Any:
    """The tokenizer of a draft; None where it has none, in its directory or on the hub."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    from foretoken.lm.load import WORDS, load_tokenizer

    try:
        return load_tokenizer(source, None, trusted)
    except TokenizerError as error:  # whose advice is of a target's
        where = shipped.resolve(source)
        local = not isinstance(where, str) or Path(where).expanduser().is_dir()
        # The cache notes what the hub said it has not; where it could not be asked nobody knows.
        kept = [True if local else try_to_load_from_cache(str(where), name) for name in WORDS]
        if _CACHED_NO_EXIST in kept and all(one in (None, _CACHED_NO_EXIST) for one in kept):
            return None
        raise CheckpointError(
            f"the draft {source} was asked for: {error.asked}",
            error.possible,
            "save its tokenizer again, or use another draft, or method prompt-lookup.",
        ) from error

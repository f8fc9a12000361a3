"""The front door: load a model once, then generate, stream and batch with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.engine.assemble import check_options
from foretoken.engine.generation_config import generation_defaults
from foretoken.engine.load_log import log_model
from foretoken.engine.models import check_request, end_tokens, engine_over
from foretoken.engine.requests import SAMPLING, check_sampling
from foretoken.engine.session import Session, session_class
from foretoken.engine.tuned import identity, read_tuned
from foretoken.errors import ConfigError
from foretoken.heads.store import method_of
from foretoken.methods import default_method, needs_draft
from foretoken.methods import method as method_row


def load(
    target: Any = None,
    method: str | None = None,
    draft: Any = None,
    tokenizer: Any = None,
    device: Any = None,
    dtype: Any = None,
    *,
    tuned: str | Path | None = None,
    controller: str | None = None,
    verifier: str | None = None,
    exact_bits: bool = False,
    kernels: str = "auto",
    compile: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    max_rows: int = 16,
    memory_budget: Any = None,
    device_map: Any = None,
    generation_config: Any = None,
    draft_vocabulary: Any = None,
    draft_thresholds: Any = None,
    **config: Any,
) -> Session:
    """A session over `target` (directory, hub name or loaded model), decoding with `method`.

    Without `method` it is `auto-draft` where there is a draft, what a `draft_head` was trained for
    where there is one, and `auto` where there is neither.
    `config` holds fields of the method's model, drafter, verifier and controller. What cannot work
    is refused here, before any weight is read where that can be known. A method that needs no
    draft leaves `draft` alone. `compile` captures the models' forwards at load where that can be
    (seconds for a real model; "off" leaves them as they are) and runs operations in C where there
    is a compiler; "max" refuses where either cannot be.

    `draft_vocabulary` are the tokens that the draft scores: ids or a file of them, or "off" for
    all; None takes what the draft's directory says. What is written follows the same law.
    `draft_thresholds` say how sure a sorted draft must be at each of its exits but the last to be
    left there, "off" that it runs all its layers; None takes what its directory says.

    The model's generation config is honoured as `generate` does: explicit options win. A
    GenerationConfig may be passed in its place, or False to leave all but its end tokens aside.

    `memory_budget` (bytes, or a text such as "2GiB") is for weights, their second copies, caches
    and what steps hold while they run; not for the interpreter and its libraries (docs/memory.md).
    Trees are made smaller, then batches, to keep to it; a text that can never fit is refused.

    `device_map` places the target's modules as in `from_pretrained`, each layer's cache beside it.

    `tuned` is a file of `foretoken tune`, or its folder: it says what is not asked for here.
    """
    loading = {
        "device": device, "dtype": dtype, "device_map": device_map,
        "allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    lm_options = {"exact_bits": exact_bits, "kernels": kernels, "compile": compile}
    parts: dict[str, Any] = {
        "controller": controller, "verifier": verifier, "max_rows": max_rows,
        "memory_budget": memory_budget,
    }  # fmt: skip
    if tuned is not None:
        asked = {"target": target, "method": method, "draft": draft, "tokenizer": tokenizer}
        asked |= {**loading, **lm_options, **parts, "generation_config": generation_config}
        asked |= {"draft_vocabulary": draft_vocabulary, "draft_thresholds": draft_thresholds}
        return load(**complete(tuned, {**asked, **config}))
    check_given(target)
    if method is None:
        method = usual_method(draft, config.get("draft_head"), controller, verifier)
    check_options(method, controller=controller, verifier=verifier, **config)
    check_places(target, method, draft, draft_vocabulary, loading)
    check_request(method, draft, max_rows)
    if (budget := parts.pop("memory_budget")) is not None:
        options = {**config, "controller": controller}
        budget = planned(budget, target, method, draft, options, loading, draft_vocabulary, kernels)
        lm_options["kernels"] = budget.kernels(kernels, max_rows)
    parts |= {
        "lm_options": lm_options, "draft_vocabulary": draft_vocabulary,
        "draft_thresholds": draft_thresholds, "budget": budget, **config,
    }  # fmt: skip
    return session_over(target, method, draft, tokenizer, loading, generation_config, parts)


def usual_method(
    draft: Any, head: Any, controller: str | None = None, verifier: str | None = None
) -> str:
    """What a user gets who names no method: what a `draft_head` was trained for where there is
    one, a draft beside it or not; else the default with this draft, or without any.
    """
    return method_of(head) if head else default_method(draft, controller, verifier)


def check_places(
    target: Any, method: str, draft: Any, draft_vocabulary: Any, loading: Mapping[str, Any]
) -> None:
    """Refuse folders that hold no model, files of no tokens, and maps of no devices."""
    from foretoken.lm.draft_vocabulary import check_asked
    from foretoken.lm.load import check_source
    from foretoken.lm.placing import check_map

    if loading["device_map"] is not None:
        check_map(loading["device_map"], loading["device"])
    check_asked(draft_vocabulary)
    for model in (target, draft if needs_draft(method_row(method)) else None):
        if isinstance(model, str | Path):
            check_source(model, loading["allow_pickle"])


def planned(
    given: Any, target: Any, method: str, draft: Any, config: Mapping[str, Any],
    loading: Mapping[str, Any], draft_vocabulary: Any, kernels: str,
) -> Any:  # fmt: skip
    """The memory budget of a load; CapabilityError before a weight is read where it is too small.

    A loaded model is counted in its own type, wherever it is.
    """
    from foretoken.engine.memory.keeping import Budget

    reading = {name: value for name, value in loading.items() if name != "device_map"}
    if not isinstance(target, str | Path):
        reading |= {"dtype": target.dtype, "device": target.device}
    config = dict(config)
    reading |= {"draft_vocabulary": draft_vocabulary, "kernels": kernels}
    reading |= {"controller": config.pop("controller")}
    return Budget.asked(given, target, method, draft, config, **reading)


def session_over(
    target: Any,
    method: str,
    draft: Any,
    tokenizer: Any,
    loading: dict[str, Any],
    generation_config: Any,
    parts: dict[str, Any],
) -> Session:
    """Read the weights and put the parts around them; options were checked by `load`."""
    from foretoken.lm.kernels.teams import dismiss
    from foretoken.lm.load import load_model, load_tokenizer

    model = load_model(target, **loading)
    vocabulary = load_tokenizer(target, tokenizer, bool(loading.get("trust_remote_code")))
    generation = generation_defaults(model, generation_config)
    engine, draft_lm = engine_over(
        model, method, draft, tokenizer=vocabulary, loading=loading, **parts
    )
    for lm in (engine.target, draft_lm):
        if lm is not None:
            log_model(lm)
    dismiss()  # texts may be written by another thread
    return session_class(method_row(method))(
        engine,
        method=method,
        tokenizer=vocabulary,
        draft=draft_lm,
        eos=end_tokens(model, vocabulary, generation_config),
        generation=generation,
    )


def check_given(target: Any) -> None:
    """Refuse a load of nothing."""
    if target is None:
        raise ConfigError(
            "load was called without a target.",
            "a target is a directory, a hub name or a loaded model; a tuned file names one, too.",
            "write for example load('./model'), or load(tuned='./tuned').",
        )


def complete(tuned: str | Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `load` takes, with what a tuned file says of the rest; another target is refused."""
    from foretoken.lm.load import load_tokenizer, target_config

    found = read_tuned(tuned)
    whole = found.completing(asked)
    trusted = bool(whole.get("trust_remote_code"))
    config = target_config(
        whole["target"], allow_pickle=bool(whole.get("allow_pickle")), trust_remote_code=trusted
    )
    words = load_tokenizer(whole["target"], asked.get("tokenizer"), trusted)
    found.check_target(identity(config, words))
    return whole


def generate(
    target: Any, prompt: Any, method: str | None = None, draft: Any = None, **options: Any
) -> Any:
    """Load, write once and forget: `options` are those of `load` and of `Session.generate`."""
    sampling = {name: value for name, value in options.items() if name in SAMPLING}
    check_sampling(sampling)
    loading = {name: value for name, value in options.items() if name not in SAMPLING}
    with load(target, method, draft, **loading) as session:
        return session.generate(prompt, **sampling)

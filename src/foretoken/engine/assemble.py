"""Engines from names: a row of METHODS, two models and options, put together or refused."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.contract import LanguageModel
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.step import Parts
from foretoken.errors import CapabilityError, ConfigError, made_by, meant
from foretoken.methods import (
    CONTROLLERS,
    VERIFIERS,
    Method,
    needs_draft,
    resolve,
    selecting,
    settled,
)
from foretoken.methods import method as method_row
from foretoken.values import fits, told


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One option of a method's parts."""

    name: str
    part: str  # "model", "drafter", "verifier" or "controller"
    kind: str  # its type, as written
    default: Any


def assemble(
    method_name: str,
    target_lm: LanguageModel,
    draft_lm: LanguageModel | None = None,
    *,
    controller: str | None = None,
    verifier: str | None = None,
    max_rows: int = 16,
    **config: Any,
) -> Any:
    """The engine of a method; `config` holds fields of its model, drafter, rule and controller, or
    `preset="paper"`, which stands for the setting of its paper.

    A controller that needs measured costs gets them later (`engine.measure`), not here.
    """
    row = _row(method_name, config)
    others = selecting(row, controller)
    controller, config = settled(row, controller, config)
    parts = _parts(row, controller, verifier)
    _check_unbounded(row, target_lm)
    _check_draft(row, target_lm, draft_lm)
    options = _route(row, parts, config, others)
    _require_options(row, config)
    if row.inner_chains and "sources" not in config and target_lm.caps.tree != "mask":
        row = replace(row, inner=row.inner_chains)
    loaded = {"target": target_lm, "draft": draft_lm, "guesser": None}
    made = {part: cls.Config(**options[part]) for part, cls in parts.items()}
    drafter = _drafter(row, "", parts, made, loaded)
    fields = _fields(parts["controller"]).keys()
    if {"depth", "nodes"} <= fields:  # a constant budget: the drafter's own size
        # by what was asked for: a row's own defaults are of drafts whose shape nobody named
        size = drafter.fitting(config.get("depth"), config.get("nodes"))
        if size is not None:
            asked = options["controller"] | {"depth": size.depth, "nodes": size.nodes}
            made["controller"] = parts["controller"].Config(**asked)
    engine: Parts = resolve(row.engine)(
        loaded["target"],
        drafter,
        parts["verifier"](made["verifier"]),
        parts["controller"](made["controller"]),
        max_rows=max_rows,
    )
    return engine


def _drafter(
    row: Method, prefix: str, parts: dict[str, Any], made: dict[str, Any], loaded: dict[str, Any]
) -> Any:
    """A row's drafter and, before it, those it is given.

    One that scores through a view of the target replaces the target of whatever is built next.
    """
    inner = []
    for name in row.inner:
        try:
            inner.append(_drafter(method_row(name), f"{name} ", parts, made, loaded))
        except CapabilityError:
            if name not in row.optional:
                raise
    given = [loaded[role] for role in row.handed()]
    if row.model == "draft":  # one for all: who gives it other weights gives them to every part
        loaded["guesser"] = loaded["guesser"] or OrdinaryModel(*given)
        given = [loaded["guesser"]]
    elif row.model:
        part = _model_part(row, prefix)
        kind = (row.head,) if row.head else ()
        if part not in loaded:
            loaded[part] = parts[part](*given, *kind, config=made[part])
        given = [loaded[part]]
    part = prefix + "drafter"
    drafter = parts[part](*given, *inner, config=made[part])
    loaded["target"] = getattr(drafter, "view", None) or loaded["target"]
    return drafter


def check_options(
    method_name: str,
    *,
    controller: str | None = None,
    verifier: str | None = None,
    **config: Any,
) -> None:
    """Raise what `assemble` would say about options alone, before any model is loaded."""
    row = _row(method_name, config)
    others = selecting(row, controller)
    controller, config = settled(row, controller, config)
    parts = _parts(row, controller, verifier)
    options = _route(row, parts, config, others)
    _require_options(row, config)
    for part, cls in parts.items():
        cls.Config(**options[part])


def config_fields(
    method_name: str, controller: str | None = None, verifier: str | None = None
) -> dict[str, ConfigField]:
    """Every option the method takes with this controller and this verifier, by name."""
    row = method_row(method_name)
    found: dict[str, ConfigField] = {}
    for part, cls in _parts(row, controller, verifier).items():
        for name, option in _fields(cls).items():
            assert name not in found, f"{name} is an option of two parts of {method_name}"
            default = row.defaults.get(name, option.default)
            role = part.split()[-1]
            found[name] = ConfigField(name, role, str(option.type), default)
    return found


def _row(name: str, config: Mapping[str, Any]) -> Method:
    """The row of a method; one that merges others takes those that `sources` names, if any."""
    row = method_row(name)
    chosen = config.get("sources")
    if "sources" not in _fields(resolve(row.drafter)) or not isinstance(chosen, list | tuple):
        return row
    sources = [method_row(source) for source in chosen]
    for source in sources:
        if needs_draft(source) or source.inner or source.engine != row.engine:
            raise ConfigError(
                f"{source.name!r} was asked for as a source of {name!r}.",
                "sources look guesses up, without a model of their own.",
                f"name look-up methods, such as {', '.join(row.inner)}.",
            )
    needs = tuple({need: None for source in sources for need in source.needs})
    return replace(row, inner=tuple(chosen), needs=needs)


def _parts(row: Method, controller: str | None, verifier: str | None) -> dict[str, Any]:
    """The classes a method is made of, by the part they play; of inner rows with their name."""
    if row.writes == "beams" and controller not in (None, row.controller):
        raise ConfigError(
            f"controller {controller!r} was asked for with method {row.name!r}.",
            "controllers that learn look at one text; beams are drafted to a fixed depth.",
            f"use controller={row.controller!r} and choose its depth.",
        )
    return {
        **_guessing(row, ""),
        "verifier": resolve(_named("verifier", verifier or row.verifier, VERIFIERS)),
        "controller": resolve(_named("controller", controller or row.controller, CONTROLLERS)),
    }


def _guessing(row: Method, prefix: str) -> dict[str, Any]:
    """Model and drafter of a row, and of the rows inside it."""
    found: dict[str, Any] = {}
    for name in row.inner:
        found |= _guessing(method_row(name), f"{name} ")
    if row.model not in ("", "draft"):
        found[_model_part(row, prefix)] = resolve(row.model)
    return {**found, prefix + "drafter": resolve(row.drafter)}


def _model_part(row: Method, prefix: str) -> str:
    """What a row's own draft model is called; rows with the same trained head have one for all."""
    return f"{row.head or prefix} model"


def _named(part: str, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise ConfigError(
            f"{part} {name!r} was asked for.",
            f"{part}s are {', '.join(known)}.",
            meant(name, known),
        )
    return known[name]


def require_draft(row: Method, draft: Any) -> None:
    """A method that guesses with a second model is refused without one."""
    if needs_draft(row) and draft is None:
        raise ConfigError(
            f"method {row.name!r} was asked for without a draft model.",
            f"{row.name!r} guesses with a second, smaller model of the same vocabulary.",
            "pass a draft model, or use method prompt-lookup, which needs none.",
        )


def _check_unbounded(row: Method, target: LanguageModel) -> None:
    """A budget of memory sizes a model's cache for one method at a time."""
    if getattr(getattr(target, "cache", None), "exact", False):
        raise ConfigError(
            f"method {row.name!r} was asked for around models that were loaded with memory_budget.",
            "the budget sizes their caches for one method at a time.",
            "close this session, and load with the other method and the same memory_budget.",
        )


def _check_draft(row: Method, target: LanguageModel, draft: LanguageModel | None) -> None:
    require_draft(row, draft)
    if draft is not None and not needs_draft(row):
        raise ConfigError(
            f"method {row.name!r} was asked for with a draft model.",
            f"{row.name!r} uses no second model; it would be loaded for nothing.",
            "leave the draft model out, or use method chain or tree.",
        )
    if draft is not None and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"a target of {target.vocab_size} tokens was paired with a draft model of "
            f"{draft.vocab_size}.",
            "guesses are token ids, so both models must share one vocabulary, or lie in folders "
            "with tokenizers, by which ids are translated.",
            "use a draft model with the target's tokenizer, or method prompt-lookup.",
        )


def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    return {option.name: option for option in dataclasses.fields(cls.Config)}


def _route(
    row: Method, parts: dict[str, Any], config: dict[str, Any], others: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Options handed to the part that knows their name; `others` might have been meant as well."""
    options: dict[str, dict[str, Any]] = {part: {} for part in parts}
    known: dict[str, list[str]] = {}  # sources that are merged may share a name
    for part, cls in parts.items():
        for name in _fields(cls):
            known.setdefault(name, []).append(part)
    for name, value in config.items():
        if name not in known:
            possible = sorted({*known, *others})
            raise ConfigError(
                f"option {name!r} was asked for with method {row.name!r}.",
                f"options of this method, with its verifier and controller: {', '.join(possible)}.",
                meant(name, possible),
            )
        for part in known[name]:
            hint = typing.get_type_hints(parts[part].Config)[name]
            options[part][name] = _checked(name, value, hint)
    for name, value in row.defaults.items():
        for part in known.get(name, ()):
            options[part].setdefault(name, value)
    return options


MADE_BY = {  # what makes the folders that methods need
    "datastore": "foretoken datastore build FILES --out DIR",
    "keys": "foretoken datastore build FILES --dense --out DIR",
    "predictors": "foretoken train exits --out DIR",
    "draft_head": "foretoken train {head} --out DIR",
}


def _require_options(row: Method, config: dict[str, Any]) -> None:
    """A method that stands on data or learned parts is refused without them."""
    for name in row.needs:
        if not config.get(name):
            heads = [head for one in (row, *map(method_row, row.inner)) if (head := one.head)]
            maker = MADE_BY[name].format(head=(*heads, "NAME")[0])
            raise ConfigError(
                f"method {row.name!r} was asked for without its {name}.",
                f"{row.name!r} needs the option {name}: a folder made for the target beforehand.",
                made_by(maker, name),
            )


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type its field declares; lists become tuples."""
    if isinstance(value, list):
        value = tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if not fits(value, hint):
        raise ConfigError(
            f"{name}={value!r} was asked for.",
            f"{name} is {told(hint)}.",
            f"pass a {name} of that type.",
        )
    return value

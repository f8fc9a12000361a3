"""The catalogue: one file per family, one row per published method."""

from __future__ import annotations

from foretoken.errors import ConfigError, meant
from foretoken.methods import (
    baseline,
    beams,
    draft_model,
    heads,
    look_up,
    lossy,
    portfolios,
    sampled_trees,
    self_speculation,
)
from foretoken.methods.method import CONTROLLERS as CONTROLLERS
from foretoken.methods.method import GENERAL_CONTROLLERS as GENERAL_CONTROLLERS
from foretoken.methods.method import VERIFIERS as VERIFIERS
from foretoken.methods.method import Family as Family
from foretoken.methods.method import Method as Method
from foretoken.methods.method import resolve as resolve
from foretoken.methods.presets import PRESETS as PRESETS
from foretoken.methods.presets import paper_setting as paper_setting
from foretoken.methods.presets import selecting as selecting
from foretoken.methods.presets import settled as settled

FAMILIES: tuple[Family, ...] = (
    baseline.FAMILY,
    look_up.FAMILY,
    portfolios.FAMILY,
    self_speculation.FAMILY,
    draft_model.FAMILY,
    sampled_trees.FAMILY,
    heads.FAMILY,
    beams.FAMILY,
    lossy.FAMILY,
)
METHODS: dict[str, Method] = {row.name: row for family in FAMILIES for row in family.methods}


def method(name: str) -> Method:
    """The row called `name`; an unknown name raises ConfigError with the nearest ones."""
    if name not in METHODS:
        raise ConfigError(
            f"method {name!r} was asked for.",
            f"methods are {', '.join(METHODS)}.",
            f"{meant(name, METHODS)} `foretoken methods` lists them all.",
        )
    return METHODS[name]


def family_of(name: str) -> Family:
    """The family a method is in."""
    return next(family for family in FAMILIES if method(name) in family.methods)


def needs_draft(row: Method) -> bool:
    """Whether a second model is needed."""
    return "draft" in row.handed() or any(needs_draft(METHODS[name]) for name in row.inner)


def default_method(
    draft: object, controller: str | None = None, verifier: str | None = None
) -> str:
    """What a user gets who names no method: `auto` without a draft model, `auto-draft` with one,
    and `chain` with one and a rule or controller that suits chains.
    """
    if draft is None:
        return "auto"
    general = controller is None or controller in GENERAL_CONTROLLERS
    return "auto-draft" if general and verifier is None else "chain"

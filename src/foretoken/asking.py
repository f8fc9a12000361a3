"""What a drafter and a controller say to each other between two tokens, beside yes and no."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

RuleT = TypeVar("RuleT", bound=Callable[..., int])

LAST = 2  # an answer of `keep_going`: draw this token, but ask the draft model for no further one


def endless(rule: RuleT) -> RuleT:
    """Mark a `keep_going` that never stops a draft, so that drafters spare the law it would see."""
    rule.endless = True  # type: ignore[attr-defined]
    return rule


def reading(*taps: int, branches: bool = False) -> Callable[[RuleT], RuleT]:
    """Mark a `keep_going` that wants these hidden layers of the draft model's newest token.

    With `branches` it decides about a whole level at once, and wants those of every branch.
    """

    def marked(rule: RuleT) -> RuleT:
        rule.taps = taps  # type: ignore[attr-defined]
        rule.branches = branches  # type: ignore[attr-defined]
        return rule

    return marked


def taps_of(rule: Callable[..., int]) -> tuple[int, ...]:
    """The hidden layers a `keep_going` wants; most want none."""
    taps: tuple[int, ...] = getattr(rule, "taps", ())
    return taps


def wants_branches(rule: Callable[..., int]) -> bool:
    """Whether a `keep_going` decides about all branches of a level; most see one law."""
    return bool(getattr(rule, "branches", False))

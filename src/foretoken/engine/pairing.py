"""Refuse combinations that would change the text, before the first token."""

from __future__ import annotations

from foretoken.asking import taps_of, wants_branches
from foretoken.errors import CapabilityError, PairingError
from foretoken.methods import VERIFIERS, resolve
from foretoken.types import Controller, Drafter, Draw, LanguageModel, Verifier


def check_pairing(target: LanguageModel, drafter: Drafter, verifier: Verifier) -> None:
    """Raise PairingError or CapabilityError where drafter, rule and target do not fit.

    A lossy verifier (empty `exact_for`) takes any draft: it promises nothing to break.
    """
    draws = ", ".join(sorted(draw.value for draw in drafter.draws))
    rule, guesser = type(verifier).__name__, type(drafter).__name__
    inexact = drafter.draws - verifier.exact_for
    if Draw.JOINT in inexact:
        raise PairingError(
            f"{type(drafter).__name__} (beams) was paired with {rule}.",
            f"{rule} judges candidates for one text; beams are judged together.",
            "use the verifier beams.",
        )
    if verifier.exact_for and inexact:
        allowed = ", ".join(sorted(draw.value for draw in verifier.exact_for))
        raise PairingError(
            f"{type(drafter).__name__} (candidates: {draws}) was paired with {rule}.",
            f"{rule} keeps the law for {allowed} candidates only; with others the text would "
            "silently follow another law, however fast it looks.",
            f"use the verifier {' or '.join(exact_rules(drafter))}, exact for {draws}.",
        )
    if getattr(verifier, "drafter", guesser) not in [cls.__name__ for cls in type(drafter).__mro__]:
        raise PairingError(
            f"{guesser} was paired with the verifier of {verifier.drafter}.",  # type: ignore[attr-defined]
            "that rule takes the first layer for the target's own, untested.",
            f"use one of the verifiers {', '.join(VERIFIERS)} that is exact for {draws}.",
        )
    if verifier.chains_only and drafter.trees:
        raise PairingError(
            f"{type(drafter).__name__} (trees) was paired with {rule}.",
            f"{rule} reads chains only.",
            f"use the verifier {' or '.join(exact_rules(drafter))}.",
        )
    if drafter.trees and target.caps.tree != "mask":
        raise CapabilityError(
            f"{type(drafter).__name__} needs a target that scores trees.",
            f"this target scores chains only: {target.caps.why}.",
            "use method chain, prompt-lookup or plain.",
        )


def check_reading(drafter: Drafter, controller: Controller) -> None:
    """A controller that reads hidden layers of a draft model needs a drafter that shows them."""
    if not taps_of(controller.keep_going):
        return
    rule, guesser = type(controller).__name__, type(drafter).__name__
    if drafter.hidden_from is None:
        raise PairingError(
            f"{guesser} was paired with the controller {rule}.",
            f"{rule} reads the hidden layers of a draft model token by token, and {guesser} shows "
            "none.",
            "use it with method chain, or use the controller fixed, confidence or cost_model.",
        )
    if drafter.trees and not wants_branches(controller.keep_going):
        raise PairingError(
            f"{guesser} was paired with the controller {rule}.",
            f"{rule} judges one chain token by token, and {guesser} grows several branches.",
            "use the controller decision, which judges them together, or method chain.",
        )
    controller.read_from(drafter.hidden_from)  # type: ignore[attr-defined]


def exact_rules(drafter: Drafter) -> list[str]:
    """Names of the verifiers that keep the law of this drafter's candidates."""
    rules = {name: resolve(place) for name, place in VERIFIERS.items()}
    return [
        name
        for name, rule in rules.items()
        if drafter.draws <= rule.exact_for and not (rule.chains_only and drafter.trees)
    ]

"""Which law a text follows, from drafter, rule and target; wrong pairings refused at the door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.contract import Controller, Drafter, Guided, LanguageModel, Verifier
from foretoken.errors import CapabilityError, PairingError
from foretoken.methods import VERIFIERS, Method, resolve
from foretoken.types import Draw, Shape

TARGETS = "the target's own law"
UNHEEDED = (
    "a prediction was passed to a method that does not use it. Predictions are guessed by lossless "
    "methods other than plain and pearl; by others the text is written without. Leave it out, or "
    "use a method such as chain or prompt-lookup."
)


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of a text. Tables, results and pages print it."""

    lossless: bool  # the law below is kept exactly
    law: str  # which law that is
    why: str  # what it rests on, or why nothing is promised

    @property
    def kept(self) -> str:
        """The law of the text; what it is not, where the law above is not kept."""
        return self.law if self.lossless else f"not {self.law}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"lossless": self.lossless, "law": self.kept, "why": self.why}

    def __str__(self) -> str:
        if self.lossless:
            return f"lossless: {self.law}"
        return f"LOSSY: {self.kept}: {self.why}"


def promise_of(drafter: Any, rule: Any, target: Any = None) -> Promise:
    """The promise of parts, or of their classes where none is built yet."""
    law = getattr(drafter, "law", TARGETS)
    for part in (drafter, target):
        if not getattr(part, "lossless", True):
            return Promise(False, law, part.why)
    if not drafter.traits.draws <= rule.exact_for:
        return Promise(False, law, rule.why)
    name = rule.__name__ if isinstance(rule, type) else type(rule).__name__
    return Promise(True, law, f"the rule {name} keeps it for these drafts")


def heeds(drafter: Any, rule: Any, promise: Promise) -> bool:
    """Whether predictions and forced tokens are put before the target with these parts.

    Nobody guesses in plain decoding, and a law that is not kept is not bent further.
    """
    fits: bool = Draw.POINT in rule.exact_for and promise.lossless
    return fits and not getattr(drafter, "silent", False)


def promise_of_row(row: Method) -> Promise:
    """What a row of METHODS promises with its own rule and default options."""
    return promise_of(resolve(row.drafter), resolve(VERIFIERS[row.verifier]))


def check_parts(
    target: LanguageModel, drafter: Drafter, verifier: Verifier, controller: Controller
) -> None:
    """Raise PairingError or CapabilityError where the parts of an engine do not fit."""
    check_candidates(drafter, verifier)
    traits = drafter.traits
    rule, guesser = type(verifier).__name__, type(drafter).__name__
    if verifier.shape is Shape.CHAIN and traits.shape is Shape.TREE:
        raise PairingError(
            f"{guesser} (trees) was paired with {rule}.",
            f"{rule} reads chains only.",
            f"use the verifier {' or '.join(fitting_rules(drafter))}.",
        )
    check_scoring(target, drafter)
    check_stopping(drafter, controller)


def check_scoring(target: Any, drafter: Any) -> None:
    """Trees need a target that scores them."""
    if drafter.traits.shape is Shape.TREE and target.caps.tree != "mask":
        raise CapabilityError(
            f"{type(drafter).__name__} needs a target that scores trees.",
            f"this target scores chains only: {target.caps.why}.",
            "use method chain, prompt-lookup or plain.",
        )


def check_candidates(drafter: Any, verifier: Any) -> None:
    """A rule is only handed candidates that it can judge."""
    draws = drafter.traits.draws
    if draws <= verifier.exact_for | verifier.lossy_for:
        return
    rule, guesser = type(verifier).__name__, type(drafter).__name__
    raise PairingError(
        f"{guesser} (candidates: {named(draws)}) was paired with {rule}.",
        f"{rule} judges {named(verifier.exact_for | verifier.lossy_for)} candidates only; with "
        "others the text would silently follow another law, however fast it looks.",
        f"use the verifier {' or '.join(fitting_rules(drafter))}.",
    )


def check_stopping(drafter: Drafter, controller: Controller) -> None:
    """A stopping rule that reads a draft model's hidden states needs one that shows them."""
    stop = controller.stop
    if stop is None or not stop.taps:
        return
    rule, guesser = type(controller).__name__, type(drafter).__name__
    if not isinstance(drafter, Guided) or not drafter.model.hidden_size:
        raise PairingError(
            f"{guesser} was paired with the controller {rule}.",
            f"{rule} reads the hidden states of a draft model token by token, and {guesser} shows "
            "none.",
            "use it with method chain, or use the controller fixed, confidence or cost_model.",
        )
    if drafter.traits.shape is Shape.TREE and not stop.branches:
        raise PairingError(
            f"{guesser} was paired with the controller {rule}.",
            f"{rule} judges one chain token by token, and {guesser} grows several branches.",
            "use the controller decision, which judges them together, or method chain.",
        )


def fitting_rules(drafter: Drafter) -> list[str]:
    """Names of the verifiers that judge this drafter's candidates, the exact ones if there are."""
    rules = {name: resolve(place) for name, place in VERIFIERS.items()}
    chains = drafter.traits.shape is Shape.CHAIN
    fit = {name: rule for name, rule in rules.items() if chains or rule.shape is not Shape.CHAIN}
    draws = drafter.traits.draws
    exact = [name for name, rule in fit.items() if draws <= rule.exact_for]
    return exact or [n for n, rule in fit.items() if draws <= rule.exact_for | rule.lossy_for]


def named(draws: frozenset[Draw]) -> str:
    return ", ".join(sorted(draw.value for draw in draws))

"""What a row of the catalogue says. Strings only: parts are imported when they are first used."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTROLLERS = {
    "fixed": "controllers.fixed:Fixed",
    "cost_model": "controllers.cost_model:CostModel",
    "smartspec": "controllers.smartspec:SmartSpec",
    "confidence": "controllers.confidence:Confidence",
    "acceptance_head": "controllers.acceptance_head:AcceptanceThreshold",
    "decision": "controllers.decision:DecisionModel",
}
GENERAL_CONTROLLERS = ("fixed", "cost_model", "smartspec")  # fit every method that drafts

WITH_HEAD = ("acceptance_head", "decision")  # controllers that a trained head decides for

# Of `paper_options` where trees grow best first: neither our bar for a further level nor our
# correction of the draft's confidence is of any paper.
NO_BAR: Mapping[str, Any] = {"min_gain": 0.0, "calibrate": False}

VERIFIERS = {
    "point": "verifiers.point:Point",
    "recursive": "verifiers.recursive:Recursive",
    "block": "verifiers.block:Block",
    "traversal": "verifiers.traversal:Traversal",
    "mixed": "verifiers.mixed:Mixed",
    "target_first": "verifiers.target_first:TargetFirst",
    "naive": "verifiers.naive:Naive",
    "k_sequential": "verifiers.k_sequential:KSequential",
    "beams": "verifiers.beams:Beams",
}


@dataclass(frozen=True, slots=True)
class Method:
    """How a published method is put together: what guesses, which grower, rule and controller."""

    name: str
    summary: str
    drafter: str  # "module:Class" below foretoken: a look-up, or a grower of what `model` guesses
    verifier: str
    controller: str = "cost_model"  # what decides how much is guessed where nobody says
    # what the grower is given: "draft", the draft model as it is, or "module:Class", a DraftModel
    # or BlockModel made of `models`; empty: the drafter itself is made of `models`
    model: str = ""
    models: tuple[str, ...] = ()  # "target", "draft", both or nothing
    head: str = ""  # a row of HEADS: the kind that `model` is told after `models`
    inner: tuple[str, ...] = ()  # rows whose drafters it is given next, each with its own options
    optional: tuple[str, ...] = ()  # of inner: left out where the target cannot carry them
    inner_chains: tuple[str, ...] = ()  # the same, for a target that scores chains only
    paper: str = ""
    verifiers: tuple[str, ...] = ()  # other rules the `verifier` option may name
    controllers: tuple[str, ...] = ()  # that fit this method, beside GENERAL_CONTROLLERS
    engine: str = "engine.engine:Engine"
    # options of its parts whose own default does not suit it; a part without the option ignores it
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # options of preset="paper" beside `defaults` and a constant budget (`presets.paper_setting`)
    paper_options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # options without a default: folders of data or learned parts
    writes: str = "text"  # one growing text per prompt, or "beams": a scored set of texts

    def brought(self) -> tuple[str, ...]:
        """Options without a default, those of the method's own controller among them."""
        return (*self.needs, "head") if self.controller in WITH_HEAD else self.needs

    def handed(self) -> tuple[str, ...]:
        """The loaded models that its parts are made of."""
        return self.models or (("draft",) if self.model == "draft" else ())


@dataclass(frozen=True, slots=True)
class Family:
    """Methods whose guesses come from the same place."""

    name: str
    guesses: str  # where guesses come from
    needs: str  # what a user has to bring
    methods: tuple[Method, ...]


def resolve(place: str) -> Any:
    """The class or function at "module:Name" below foretoken, imported now."""
    return pkgutil.resolve_name(f"foretoken.{place}")

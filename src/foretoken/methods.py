"""The catalogue: one row per published method. Strings only; parts are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Method:
    """How a method is put together, and what it promises."""

    name: str
    summary: str
    drafter: str  # "module:Class" below foretoken
    verifier: str
    controller: str = "fixed"
    models: tuple[str, ...] = ()  # what the drafter is handed: "target", "draft", both or nothing
    inner: tuple[str, ...] = ()  # rows whose drafters it is handed next, each with its own options
    optional: tuple[str, ...] = ()  # of inner: left out where the target cannot carry them
    inner_chains: tuple[str, ...] = ()  # the same, for a target that scores chains only
    lossless: bool = True
    paper: str = ""
    verifiers: tuple[str, ...] = ()  # other rules the `verifier` option may name
    controllers: tuple[str, ...] = ()  # that fit this method, beside GENERAL_CONTROLLERS
    loop: str = "loop:decode"  # "module:function" below engine
    # options of its parts whose own default does not suit it; a part without the option ignores it
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # options without a default: folders of data or learned parts
    writes: str = "text"  # one growing text per prompt, or "beams": a scored set of texts
    law: str = ""  # what a lossless method is exact for, where that is not the target's own text

    @property
    def needs_draft(self) -> bool:
        """Whether a second model is needed."""
        return "draft" in self.models or any(METHODS[name].needs_draft for name in self.inner)


CONTROLLERS = {
    "fixed": "controllers.fixed:Fixed",
    "cost_model": "controllers.cost_model:CostModel",
    "confidence": "controllers.confidence:Confidence",
    "acceptance_head": "controllers.acceptance_head:AcceptanceThreshold",
    "decision": "controllers.decision:DecisionModel",
}
GENERAL_CONTROLLERS = ("fixed", "cost_model")  # fit every method that drafts

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

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "plain",
            "one token per target forward: the baseline, through the same loop",
            drafter="drafters.nothing:Nothing",
            verifier="point",
            paper="",
        ),
        Method(
            "chain",
            "a draft model guesses a few tokens ahead",
            drafter="drafters.chain_model:ChainModel",
            verifier="block",
            verifiers=("recursive",),
            controllers=("confidence",),
            models=("draft",),
            paper="arXiv 2211.17192, 2302.01318; block verification arXiv 2403.10444",
        ),
        Method(
            "pearl",
            "draft and target at the same time: guessing goes on while guesses are verified",
            drafter="drafters.run_ahead:RunAhead",
            verifier="block",
            verifiers=("recursive",),
            models=("draft",),
            loop="overlap:decode",
            paper="arXiv 2408.11850",
        ),
        Method(
            "specdec++",
            "a chain that ends where a trained head expects a rejection",
            drafter="drafters.chain_model:ChainModel",
            verifier="block",
            verifiers=("recursive",),
            controller="acceptance_head",
            models=("draft",),
            paper="arXiv 2405.19715",
        ),
        Method(
            "tree",
            "a draft model grows a tree of likely continuations, best first",
            drafter="drafters.tree_model:TreeModel",
            verifier="point",
            models=("draft",),
            paper="arXiv 2406.17276, 2402.12374",
        ),
        Method(
            "layerskip",
            "the target's first layers guess, the others go on from there; nothing is loaded twice",
            drafter="drafters.layer_skip:LayerSkip",
            verifier="block",
            verifiers=("recursive",),
            models=("target",),
            paper="arXiv 2404.16710",
        ),
        Method(
            "del",
            "the target's first layers guess; which, and how far, follows what all layers said",
            drafter="drafters.dynamic_exit:DynamicExit",
            verifier="block",
            controller="cost_model",
            verifiers=("recursive",),
            models=("target",),
            defaults={"depth": 18},
            paper="arXiv 2504.05598",
        ),
        Method(
            "swift",
            "the target less some sublayers guesses; which ones is searched for as it writes",
            drafter="drafters.layer_set:LayerSet",
            verifier="recursive",
            models=("target",),
            defaults={"depth": 25},
            paper="arXiv 2410.06916",
        ),
        Method(
            "specee",
            "the target stops at the layer where trained predictors are sure; lossy",
            drafter="drafters.early_leave:EarlyLeave",
            verifier="point",
            models=("target", "draft"),
            lossless=False,
            needs=("predictors",),
            paper="arXiv 2504.08850",
        ),
        Method(
            "prompt-lookup",
            "continue the way the last n-gram continued before; no second model",
            drafter="drafters.prompt_lookup:PromptLookup",
            verifier="point",
            paper="github.com/apoorvumang/prompt-lookup-decoding",
        ),
        Method(
            "token-recycling",
            "reuse what the target said about every token it scored, right or wrong",
            drafter="drafters.token_recycling:TokenRecycling",
            verifier="point",
            models=("target",),
            defaults={"depth": 6, "nodes": 80},
            paper="arXiv 2408.08696",
        ),
        Method(
            "rest",
            "continue the way a datastore of texts continued; no second model",
            drafter="drafters.retrieval:Retrieval",
            verifier="point",
            models=("target",),
            needs=("datastore",),
            defaults={"depth": 10, "nodes": 64},
            paper="arXiv 2311.08252",
        ),
        Method(
            "suffix",
            "follow the most frequent continuations in this request and in earlier answers",
            drafter="drafters.suffix:SuffixDecoding",
            verifier="point",
            defaults={"depth": 32, "nodes": 32},
            paper="arXiv 2411.04975",
        ),
        Method(
            "mcsd",
            "a draft model draws several candidates per position, in a tree of fixed shape",
            drafter="drafters.sampled_tree:SampledTree",
            verifier="recursive",
            verifiers=("traversal", "naive", "mixed"),
            models=("draft",),
            paper="arXiv 2401.06706",
        ),
        Method(
            "mcsd-target-init",
            "a tree whose first layer is the target's own; exact only for k=(1, 1, ...)",
            drafter="drafters.target_first:TargetFirst",
            verifier="target_first",
            models=("draft",),
            lossless=False,
            paper="arXiv 2409.10644",
        ),
        Method(
            "mcsd-dynamic",
            "chains below the target's own tokens, cut by a trained model; exact only for k=1",
            drafter="drafters.target_first:TargetFork",
            verifier="target_first",
            controller="decision",
            models=("draft",),
            lossless=False,
            paper="arXiv 2409.10644",
        ),
        Method(
            "spectr",
            "a draft model draws independent chains, one of which is selected token by token",
            drafter="drafters.sampled_tree:IndependentChains",
            verifier="k_sequential",
            verifiers=("recursive", "traversal", "mixed"),
            models=("draft",),
            paper="arXiv 2310.15141",
        ),
        Method(
            "rsd-c",
            "a draft model draws distinct candidates, with constant branching",
            drafter="drafters.sampled_tree:ConstantBranching",
            verifier="recursive",
            verifiers=("traversal", "mixed"),
            models=("draft",),
            paper="arXiv 2402.14160",
        ),
        Method(
            "rsd-s",
            "a draft model draws a beam of distinct paths by stochastic beam search",
            drafter="drafters.stochastic_beam:StochasticBeam",
            verifier="recursive",
            verifiers=("traversal", "mixed"),
            models=("draft",),
            paper="arXiv 2402.14160, 1903.06059",
        ),
        Method(
            "lookahead",
            "the target iterates on a window of its own future; n-grams seen there are the guesses",
            drafter="drafters.lookahead:Lookahead",
            verifier="point",
            defaults={"depth": 10, "nodes": 56},
            paper="arXiv 2402.02057",
        ),
        Method(
            "retrieval-dense",
            "continue the way texts did where the target was in a similar state; no second model",
            drafter="drafters.dense_retrieval:DenseRetrieval",
            verifier="point",
            models=("target",),
            needs=("keys",),
            defaults={"depth": 10, "nodes": 64},
            paper="arXiv 2505.00105, 2504.08386, 1911.00172",
        ),
        Method(
            "rasd",
            "a draft model's tree, fused with what it finds plausible in a datastore",
            drafter="drafters.guided_retrieval:GuidedRetrieval",
            verifier="point",
            models=("target",),
            inner=("tree",),
            needs=("datastore",),
            defaults={"depth": 10, "nodes": 64},
            paper="arXiv 2503.03434",
        ),
        Method(
            "beam-sampling",
            "several scored texts per prompt, drawn together: the baseline of dsbd",
            drafter="drafters.beam_model:NoBeams",
            verifier="beams",
            loop="beam:decode",
            writes="beams",
            law="beam sampling",
        ),
        Method(
            "dsbd",
            "a draft model runs beam sampling ahead; the target keeps as many beams as stand",
            drafter="drafters.beam_model:BeamModel",
            verifier="beams",
            models=("draft",),
            defaults={"depth": 4},
            paper="arXiv 2409.16560",
            loop="beam:decode",
            writes="beams",
            law="dynamic-width beam sampling",
        ),
        Method(
            "fused",
            "several look-up methods in one tree: prompt look-up, suffixes and recycled tokens",
            drafter="drafters.fusion:Fusion",
            verifier="point",
            inner=("prompt-lookup", "suffix", "token-recycling"),
            defaults={"depth": 10, "nodes": 80},
        ),
        Method(
            "auto",
            "whatever pays just now: looked-up trees, the target's own first layers, or nothing",
            drafter="drafters.choice:Choice",
            verifier="recursive",
            controller="cost_model",
            inner=("prompt-lookup", "suffix", "token-recycling", "del"),
            optional=("del",),
            inner_chains=("prompt-lookup",),
            defaults={"depth": 10, "nodes": 80},
        ),
    )
}


def default_method(draft: object) -> str:
    """What a user gets who names no method: `chain` with a draft model, `auto` without."""
    return "auto" if draft is None else "chain"


def method(name: str) -> Method:
    """The row called `name`; an unknown name raises ConfigError with the nearest ones."""
    if name not in METHODS:
        raise ConfigError(
            f"method {name!r} was asked for.",
            f"methods are {', '.join(METHODS)}.",
            f"did you mean {nearest(name, METHODS)}? `foretoken methods` lists them all.",
        )
    return METHODS[name]


def resolve(place: str) -> Any:
    """The class or function at "module:Name" below foretoken, imported now."""
    module, name = place.split(":")
    return getattr(importlib.import_module(f"foretoken.{module}"), name)

"""The catalogue of trainable parts: one row per head. Strings only; parts are imported on first
use.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.errors import ConfigError, meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A module, what it is trained on, and how; places are "module:Name" below foretoken."""

    name: str  # also the kind in its card and the argument of `foretoken train`
    summary: str
    module: str  # an nn.Module built from its `Config`, a HeadConfig
    serves: str  # the method or controller that asks it
    models: tuple[str, ...] = ("target", "draft")  # what the capture needs: both, or one
    reads: str = "draft"  # the model whose hidden states it sees
    captures: str = ""  # a Capture: what is recorded of the models while they decode
    objective: str = ""  # a HeadObjective: the loss, and how good the head is
    config: str = ""  # a TrainingConfig: every training option
    stands_for: str = ""  # the head in whose place it is taken as well; empty: none but its own
    # of texts: "tokens", those written in it taken for the target's, or the target's own "laws"
    learns: Literal["", "tokens", "laws"] = ""  # "": nothing of texts that are kept

    @property
    def trainable(self) -> bool:
        """Whether `foretoken train` can make it; else it has random weights only."""
        return bool(self.captures and self.objective and self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What every head is built from; a head's own `Config` adds its shape."""

    hidden_size: int  # of the model whose hidden states the head reads
    vocab_size: int  # of the tokens it was trained on


HEADS: dict[str, Head] = {
    head.name: head
    for head in (
        Head(
            name="acceptance",
            summary="how likely the target accepts a drafted token; ends drafts of specdec++",
            module="heads.acceptance:AcceptanceHead",
            captures="training.captures.guesses:Guesses",
            objective="training.objectives.acceptance:AcceptanceObjective",
            config="training.objectives.acceptance:AcceptanceTraining",
            serves="specdec++",
        ),
        Head(
            name="decision",
            summary="whether one more level pays in multi-candidate trees; a soft or a hard model",
            module="heads.decision:DecisionHead",
            captures="training.captures.guesses:Guesses",
            objective="training.objectives.decision:DecisionObjective",
            config="training.objectives.decision:DecisionTraining",
            serves="mcsd-dynamic",
        ),
        Head(
            name="exits",
            summary="whether a layer of the target already says what its last one will",
            module="heads.exits:ExitPredictors",
            reads="target",
            captures="training.captures.layers:LayerPredictions",
            objective="training.objectives.exits:ExitObjective",
            config="training.objectives.exits:ExitTraining",
            serves="specee",
        ),
        Head(
            name="medusa",
            summary="the tokens several places ahead, all from one state of the target",
            module="heads.medusa:Medusa",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.guessing:ParallelObjective",
            config="training.objectives.guessing:ParallelTraining",
            learns="tokens",
            serves="medusa",
        ),
        Head(
            name="hydra",
            summary="the tokens several places ahead, each head knowing the guesses before its own",
            module="heads.hydra:Hydra",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.guessing:DeepObjective",
            config="training.objectives.guessing:DeepTraining",
            learns="laws",
            serves="hydra",
        ),
        Head(
            name="chimera",
            summary="the tokens several places ahead, each behind a trigram that sees the text",
            module="heads.chimera:Chimera",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.guessing:BranchObjective",
            config="training.objectives.guessing:BranchTraining",
            learns="tokens",
            serves="chimera",
        ),
        Head(
            name="eagle",
            summary="the target's next hidden state, from the last one and the token after it",
            module="heads.eagle:Eagle",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.guessing:EagleObjective",
            config="training.objectives.guessing:FeatureTraining",
            learns="laws",
            serves="eagle2",
        ),
        Head(
            name="fspad",
            summary="such a state, and beside it what a law is read from; the token gates both",
            module="heads.fspad:Fspad",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.guessing:FeatureObjective",
            config="training.objectives.guessing:FeatureTraining",
            learns="laws",
            serves="fspad",
        ),
        Head(
            name="falcon",
            summary="the target's next states, a block of them in a pass, from a block of tokens",
            module="heads.falcon:Falcon",
            models=("target",),
            reads="target",
            captures="training.captures.texts:Texts",
            objective="training.objectives.glancing:GlancingObjective",
            config="training.objectives.glancing:GlancingTraining",
            learns="laws",
            serves="falcon",
        ),
        Head(
            name="eagle3",
            summary="the next token, from tokens beside three layers' states or its own output",
            module="heads.eagle3:Eagle3",
            models=("target",),
            reads="target",
            captures="training.captures.texts:LayeredTexts",
            objective="training.objectives.unrolled:UnrolledObjective",
            config="training.objectives.unrolled:UnrolledTraining",
            learns="laws",
            serves="auto-eagle3",
        ),
        Head(
            name="eagle3-wide",
            summary="EAGLE-3 as its authors publish it: attention reads embedding and state apart",
            module="heads.wide_eagle3:WideEagle3",
            models=("target",),
            reads="target",
            serves="auto-eagle3",
            stands_for="eagle3",
        ),
        Head(
            name="ctc",
            summary="frames that collapse to the next tokens, however they are aligned",
            module="heads.ctc:CtcBlock",
            models=("target",),
            reads="target",
            captures="training.captures.texts:TappedTexts",
            objective="training.objectives.blocks:BlockObjective",
            config="training.objectives.blocks:FrameTraining",
            learns="tokens",
            serves="ctc-drafter",
        ),
        Head(
            name="longspec",
            summary="the next token, from a window of tokens and the target's own KV cache",
            module="heads.longspec:LongSpec",
            models=("target",),
            reads="target",
            captures="training.captures.keys_values:KeysValues",
            objective="training.objectives.long_contexts:LongContextObjective",
            config="training.objectives.long_contexts:LongContextTraining",
            learns="tokens",
            serves="longspec",
        ),
        Head(
            name="dflash",
            summary="a block of tokens in one pass, each layer looking at the target's states",
            module="heads.block:Block",
            models=("target",),
            reads="target",
            captures="training.captures.texts:TappedTexts",
            objective="training.objectives.blocks:BlockObjective",
            config="training.objectives.blocks:BlockTraining",
            learns="laws",
            serves="dflash",
        ),
        Head(
            name="dspark",
            summary="such a block, whose laws are corrected by the token before each",
            module="heads.block:Block",
            models=("target",),
            reads="target",
            captures="training.captures.texts:TappedTexts",
            objective="training.objectives.blocks:BlockObjective",
            config="training.objectives.blocks:CorrectedTraining",
            learns="laws",
            serves="dspark",
        ),
    )
}


def head_row(name: str) -> Head:
    """The row of a head; ConfigError with the nearest names where there is none."""
    if name not in HEADS:
        raise ConfigError(
            f"the head {name!r} was asked for.",
            f"heads are {', '.join(HEADS)}.",
            f"{meant(name, HEADS)} `foretoken train --list` tells what they do.",
        )
    return HEADS[name]


def resolve(place: str) -> Any:
    """The class at "module:Name" below foretoken, imported now."""
    return pkgutil.resolve_name(f"foretoken.{place}")


def fits_vocabulary(tokens: Any, vocab_size: int) -> bool:
    """Whether these ids [n] that a head scores are different tokens of a vocabulary."""
    inside = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    return inside and len(set(tokens.tolist())) == len(tokens)

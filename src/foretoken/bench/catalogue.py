"""What a bench reads of the catalogue of methods, so that rows, tables and pictures agree."""

from __future__ import annotations

import re

from foretoken import methods
from foretoken.engine.promise import promise_of_row
from foretoken.methods import METHODS, method

PEERS = ("hf:plain", "hf:compiled", "hf:assisted", "hf:prompt-lookup")
ENGINES = (  # of other packages, in interpreters of their own
    "llama:plain", "llama:lookup", "llama:draft", "vllm:plain", "vllm:ngram", "vllm:draft",
)  # fmt: skip
GROUPS = ("baseline", "look-up", "draft model", "self-speculation", "lossy", "peers")
BASELINES = frozenset({"plain", "beam-sampling"})  # draft nothing
BEAM_BASELINE = "beam-sampling"


def is_peer(name: str) -> bool:
    """Whether a row is none of ours: transformers' own `generate`, or another engine."""
    return name.startswith("hf:") or engine_of(name) is not None


def engine_of(name: str) -> str | None:
    """The package that a row runs in an interpreter of its own, if it does."""
    return name.split(":")[0] if name in ENGINES else None


def writes_together(name: str) -> bool:
    """Whether a row writes the texts of several requests at once."""
    return engine_of(name) == "vllm" if is_peer(name) else not writes_beams(name)


def needs_draft(name: str) -> bool:
    """Whether a second model is needed."""
    if is_peer(name):
        return name.endswith((":assisted", ":draft"))
    return methods.needs_draft(method(name))


def needs(name: str) -> tuple[str, ...]:
    """Options without a default: folders of data or learned parts."""
    return METHODS[name].needs


def lossless(name: str) -> bool | None:
    """Whether a method keeps the target's law; None for what is not ours."""
    return promise_of_row(METHODS[name]).lossless if name in METHODS else None


def writes_beams(name: str) -> bool:
    """Whether a method writes several scored texts per prompt."""
    return name in METHODS and METHODS[name].writes == "beams"


def beam_width(label: str) -> int:
    """The beams of a row, from its label: only rows of one width write comparable texts."""
    from foretoken.engine.assemble import config_fields

    asked = re.search(r"\bnum_beams=(\d+)", label)
    return int(asked[1]) if asked else int(config_fields(BEAM_BASELINE)["num_beams"].default)


def group(name: str) -> str:
    """The group of GROUPS whose colour a row is drawn in."""
    if is_peer(name):
        return "peers"
    if lossless(name) is False:
        return "lossy"
    if name in BASELINES:
        return "baseline"
    if name not in METHODS or needs_draft(name):
        return "draft model"
    own = methods.family_of(name).name == "self-speculation"
    return "self-speculation" if own else "look-up"

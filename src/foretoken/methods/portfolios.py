"""Several sources of guesses at once: merged in one tree, or the one that pays just now."""

from foretoken.methods.look_up import LONG
from foretoken.methods.method import NO_BAR, Family, Method

FAMILY = Family(
    "portfolio",
    "several of the others: merged in one tree, or whichever pays at the moment",
    "nothing; a draft model for hybrid and rasd, and a datastore for rasd if there is one",
    (
        Method(
            "auto",
            "whatever pays just now: looked-up trees, the target's own first layers, or nothing",
            drafter="drafters.portfolio:Portfolio",
            verifier="recursive",
            inner=("prompt-lookup", "suffix", "token-recycling", "del"),
            optional=("del",),
            inner_chains=("prompt-lookup",),
            defaults={"depth": 10, "nodes": 80, "max_depth": LONG},
        ),
        Method(
            "auto-draft",
            "hybrid for greedy text, chain for sampled text: the default with a draft model",
            drafter="drafters.by_temperature:ByTemperature",
            verifier="recursive",
            inner=("hybrid", "chain"),
            inner_chains=("chain", "chain"),
            defaults={"depth": 10, "nodes": 64, "max_depth": LONG},
        ),
        Method(
            "fused",
            "several look-up methods in one tree: prompt look-up, suffixes and recycled tokens",
            drafter="drafters.fusion:Fusion",
            verifier="point",
            inner=("prompt-lookup", "suffix", "token-recycling"),
            defaults={"depth": 10, "nodes": 80, "max_depth": LONG},
        ),
        Method(
            "hybrid",
            "look-ups in one tree, and a draft model's tree where they leave something to guess",
            drafter="drafters.hybrid:Hybrid",
            verifier="point",
            inner=("tree", "prompt-lookup", "suffix"),
            defaults={"depth": 10, "nodes": 64, "max_depth": LONG},
        ),
        Method(
            "rasd",
            "a draft model's tree, fused with what it finds plausible in a datastore or the text",
            drafter="drafters.guided_retrieval:GuidedRetrieval",
            verifier="point",
            models=("target",),
            inner=("tree",),
            defaults={"depth": 10, "nodes": 64, "max_depth": LONG},
            paper_options=NO_BAR,
            paper="arXiv 2503.03434",
        ),
    ),
)

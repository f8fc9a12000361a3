"""A small head trained for the target guesses from the target's own hidden states."""

from foretoken.methods.method import Family, Method

EAGLE_TREE = tuple(  # paths of ranks, digit by digit: the released static tree of 25 nodes
    tuple(map(int, path))
    for path in (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ).split()
)

FAMILY = Family(
    "heads",
    "a trained head on the target's hidden states: parallel heads, or one that goes on alone",
    "a head trained for the target: `foretoken train`",
    (
        Method(
            "medusa",
            "heads on the target's last state guess several places at once; their best paths",
            drafter="drafters.growers.product:Product",
            model="drafters.parts.parallel_heads:ParallelHeads",
            models=("target",),
            head="medusa",
            needs=("draft_head",),
            verifier="point",
            defaults={"depth": 4, "nodes": 16},
            paper_options={"nodes": 63},
            paper="arXiv 2401.10774",
        ),
        Method(
            "eagle",
            "a one-layer head goes on with the target's hidden states, in a tree of fixed shape",
            drafter="drafters.growers.best_first:BestFirst",
            model="drafters.parts.state_reader:StateReader",
            models=("target",),
            head="eagle",
            needs=("draft_head",),
            verifier="point",
            defaults={"template": EAGLE_TREE, "depth": 5, "nodes": 25},
            paper="arXiv 2401.15077",
        ),
        Method(
            "eagle3",
            "a small decoder on three layers' hidden states, in a tree that grows where it is sure",
            drafter="drafters.growers.best_first:BestFirst",
            model="drafters.parts.state_reader:StateReader",
            models=("target",),
            head="eagle3",
            needs=("draft_head",),
            verifier="point",
            paper_options={"depth": 7, "nodes": 60, "branch": 10},
            paper="arXiv 2503.01840",
        ),
        Method(
            "eagle3-chain",
            "the same decoder, drawing one chain of guesses",
            drafter="drafters.growers.priced_chain:PricedChain",
            model="drafters.parts.state_reader:StateReader",
            models=("target",),
            head="eagle3",
            needs=("draft_head",),
            verifier="block",
            verifiers=("recursive",),
            controllers=("confidence",),
            paper="arXiv 2503.01840",
        ),
        Method(
            "eagle3-hybrid",
            "look-ups in one tree, and an EAGLE-3 head's tree where they leave something to guess",
            drafter="drafters.hybrid:Hybrid",
            verifier="point",
            inner=("eagle3", "prompt-lookup", "suffix"),
            needs=("draft_head",),
            defaults={"depth": 10, "nodes": 64},
        ),
    ),
)

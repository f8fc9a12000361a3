"""A small head trained for the target guesses from the target's own hidden states."""

from foretoken.methods.method import Family, Method

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
            paper="arXiv 2401.10774",
        ),
    ),
)

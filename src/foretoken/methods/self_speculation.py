"""The target guesses for itself with part of its layers."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "self-speculation",
    "the target's own first layers, or the target less some sublayers",
    "nothing; a target trained for early exits helps",
    (
        Method(
            "layerskip",
            "the target's first layers guess, the others go on from there; nothing is loaded twice",
            drafter="drafters.growers.chain:Chain",
            model="drafters.layer_skip:FirstLayers",
            models=("target",),
            verifier="block",
            verifiers=("recursive",),
            paper_options={"depth": 6},
            paper="arXiv 2404.16710",
        ),
        Method(
            "del",
            "the target's first layers guess; which, and how far, follows what all layers said",
            drafter="drafters.dynamic_exit:DynamicExit",
            models=("target",),
            verifier="block",
            verifiers=("recursive",),
            defaults={"depth": 18},
            paper_options={"every_exit": True, "look_every": 1, "look_back": 32},
            paper="arXiv 2504.05598",
        ),
        Method(
            "swift",
            "the target less some sublayers guesses; which ones is searched for as it writes",
            drafter="drafters.layer_set:LayerSet",
            models=("target",),
            verifier="recursive",
            defaults={"depth": 25, "nodes": 50},
            paper_options={
                "nodes": 250,
                "search_share": 1000,
                "bayes_interval": 25,
                "hopeless_after": 1001,  # never: above most_tries
            },
            paper="arXiv 2410.06916",
        ),
    ),
)

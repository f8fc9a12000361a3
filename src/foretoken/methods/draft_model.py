"""A smaller draft model of the same vocabulary guesses."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "draft-model",
    "a draft model: a chain, a grown tree, learned lengths, drafting while verifying",
    "a draft model",
    (
        Method(
            "chain",
            "a draft model guesses a few tokens ahead",
            drafter="drafters.growers.priced_chain:PricedChain",
            model="draft",
            verifier="block",
            verifiers=("recursive",),
            controllers=("confidence",),
            paper_options={"depth": 5},
            paper="arXiv 2211.17192, 2302.01318; block verification arXiv 2403.10444",
        ),
        Method(
            "tree",
            "a draft model grows a tree of likely continuations, best first",
            drafter="drafters.growers.best_first:BestFirst",
            model="draft",
            verifier="point",
            paper_options={"depth": 10, "nodes": 60},
            paper="arXiv 2406.17276, 2402.12374",
        ),
        Method(
            "specdec++",
            "a chain that ends where a trained head expects a rejection",
            drafter="drafters.growers.chain:Chain",
            model="draft",
            verifier="block",
            verifiers=("recursive",),
            controller="acceptance_head",
            paper="arXiv 2405.19715",
        ),
        Method(
            "pearl",
            "draft and target at the same time: guessing goes on while guesses are verified",
            drafter="drafters.growers.chain:Chain",
            model="drafters.run_ahead:RunAhead",
            models=("draft",),
            verifier="block",
            verifiers=("recursive",),
            engine="engine.overlap:OverlapEngine",
            paper_options={"depth": 4},
            paper="arXiv 2408.11850",
        ),
    ),
)

"""A draft model draws several candidates per position."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "sampled-trees",
    "a draft model that draws several candidates per position",
    "a draft model",
    (
        Method(
            "mcsd",
            "a draft model draws several candidates per position, in a tree of fixed shape",
            drafter="drafters.growers.sampled_tree:SampledTree",
            model="draft",
            verifier="recursive",
            verifiers=("traversal", "naive", "mixed"),
            paper_options={"k": (4, 2, 2, 1)},
            paper="arXiv 2401.06706",
        ),
        Method(
            "spectr",
            "a draft model draws independent chains, one of which is selected token by token",
            drafter="drafters.growers.sampled_tree:IndependentChains",
            model="draft",
            verifier="k_sequential",
            verifiers=("recursive", "traversal", "mixed"),
            paper_options={"k": 8, "depth": 8},
            paper="arXiv 2310.15141",
        ),
        Method(
            "rsd-c",
            "a draft model draws distinct candidates, with constant branching",
            drafter="drafters.growers.sampled_tree:ConstantBranching",
            model="draft",
            verifier="recursive",
            verifiers=("traversal", "mixed"),
            paper_options={"k": (2, 2, 2)},
            paper="arXiv 2402.14160",
        ),
        Method(
            "rsd-s",
            "a draft model draws a beam of distinct paths by stochastic beam search",
            drafter="drafters.growers.stochastic_beam:StochasticBeam",
            model="draft",
            verifier="recursive",
            verifiers=("traversal", "mixed"),
            paper_options={"width": 4, "depth": 4},
            paper="arXiv 2402.14160, 1903.06059",
        ),
    ),
)

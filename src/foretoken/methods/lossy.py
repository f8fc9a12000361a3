"""Methods whose text follows another law than the target's, and say so wherever they are met."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "lossy",
    "the target itself, bent: first layers of its own law, or layers left early; LOSSY",
    "a draft model; trained predictors for specee, a trained decision model for mcsd-dynamic",
    (
        Method(
            "mcsd-target-init",
            "a tree whose first layer is the target's own; exact only for k=(1, 1, ...)",
            drafter="drafters.target_first:TargetFirst",
            model="draft",
            verifier="target_first",
            paper_options={"k": (2, 4, 4, 1, 1)},
            paper="arXiv 2409.10644",
        ),
        Method(
            "mcsd-dynamic",
            "chains below the target's own tokens, cut by a trained model; exact only for k=1",
            drafter="drafters.target_first:TargetFork",
            model="draft",
            verifier="target_first",
            controller="decision",
            defaults={"depth": 6},  # the target's own first layer and the paper's five drafted ones
            paper="arXiv 2409.10644",
        ),
        Method(
            "specee",
            "greedy text stops at the layer where trained predictors are sure; lossy",
            drafter="drafters.early_leave:EarlyLeave",
            models=("target", "draft"),
            verifier="point",
            needs=("predictors",),
            paper_options={"sure_above": 0.5, "depth": 5, "nodes": 25},
            paper="arXiv 2504.08850",
        ),
    ),
)

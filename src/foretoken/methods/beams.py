"""Beam sampling: several scored texts per prompt."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "beams",
    "beams, several scored texts per prompt",
    "nothing; a draft model for dsbd",
    (
        Method(
            "beam-sampling",
            "several scored texts per prompt, drawn together: the baseline of dsbd",
            drafter="drafters.beam_model:NoBeams",
            verifier="beams",
            controller="fixed",
            engine="engine.beam:BeamEngine",
            writes="beams",
        ),
        Method(
            "dsbd",
            "a draft model runs beam sampling ahead; the target keeps as many beams as stand",
            drafter="drafters.beam_model:BeamModel",
            models=("draft",),
            verifier="beams",
            controller="fixed",
            defaults={"depth": 4},
            engine="engine.beam:BeamEngine",
            writes="beams",
            paper="arXiv 2409.16560",
        ),
    ),
)

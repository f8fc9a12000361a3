"""Plain decoding, the baseline of every comparison."""

from foretoken.methods.method import Family, Method

FAMILY = Family(
    "baseline",
    "nowhere: plain decoding, through the same engine",
    "nothing",
    (
        Method(
            "plain",
            "one token per target forward: the baseline, through the same engine",
            drafter="drafters.nothing:Nothing",
            verifier="point",
            controller="fixed",
        ),
    ),
)

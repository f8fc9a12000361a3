"""A small head trained for the target guesses from the target's own hidden states."""

from foretoken.methods.method import Family, Method

ROWS: tuple[Method, ...] = ()

FAMILY = Family(
    "heads",
    "a trained head on the target's hidden states: parallel heads, or one that goes on alone",
    "a head trained for the target: `foretoken train`",
    ROWS,
)

"""The audit finds every bug that is put in, and finds none where there is none."""

from __future__ import annotations

import pytest
import torch

from foretoken.audit.mutations import MUTATIONS, Mutation, find

# The failure classes of the issue, each by the mutations that stand for it.
CLASSES = {
    "wrong q": ("wrong q: flattened", "wrong q: argmax"),
    "unnormalised residual": ("unnormalised residual", "residual without P", "no residual"),
    "residual of the whole law": ("residual without P", "residual without what is owed"),
    "fixed siblings taken for drawn ones": ("siblings: fixed as drawn",),
    "length decided by the drawn token": ("length by the drawn token",),
    "sibling duplicates": (
        "siblings: distinct as independent",
        "siblings: q keeps a tried token",
        "siblings: sorted",
        "siblings: repeats dropped",
    ),
    "several tries": ("k tries: undivided", "k tries: residual of one"),
    "bonus from the wrong row": ("bonus from the wrong row", "greedy from the wrong row"),
    "stop inside a block": ("stop inside a block", "tokens before the end lost"),
    "penalties that see only block ends": ("penalties at block ends",),
    "one cache column off": ("one cache column off", "mask leak"),
    "draws mispaired": ("mispaired draws", "wrong pairing"),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_injected_bug_is_caught(mutation: Mutation) -> None:
    with torch.inference_mode():
        finding = find(mutation)
    assert finding.sound <= finding.bound, "the sound part fails its own check"
    assert finding.broken > finding.bound, "the bug went unseen"


def test_every_failure_class_has_its_mutation() -> None:
    names = {mutation.name for mutation in MUTATIONS}
    assert len(names) == len(MUTATIONS)
    for wanted in CLASSES.values():
        assert names >= set(wanted)

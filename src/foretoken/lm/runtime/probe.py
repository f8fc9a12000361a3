"""What a model's cache allows, found out by running it once at load.

A small irregular tree, a chain, two rows of different length and one alone are scored through the
cache and compared with forwards that use none. The widest plan whose numbers agree is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.lm.runtime import attention
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.finite import check_finite, check_logits
from foretoken.lm.runtime.plan import Plan
from foretoken.lm.runtime.rounding import allowed, error_of, relative, unmasked
from foretoken.lm.unreadable import NO_MEMORY
from foretoken.types import Caps, DecodeState, Draft, Draw, SamplingParams, TokenTree

LENGTHS = (9, 4)  # tokens of the two rows
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 3)  # an irregular tree
PATH = (1, 4, 6)  # what is kept of it: columns that are no neighbours
SECOND = (-1, 0, 0, 2)  # the tree after that
LATE = ("attention_chunk_size", "original_max_position_embeddings")  # beside all windows
SHORT = 1000  # tokens up to which lengths that the configuration names are tried in any case
SECONDS = 3.0  # for longer ones
# What model code raises when it is handed a mask or a cache it was not written for.
RAISED = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


@contextmanager
def refused(asked: str, cannot: str) -> Iterator[None]:
    """CapabilityError where model code raises inside: what was asked for, and what its layers
    cannot be. That memory is short tells nothing of a model, and is raised as it is."""
    try:
        yield
    except RAISED as raised:
        if isinstance(raised, torch.OutOfMemoryError) or NO_MEMORY.search(str(raised)):
            raise
        said = str(raised).partition("\n")[0][:120]
        raise CapabilityError(
            asked,
            f"this model's layers cannot be {cannot}: {type(raised).__name__}: {said}.",
            "use method chain, prompt-lookup or plain.",
        ) from raised


def choose_plan(lm: CachedLM) -> Truth:
    """Set `lm.plan` to the widest plan that gives right numbers, its caps and vocabulary size.

    What it was compared with.
    """
    check_finite(lm.model, lm.name)
    truth, lm.vocab_size = fresh_logits(lm.model)
    check_logits(lm.model, lm.name, [logits for row in truth.logits for logits in row])
    most = allowed(lm.model.dtype)
    late: list[Truth] | None = None
    reason = ""
    for plan in plans(lm):
        lm.plan = plan if not reason or plan.tree else replace(plan, why=reason)
        try:
            error = trial(lm, truth)
            if error <= most and lm.plan.own:  # masks of a row alone are not always made
                error = max(error, lone_trial(lm, truth, tree=True)[0])
            if error <= most:
                late = late_truths(lm) if late is None else late
                error = max([error, *(trial(lm, one) for one in late)])
        except RAISED as raised:
            reason = reason or f"{lm.family.name} refuses: {str(raised).splitlines()[0][:120]}"
            continue
        if error <= most:
            tree = "mask" if lm.plan.tree else "chain"
            lm.caps = Caps(tree, lm.plan.ragged, bool(lm._layers), lm.plan.why)
            longest = max((len(one.prompts[0]) for one in late or ()), default=0)
            lm.shared.verified = max(lm.shared.verified, longest)
            return truth
        reason = reason or f"a tree's logits are off by {error:.0%} of their spread"
    check_finite(lm.model, lm.name, None)  # a fused attention may hide NaN that another shows
    raise CapabilityError(
        f"{lm.family.name} cannot be decoded from a cache that takes tokens back.",
        f"neither trees nor chains give the logits of a forward without a cache ({reason}).",
        "use another model, or plain transformers generate for this one.",
    )


def late_truths(lm: CachedLM) -> list[Truth]:
    """Texts beyond the lengths from which on the model behaves otherwise, as far as they can be
    afforded; longer texts are checked as they are written (`CachedLM.self_check`)."""
    room = (lm.max_length or 1 << 30) - LENGTHS[0] - len(SECOND)
    began = perf_counter()
    fresh_logits(lm.model, (LENGTHS[0],), (SECOND,))
    pace = (perf_counter() - began) / LENGTHS[0]
    return [
        fresh_logits(lm.model, (length + LENGTHS[0],), (SECOND,))[0]
        for length in late_lengths(lm.model.config.get_text_config(decoder=True).to_dict())
        if length <= room and (length <= SHORT or 2 * pace * length <= SECONDS)
    ]


def late_lengths(config: Mapping[str, Any]) -> list[int]:
    """Windows, chunks and switches of rotations that a configuration names, in any of its parts."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found.update(late_lengths(value))
        elif type(value) is int and value > 0 and ("window" in str(name) or name in LATE):
            found.add(value)
    return sorted(found)


def plans(lm: CachedLM) -> list[Plan]:
    """What to try, best first."""
    family = lm.family
    chain = Plan(tree=False, ragged=False, attention=None)
    if family.by_place:
        return [replace(chain, why=f"{family.name} attends by place in the cache, not by position")]
    ragged = family.switch is None
    why = "" if ragged else f"longrope scales all positions of a call beyond {family.switch}"
    own = Plan(True, ragged, attention.NAME, why)
    others = [Plan(True, ragged, name, why) for name in (None, "eager")]
    # Some layers hand nothing but the mask on to their attention, or never ask which one to use.
    return [own, replace(own, told=False), *others, chain]


def probe_row(tokens: Sequence[int]) -> DecodeState:
    """A row that is scored and never written on."""
    return DecodeState(list(tokens), len(tokens), SamplingParams(), SeededCoins(0), None)


def some_tokens(count: int, vocab: int, seed: int) -> list[int]:
    """Distinct-looking ids spread over the vocabulary."""
    return [(seed * 7919 + 104729 * (i + 1)) % vocab for i in range(count)]


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The path from the root, included, to every node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@dataclass(slots=True)
class Truth:
    """Rows, trees and the logits a plain forward gives for every node."""

    prompts: list[list[int]]
    shapes: tuple[tuple[int, ...], ...]  # round -> parents
    nodes: list[list[list[int]]]  # row -> round -> tokens of the tree
    logits: list[list[Tensor]]  # row -> round -> [N, V]


@torch.inference_mode()
def fresh_logits(
    model: Any,
    lengths: tuple[int, ...] = LENGTHS,
    shapes: tuple[tuple[int, ...], ...] = (PARENTS, SECOND),
) -> tuple[Truth, int]:
    """The truth, by one forward per path, without a cache; and the width of the logits."""
    width = int(model.get_output_embeddings().weight.shape[0])
    known = int(model.get_input_embeddings().weight.shape[0])
    vocab = min(width, known)
    prompts: list[list[int]] = []
    nodes: list[list[list[int]]] = []
    logits: list[list[Tensor]] = []
    for row, length in enumerate(lengths):
        before = some_tokens(length, vocab, row)
        prompts.append(before)
        nodes.append([])
        logits.append([])
        for turn, parents in enumerate(shapes):
            first = before[-1:] if turn == 0 else some_tokens(1, vocab, row + 4)
            tree = [*first, *some_tokens(len(parents) - 1, vocab, row + 2 + 4 * turn)]
            before = before if turn == 0 else [*before, *first]
            nodes[row].append(tree)
            logits[row].append(plain(model, before[:-1], tree, parents))
            before = before + [tree[node] for node in PATH if turn + 1 < len(shapes)]
    return Truth(prompts, shapes, nodes, logits), int(logits[0][0].shape[-1])


def plain(model: Any, before: list[int], tokens: list[int], parents: Sequence[int]) -> Tensor:
    """Logits [N, V] of every node, each leaf's path in a forward of its own."""
    rows: dict[int, Tensor] = {}
    inner = set(parents)
    for path in paths_of(parents):
        if path[-1] in inner:
            continue
        ids = torch.tensor([before + [tokens[node] for node in path]], device=model.device)
        scored = model(input_ids=ids, use_cache=False).logits[0, len(before) :]
        rows.update(zip(path, scored, strict=True))
    return torch.stack([rows[node] for node in range(len(parents))]).float()


def trial(lm: CachedLM, truth: Truth) -> float:
    """Largest error of any node, relative to how much logits differ between nodes."""
    rows = [probe_row(prompt) for prompt in truth.prompts]
    worst = 0.0
    try:
        lm.prefill(rows)
        for turn, parents in enumerate(truth.shapes):
            wanted = [logits[turn] for logits in truth.logits]
            trees = [TokenTree(tuple(nodes[turn]), tuple(parents)) for nodes in truth.nodes]
            path: Sequence[int] = PATH
            if not lm.plan.tree:  # the longest path of the same tree, scored as a chain
                kept = max(paths_of(parents), key=len)
                trees = [chain_of(tree, kept) for tree in trees]
                wanted = [logits[kept] for logits in wanted]
                path = range(1, len(PATH) + 1)
            scores = lm.score(rows, [Draft(tree, Draw.POINT) for tree in trees])
            pairs = zip(scores, wanted, strict=True)
            worst = max([worst, *(difference(score.logits, right) for score, right in pairs)])
            if turn + 1 < len(truth.shapes):
                lm.commit(rows, [path] * len(rows))
                for row, nodes in zip(rows, truth.nodes, strict=True):
                    row.extend([*(nodes[turn][node] for node in PATH), nodes[turn + 1][0]])
    finally:
        lm.reset()
    return worst


def disagreement(lm: CachedLM, truth: Truth) -> str:
    """Why what runs now is not the forward that `truth` came from; nothing where it is."""
    try:
        alone, in_c = lone_trial(lm, truth)
        error = max(trial(lm, truth), alone)
        if in_c:  # by torch's attention as well, which other lengths may get
            lm.in_slots.most = 0  # until the trial is over, when all is forgotten
            error = max(error, trial(lm, truth))
    except RAISED as raised:
        return f"its captured forward raised {str(raised).splitlines()[0][:120]}"
    rounding = error <= allowed(lm.model.dtype)
    return "" if rounding else f"its captured logits are off by {error:.0%} of their spread"


def lone_trial(lm: CachedLM, truth: Truth, tree: bool = False) -> tuple[float, bool]:
    """The error of one token alone, whose shapes tracing does not see, and where it is asked for of
    a `tree` alone; whether the token attended in C."""
    row, right = probe_row(truth.prompts[0]), truth.logits[0][0]
    nodes, parents = tuple(truth.nodes[0][0]), truth.shapes[0]
    try:
        lm.prefill([row])
        logits = lm.score([row], [Draft(TokenTree(nodes[:1], (-1,)), Draw.POINT)])[0].logits
        error = difference(torch.cat([logits.float(), right[1:]]), right)
        in_c = lm.lean is not None and lm.lean.plain_scores and lm.in_slots.takes(1)
        if tree:
            whole = Draft(TokenTree(nodes, parents), Draw.POINT)
            error = max(error, difference(lm.score([row], [whole])[0].logits, right))
        return error, in_c
    finally:
        lm.reset()


def chain_of(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    return TokenTree(tuple(tree.tokens[n] for n in nodes), tuple(range(-1, len(nodes) - 1)))


def difference(logits: Tensor, right: Tensor) -> float:
    """Largest error of a node over the spread of logits between nodes; NaN counts as infinite."""
    logits, right = unmasked(logits, right)
    spread = (right - right.mean(0)).square().mean().sqrt()
    return relative(error_of(logits, right).max(), spread.clamp_min(1e-12))

"""What a model's cache allows, found out by running it once at load.

A small irregular tree, a chain and two rows of different length are scored through the cache and
compared with forwards that use none. The widest plan whose numbers agree is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.errors import CapabilityError
from foretoken.lm import attention
from foretoken.lm.plan import Plan
from foretoken.types import Caps, DecodeState, Draft, Draw, SamplingParams, TokenTree

if TYPE_CHECKING:
    from foretoken.lm.cached import CachedLM

LENGTHS = (9, 4)  # tokens of the two rows
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 3)  # an irregular tree
PATH = (1, 4, 6)  # what is kept of it: columns that are no neighbours
SECOND = (-1, 0, 0, 2)  # the tree after that
ALLOWED = {torch.float64: 1e-6, torch.float32: 3e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# What model code raises when it is handed a mask or a cache it was not written for.
RAISED = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


def choose_plan(lm: CachedLM) -> tuple[Caps, int]:
    """Set `lm.plan` to the widest plan that gives right numbers; its caps and vocabulary size."""
    truth, vocab = fresh_logits(lm.model, lm.family.max_length)
    reason = ""
    for plan in plans(lm):
        lm.plan = plan if not reason or plan.tree else with_reason(plan, reason)
        try:
            error = trial(lm, truth, vocab)
        except RAISED as raised:
            reason = reason or f"{lm.family.name} refuses: {str(raised).splitlines()[0][:120]}"
            continue
        finally:
            lm.reset()
        if error <= ALLOWED.get(lm.model.dtype, 2e-1):
            tree = "mask" if lm.plan.tree else "chain"
            return Caps(tree, lm.plan.ragged, bool(lm._layers), lm.plan.why), vocab
        reason = reason or f"a tree's logits are off by {error:.0%} of their spread"
    raise CapabilityError(
        f"{lm.family.name} cannot be decoded from a cache that takes tokens back.",
        f"neither trees nor chains give the logits of a forward without a cache ({reason}).",
        "use another model, or plain transformers generate for this one.",
    )


def plans(lm: CachedLM) -> list[Plan]:
    """What to try, best first."""
    family = lm.family
    chain = Plan(tree=False, ragged=False, attention=None)
    if family.by_place:
        why = f"{family.name} attends by place in the cache, not by position"
        return [with_reason(chain, why)]
    ragged = family.switch is None
    why = "" if ragged else f"longrope scales all positions of a call beyond {family.switch}"
    names: list[str | None] = [attention.NAME, None, "eager"]
    return [*(Plan(True, ragged, name, why) for name in names), chain]


def with_reason(plan: Plan, why: str) -> Plan:
    return Plan(plan.tree, plan.ragged, plan.attention, why)


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
    nodes: list[list[list[int]]]  # row -> round -> tokens of the tree
    logits: list[list[Tensor]]  # row -> round -> [N, V]
    tree: bool = True


@torch.inference_mode()
def fresh_logits(model: Any, longest: int | None) -> tuple[Truth, int]:
    """The truth, by one forward per path, without a cache; and the width of the logits."""
    width = int(model.get_output_embeddings().weight.shape[0])
    known = int(model.get_input_embeddings().weight.shape[0])
    vocab = min(width, known)
    prompts, nodes, logits = [], [], []
    for row, length in enumerate(LENGTHS):
        prompt = some_tokens(length, vocab, row)
        first = [prompt[-1], *some_tokens(len(PARENTS) - 1, vocab, row + 2)]
        kept = prompt + [first[node] for node in PATH]
        extra = some_tokens(1, vocab, row + 4)
        second = [extra[0], *some_tokens(len(SECOND) - 1, vocab, row + 6)]
        prompts.append(prompt)
        nodes.append([first, second])
        logits.append([plain(model, prompt[:-1], first, PARENTS),
                       plain(model, kept, second, SECOND)])  # fmt: skip
    return Truth(prompts, nodes, logits), int(logits[0][0].shape[-1])


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


def trial(lm: CachedLM, truth: Truth, vocab: int) -> float:
    """Largest error of any node, relative to how much logits differ between nodes."""
    lm.vocab_size = vocab
    params = SamplingParams(max_new_tokens=64)
    rows = [
        DecodeState(list(prompt), len(prompt), params, SeededCoins(0), None)
        for prompt in truth.prompts
    ]
    shapes = (PARENTS, SECOND)
    path: tuple[int, ...] = PATH
    for row in rows:
        lm.prefill(row)
    worst = 0.0
    for turn, parents in enumerate(shapes):
        wanted = [logits[turn] for logits in truth.logits]
        trees = [TokenTree(tuple(nodes[turn]), tuple(parents)) for nodes in truth.nodes]
        if not lm.plan.tree:
            # The longest path of the same tree, scored as a chain.
            kept = max(paths_of(parents), key=len) if turn else [0, *PATH]
            trees = [chain_of(tree, kept) for tree in trees]
            wanted = [logits[kept] for logits in wanted]
            path = tuple(range(1, len(PATH) + 1))
        scores = lm.score(rows, [Draft(tree, Draw.POINT) for tree in trees])
        pairs = zip(scores, wanted, strict=True)
        worst = max([worst, *(difference(score.logits, right) for score, right in pairs)])
        if turn == 0:
            lm.commit(rows, [path] * len(rows))
            for row, nodes in zip(rows, truth.nodes, strict=True):
                row.extend([*(nodes[0][node] for node in PATH), nodes[1][0]])
    return worst


def chain_of(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    return TokenTree(tuple(tree.tokens[n] for n in nodes), tuple(range(-1, len(nodes) - 1)))


def difference(logits: Tensor, right: Tensor) -> float:
    """Root mean square error over the spread of logits between nodes; NaN counts as infinite."""
    spread = (right - right.mean(0)).square().mean().sqrt()
    error = (logits.float() - right).square().mean(-1).sqrt().max() / spread.clamp_min(1e-12)
    return float(error) if bool(torch.isfinite(error)) else float("inf")

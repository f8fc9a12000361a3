"""Rewrites of a captured forward that leave its function alone: fewer and cheaper operations.

Each looks for one pattern and leaves what it does not know as it is. The result is compared with
the model's own forward when it is built (`kernels.lean`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from foretoken.lm.kernels.capture import PLACES, Capture
from foretoken.lm.kernels.few_tokens import rms_norm, rotated

A = torch.ops.aten
CHECKS = frozenset({
    A._assert_tensor_metadata.default, A._assert_scalar.default,
    A.sym_constrain_range_for_size.default,
})  # fmt: skip
PASSING = frozenset({A.alias.default, A.detach.default, A.dropout.default})
CASTS = frozenset({A.to.dtype, A.to.device, A.to.dtype_layout, A._to_copy.default})
SHAPES = frozenset({A.sym_size.int, A.unsqueeze.default})  # asked for again in every layer
VIEWS = frozenset({A.t.default, A.transpose.int, A.unsqueeze.default, A.expand.default})
Node = Any  # an fx.Node, whose arguments are of too many types to be told apart
SMALL = 1 << 20  # elements up to which what is made of weights alone is kept


def rewrite(capture: Capture) -> set[fx.Node]:
    """Apply all rewrites in place; the nodes that depend on weights alone."""
    clean(capture.graph)
    merge_equal(capture.graph)
    settled = constant_nodes(capture)
    rms_norms(capture.graph, settled)
    rotations(capture.graph)
    wanted_places(capture)
    capture.graph.eliminate_dead_code()
    return constant_nodes(capture)


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """Nodes that call one of `targets`; the graph may be changed meanwhile."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def value(node: fx.Node) -> Any:
    """The example that tracing saw: shape with symbols, type."""
    return node.meta.get("val")


def clean(graph: fx.Graph) -> None:
    """Take out checks, and what changes nothing: casts to the same type, factors of one."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in CHECKS:
            graph.erase_node(node)
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and changes_nothing(node, first):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def changes_nothing(node: Node, first: Node) -> bool:
    if node.target in PASSING:
        return True
    before, after = value(first), value(node)
    if node.target in CASTS:
        return bool(before.dtype is after.dtype and before.device == after.device)
    if node.target is not A.mul.Tensor or isinstance(node.args[1], fx.Node):
        return False
    return bool(node.args[1] == 1.0 and before.dtype is after.dtype)


def merge_equal(graph: fx.Graph) -> None:
    """One node where several ask for the same size or view."""
    seen: dict[Any, fx.Node] = {}
    for node in calls(graph, *SHAPES):
        key = node.target, node.args
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def constant_nodes(capture: Capture) -> set[fx.Node]:
    """Small results of weights alone, the weights among them: the same until a weight changes."""
    known: set[fx.Node] = {*capture.weights, *capture.constants}
    for node in capture.graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        if all(given in known for given in node.all_input_nodes):
            made = value(node)
            small = isinstance(made, torch.Tensor) and made.numel() <= SMALL
            if small or node.target in VIEWS:
                known.add(node)
    return known


def wanted_places(capture: Capture) -> None:
    """Pick states where logits are wanted, and take all where they are wanted everywhere."""
    places = capture.inputs[PLACES]
    for node in calls(capture.graph, A.index.Tensor):
        states, chosen = node.args
        if [*chosen] == [None, places]:  # type: ignore[misc]
            picked = insert(node, node, at_places, states, places)
            node.replace_all_uses_with(picked)


def at_places(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """States [B, Q, H] at places [P], which ascend: as many as there are tokens, then all."""
    return states if len(places) == states.shape[1] else states.index_select(1, places)


def insert(before: fx.Node, like: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
    """A call in front of `before`, with the shape and type of `like`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(function, args)
    node.meta = dict(like.meta)
    return node


def rms_norms(graph: fx.Graph, settled: set[fx.Node]) -> None:
    """x * rsqrt(mean(x x) + eps) * w as one operation in place of five."""
    widened: dict[fx.Node, fx.Node] = {}
    for root in calls(graph, A.rsqrt.default):
        found = norm_around(root, settled)
        if found is None:
            continue
        states, weight, eps, result = found
        if weight not in widened:
            with graph.inserting_after(weight):
                widened[weight] = graph.call_function(with_zeros, (weight,))
            widened[weight].meta = dict(weight.meta)
        kept = insert(result, result, rms_norm, states, weight, widened[weight], eps)
        if value(states).dtype is not value(result).dtype:
            kept = insert(result, result, A.to.dtype, kept, value(result).dtype)
        result.replace_all_uses_with(kept)
    graph.eliminate_dead_code()


def norm_around(
    root: Node, settled: set[fx.Node]
) -> tuple[fx.Node, fx.Node, float, fx.Node] | None:
    """States, weight, eps and result of the norm that takes this root; None for anything else."""
    added = root.args[0]
    if not is_call(added, A.add.Tensor) or not is_call(added.args[0], A.mean.dim):
        return None
    mean, eps = added.args[:2]
    square = mean.args[0]
    if mean.args[1] != [-1] or not is_call(square, A.pow.Tensor_Scalar) or square.args[1] != 2:
        return None
    wide = square.args[0]
    node = one_user(root, A.mul.Tensor)
    if node is None or wide not in node.args or not isinstance(eps, float):
        return None
    states = wide.args[0] if is_call(wide, A.to.dtype) else wide
    node = after_cast(node)
    scaled = one_user(node, A.mul.Tensor)
    if scaled is None:
        return None
    [weight] = [other for other in scaled.args if other is not node] or [None]
    if weight not in settled or value(weight).dim() != 1:
        return None
    return states, weight, eps, after_cast(scaled)


def one_user(node: fx.Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], target) else None


def after_cast(node: fx.Node) -> Node:
    """The cast of a node where that is all it is for."""
    return one_user(node, A.to.dtype) or node


def with_zeros(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat((weight, torch.zeros_like(weight)))


def rotations(graph: fx.Graph) -> None:
    """x cos + (-x2, x1) sin, halves swapped, as one operation in place of seven."""
    signed: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in calls(graph, A.add.Tensor):
        found = rotation_at(node)
        if found is None:
            continue
        states, cos, sin, half = found
        if (sin, half) not in signed:
            with graph.inserting_after(sin):
                signed[sin, half] = graph.call_function(sign_first_half, (sin, half))
            signed[sin, half].meta = dict(sin.meta)
        turned = insert(node, node, rotated, states, cos, signed[sin, half], half)
        node.replace_all_uses_with(turned)
    graph.eliminate_dead_code()


def rotation_at(node: Node) -> tuple[fx.Node, fx.Node, fx.Node, int] | None:
    """States, cos, sin and half the width of a rotation that ends in this sum."""
    left, right = node.args[:2]
    if not (is_call(left, A.mul.Tensor) and is_call(right, A.mul.Tensor)):
        return None
    (states, cos), (swapped, sin) = left.args, right.args
    if not is_call(swapped, A.cat.default) or len(swapped.args[0]) != 2:
        return None
    turned, lower = swapped.args[0]
    if not (is_call(turned, A.neg.default) and is_call(lower, A.slice.Tensor)):
        return None
    upper = turned.args[0]
    if not is_call(upper, A.slice.Tensor) or {upper.args[0], lower.args[0]} != {states}:
        return None
    half, width = upper.args[2], value(states).shape[-1]
    if lower.args[2:] != (0, half) or width != 2 * half or value(sin).shape[-1] != width:
        return None
    return states, cos, sin, half


def sign_first_half(sin: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)

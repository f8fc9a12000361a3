"""A captured graph written out as straight-line Python: a line per operation, no modules, no hooks.

What depends on weights alone is written as a function of its own, run again when weights change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from foretoken.lm.kernels.capture import Capture, attention

A = torch.ops.aten
# The same operations by their short names: calling them takes a third of the time.
SHORT: dict[Any, Callable[..., Any]] = {
    A.mul.Tensor: torch.mul,
    A.add.Tensor: torch.add,
    A.sub.Tensor: torch.sub,
    A.neg.default: torch.neg,
    A.cat.default: torch.cat,
    A.view.default: torch.Tensor.view,
    A.reshape.default: torch.reshape,
    A.transpose.int: torch.transpose,
    A.unsqueeze.default: torch.unsqueeze,
    A.linear.default: F.linear,
    A.silu.default: torch._C._nn.silu,
    A.layer_norm.default: torch.layer_norm,
}
ATTEND = "attend"
EXTRA = ("entering", "nothing")  # arguments that may be read in a node's place
Names = dict[str, Any]


class Program:
    """Straight-line code over one graph: `settle` per state of the weights, `variant` per use."""

    def __init__(self, capture: Capture, settled: Collection[fx.Node]) -> None:
        self.capture, self.settled = capture, settled
        self.names: Names = {}  # globals of the code: weights, constants, operations
        self.known: dict[Any, str] = {}  # operation or object -> its name there
        self.tables: dict[Sequence[fx.Node], Any] = {}  # values by position, for all variants
        self.forms: dict[fx.Node, Any] = {}  # of values in segments: to print a symbol takes long
        self.label = {node: f"v{i}" for i, node in enumerate(capture.graph.nodes)}
        for node, tensor in capture.constants.items():
            self.names[self.label[node]] = tensor
        self.kept = self.settled_results()
        self.settle = self.compile_settling()

    def variant(
        self, results: Sequence[fx.Node], instead: Mapping[fx.Node, fx.Node | str] | None = None
    ) -> Callable[..., list[torch.Tensor]]:
        """`run(ids, positions, places, attend)` -> the values of `results`, logits as [B * P, V].

        `instead`: nodes in whose place another node is read, or one of the arguments EXTRA.
        """
        writer = Writer(self, instead or {})
        needed = writer.needed(results)
        order = [node for node in self.capture.graph.nodes if node in needed]
        last = {given: node for node in order for given in writer.inputs(node)}
        keep = {writer.place(node) for node in results}
        done: dict[fx.Node, list[str]] = {}  # memory of a prompt's states is given back at once
        for given, user in last.items():
            if given in needed and given not in keep:
                done.setdefault(user, []).append(self.label[given])
        lines = []
        for node in order:
            lines.append(f"{self.label[node]} = {writer.call(node)}")
            if node in done:
                lines.append(f"del {', '.join(done[node])}")
        lines.append(f"return [{', '.join(map(writer.result, results))}]")
        inputs = [self.label[node] for node in self.capture.inputs]
        extra = [f"{name}=None" for name in EXTRA] if instead else []
        return self.compile("run", [*inputs, ATTEND, *extra], lines)  # type: ignore[no-any-return]

    def settled_results(self) -> list[fx.Node]:
        """Computed nodes that depend on weights alone and are read by one that does not."""
        return [
            node for node in self.capture.graph.nodes
            if node in self.settled and node.op == "call_function"
            and any(user not in self.settled for user in node.users)
        ]  # fmt: skip

    def compile_settling(self) -> Callable[[], None]:
        """Reads all weights as they are now, and computes what depends on them alone."""
        writer = Writer(self, {})
        computed = [n for n in self.settled if n.op == "call_function"]
        order = [node for node in self.capture.graph.nodes if node in set(computed)]
        lines = [f"{self.label[node]} = {writer.call(node)}" for node in order]
        lines.append(f"return [{', '.join(self.label[node] for node in self.kept)}]")
        compute = self.compile("settle", [], lines)
        weights = [(self.label[node], weight) for node, weight in self.capture.weights.items()]

        def settle() -> None:
            self.names.update((name, weight.now()) for name, weight in weights)
            with torch.no_grad():
                made = compute()
            self.names.update(zip((self.label[node] for node in self.kept), made, strict=True))

        return settle

    def compile(self, name: str, arguments: Sequence[str], lines: Sequence[str]) -> Any:
        source = f"def {name}({', '.join(arguments)}):\n " + "\n ".join(lines)
        space: Names = {}
        exec(compile(source, f"<captured {name}>", "exec"), self.names, space)
        return space[name]

    def named(self, thing: Any, letter: str) -> str:
        """The global name of an operation or object."""
        if thing not in self.known:
            self.known[thing] = f"{letter}_{len(self.known)}"
            self.names[self.known[thing]] = thing
        return self.known[thing]


class Writer:
    """Renders nodes of one variant."""

    def __init__(self, program: Program, instead: Mapping[fx.Node, fx.Node | str]) -> None:
        self.program, self.instead = program, instead

    def place(self, node: fx.Node) -> fx.Node | str:
        """What is read where `node` is asked for."""
        found: fx.Node | str = node
        while isinstance(found, fx.Node) and found in self.instead:
            found = self.instead[found]
        return found

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        placed = [self.place(given) for given in node.all_input_nodes]
        return [given for given in placed if isinstance(given, fx.Node)]

    def needed(self, results: Sequence[fx.Node]) -> set[fx.Node]:
        """Nodes to compute for `results`."""
        settled = self.program.settled
        waiting = [place for node in results if isinstance(place := self.place(node), fx.Node)]
        found: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in found or node in settled or node.op == "placeholder":
                continue
            found.add(node)
            waiting += self.inputs(node)
        return found

    def said(self, value: Any) -> str:
        """A value as an expression."""
        if isinstance(value, fx.Node):
            place = self.place(value)
            return place if isinstance(place, str) else self.program.label[place]
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.said(item) for item in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float):
            return (
                repr(value)
                if value == value and abs(value) != float("inf")
                else f"float('{value}')"
            )
        return self.program.named(value, "c")

    def result(self, node: fx.Node) -> str:
        """What is returned of a node: its value, but of logits the rows one behind another."""
        said = self.said(node)
        return f"{said}.flatten(0, 1)" if node is self.program.capture.logits else said

    def call(self, node: fx.Node) -> str:
        """The operation of a node."""
        if node.op != "call_function":
            raise NotImplementedError(f"a node of the kind {node.op}")
        target = node.target
        if target is A.sym_size.int:
            return f"{self.said(node.args[0])}.shape[{node.args[1]}]"
        if target is operator.getitem:
            return f"{self.said(node.args[0])}[{node.args[1]}]"
        given = [self.said(value) for value in node.args]
        given += [f"{name}={self.said(value)}" for name, value in node.kwargs.items()]
        if target is attention_node:
            return f"{ATTEND}({', '.join(_in_order(given))})"
        function = SHORT.get(target, target)
        if isinstance(function, torch._ops.OpOverload):
            function = function._op
        return f"{self.program.named(function, 'f')}({', '.join(given)})"


attention_node = torch.ops.foretoken.attention.default
assert attention is not None


def _in_order(given: list[str]) -> list[str]:
    """query, key, value, layer, ... with the layer first, as the cache is asked."""
    query, key, value, layer, *rest = given
    return [layer, query, key, value, *rest]

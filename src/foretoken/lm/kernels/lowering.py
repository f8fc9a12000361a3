"""Which operations of a captured graph can be steps of one call in C, and where their numbers lie.

In a step every value is token-major: the numbers of a token side by side, whatever the graph says
of heads and transposes, so views cost nothing. What has no rule here stays an operation of torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from foretoken.lm.kernels.few_tokens import rms_norm, rotated
from foretoken.lm.kernels.linears import Product
from foretoken.lm.kernels.merged import Merged, Site
from foretoken.lm.kernels.rewrites import A, at_places, value
from foretoken.lm.kernels.straight_line import attention_node

KINDS = (
    "product", "norm", "rotate", "attend", "add", "times", "scale", "silu", "gelu", "relu", "copy",
    "pick", "look up",
)  # fmt: skip
KIND = {name: number for number, name in enumerate(KINDS)}
MAPS = {A.add.Tensor: "add", A.mul.Tensor: "times", A.silu.default: "silu", A.relu.default: "relu"}
VIEWS = (A.view.default, A.reshape.default)
TURN = A.transpose.int
WHOLE = 32  # numbers of a token are a multiple of it


@dataclass(frozen=True, slots=True)
class Place:
    """Token t's numbers begin at `offset + t * apart` of a buffer."""

    buffer: int
    offset: int
    apart: int


@dataclass(frozen=True, slots=True)
class Form:
    """What one token has of a value, and which of the graph's dimensions counts tokens."""

    shape: tuple[int, ...]  # without rows and tokens
    axis: int
    behind: bool  # all other dimensions are behind the tokens'
    counted: int  # which tokens there is one for: all (0), or those that logits are wanted of (1)

    @property
    def count(self) -> int:
        found = 1
        for size in self.shape:
            found *= size
        return found


@dataclass(frozen=True, slots=True)
class Given:
    """What a stretch reads from outside: `count` numbers of each token, which `axis` counts."""

    node: fx.Node | str
    buffer: int
    axis: int
    count: int


@dataclass(frozen=True, slots=True)
class LookUp:
    """A value of which each token has one row of a table."""

    input: int  # of the forward, that holds the rows' numbers
    table: Callable[[], torch.Tensor]  # the rows as they are now, one behind another
    grow: Callable[[int], None] | None = None  # have at least so many, where that can be done


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `width` numbers of each token are read from the first place."""

    kind: int
    width: int
    places: tuple[Place, ...]  # read, at most three
    to: Place
    what: Any = None  # the linear layers, the node of a norm's weight, or a LookUp
    count: int = 0  # width of a norm or a head; layer of the cache
    real: float = 0.0
    counted: int = 0  # as in Form


class Lowering:
    """Steps of one stretch of the graph, as nodes are added to it in their order."""

    def __init__(
        self,
        counts: Sequence[Any],  # the graph's symbols for numbers of tokens, as in Form
        dtype: torch.dtype,
        settled: Collection[fx.Node],
        place: Callable[[fx.Node], fx.Node | str],  # what is read where a node is asked for
        shapes: dict[fx.Node, Form | None],  # of nodes, as they were asked for by all stretches
        whole: bool = True,  # products and attention are steps, too
        look_ups: Mapping[fx.Node, LookUp] | None = None,
    ) -> None:
        self.whole, self.look_ups = whole, look_ups or {}
        self.counts, self.dtype, self.shapes = [str(count) for count in counts], dtype, shapes
        self.settled, self.place = settled, place
        self.at: dict[fx.Node | str, Place] = {}
        self.inputs: list[Given] = []
        self.buffers: list[int] = []  # numbers per token
        self.steps: list[Step] = []
        self.nodes: set[fx.Node] = set()
        self.forms: dict[int, tuple[int, ...]] = {}  # layer -> heads, then steps of q, k and v

    def add(self, node: fx.Node) -> bool:
        """Whether the node is part of the stretch now."""
        site = getattr(node.target, "__self__", None)
        if isinstance(site, Product | Merged):
            done = self.whole and self.product(node, site)
        else:
            rule = RULES.get(node.target)
            done = rule is not None and not node.kwargs.keys() - ALLOWED and rule(self, node)
        if done:
            self.nodes.add(node)
        return done

    def form(self, node: Any) -> Form | None:
        """Of a value that can be read in a step; None for any other."""
        if not isinstance(node, fx.Node) or node in self.settled:
            return None
        if node not in self.shapes:
            self.shapes[node] = self.shape(node)
        found = self.shapes[node]
        if found is None or (found.counted and not self.whole):
            return None  # what lies between products is done for one number of tokens
        return found if found.behind or self.place(node) in self.at else None

    def shape(self, node: fx.Node) -> Form | None:
        """Of a value with so many numbers per token that steps can take it."""
        known = value(node)
        if not isinstance(known, torch.Tensor) or known.dtype is not self.dtype:
            return None
        sizes = list(known.shape[1:])  # the first counts rows: one here
        symbols = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
        if len(symbols) != 1 or (count := str(sizes[symbols[0]])) not in self.counts:
            return None
        axis = symbols[0]
        rest = tuple(size for i, size in enumerate(sizes) if i != axis)
        behind = all(size == 1 for size in sizes[:axis])
        found = Form(rest, axis, behind, self.counts.index(count))
        return found if found.count % WHOLE == 0 else None

    def read(self, node: fx.Node) -> Place:
        """Where a value is that has a form; one from outside is looked up, or becomes an input."""
        given = self.place(node)
        if given not in self.at:
            form = self.form(node)
            assert form is not None
            to = self.at[given] = self.room(form.count)
            look_up = self.look_ups.get(given) if isinstance(given, fx.Node) else None
            if look_up is None:
                self.inputs.append(Given(given, to.buffer, 1 + form.axis, form.count))
            else:
                self.steps.append(
                    Step(KIND["look up"], form.count, (), to, look_up, counted=form.counted)
                )
        return self.at[given]

    def look_through(self, node: Any) -> None:
        """Have a value from outside read where it came from, if only views lie between: a product
        leaves the heads of a token side by side, whatever order the graph gives them.
        """
        views = []
        while self.form(node) is None and getattr(node, "target", None) in (*VIEWS, TURN):
            views.append(node)
            node = self.place(node.args[0])
        if not views or self.form(node) is None:
            return
        self.read(node)
        for view in reversed(views):
            if not (self.turned if view.target is TURN else self.view)(view):
                return

    def room(self, count: int) -> Place:
        """A new buffer of so many numbers per token."""
        self.buffers.append(count)
        return Place(len(self.buffers) - 1, 0, count)

    def put(
        self, node: fx.Node, kind: str, read: list[fx.Node], count: int, *how: Any, **more: Any
    ) -> bool:
        """Append a step whose result is the node's value, `count` numbers per token."""
        form = self.form(read[0])
        assert form is not None
        places = tuple(self.read(given) for given in read)
        self.at[node] = self.room(count)
        more.setdefault("counted", form.counted)
        self.steps.append(Step(KIND[kind], form.count, places, self.at[node], *how, **more))
        return True

    def pick(self, node: Any) -> bool:
        """States of the tokens that logits are wanted of."""
        form = self.form(node.args[0]) if self.whole else None
        wanted = self.form_of_view(node)
        if form is None or wanted is None or not form.behind or form.count != wanted.count:
            return False
        return self.put(node, "pick", [node.args[0]], form.count, counted=wanted.counted)

    def product(self, node: fx.Node, site: Site) -> bool:
        form = self.form(node.args[0])
        if form is None or form.shape != (site.width,) or site.places is None:
            return False
        said = value(node)
        parts = said if isinstance(said, list | tuple) else [said]
        if site.dtype is not self.dtype or any(part.shape[-1] % WHOLE for part in parts):
            return False
        given: Any = node.args[0]
        return self.put(node, "product", [given], site.places.outs, site.places)

    def norm(self, node: Any) -> bool:
        states, weight, _, eps = node.args
        form = self.form(states)
        known = value(weight)
        if form is None or known.dtype is not self.dtype or form.shape[-1] % WHOLE:
            return False
        return self.put(node, "norm", [states], form.count, weight, form.shape[-1], eps)

    def rotation(self, node: Any) -> bool:
        states, cos, sin, half = node.args
        self.look_through(states)
        forms = [self.form(given) for given in (states, cos, sin)]
        if None in forms:
            return False
        wide, *angles = [form for form in forms if form is not None]
        if any(angle.count != 2 * half for angle in angles) or wide.shape[-1] != 2 * half:
            return False
        return self.put(node, "rotate", [states, cos, sin], wide.count, None, 2 * half)

    def attention(self, node: Any) -> bool:
        *given, layer, scaling, softcap, sinks = node.args
        if not self.whole:
            return False
        forms = [self.form(states) for states in given]
        if softcap is not None or sinks is not None or None in forms:
            return False
        queries, keys, values = [form for form in forms if form is not None]
        if any(form.axis != 1 or len(form.shape) != 2 for form in (queries, keys, values)):
            return False
        heads, width = queries.shape
        self.put(
            node, "attend", given, heads * values.shape[1], None, layer,
            width**-0.5 if scaling is None else scaling,
        )  # fmt: skip
        steps = zip((queries, keys, values), given, strict=True)
        inner = [n for form, states in steps for n in (form.shape[1], self.read(states).apart)]
        self.forms[layer] = (heads, *inner)
        return True

    def map(self, node: Any) -> bool:
        """y = f(a) or f(a, b) for numbers of equal places."""
        read = [given for given in node.args if isinstance(given, fx.Node)]
        forms = [self.form(given) for given in read]
        form = self.form(node)
        if form is None or set(forms) != {form}:
            return False
        kind, real = MAPS[node.target], 0.0
        if kind in ("add", "times") and len(read) == 1:
            if kind == "add" or not isinstance(node.args[1], int | float):
                return False
            kind, real = "scale", float(node.args[1])
        return self.put(node, kind, read, form.count, real=real)

    def gelu(self, node: Any) -> bool:
        form = self.form(node.args[0])
        if form is None or node.kwargs.get("approximate") != "tanh":
            return False
        return self.put(node, "gelu", [node.args[0]], form.count)

    def view(self, node: Any) -> bool:
        """The same numbers of a token in another shape."""
        given = self.place(node.args[0])
        before, after = self.form(node.args[0]), self.form_of_view(node)
        if given not in self.at or before is None or after is None:
            return False
        if not (before.behind and after.behind) or before.count != after.count:
            return False
        self.at[node] = self.at[given]
        return True

    def form_of_view(self, node: fx.Node) -> Form | None:
        """Its form, though it has no place yet."""
        self.at[node] = Place(0, 0, 0)
        found = self.form(node)
        del self.at[node]
        return found

    def turned(self, node: Any) -> bool:
        """Tokens and heads exchanged: the same numbers in the same place."""
        given = self.place(node.args[0])
        if given not in self.at or self.form(node.args[0]) is None:
            return False
        if tuple(sorted(node.args[1:])) != (1, 2) or len(value(node).shape) != 4:
            return False
        if self.form_of_view(node) is None:
            return False
        self.at[node] = self.at[given]
        return True

    def part(self, node: Any) -> bool:
        """The outputs of one of several linear layers over one input."""
        both, which = node.args
        site = getattr(getattr(both, "target", None), "__self__", None)
        if not isinstance(site, Merged) or both not in self.at:
            return False
        whole, first = self.at[both], sum(site.sizes[:which])
        self.at[node] = Place(whole.buffer, first, whole.apart)
        if self.form(node) is not None:
            return True
        del self.at[node]
        return False


ALLOWED = {"approximate"}
RULES: dict[Any, Callable[[Lowering, fx.Node], bool]] = {
    rms_norm: Lowering.norm,
    rotated: Lowering.rotation,
    attention_node: Lowering.attention,
    at_places: Lowering.pick,
    A.gelu.default: Lowering.gelu,
    TURN: Lowering.turned,
    operator.getitem: Lowering.part,
    **dict.fromkeys(MAPS, Lowering.map),
    **dict.fromkeys(VIEWS, Lowering.view),
}

"""The lean forward: a model captured once, rewritten, and run as straight-line code.

Linear layers that read the same input become one product, its kernel measured at load; attention
is asked of the caller, who knows the cache. The model itself is not changed, and its weights stay
where they are: changed ones are followed (`renew`), or noticed by their versions (`Variant`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, fx, nn

from foretoken.lm.kernels.capture import Capture, capture
from foretoken.lm.kernels.linears import Product, linears
from foretoken.lm.kernels.merged import Merged, Site
from foretoken.lm.kernels.rewrites import A, calls, insert, rewrite, value
from foretoken.lm.kernels.seams import Seam, seams
from foretoken.lm.kernels.segmented import segmented
from foretoken.lm.kernels.segments import Segment
from foretoken.lm.kernels.straight_line import Program, attention_node
from foretoken.lm.runtime.cache_attention import Attention
from foretoken.lm.runtime.captured import WHOLE, Cut, Sublayer
from foretoken.lm.runtime.family import Family, decoder_layers, decoder_of
from foretoken.lm.runtime.fingerprints import tied
from foretoken.lm.runtime.slot_attention import SlotAttention
from foretoken.native import scratch
from foretoken.types import Embedding, FinalNorm, Layer, Tap, Taps


class Way(Enum):
    """What does the work of a forward besides attention."""

    TORCH = auto()
    FEW = auto()  # segments in C, products inside
    MANY = auto()  # products of libraries, segments in C between them


class Copies:
    """Weights that something was made of, as they were then."""

    __slots__ = ("versions", "weights")

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [weight for weight in weights if not weight.is_inference()]
        self.versions = [weight._version for weight in self.weights]

    def changed(self) -> bool:
        """Whether one was written to since. Some hundred of them, which lie far apart, take a tenth
        of a millisecond."""
        return self.versions != [weight._version for weight in self.weights]


@dataclass(frozen=True, slots=True)
class Variant:
    """The code that gives certain results, and the weights that it does not read where they lie."""

    run: Callable[..., list[Tensor]]
    copies: Copies
    alone: Segment | None = None  # all that it is, where it makes logits of few tokens in one call


CUTS = 16  # sets of sublayers left out whose code is kept: a search tries hundreds


class LeanForward:
    """A captured model, run without its modules."""

    def __init__(self, captured: Capture) -> None:
        self.capture = captured
        settled = rewrite(captured)
        self.sites = merge_linears(captured)
        captured.graph.eliminate_dead_code()
        self.program = Program(captured, settled)
        self.plain_scores = plain_scores(captured.graph)
        self.layers = sum(isinstance(mark, Layer) for mark in captured.marks)
        self.variants: dict[tuple[Taps, Cut, Way, bool], Variant] = {}
        self.spared = False  # of memory there is little: many tokens use the same again
        self.reach = 0  # tokens of a forward for which products in C are the faster way
        width = value(captured.states[Embedding()]).shape[-1]
        weight = next(captured.root.parameters())
        self.nothing = weight.new_zeros(1, 1, width, requires_grad=False)
        self.traced = seams(captured.root)
        self.tied = tied(captured.root)
        self.settle()

    @classmethod
    def of(cls, model: Any, family: Family, ragged: bool) -> LeanForward:
        """Capture `model`; CapabilityError with the reason where it cannot be."""
        layers, decoder = decoder_layers(model, family.layers), decoder_of(model)
        return cls(capture(model, family, layers, decoder, ragged))

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        places: Tensor,
        attend: Attention | None,
        taps: Taps = (),
        cut: Cut = WHOLE,
        entering: Tensor | None = None,
    ) -> list[Tensor]:
        """What `taps` read, each [B, Q, H], then logits [B * P, V] at `places` of every row.

        Without a head, the last are the states [B, Q, H] that it would have read behind the layers.
        `entering` [B, Q, H] is what enters layer `cut.start`; None: the tokens' embeddings, which
        enter the first.
        """
        way = Way.TORCH
        if type(attend) is SlotAttention and len(ids) == 1:
            way = Way.FEW if ids.shape[1] <= self.reach else Way.MANY
        entered = entering is not None
        found = self.variant(taps, cut, way, entered)
        given = {}
        if entered or cut.without:
            given = {"entering": entering, "nothing": self.nothing.expand(*ids.shape, -1)}
        if way is not Way.MANY or not self.spared:
            return found.run(ids, positions, places, attend, **given)
        with scratch.used_again() as memory:
            made = found.run(ids, positions, places, attend, **given)
            memory.leave(made)
        return made

    def variant(self, taps: Taps, cut: Cut, way: Way, entered: bool) -> Variant:
        """The code that gives these results, over the weights as they are now."""
        key = taps, cut, way, entered
        found = self.variants.get(key) or self.write(*key)
        if found.copies.changed():
            self.follow_versions()
            found = self.write(*key)
        return found

    def in_one_call(self, entered: bool = False) -> Segment | None:
        """The whole forward of few tokens, or of what stands for their embeddings, as one call in
        C; None where it is more than that."""
        return self.variant((), WHOLE, Way.FEW, entered).alone

    def write(self, taps: Taps, cut: Cut, way: Way, entered: bool) -> Variant:
        """The code that gives these results and no others."""
        if self.whole.changed():  # else nobody would look at what was written to before
            self.follow_versions()
        states = self.capture.states
        stop = self.layers if cut.stop is None else cut.stop
        instead: dict[fx.Node, fx.Node | str] = {}
        for i in range(stop, self.layers):
            instead[states[Layer(i)]] = states[Layer(stop - 1)]
        for part in cut.without:
            instead[states[part]] = "nothing"
            if Sublayer(part.layer, 1 - part.kind) in cut.without:
                instead[states[Layer(part.layer)]] = states[Layer(part.layer - 1)]
        if entered:
            entries: list[Tap] = [Embedding(), *map(Layer, range(self.layers)), FinalNorm()]
            instead[states[entries[cut.start]]] = "entering"
        results = [states[self.known(tap)] for tap in taps]
        if cut.fills:
            results.append(last_attention(self.capture.graph, states[Layer(stop - 1)]))
        else:
            results.append(self.capture.logits if cut.head else states[Layer(stop - 1)])
        written = None
        if way is not Way.TORCH:
            written = segmented(self.program, results, instead, way is Way.FEW)
        if written is None:
            found = Variant(self.program.variant(results, instead), self.whole)
        else:
            found = Variant(written.run, Copies(written.made_of), written.alone)
        tried = [key for key in self.variants if key[1].without]
        if cut.without and len(tried) >= CUTS:
            del self.variants[tried[0]]
        self.variants[taps, cut, way, entered] = found
        return found

    def known(self, tap: Tap) -> Tap:
        """The tap as the capture names it: layers counted from the first; IndexError for others."""
        return Layer(range(self.layers)[tap.index]) if isinstance(tap, Layer) else tap

    def follow_versions(self) -> None:
        """Read again what was written to in place since the last call."""
        for site in self.sites:
            parts = site.parts if isinstance(site, Merged) else (site,)
            biased = isinstance(site, Merged) and site.bias is not None  # which nobody watches
            if biased or any(part.watched._version != part.version for part in parts):
                site.renew()
        self.settle()

    def patched(self, now: list[Seam]) -> bool:
        """Whether modules were replaced, hooked into or given other code or values since."""
        return now != self.traced

    def parted(self) -> bool:
        """Whether a weight of several modules is no longer one: the graph reads it of one alone."""
        return not self.tied <= tied(self.capture.root)

    def settle(self) -> None:
        """Take all weights as they are now."""
        self.program.settle()
        self.program.tables.clear()
        self.variants.clear()  # segments know where the weights were
        self.whole = Copies([weight.now() for weight in self.capture.weights.values()])


def last_attention(graph: fx.Graph, end: fx.Node) -> fx.Node:
    """The attention behind which nothing is written to the cache; `end`, where it is not one."""
    asked = list(calls(graph, attention_node))
    before, waiting = set[fx.Node](), asked[-1:]
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += node.all_input_nodes
    return asked[-1] if before.issuperset(asked) else end


def plain_scores(graph: fx.Graph) -> bool:
    """Whether all attention is a softmax of scaled products, uncapped and without sinks."""
    return all(node.args[5:7] == (None, None) for node in calls(graph, attention_node))


def merge_linears(captured: Capture) -> list[Site]:
    """Put products in place of all linear layers of the graph; one for all with the same input."""
    modules = {id(module.weight): module for module in linears(captured.root)}
    groups: dict[Any, list[tuple[fx.Node, Product]]] = {}
    for node in calls(captured.graph, A.linear.default, A.addmm.default):
        product = product_of(node, captured, modules)
        if product is not None:
            groups.setdefault((input_of(node), product.dtype), []).append((node, product))
    sites: list[Site] = []
    for (given, _), members in groups.items():
        if len(members) == 1:
            [(node, product)] = members
            node.replace_all_uses_with(insert(node, node, product.multiply, given))
            sites.append(product)
            continue
        site = Merged([product for _, product in members])
        first = members[0][0]
        both = insert(first, first, site.multiply, given)
        for i, (node, _) in enumerate(members):
            node.replace_all_uses_with(insert(first, node, operator.getitem, both, i))
        sites.append(site)
    return sites


def input_of(node: fx.Node) -> fx.Node:
    """What a linear layer reads."""
    given: Any = node.args[0] if node.target is A.linear.default else node.args[1]
    assert isinstance(given, fx.Node)
    return given


def product_of(node: fx.Node, captured: Capture, modules: dict[int, nn.Module]) -> Product | None:
    """The product for this node, where its weight and bias are a linear layer's own."""
    if node.target is A.linear.default:
        weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    else:  # GPT-2's layers: weights stored the other way round
        bias, _, weight = node.args[:3]
    found = captured.weights.get(weight)  # type: ignore[arg-type]
    module = modules.get(id(getattr(found.owner, found.name))) if found is not None else None
    if module is None or node.kwargs:
        return None
    own = captured.weights.get(bias) if bias is not None else None  # type: ignore[arg-type]
    theirs = None if own is None else getattr(own.owner, own.name)
    same = theirs is module.bias and (bias is None) == (module.bias is None)
    return Product(module) if same else None

"""Probes behind `exact_bits`: a promise of equal bits is made only where equal bits were seen.

Which sums a library makes in which order is a property of a build and a machine. So the model's
own products, the attention at its own sizes, and then whole forwards are compared bit by bit:
one token at a time against chains, trees and ragged batches, in logits and in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import CapabilityError
from foretoken.lm.kernels import bits
from foretoken.lm.kernels.choosing import KernelReport, installed
from foretoken.lm.kernels.linears import can_pack
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.probe import probe_row, some_tokens
from foretoken.types import DecodeState, Draft, Draw, Rows, TokenTree

ROWS = (2, 3, 5, 8, 15, 16, 17, 33, 64)  # row counts of products that must agree
STEPS = 4  # tokens per probe row, across the border of two blocks
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def promise_bits(lm: CachedLM) -> KernelReport:
    """Switch `lm` to exact products and attention; CapabilityError where bits would differ."""
    reason = unsuited(lm)
    if not reason:
        kernels: KernelReport = lm.borrowing.install("packed", pad_lone=True)
        lm.plan = replace(lm.plan, attention=bits.NAME, ordered=True)
        with torch.inference_mode():
            reason = probe_bits(lm)
        lm.reset()
        if not reason:
            return kernels
    raise CapabilityError(
        f"exact_bits=True was asked of {lm.family.name}.",
        f"equal bits cannot be promised here: {reason}.",
        "load it without exact_bits; greedy text then equals plain decoding up to exact ties.",
    )


def unsuited(lm: CachedLM) -> str:
    """Reasons that need no measurement."""
    config = lm.model.config.get_text_config(decoder=True)
    if lm.device.type != "cpu" or lm.model.dtype is not torch.float32:
        return f"the mode is for float32 on a CPU, this is {lm.model.dtype} on {lm.device.type}"
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        return "products of mixtures of experts depend on how many tokens each expert gets"
    if not lm.plan.own:
        return "its attention cannot be replaced"
    if not lm.plan.ragged:
        return lm.plan.why
    if not can_pack(lm.model.dtype):
        return "this build of torch has no oneDNN, whose packed products are needed"
    return ""


def probe_bits(lm: CachedLM) -> str:
    """Set the span that sums keep their order over; which operation fails, or nothing."""
    lm.span = probe_span(lm)
    if lm.span is None:
        return f"attention products split sums of {bits.SPANS[-1]} columns"
    return probe_products(lm) or probe_forwards(lm, lm.span)


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Irregular numbers in (-1, 1) that need no generator."""
    count = 1
    for size in shape:
        count *= size
    angles = torch.arange(count, dtype=torch.float64) * (2.399963 + seed) + seed
    return (angles.sin() * 43758.5453).frac().float().reshape(shape)


def probe_span(lm: CachedLM) -> bits.Span | None:
    """The longest sums that zero columns do not disturb, at the model's head sizes."""
    config = lm.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = max(1, heads // lm.family.fold)
    for unsplit in bits.SPANS:
        span = bits.Span.of(unsplit)
        if all(sums_in_order(span, groups, width, seed) for seed in (1, 2)):
            return span
    return None


def sums_in_order(span: bits.Span, groups: int, width: int, seed: int) -> bool:
    """Whether weighted sums over a block survive gaps, and rows their company."""
    rows, columns = 48, span.block + span.reach
    value, weights = noise(1, groups, columns, width, seed=seed), noise(1, groups, rows, columns)
    weights = weights.abs()
    for kept in {span.block, span.block - 1, span.block * 2 // 3, 20, 5}:
        short = weights[..., :kept].contiguous()
        alone = short[:, :, :16] @ value[:, :, :kept]
        for at in {0, kept // 2, kept - 1}:
            for gap in (1, 5, 16, span.reach):
                spread = torch.zeros_like(weights)
                pushed = value.clone()
                spread[..., :at] = short[..., :at]
                spread[..., at + gap : kept + gap] = short[..., at:]
                pushed[:, :, at + gap : kept + gap] = value[:, :, at:kept]
                if not torch.equal((spread @ pushed)[:, :, :16], alone):
                    return False
    return True


def probe_products(lm: CachedLM) -> str:
    """Each shape of linear layer, over all row counts: the same row must give the same bits."""
    seen = set()
    whole = {id(product.module) for product in installed(lm.model)}
    for name, module in lm.model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in whole:
            return f"{name} has a forward of its own that cannot be replaced"
    for product in installed(lm.model):
        shape = tuple(product.matrix.shape)
        if shape in seen:
            continue
        seen.add(shape)
        x = noise(1, max(ROWS), shape[1])
        many = product(x)
        for rows in (1, *ROWS):
            for start in (0, max(ROWS) - rows):
                few = product(x[:, start : start + rows])
                if not torch.equal(few, many[:, start : start + rows]):
                    return f"the product with a {shape[0]}x{shape[1]} weight differs at {rows} rows"
    return ""


def probe_forwards(lm: CachedLM, span: bits.Span) -> str:
    """Whole forwards: trees of several sizes, then a ragged batch, against one token at a time."""
    block = span.block
    room = (lm.max_length or 4 * block) - 2 * STEPS
    lengths = sorted({min(block - 2, room), min(2 * block - 1, room), 5})
    vocab = min(lm.vocab_size, lm.model.get_input_embeddings().weight.shape[0])
    texts = [some_tokens(length + STEPS, vocab, seed) for seed, length in enumerate(lengths)]
    rows = [start_row(lm, text) for text in texts]
    trees = [
        [tree_around(text[-STEPS:], nodes, vocab) for text in texts]
        for nodes in (STEPS, 2 * STEPS + 1, min(span.reach, 64))
    ]
    mixed = [trees[i % len(trees)][i] for i in range(len(rows))]
    alone = [
        [together(lm, [row], [tree])[0] for row, tree in zip(rows, size, strict=True)]
        for size in trees
    ]
    beside = together(lm, rows, mixed)
    with traced(lm.model) as trace:
        plain = [one_by_one(lm, row, text) for row, text in zip(rows, texts, strict=True)]
    for size, found in zip(trees, alone, strict=True):
        for i, truth in enumerate(plain):
            if not same(found[i], truth):
                what = f"a tree of {len(size[i][0])} nodes differs from single tokens"
                steps = slice(i * STEPS, (i + 1) * STEPS)
                lone = {name: calls[steps] for name, calls in trace.items()}
                return f"{what}, first in {culprit(lm, texts[i], size[i], lone)}"
    for found_beside, truth in zip(beside, plain, strict=True):
        if not same(found_beside, truth):
            return "a row differs beside rows of other lengths"
    return ""


Bits = tuple[Tensor, list[Tensor]]  # logits of the last STEPS tokens, and their cache columns
Path = tuple[TokenTree, tuple[int, ...]]  # a tree and the nodes in it that are looked at


def same(found: Bits, truth: Bits) -> bool:
    return torch.equal(found[0], truth[0]) and all(
        torch.equal(a, b) for a, b in zip(found[1], truth[1], strict=True)
    )


def start_row(lm: CachedLM, text: Sequence[int]) -> DecodeState:
    """A row that holds the text up to the first of its last STEPS tokens, which is the root."""
    row = probe_row(text[: len(text) - STEPS + 1])
    lm.prefill([row])
    return row


def one_by_one(lm: CachedLM, row: DecodeState, text: Sequence[int]) -> Bits:
    """Plain decoding of the last STEPS tokens."""
    logits, states = [], []
    while True:
        draft = Draft(TokenTree((row.tokens[-1],), (-1,)), Draw.POINT)
        logits.append(lm.score([row], [draft])[0].logits[0].clone())
        states.append(columns(lm, row, [0]))
        lm.commit([row], [()])
        if len(row.tokens) == len(text):
            break
        row.tokens.append(text[len(row.tokens)])
    return torch.stack(logits), [torch.cat(parts, 1) for parts in zip(*states, strict=True)]


def together(lm: CachedLM, rows: Rows, trees: Sequence[Path]) -> list[Bits]:
    """The same tokens as paths of trees, all rows in one forward; nothing is committed."""
    scores = lm.score(rows, [Draft(tree, Draw.POINT) for tree, _ in trees])
    return [
        (score.logits[[0, *path]].clone(), columns(lm, row, [0, *path]))
        for row, score, (_, path) in zip(rows, scores, trees, strict=True)
    ]


def columns(lm: CachedLM, row: DecodeState, nodes: Sequence[int]) -> list[Tensor]:
    """Copies of the columns of some nodes of a row's open tree, all layers that have their own."""
    memory = lm._memory(row)
    places = [memory.cached + node for node in nodes]
    return [
        buffer[memory.slot][:, places]
        for layer in lm.cache.rows_of
        for buffer in (layer.keys, layer.values)
        if buffer is not None  # as it is where another layer's are read
    ]


def tree_around(path: Sequence[int], nodes: int, vocab: int) -> Path:
    """A tree of at least `nodes` nodes in which `path` is scattered among others."""
    extra = iter(some_tokens(nodes, vocab, 77))
    tokens, parents, kept = [path[0]], [-1], [0]
    spare = max(0, nodes - len(path))
    gap = spare // max(1, len(path) - 1)
    for token in path[1:]:
        for i in range(gap):
            tokens.append(next(extra))
            parents.append((i * 7) % (len(tokens) - 1) if i else kept[-1])
        tokens.append(token)
        parents.append(kept[-1])
        kept.append(len(tokens) - 1)
    return TokenTree(tuple(tokens), tuple(parents)), tuple(kept[1:])


def culprit(lm: CachedLM, text: Sequence[int], pair: Path, lone: Trace) -> str:
    """The first operation that has equal inputs in both and outputs that differ."""
    lm.reset()
    row = start_row(lm, text)
    with traced(lm.model) as many:
        together(lm, [row], [pair])
    for name, calls in lone.items():
        if name not in many:
            continue
        inputs, output = many[name][0]
        for node, (lone_inputs, lone_output) in zip([0, *pair[1]], calls, strict=False):
            if agree(inputs, node, lone_inputs) and not agree(output, node, lone_output):
                kind = type(lm.model.get_submodule(name)).__name__
                return f"{name} ({kind}, width {lone_output.shape[-1]})"
    return "the attention"


Trace = dict[str, list[tuple[Tensor, Tensor]]]  # module -> input and output of every call


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Calls of every module that has no parts and maps one tensor to one, in calling order."""
    trace: Trace = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            if inputs and isinstance(output, Tensor) and inputs[0].is_floating_point():
                trace.setdefault(name, []).append((inputs[0].clone(), output.clone()))

        return hook

    hooks = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def agree(many: Tensor, node: int, lone: Tensor) -> bool:
    """Whether the numbers of one node are the bits of the token alone."""
    width = lone.shape[-1]
    rows = many.reshape(-1, width)
    return node >= rows.shape[0] or torch.equal(rows[node], lone.reshape(-1, width)[0])

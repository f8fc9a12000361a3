"""Opens a model: reads its family, probes its plan, chooses its kernels, promises its bits."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.draft_exits import Exits
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.few_rows import enough, with_few_rows
from foretoken.lm.kernels.bits_probe import promise_bits
from foretoken.lm.kernels.borrowed import Borrowing
from foretoken.lm.kernels.capture import refusal
from foretoken.lm.kernels.graphs import Graphs
from foretoken.lm.kernels.lean import LeanForward
from foretoken.lm.kernels.seams import hooked
from foretoken.lm.placing import check_placed, is_split
from foretoken.lm.runtime.cached import CachedLM
from foretoken.lm.runtime.family import describe
from foretoken.lm.runtime.probe import choose_plan, disagreement
from foretoken.lm.runtime.sharing import shared_by
from foretoken.lm.token_map import TokenMap
from foretoken.lm.views.few_rows import FewRows, NarrowRows
from foretoken.lm.views.mapped_tokens import MappedTokens
from foretoken.lm.views.sorted_exits import SortedExits
from foretoken.native.compiling import Unavailable
from foretoken.native.library import library

COMPILE = ("auto", "max", "off")
FORWARD_OPTIONS = ("kernels", "compile")  # what a draft model takes as well


def open_lm(
    model: Any,
    *,
    name: str = "target",
    exact_bits: bool = False,
    kernels: str = "auto",
    compile: str = "auto",
) -> CachedLM:
    """A language model over a transformers model, or CapabilityError with what it lacks.

    `kernels` is a mode of `choose_kernels`; `compile` captures the model's forward (`kernels.lean`)
    and runs its operations in C (`foretoken.native`), each where that can be; 'max' refuses a model
    or a machine where one of them cannot be; 'off' does not capture. `exact_bits` promises logits
    and cache whose bits do not depend on what is scored together (`kernels.bits`), or refuses with
    the reason. A refused model is given back as it was.
    """
    check_placed(model)
    family = describe(model)
    if model.device.type == "cuda":
        leave_cudnn_out()
    # Nobody else runs the model meanwhile: it is asked in other ways than its users ask it, and a
    # trace puts symbols in the place of its weights.
    with shared_by(model).lock, ExitStack() as refused:
        borrowing = Borrowing(model, name)  # in evaluation mode from here on
        refused.callback(borrowing.close)
        borrowing.follow()
        lm = CachedLM(model, family, borrowing, name)
        truth = choose_plan(lm)
        if exact_bits:
            lm.kernels = promise_bits(lm)
        else:
            capture = partial(captured, lm) if capturing(compile, kernels) else None
            lm.kernels = borrowing.install(kernels, capture=capture)
            if lm.lean is not None and (why := disagreement(lm, truth)):
                lm.kernels = borrowing.give_up_capture(why)
        if compile == "max":
            check_fastest(lm)
        refused.pop_all()
    graphed = lm.device.type == "cuda" and lm.plan.tree and not is_split(model)
    if graphed and hooked(model) is None:
        lm.graphs = Graphs(lm)
    return lm


def leave_cudnn_out() -> None:
    """Have torch's attention use other kernels than cuDNN's in this process.

    torch prefers those on Hopper and later, and they are planned anew for every shape, for tens of
    milliseconds and more: the columns of a text are others at every token. Whoever wants them back
    calls `torch.backends.cuda.enable_cudnn_sdp(True)` after loading.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def open_draft(
    model: Any,
    rows: OutputRows | None,
    tokens: TokenMap | None = None,
    exits: Exits | None = None,
    **options: Any,
) -> CachedLM | SortedExits | FewRows:
    """A draft that computes `rows` of its output layer (None: all); its model stays as it is.

    `tokens` tell the target's ids to a draft of another tokenizer, whose rows are then theirs.
    `exits` are those behind which a sorted draft may be left (None: it runs all its layers).
    """
    if rows is None:
        return left_early(open_lm(model, name="draft", **options), exits)
    rows = rows.to(model.device)
    head = model.get_output_embeddings()
    reduced, part = with_few_rows(model, enough(rows.rows, len(head.weight)))
    lm = left_early(open_lm(reduced, name="draft", **options), exits, len(rows))
    if tokens is None or tokens.one_to_one:
        return FewRows(lm, rows, part.follow, model)
    if tokens.alike:
        return NarrowRows(lm, rows, part.follow, model, known=tokens.alike)
    return MappedTokens(lm, replace(tokens, rows=rows), part.follow)


def left_early(
    lm: CachedLM, exits: Exits | None, counted: int | None = None
) -> CachedLM | SortedExits:
    """A draft left at its exits, if it has several, or CapabilityError with the model given back.

    `counted` of its logits are those of tokens that it may guess.
    """
    if exits is None:
        return lm
    with ExitStack() as refused:
        refused.callback(lm.close)
        view = SortedExits(lm, exits, counted)
        refused.pop_all()
    return view


def capturing(compile: str, kernels: str) -> bool:
    """Whether a model is to be captured; ConfigError for what `compile` cannot be."""
    if compile not in COMPILE:
        raise ConfigError(
            f"compile={compile!r} was asked for.",
            f"compile is one of {', '.join(COMPILE)}.",
            "pass one of these; 'auto' is the default.",
        )
    return compile != "off" and kernels in ("auto", "inplace", "dense")


def check_fastest(lm: CachedLM) -> None:
    """CapabilityError where compile='max' would be less than it says."""
    missing = [] if lm.kernels.captured else [lm.kernels.uncaptured or "kernels or bits are fixed"]
    if lm.device.type == "cpu" and isinstance(found := library(), Unavailable):
        missing.append(str(found))
    if missing:
        raise CapabilityError(
            f"compile='max' was asked for the {lm.name}, {lm.family.name}.",
            f"its forward cannot be captured and run in C: {'; '.join(missing)}.",
            "leave compile='auto', which does as much of it as can be.",
        )


def captured(lm: CachedLM) -> LeanForward:
    """The captured forward of a model whose attention and positions are ours to give."""
    if not (lm.plan.own and lm.plan.tree and lm._positions_accepted and lm._keep_accepted):
        raise refusal(lm.family, "its attention, positions or places of logits cannot be given")
    if is_split(lm.model):
        raise refusal(lm.family, "its layers are on several devices")
    if lm.family.switch is not None:
        raise refusal(lm.family, "its rotations follow the longest position of a call")
    return LeanForward.of(lm.model, lm.family, lm.plan.ragged)

"""What every layer of a target would have said of its own text (SpecEE, arXiv 2504.08850).

The text is read again in one forward with all hidden layers, and with the draft model's candidates
at every place; the label is whether a layer's most likely token is the last layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretoken.engine.session import Session
from foretoken.lm.views.early_exit_scoring import Readout
from foretoken.lm.views.view import innermost
from foretoken.training.capture import Capture, Tensors
from foretoken.trees.build import chain
from foretoken.types import DecodeState, Draft, Draw, Layer


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPredictions(Capture):
    """Logits [n, L - 1, K] of the candidates and labels [n, L - 1] of every layer but the last."""

    candidates: int  # likely tokens that are looked at

    def record(self, session: Session, row: DecodeState, text: Sequence[int]) -> Tensors:
        target, draft = innermost(session.target), session.draft
        readout = Readout(target)  # type: ignore[arg-type]
        tree = chain(row.tokens[-1], text[:-1])
        target.prefill([row])
        taps = tuple(Layer(i) for i in range(target.layers))
        [score] = target.score([row], [Draft(tree, Draw.POINT)], taps)
        target.free([row])
        draft.prefill([row])
        [guesses] = draft.grow([row], [tree.tokens], [tree.parents])
        draft.free([row])
        candidates = guesses.logits.topk(self.candidates).indices  # [n, K]
        final = score.logits.argmax(-1)
        scores, labels = [], []
        for layer in range(len(taps) - 1):
            normed = readout.norm(score.hidden[:, layer])  # type: ignore[index]
            scores.append(readout.some(normed, candidates))
            labels.append(torch.tensor(readout.best(normed), device=final.device) == final)
        return {
            "input_ids": final.cpu(),
            "scores": torch.stack(scores, 1).float().cpu(),
            "labels": torch.stack(labels, 1).float().cpu(),
        }

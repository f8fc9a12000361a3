"""Acceptance of a draft while it is trained, measured by the engine itself on held-out prompts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.engine.assemble import assemble
from foretoken.engine.session import Session
from foretoken.lm.draft_exits import Exits
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.opening import open_draft


@dataclass(frozen=True, slots=True)
class Measured:
    """What a draft reaches on a session's target."""

    acceptance: float  # accepted tokens over drafted ones, those behind a rejection not counted
    mean_accepted_length: float  # tokens per target forward
    left: Mapping[int, int] = field(default_factory=dict)  # of a sorted draft: forwards by layers

    def told(self, cost: float, depth: int) -> dict[str, float]:
        """By name, with the speed-up to expect where a draft forward costs `cost` of a target's.

        A chain of `depth` is taken to be scored at the price of one token.
        """
        return {
            "acceptance": self.acceptance,
            "tokens_per_forward": self.mean_accepted_length,
            "estimated_speed_up": self.mean_accepted_length / (1.0 + cost * depth),
        }


@dataclass(frozen=True, slots=True)
class EngineAcceptance:
    """Writes held-out prompts with a chain of the draft, and counts what the target took.

    `prompts` are token ids; `tokens` the reduced vocabulary [R], or None; half the prompts are
    written greedily, half at temperature 1. `exits` are those of a sorted draft.
    """

    session: Session
    prompts: Sequence[Sequence[int]]
    tokens: Tensor | None
    cost: float
    depth: int = 4
    new_tokens: int = 48
    exits: Exits | None = None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model).told(self.cost, self.depth)

    def measure(self, model: nn.Module) -> Measured:
        """Acceptance and mean accepted length over all prompts."""
        draft = drafting(model, self.session.target.model, self.tokens, self.exits)
        try:
            engine = assemble(
                "chain", self.session.target, draft, depth=self.depth, max_rows=len(self.prompts)
            )
            writer = Session(
                engine, method="chain", tokenizer=self.session.tokenizer, draft=draft,
                eos=self.session.eos,
            )  # fmt: skip
            rows = []
            for temperature, some in ((0.0, self.prompts[::2]), (1.0, self.prompts[1::2])):
                if some:
                    rows += writer.rows(
                        [list(one) for one in some], self.new_tokens,
                        temperature=temperature, seed=list(range(len(some))),
                    )  # fmt: skip
            counts = Counts()
            writer.decode(rows, counts.watch)
            return counts.measured(getattr(draft, "left", {}))
        finally:
            draft.close()


@dataclass(slots=True)
class Counts:
    """Sums over steps."""

    accepted: int = 0
    judged: int = 0  # drafted tokens up to and with the first rejection
    emitted: int = 0
    forwards: int = 0

    def watch(self, step: Any, at: int) -> None:
        """Count what one step did for one row."""
        drafted, accepted = len(step.drafts[at].tree.tokens) - 1, len(step.verdicts[at].path)
        self.accepted += accepted
        self.judged += min(drafted, accepted + 1)
        self.emitted += len(step.emitted[at])
        self.forwards += 1

    def measured(self, left: Mapping[int, int]) -> Measured:
        return Measured(
            self.accepted / max(self.judged, 1), self.emitted / max(self.forwards, 1),
            dict(sorted(left.items())),
        )  # fmt: skip


@torch.no_grad()
def drafting(
    model: nn.Module, target: Any, tokens: Tensor | None, exits: Exits | None = None
) -> Any:
    """A copy of a model under training, opened as a draft that guesses these tokens only.

    Its numbers are of the target's type, and where the target's are.
    """
    trained: Any = model
    made: Any = type(trained)(copy.deepcopy(trained.config))
    made.load_state_dict(trained.state_dict())
    made.set_attn_implementation("sdpa")
    made.eval().requires_grad_(False).to(target.device, target.dtype)
    width = made.config.vocab_size
    rows = None if tokens is None else OutputRows.of_tokens(tokens.tolist(), width)
    return open_draft(made, rows, exits=exits, compile="off")

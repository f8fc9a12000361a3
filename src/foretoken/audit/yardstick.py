"""Acceptance of every rule beside the best possible, over random laws and over laws of models.

What a rule leaves of the optimum, a better rule could still give; what the optimum leaves of one,
only a better draft can. A rule above its optimum would not be exact.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from torch import Tensor

from foretoken.audit.acceptance import RULES, single
from foretoken.audit.transport import by_cut, by_flow, candidate_sets
from foretoken.contract import Verifier
from foretoken.errors import ConfigError
from foretoken.lm.table import TableLM
from foretoken.types import Draft, Draw, Rows, Scores, Verdict

LawPair = tuple[Tensor, Tensor]  # p and q over the same tokens
CANDIDATES = (2, 3, 4)
FLOW_SETS = 1000  # the linear programme is solved up to so many candidate sets
SLACK = 1e-9  # rounding, and what the solver tolerates
TOP_K = 16  # of the models' laws: both laws together then have 32 tokens at most
CONTESTED = 0.9  # below this acceptance of one candidate, a second one has something to win


@dataclass(frozen=True, slots=True)
class Measured:
    """One rule over one family of laws, all means."""

    laws: str
    count: int
    k: int
    draw: str
    rule: str
    acceptance: float
    acceptance_error: float  # standard error of that mean
    optimum: float
    share: float  # of the optimum
    share_error: float
    worst_excess: float  # largest acceptance above the optimum; rounding, or the rule is not exact
    flow_gap: float | None  # largest difference of the programme from the cut; None: cut alone


@dataclass(frozen=True, slots=True)
class Yardstick:
    """All of them, with what one candidate reaches."""

    one: dict[str, float]  # by family of laws: mean of 1 - TV
    rows: tuple[Measured, ...]

    @property
    def passed(self) -> bool:
        """No rule above its optimum, and both ways to the optimum agree."""
        return all(max(r.worst_excess, r.flow_gap or 0.0) <= SLACK for r in self.rows)

    def to_json(self) -> str:
        document = {"passed": self.passed, "one_candidate": self.one}
        return json.dumps({**document, "rows": [asdict(row) for row in self.rows]}, indent=2)

    def render(self, width: int | None = None) -> str:
        """The table as text, coloured when it goes to a terminal."""
        terminal = sys.stdout.isatty()
        console = Console(
            file=io.StringIO(), force_terminal=terminal, width=width or (None if terminal else 120)
        )
        with console.capture() as page:
            console.print(self.table())
            good = "no rule above its optimum" if self.passed else "a rule is above its optimum"
            console.print(good, style="bold green" if self.passed else "bold red")
        return page.get()

    def table(self) -> RenderableType:
        page = Table(title="foretoken audit --acceptance", title_justify="left")
        for name in ("laws", "k", "candidates", "rule"):
            page.add_column(name)
        for name in ("acceptance", "best possible", "share of it"):
            page.add_column(name, justify="right")
        seen = ""
        for row in self.rows:
            if row.laws != seen:
                page.add_section()
                one = f"{self.one[row.laws]:.4f}"
                page.add_row(f"{row.laws} ({row.count})", "1", "one", "any", one, one, "100.0 %")
                seen = row.laws
            best = f"{row.optimum:.4f}" + ("" if row.flow_gap is None else " lp")
            share = f"{100 * row.share:.1f} %"
            page.add_row("", str(row.k), row.draw, row.rule, f"{row.acceptance:.4f}", best, share)
        page.caption = "lp: the linear programme was solved too, and agrees with the cut"
        return page


def optimum(p: Tensor, q: Tensor, k: int, draw: Draw) -> tuple[float, float | None]:
    """The best acceptance with such candidates, and how far two ways to it are apart."""
    sets = candidate_sets(q, k, draw) if few_sets(q, k, draw) else None
    flow = None if sets is None else by_flow(p, sets)
    if draw is Draw.MIXED:
        assert flow is not None, "mixed candidates make as few sets as there are tokens"
        return flow, 0.0
    cut = by_cut(p, q, k, draw)
    return cut, None if flow is None else abs(flow - cut)


def few_sets(q: Tensor, k: int, draw: Draw) -> bool:
    """Whether the sets can be written down; there are at most so many as ordered draws."""
    support = int((q > 0.0).sum())
    sets = 1
    for i in range(1 if draw is Draw.MIXED else k):
        sets = sets * (support + i) // (i + 1)
    return sets <= FLOW_SETS


def measure(name: str, pairs: Sequence[LawPair]) -> list[Measured]:
    """Every rule with every number of candidates, over laws of one family."""
    rows = []
    for k in CANDIDATES:
        best = {
            draw: [optimum(p, q, k, draw) for p, q in pairs]
            for draw in dict.fromkeys(rule.draw for rule in RULES)
        }
        for rule in RULES:
            found = [rule.accepts(p, q, k) for p, q in pairs]
            limits = [limit for limit, _ in best[rule.draw]]
            gaps = [gap for _, gap in best[rule.draw] if gap is not None]
            shares = [a / b if b > 0.0 else 1.0 for a, b in zip(found, limits, strict=True)]
            rows.append(
                Measured(
                    laws=name,
                    count=len(pairs),
                    k=k,
                    draw=rule.draw.value,
                    rule=rule.name,
                    acceptance=fmean(found),
                    acceptance_error=standard_error(found),
                    optimum=fmean(limits),
                    share=fmean(shares),
                    share_error=standard_error(shares),
                    worst_excess=max(a - b for a, b in zip(found, limits, strict=True)),
                    flow_gap=max(gaps) if len(gaps) == len(pairs) else None,
                )
            )
    return rows


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def random_laws(vocab: int, count: int, related: bool, seed: int = 0) -> list[LawPair]:
    """Softmax of normal logits; a related q is p's, disturbed."""
    target = TableLM.random(vocab, seed=seed).logits.reshape(-1, vocab)[:count]
    other = TableLM.random(vocab, seed=seed + 1).logits.reshape(-1, vocab)[:count]
    guess = target + 0.5 * other if related else other
    return list(zip(target.softmax(-1), guess.softmax(-1), strict=True))


class Watch:
    """A verifier that notes the laws at the root of every draft, and leaves the verdict alone."""

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule
        self.exact_for, self.lossy_for, self.shape = rule.exact_for, rule.lossy_for, rule.shape
        self.seen: list[LawPair] = []

    def verify(
        self, rows: Rows, drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[Verdict]:
        for draft, score in zip(drafts, scores, strict=True):
            if draft.q is not None and draft.q[0] is not None and score.p is not None:
                p, q = score.p[0].double().cpu(), draft.q[0].double().cpu()
                either = ((p > 0.0) | (q > 0.0)).nonzero()[:, 0]  # the tokens that matter
                self.seen.append((p[either] / p.sum(), q[either] / q.sum()))
        return self.rule.verify(rows, drafts, scores)


def model_laws(
    target: Any, draft: Any, prompts: Sequence[str], count: int, seed: int = 0
) -> list[LawPair]:
    """Laws met while the models go on from `prompts` at temperature 1, top-k 16."""
    from foretoken.engine.loading import load

    with load(target, "chain", draft, depth=2) as session:
        watch = Watch(session.engine.verifier)
        session.engine.verifier = watch
        session.generate(list(prompts), 32, temperature=1.0, top_k=TOP_K, seed=seed)
    step = max(1, len(watch.seen) // count)
    return watch.seen[::step][:count]


def families(
    target: Any, draft: Any, prompts: Sequence[str], count: int, seed: int = 0
) -> Iterator[tuple[str, list[LawPair]]]:
    """The kinds of laws by name; those of models where models were given."""
    for vocab in (8, 32):
        yield f"unrelated, V={vocab}", random_laws(vocab, count, related=False, seed=seed)
    for vocab in (8, 32):
        yield f"related, V={vocab}", random_laws(vocab, count, related=True, seed=seed)
    if target is None:
        return
    if draft is None:
        raise ConfigError(
            "the acceptance on a target without a draft was asked for.",
            "acceptance is a matter of two laws: the target's and the draft's.",
            "pass --draft, or leave --target out for the shipped pair.",
        )
    met = model_laws(target, draft, prompts, 3 * count, seed)
    yield "the models', top-k 16", met
    contested = [(p, q) for p, q in met if single(p, q) < CONTESTED]
    if contested:
        yield f"of these, one < {CONTESTED}", contested


@torch.inference_mode()
def run(
    target: Any = None,
    draft: Any = None,
    prompts: Sequence[str] = (),
    count: int = 40,
    seed: int = 0,
    told: Callable[[str], None] = lambda name: None,
) -> Yardstick:
    """Measure every family of laws; `told` hears the name of each before it is measured.

    Those of models are met while they go on from `prompts`, some dozens of steps for each.
    """
    one, rows = {}, []
    for name, pairs in families(target, draft, prompts, count, seed):
        told(name)
        one[name] = fmean(single(p, q) for p, q in pairs)
        rows += measure(name, pairs)
    return Yardstick(one, tuple(rows))

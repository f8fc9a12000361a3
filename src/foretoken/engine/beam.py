"""The loop of beams: draft a forest, score it in one target forward, keep what stands.

A verdict is a set of scored texts, so this is a loop of its own. With nothing drafted it is plain
beam sampling. What is exact: every layer's beams are independent draws from the target's joint law
over the beams kept before, the first K of them always, the rest where a round ends; K is computed
before any is looked at. With `min_width` = `num_beams` the law is that of a fixed width. With
smaller ones the width depends on what was accepted, as published (arXiv 2409.16560).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from foretoken.contract import Controller
from foretoken.engine.interrupts import Uninterrupted
from foretoken.engine.promise import Promise, check_candidates, check_scoring, promise_of
from foretoken.errors import ConfigError
from foretoken.lm.runtime.branches import BranchingLM, feed, prune
from foretoken.row import place_processors
from foretoken.trees.forest import Beam, BeamRow, Cut, Layer, Written
from foretoken.types import Traits
from foretoken.verifiers.beams import Beams, LayerVerdict
from foretoken.warp.joint import joint_law


class BeamDrafter(Protocol):
    """Guesses forests."""

    traits: Traits

    def start(self, row: BeamRow) -> None: ...
    def propose(self, rows: Sequence[BeamRow], depths: Sequence[int]) -> list[tuple[Layer, ...]]:
        """Layers below each row's beams; their nodes enter the row's forest."""
        ...

    def settle(self, rows: Sequence[BeamRow], cuts: Sequence[Cut]) -> None:
        """Called after the rows' forests were cut."""
        ...

    def finish(self, row: BeamRow) -> None: ...


@dataclass(eq=False)
class BeamEngine:
    """Target, drafter, rule and controller of beams; one batch at a time."""

    target: BranchingLM
    drafter: BeamDrafter
    verifier: Beams
    controller: Controller
    max_rows: int = 16

    def __post_init__(self) -> None:
        check_candidates(self.drafter, self.verifier)
        check_scoring(self.target, self.drafter)
        check_samples(self.drafter, self.verifier)

    @property
    def promise(self) -> Promise:
        """The law that texts of this engine follow."""
        return promise_of(self.drafter, self.verifier, self.target)


def check_samples(drafter: BeamDrafter, rule: Beams) -> None:
    """Refuse drafts of which no layer could ever stand."""
    samples, least = getattr(drafter, "samples", 0), rule.config.min_width
    if 0 < samples < least:
        raise ConfigError(
            f"samples={samples} was asked for with min_width={least}.",
            "a drafted layer stands once min_width of its samples are accepted.",
            f"pass samples={least} or more, samples=0 for as many as there are beams, or a smaller "
            "min_width.",
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """One layer of one row: the law, what was drawn from it, and over which texts."""

    nodes: tuple[int, ...]  # texts that stood
    law: Tensor  # [nV] over (text, token) pairs
    verdict: LayerVerdict  # pairs of `law`


@dataclass(frozen=True, slots=True)
class Round:
    """What a round did to one row."""

    layers: tuple[Layer, ...]
    judged: tuple[Judged, ...]  # layers looked at; one more if all were passed
    grown: int  # tokens every beam gained

    @property
    def widths(self) -> list[int]:
        """Beams drawn, for each token of the round."""
        return [len(layer.verdict.pairs) for layer in self.judged]


@dataclass(frozen=True, slots=True)
class BeamRecord:
    """One round as listeners see it."""

    rows: tuple[BeamRow, ...]
    rounds: tuple[Round, ...]
    nodes: int  # scored in the target forward
    draft_seconds: float
    target_seconds: float


def decode(
    requests: Iterable[BeamRow], engine: BeamEngine, max_rows: int | None = None
) -> Generator[BeamRecord]:
    """Run rows to their end, at most `max_rows` together. Closing it early frees every row."""
    waiting, running = deque(requests), list[BeamRow]()
    try:
        while waiting or running:
            with Uninterrupted(), torch.inference_mode():
                while waiting and len(running) < (max_rows or engine.max_rows):
                    row = waiting.popleft()
                    place_processors(row.state, getattr(engine.target, "device", None))
                    running.append(row)
                    engine.target.prefill([row.state])
                    engine.drafter.start(row)
                record = step(running, engine)
                leave([row for row in running if not row.beams], engine)
                running = [row for row in running if row.beams]
            yield record
    finally:
        with Uninterrupted():
            leave(running, engine)


def leave(rows: Sequence[BeamRow], engine: BeamEngine) -> None:
    """Forget rows that ended."""
    for row in rows:
        engine.drafter.finish(row)
    engine.target.free([row.state for row in rows])


def step(rows: Sequence[BeamRow], engine: BeamEngine) -> BeamRecord:
    """One round. Every beam grows by at least one token."""
    lm, drafter = engine.target, engine.drafter
    began = perf_counter()
    budgets = engine.controller.budgets([row.state for row in rows])
    depths = [
        clip(row, budget.depth, lm.max_length) for row, budget in zip(rows, budgets, strict=True)
    ]
    layers = drafter.propose(rows, depths)
    drafted = perf_counter()
    wanted = [nodes_of(row, drawn) for row, drawn in zip(rows, layers, strict=True)]
    logits = feed(
        lm,
        [row.state for row in rows],
        [row.forest for row in rows],
        [row.columns for row in rows],
        wanted,
    )
    scored = perf_counter()
    rounds, kept = [], []
    for row, drawn, nodes, said in zip(rows, layers, wanted, logits, strict=True):
        done, beams = judge(row, drawn, dict(zip(nodes, said, strict=True)), engine.verifier)
        rounds.append(done)
        if beams:
            kept.append((row, row.settle(beams)))
        else:
            row.beams = []
    if kept:
        going, cuts = [row for row, _ in kept], [cut for _, cut in kept]
        prune(lm, [row.state for row in going], [row.columns for row in going], cuts)
        drafter.settle(going, cuts)
    return BeamRecord(
        tuple(rows), tuple(rounds), sum(map(len, wanted)), drafted - began, scored - drafted
    )


def clip(row: BeamRow, depth: int, longest: int | None) -> int:
    """A depth that neither outruns the row's cap nor the model's positions."""
    depth = min(depth, row.room - 1)  # a round adds one token beyond its last layer
    if longest is not None:
        depth = min(depth, longest - row.state.prompt_len - row.length)
    return max(depth, 0)


def nodes_of(row: BeamRow, layers: Sequence[Layer]) -> list[int]:
    """What the target is asked about: the beams' last tokens, then the draft in layer order."""
    drafted = {node for layer in layers for node in layer.nodes}
    return [beam.node for beam in row.beams] + sorted(drafted)


def judge(
    row: BeamRow, layers: Sequence[Layer], logits: dict[int, Tensor], rule: Beams
) -> tuple[Round, list[Beam]]:
    """Walk the layers until one fails; the beams that go on, none if all texts are complete."""
    seen: list[Judged] = []
    beams, grown = list(row.beams), 0
    for layer in [*layers, None]:
        law, log_p = joint(row, beams, logits)
        if layer is None:
            count = 1 if rule.config.keep_one else row.width
            pairs = tuple(row.state.coins.draw(law) for _ in range(count))
            verdict = LayerVerdict(pairs, 0, count, False)
        else:
            verdict = judge_layer(row, beams, layer, law, rule)
        seen.append(Judged(tuple(beam.node for beam in beams), law, verdict))
        grown += 1
        beams = complete(row, drawn_beams(row, beams, verdict.pairs, law, log_p), grown)
        if not verdict.passed or not beams:
            break
    return Round(tuple(layers), tuple(seen), grown), beams


def joint(row: BeamRow, beams: Sequence[Beam], logits: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """The target's law over (beam, token) pairs, and log p of each beam's next token."""
    state, forest = row.state, row.forest
    found = joint_law(
        state.warp,
        state.tokens,
        [forest.text(beam.node) for beam in beams],
        [beam.weight for beam in beams],
        torch.stack([logits[beam.node] for beam in beams]),
    )
    return found.law, found.log_p


def judge_layer(
    row: BeamRow, beams: Sequence[Beam], layer: Layer, law: Tensor, rule: Beams
) -> LayerVerdict:
    """The rule's verdict in pairs of `law`: attempts whose beam fell have no chance."""
    vocab = len(law) // len(beams)
    places = {node: i for i, node in enumerate(layer.parents)}
    columns = torch.tensor([places[beam.node] for beam in beams], device=law.device)
    q = layer.q.view(-1, vocab)[columns].flatten().to(law)
    standing = {int(place): i for i, place in enumerate(columns.tolist())}
    attempts = [
        standing[pair // vocab] * vocab + pair % vocab if pair // vocab in standing else None
        for pair in layer.pairs
    ]
    return rule.judge(law, q, attempts, row.width, row.state.coins)


def drawn_beams(
    row: BeamRow, beams: Sequence[Beam], pairs: Sequence[int], law: Tensor, log_p: Tensor
) -> list[Beam]:
    """The beams that `pairs` of `law` make; a pair drawn twice is one beam.

    Two copies would count a text double in the next law: weights are shares of texts.
    """
    vocab = log_p.shape[-1]
    made = []
    for pair in dict.fromkeys(pairs):
        beam, token = beams[pair // vocab], pair % vocab
        node = row.forest.child(beam.node, token)
        likelihood = beam.log_likelihood + float(log_p[pair // vocab, token])
        made.append(Beam(node, float(law[pair].log()), likelihood))
    return made


def complete(row: BeamRow, beams: Sequence[Beam], grown: int) -> list[Beam]:
    """Put complete texts aside, the `width` best of all so far; the beams that go on."""
    most, why = row.state.limit
    full = row.length + grown >= most
    left = []
    for beam in beams:
        stopped = row.forest.tokens[beam.node] in row.state.params.eos
        if not stopped and not full:
            left.append(beam)
            continue
        text = (*row.state.new_tokens, *row.forest.text(beam.node))
        row.written.append(Written(text, beam.log_likelihood, "stop" if stopped else why))
    row.written.sort(key=lambda text: text.score, reverse=True)  # stable: of equals, the first
    del row.written[row.width :]  # what will never be shown: a long text leaves many behind
    return left

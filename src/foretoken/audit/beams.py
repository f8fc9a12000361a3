"""The checks of methods that write beams: the law of the set, one text, greedy, cache, seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from foretoken.audit import beam_law as exact
from foretoken.audit.beam_law import BeamBuild
from foretoken.audit.cache import Witness
from foretoken.audit.greedy import fresh_logits
from foretoken.audit.law import BOUND, PROMPT, own_law, total_variation
from foretoken.audit.rows import seeded_rows, write
from foretoken.contract import LanguageModel
from foretoken.engine.assemble import assemble
from foretoken.engine.beam import decode
from foretoken.lm.table import TableLM
from foretoken.methods import Method, needs_draft
from foretoken.trees.forest import BeamRow, Written
from foretoken.types import Ragged, Rows, SamplingParams, Scores, Taps

Checked = tuple[bool, str, dict[str, Any]]
Job = tuple[str, str, Callable[[], Checked]]

WIDTH = 4
HOT: dict[str, Any] = {"temperature": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": HOT,
    "temperature 0.7, top-k 3": {"temperature": 0.7, "top_k": 3},
    "end token, minimum length, bias": {
        **HOT, "eos": frozenset({1}), "min_new_tokens": 1, "logit_bias": {0: 0.5},
    },
    "penalties, min-p": {
        **HOT, "min_p": 0.1, "repetition_penalty": 1.4, "frequency_penalty": 0.4,
    },
    "temperature 0": {"temperature": 0.0},
}  # fmt: skip


def table_build(entry: Method, vocab: int, **config: Any) -> BeamBuild:
    """Makes the method's engine over tables; without a draft, its options are left out."""
    if not needs_draft(entry):
        config = {name: value for name, value in config.items() if name == "num_beams"}

    def build() -> Any:
        draft = TableLM.random(vocab, seed=22) if needs_draft(entry) else None
        return assemble(entry.name, TableLM.random(vocab, seed=21), draft, **config)

    return build


def beam_jobs(
    entry: Method, target: LanguageModel | None, draft: LanguageModel | None
) -> list[Job]:
    """Every check of one method."""
    jobs: list[Job] = [
        ("beam law", f"{entry.name}, {name}", partial(job, entry)) for name, job in LAWS.items()
        if needs_draft(entry) or name in UNDRAFTED
    ]  # fmt: skip
    build = table_build(entry, 4, num_beams=WIDTH, depth=3)
    prompts = ((0, 1, 2, 0, 1), (2, 2, 1, 2, 2), (1,), (0, 2, 1, 1, 0, 2, 1))
    jobs += machinery(entry.name, "tables", build, prompts, 40)
    missing = "target" if target is None else "draft" if needs_draft(entry) and not draft else ""
    if missing:
        jobs.append(("models", entry.name, partial(left_out, missing)))
    elif target is not None:
        models = (target, draft) if needs_draft(entry) else (target,)
        build = partial(assemble, entry.name, *models, num_beams=WIDTH)
        wide = [[(7 * i * i + 3 * i) % target.vocab_size for i in range(n)] for n in (23, 1, 9)]
        jobs += machinery(entry.name, "models", build, wide, 24)
    return jobs


def machinery(name: str, where: str, build: BeamBuild, prompts: Ragged, tokens: int) -> list[Job]:
    """What must hold on any model."""
    return [
        (f"beams greedy, {where}", name, partial(greedy, build, prompts, tokens)),
        (f"beams cache, {where}", name, partial(cache, build, prompts, tokens // 2)),
        (f"beams seeds and neighbours, {where}", name, partial(seeds, build, prompts, tokens)),
    ]


def left_out(missing: str) -> Checked:
    from foretoken.errors import CapabilityError

    raise CapabilityError(
        "beams were to be audited on real models.",
        f"no {missing} model was given",
        f"pass a {missing} model.",
    )


def fixed_width(entry: Method, settings: Iterable[str] = SETTINGS) -> Checked:
    """With K = W the set of texts has the law of W beams, whatever was drafted."""
    gaps = {}
    for name in settings:
        params = SamplingParams(max_new_tokens=2, **SETTINGS[name])
        prompt = [token % 2 for token in PROMPT]
        build = table_build(entry, 2, num_beams=2, min_width=2, depth=1)
        seen = exact.engine_texts(build, prompt, params, 2)
        truth = exact.fixed_width(exact.Table(TableLM.random(2, seed=21), prompt, params, 2))
        gaps[name] = exact.variation(seen.law, truth)
    return within(gaps, "settings")


def one_beam(entry: Method) -> Checked:
    """One beam is speculative sampling: the law of its text is the target's own."""
    gaps = {}
    for name, setting in SETTINGS.items():
        params = SamplingParams(max_new_tokens=3, **setting)
        build = table_build(entry, 3, num_beams=1, depth=2, samples=1)
        seen = exact.engine_texts(build, PROMPT, params, 1)
        texts = {texts[0]: chance for texts, chance in seen.law.items()}
        truth = own_law(TableLM.random(3, seed=21), PROMPT, params)
        gaps[name] = total_variation(texts, truth)
    return within(gaps, "settings")


def dynamic_width(
    entry: Method, thresholds: Sequence[float] = (0.9, 0.5), samples: int = 2
) -> Checked:
    """With smaller K, the law is that of beam sampling whose width the draft decides."""
    gaps = {}
    prompt = [token % 2 for token in PROMPT]
    params = SamplingParams(max_new_tokens=3, **HOT)
    table = exact.Table(TableLM.random(2, seed=21), prompt, params, 2)
    for threshold in thresholds:
        build = table_build(entry, 2, num_beams=2, depth=1, threshold=threshold, samples=samples)
        seen = exact.engine_texts(build, prompt, params, 2)
        truth = exact.one_layer_ahead(
            table, TableLM.random(2, seed=22), samples, partial(width_of, threshold, 2)
        )
        gaps[f"threshold {threshold}"] = exact.variation(seen.law, truth)
    return within(gaps, "thresholds")


def width_of(threshold: float, width: int, at_least: Sequence[float]) -> int:
    """K from the chances that at least 0, 1, ... are accepted."""
    if threshold < 0:
        return min(max(int(sum(at_least[1:]) + 1e-9), 1), width)
    reached = [k for k, chance in enumerate(at_least) if chance >= threshold]
    return min(max(reached, default=0) or 1, width)


def layers(
    entry: Method, cases: Sequence[tuple[float, bool]] = ((0.9, False), (0.4, True))
) -> Checked:
    """In deeper drafts every layer's pairs are independent draws, given what came before."""
    gaps = {}
    prompt = [token % 2 for token in PROMPT]
    params = SamplingParams(max_new_tokens=3, **HOT)
    for threshold, keep_one in cases:
        build = table_build(entry, 2, num_beams=2, depth=2, threshold=threshold, keep_one=keep_one)
        seen = exact.engine_texts(build, prompt, params, 2)
        if seen.accepted == 0.0:
            return False, "no drafted beam ever stood, so nothing was shown", {}
        gaps[f"threshold {threshold}{', one kept' if keep_one else ''}"] = exact.layers_gap(seen)
    return within(gaps, "drafts of two layers")


LAWS: dict[str, Callable[[Method], Checked]] = {
    "fixed width": fixed_width,
    "one beam": one_beam,
    "dynamic width": dynamic_width,
    "every layer": layers,
}
UNDRAFTED = ("fixed width", "one beam")  # what beams without a draft can be checked for


def within(gaps: Mapping[str, float], of: str) -> Checked:
    """The verdict over several cases."""
    worst = max(gaps, key=lambda name: gaps[name])
    good = gaps[worst] <= BOUND
    detail = f"TV {gaps[worst]:.1e} over {len(gaps)} {of}" if good else f"{gaps[worst]} at {worst}"
    return good, detail, dict(gaps)


def written(build: BeamBuild, rows: Rows, max_rows: int = 16) -> list[list[Written]]:
    """What `rows` become."""
    beams = [BeamRow(row, WIDTH) for row in rows]
    for _ in decode(beams, build(), max_rows):
        pass
    return [sorted(row.written, key=lambda text: text.tokens) for row in beams]


def greedy(build: BeamBuild, prompts: Ragged, tokens: int) -> Checked:
    """At temperature 0 there is one text, and it is plain decoding's."""
    target = build().target
    params = SamplingParams(max_new_tokens=tokens)
    texts = written(build, seeded_rows(prompts, params, target.vocab_size))
    expected = [
        write(assemble("plain", target), seeded_rows([prompt], params, target.vocab_size))[0]
        for prompt in prompts
    ]
    same = [[list(text.tokens) for text in row] for row in texts] == [[text] for text in expected]
    return same, f"{tokens * len(prompts)} tokens", {}


def cache(build: BeamBuild, prompts: Ragged, tokens: int) -> Checked:
    """Every scored node, said again from nothing; and every score, from fresh logits."""
    engine = build()
    witness = ForestWitness(engine.target)
    engine.target = witness
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0)
    rows = [BeamRow(row, WIDTH) for row in seeded_rows(prompts, params, witness.vocab_size)]
    for _ in decode(rows, engine):
        pass
    seen = witness.difference
    off = max(abs(text.log_likelihood - likelihood(witness.inner, row, text))
              for row in rows for text in row.written)  # fmt: skip
    detail = f"{seen.nodes} nodes, largest difference {seen.relative:.1e}, of scores {off:.1e}"
    return seen.good and off <= 1e-2, detail, {"relative": seen.relative, "scores": off}


@torch.inference_mode()
def likelihood(lm: LanguageModel, row: BeamRow, text: Written) -> float:
    """The log-likelihood of a text, from fresh forwards."""
    context = list(row.state.tokens[: row.state.prompt_len])
    total = 0.0
    for token in text.tokens:
        total += float(fresh_logits(lm, context).double().log_softmax(-1)[token])
        context.append(token)
    return total


class ForestWitness(Witness):
    """A target that recomputes every node of the open forests it is fed."""

    def __init__(self, inner: LanguageModel) -> None:
        super().__init__(inner)
        self.open: dict[int, tuple[list[int], list[int]]] = {}  # uid -> tokens and parents

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        scored = self.inner.grow(rows, tokens, parents, taps)
        for row, new, above, score in zip(rows, tokens, parents, scored, strict=True):
            if above and above[0] < 0:
                self.open[row.uid] = [], []
            held, up = self.open[row.uid]
            for token, parent, said in zip(new, above, score.logits, strict=True):
                held.append(token)
                up.append(parent)
                path, node = [], len(held) - 1
                while node > 0:
                    path.append(held[node])
                    node = up[node]
                fresh = fresh_logits(self.inner, [*row.tokens, *path[::-1]])
                self.compare(said, fresh, row, len(held) - 1)
        return scored

    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
        inner: Any = self.inner
        inner.prune(rows, kept, settled)
        for row, nodes, count in zip(rows, kept, settled, strict=True):
            tokens, parents = self.open[row.uid]
            places = {node: i - count for i, node in enumerate(nodes)}
            left = nodes[count:]
            self.open[row.uid] = (
                [tokens[node] for node in left],
                [max(places.get(parents[node], -1), -1) for node in left],
            )


def seeds(build: BeamBuild, prompts: Ragged, tokens: int) -> Checked:
    """A seed repeats its texts, alone and beside others; another seed writes others."""
    vocab = build().target.vocab_size
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0)

    def texts(seed: int, which: Ragged, rows: int = 16) -> list[list[Any]]:
        found = written(build, seeded_rows(which, params, vocab, seed), rows)
        return [[text.tokens for text in row] for row in found]

    together = texts(0, prompts, max(2, len(prompts) - 1))
    alone = [texts(i, [prompt])[0] for i, prompt in enumerate(prompts)]
    changed = sum(a != b for a, b in zip(together, alone, strict=True))
    changed += sum(a != b for a, b in zip(together, texts(0, prompts), strict=True))
    unused = texts(1000, prompts) == together
    return not changed and not unused, f"{changed} of {2 * len(prompts)} texts changed", {}

"""The checks of an audit, as named jobs: exact laws, rules, pairings, greedy text, cache, seeds.

Checks that need an exact law run on tables in float64. Greedy equality, cache and seeds run on the
models handed in as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from foretoken.audit import law as exact
from foretoken.audit.beams import beam_jobs
from foretoken.audit.cache import cache_difference
from foretoken.audit.drawn_trees import DrawnTree, rule_gap
from foretoken.audit.fixtures import needed
from foretoken.audit.greedy import compare_greedy
from foretoken.audit.mutations import MUTATIONS, Mutation, find
from foretoken.audit.rows import Build, neighbour_differences, seed_differences
from foretoken.audit.sorted_draws import leaving_early
from foretoken.contract import LanguageModel
from foretoken.controllers.fixed import Fixed
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine
from foretoken.engine.promise import promise_of_row
from foretoken.errors import CapabilityError, PairingError
from foretoken.lm.table import TableLM
from foretoken.lm.views.table_views import scoring_few
from foretoken.methods import (
    GENERAL_CONTROLLERS,
    METHODS,
    VERIFIERS,
    Method,
    needs_draft,
    resolve,
)
from foretoken.types import Draw, SamplingParams, Shape

SHAPES = ((2, 1), (1, 2), (2, 2), (3, 1))
TABLE_PROMPTS = ((0, 1, 2, 0, 1), (2, 2, 1, 2, 2), (1,), (0, 2, 1, 1, 0, 2, 1))
VIEWED = ("chain", "tree", "mcsd")  # audited with each of DRAFTS as well
WORDS = (0, 2)
DRAFTS: dict[str, Callable[[TableLM], Any]] = {
    "reduced draft vocabulary": partial(scoring_few, tokens=WORDS),
    "sorted draft": leaving_early,
}
TABLE_TOKENS = 60  # written after each prompt by a table
MODEL_TOKENS = 48  # and by a real model

Checked = tuple[bool, str, dict[str, Any]]  # passed, what was seen, numbers
Job = tuple[str, str, Callable[[], Checked]]  # check, subject, how


def all_jobs(
    methods: Sequence[Method],
    target: LanguageModel | None,
    draft: LanguageModel | None,
    mutate: bool,
) -> list[Job]:
    """Every check of an audit, grouped by kind."""
    jobs: list[Job] = []
    for entry in methods:
        if entry.writes == "beams":
            jobs += beam_jobs(entry, target, draft)
    methods = [entry for entry in methods if entry.writes == "text"]
    for entry in methods:
        jobs += law_jobs(entry)
    jobs += rule_jobs()
    jobs.append(("pairing", "wrong pairings", refused_pairings))
    for entry in methods:
        jobs += table_jobs(entry)
    for entry in methods:
        jobs += model_jobs(entry, target, draft)
    if mutate:
        jobs += [("mutation", bug.name, partial(mutation_found, bug)) for bug in MUTATIONS]
    order = list(dict.fromkeys(check for check, _, _ in jobs))
    return sorted(jobs, key=lambda job: order.index(job[0]))


def table_engine(
    entry: Method,
    vocab: int,
    controller: str,
    verifier: str | None = None,
    depth: int = 2,
    view: Callable[[TableLM], Any] | None = None,
    guesses: int = 22,
) -> Engine:
    """The method's own engine over tables; a controller that reads the clock gets a steady one.

    `view` makes the draft of a table, the one with the seed `guesses`, where that is not the draft
    itself.
    """
    config = needed(entry, vocab, controller)
    if controller == "fixed" and entry.name != "plain":
        config |= {"depth": depth, "nodes": 2 * depth}
    if controller in ("cost_model", "smartspec"):  # trees small enough to be enumerated
        config |= {"max_nodes": 2 * depth}
    if verifier == "mixed":  # the rule for drafts of which a part is fixed
        config |= {"greedy_draft": True}
    draft = TableLM.random(vocab, seed=guesses)
    draft_lm = draft if view is None else view(draft)
    engine: Engine = assemble(
        entry.name,
        TableLM.random(vocab, seed=21),
        draft_lm if needs_draft(entry) else None,
        controller=controller,
        verifier=verifier,
        **config,
    )
    engine.controller = exact.Steady(engine.controller)
    return engine


def combinations(entry: Method) -> list[tuple[str, str]]:
    """The verifiers and controllers a method can be put together with."""
    if entry.name == "plain":
        return [(entry.verifier, "fixed")]
    controllers = dict.fromkeys((*GENERAL_CONTROLLERS, entry.controller, *entry.controllers))
    return [(v, c) for v in (entry.verifier, *entry.verifiers) for c in controllers]


AGREES = 26  # seed of a draft whose greedy text is the target's here and there: else nothing that
# is drafted behind a token is ever judged at temperature 0


def law_jobs(entry: Method, settings: Sequence[str] = tuple(exact.SETTINGS)) -> list[Job]:
    """Exact law of every combination of a lossless method, under sampling settings by name."""
    if not promise_of_row(entry).lossless:
        return []
    jobs: list[Job] = [
        (
            "exact law",
            f"{entry.name} ({verifier}, {controller})",
            partial(method_law, entry, verifier, controller, settings=settings),
        )
        for verifier, controller in combinations(entry)
    ]
    for name, view in DRAFTS.items() if entry.name in VIEWED else ():
        how = partial(method_law, entry, entry.verifier, "fixed", view, settings)
        jobs.append(("exact law", f"{entry.name}, {name}", how))
    return jobs


def method_law(
    entry: Method,
    verifier: str,
    controller: str,
    view: Callable[[TableLM], Any] | None = None,
    settings: Sequence[str] = tuple(exact.SETTINGS),
) -> Checked:
    """The largest total variation over sampling settings."""
    # Every drawn node multiplies the outcomes by the vocabulary.
    drafter = table_engine(entry, 4, controller, verifier).drafter
    vocab = 3 if drafter.traits.shape is Shape.TREE and not drafter.traits.fixed else 4
    build = partial(table_engine, entry, vocab, controller, verifier, view=view, guesses=AGREES)
    gaps = {
        name: exact.law_gap(build, TableLM.random(vocab, seed=21), exact.SETTINGS[name])
        for name in settings
    }
    worst = max(gaps, key=lambda name: gaps[name].variation)
    value = gaps[worst].variation
    outcomes = sum(gap.law.outcomes for gap in gaps.values())
    detail = f"TV {value:.1e} over {len(gaps)} settings, {outcomes} outcomes"
    if value > exact.BOUND:
        detail = f"TV {value:.3g} at {worst}"
    elif entry.name != "plain" and (silent := undrafted(gaps)):
        detail = f"nothing was drafted at {' and '.join(silent)}, so nothing was shown"
        value = float("inf")
    values = {name: gap.variation for name, gap in gaps.items()}
    return value <= exact.BOUND, detail, values


def undrafted(gaps: Mapping[str, exact.Gap]) -> list[str]:
    """Which of greedy and sampled text, where settings ask for it, nothing was drafted for."""
    drafted: dict[str, float] = {}
    for name, gap in gaps.items():
        sampled = exact.SETTINGS[name]["temperature"] > 0.0
        kind = "temperatures above 0" if sampled else "temperature 0"
        drafted[kind] = drafted.get(kind, 0.0) + gap.law.drafted
    return [kind for kind, expected in drafted.items() if expected == 0.0]


DRAWN_SHAPES = ((2, 1), (1, 2), (3,))  # every drawn node multiplies the outcomes


def rule_jobs() -> list[Job]:
    """Each rule on each kind of children it claims to be exact for, on several tree shapes."""
    jobs: list[Job] = []
    for rule in (resolve(place) for place in VERIFIERS.values()):
        for draw in sorted(rule.exact_for - {Draw.JOINT}, key=lambda draw: draw.value):
            shapes: Sequence[tuple[int, ...]] = (
                SHAPES if draw in (Draw.POINT, Draw.MIXED) else DRAWN_SHAPES
            )
            shapes = ((1, 1),) if rule.shape is Shape.CHAIN else shapes
            subject = f"{rule.__name__} on {draw.value} children"
            jobs.append(("rule", subject, partial(rule_law, rule, draw, shapes)))
    return jobs


def rule_law(rule: Any, draw: Draw, shapes: Sequence[tuple[int, ...]]) -> Checked:
    target, guess = TableLM.random(3, seed=31), TableLM.random(3, seed=32)
    values = {
        str(widths): rule_gap(rule(), draw, widths, target, guess, {"temperature": 1.0}).variation
        for widths in shapes
    }
    worst = max(values.values())
    return worst <= exact.BOUND, f"TV {worst:.1e} over shapes {', '.join(values)}", values


def refused_pairings() -> Checked:
    """Every pairing of a rule with children it is not exact for raises PairingError."""
    lm = TableLM.random(3)
    rules = [resolve(place) for place in VERIFIERS.values()]
    wrong = [
        (rule, draw, widths)
        for rule in rules
        for draw in Draw
        for widths in ((1,), (2,))
        if draw not in rule.exact_for | rule.lossy_for
        or (rule.shape is Shape.CHAIN and widths == (2,))
    ]
    accepted = []
    for rule, draw, widths in wrong:
        try:
            Engine(lm, DrawnTree(lm, widths, draw), rule(), Fixed())
        except PairingError:
            continue
        accepted.append(f"{rule.__name__} on {draw.value}")
    detail = f"{len(wrong) - len(accepted)} of {len(wrong)} refused"
    return not accepted, detail, {"accepted": accepted}


def table_jobs(entry: Method) -> list[Job]:
    """What is exact on tables: greedy text, cache, neighbours, seeds."""
    plain = partial(table_engine, METHODS["plain"], 4, "fixed")
    jobs: list[Job] = []
    kinds: list[tuple[str, Callable[..., Engine]]] = [
        (
            f"{entry.name} ({verifier}, {controller})",
            partial(table_engine, entry, 4, controller, verifier, 4),
        )
        for verifier, controller in combinations(entry)
    ]
    for name, view in DRAFTS.items() if entry.name in VIEWED else ():
        viewed = partial(table_engine, entry, 4, "fixed", None, 4, view)
        kinds.append((f"{entry.name}, {name}", viewed))
    for name, build in kinds:
        agreeing = partial(build, guesses=AGREES)
        same = partial(greedy, plain, agreeing, TABLE_PROMPTS, TABLE_TOKENS)
        jobs += [("greedy, tables", name, same)] if promise_of_row(entry).lossless else []
        jobs += [
            ("cache, tables", name, partial(cache, build, TABLE_PROMPTS, 24)),
            ("neighbours", name, partial(neighbours, build, TABLE_PROMPTS, TABLE_TOKENS)),
            ("seeds", name, partial(seeds, build, TABLE_PROMPTS, TABLE_TOKENS)),
        ]
    return jobs


def model_jobs(
    entry: Method, target: LanguageModel | None, draft: LanguageModel | None
) -> list[Job]:
    """The same on the models that were handed in; rows that cannot run say why."""
    if target is None:
        return [("models", entry.name, partial(left_out, "no target model was given"))]
    if needs_draft(entry) and draft is None:
        return [("models", entry.name, partial(left_out, "no draft model was given"))]
    config: dict[str, Any] = {} if entry.name == "plain" else {"depth": 4}
    config |= needed(entry, target.vocab_size, "fixed", target_hidden=target.hidden_size)
    build = partial(
        assemble,
        entry.name,
        target,
        draft if needs_draft(entry) else None,
        controller="fixed",
        **config,
    )
    plain = partial(assemble, "plain", target)
    prompts = model_prompts(target.vocab_size)
    same = partial(greedy, plain, build, prompts, MODEL_TOKENS)
    jobs: list[Job] = (
        [("greedy, models", entry.name, same)] if promise_of_row(entry).lossless else []
    )
    return [
        *jobs,
        ("cache, models", entry.name, partial(cache, build, prompts, 8)),
        ("seeds, models", entry.name, partial(seeds, build, prompts, MODEL_TOKENS)),
    ]


def model_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of very different lengths, made of the first tokens of the vocabulary.

    One repeats itself, so that look-up has something to find.
    """
    usable = min(vocab_size, 512)
    mixed = [(37 * i * i + 11 * i + 5) % usable for i in range(90)]
    return [mixed[:40], mixed[7:8], mixed[10:16] * 4, mixed]


def left_out(why: str) -> Checked:
    raise CapabilityError("a check on real models was asked for.", why, "pass the models.")


def greedy(plain: Build, build: Build, prompts: Any, tokens: int) -> Checked:
    found = compare_greedy(plain, build, prompts, tokens)
    ties = len(found.divergences) - len(found.errors)
    detail = f"{found.tokens} tokens equal plain decoding's"
    if ties:
        worst = max(d.margin for d in found.divergences if d.near_tie)
        detail = f"{ties} of {len(prompts)} texts part at a near tie (margin up to {worst:.2g})"
    if found.errors:
        worst_error = max(found.errors, key=lambda d: d.margin)
        detail = f"{len(found.errors)} texts differ, margin {worst_error.margin:.3g}"
    guesses = asdict(found.guesses)
    values = {"divergences": [asdict(d) for d in found.divergences], "tokens": found.tokens}
    return not found.errors, f"{detail}; {found.guesses.told()}", values | guesses


def cache(build: Build, prompts: Any, tokens: int) -> Checked:
    seen = cache_difference(build, prompts, tokens)
    detail = f"{seen.nodes} nodes recomputed, largest relative difference {seen.relative:.1e}"
    if not seen.good:
        detail += f" at {seen.where} (bound {seen.bound:.0e})"
    values = {"relative": seen.relative, "bound": seen.bound, **asdict(seen.guesses)}
    return seen.good, f"{detail}; {seen.guesses.told()}", values


def neighbours(build: Build, prompts: Any, tokens: int) -> Checked:
    """Texts alone and in company."""
    why = follows_company(build())
    temperatures = () if why else (0.0, 1.0)
    changed = 0
    for temperature in temperatures:
        params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
        with torch.inference_mode():
            changed += neighbour_differences(build, prompts, params)
    detail = f"{changed} of {len(temperatures) * len(prompts)} texts changed"
    detail += f"; {why}" if why else ""
    return changed == 0, detail, {"changed": changed}


def follows_company(engine: Engine) -> str:
    """Why a lossy text may differ in company: it follows the shape of its drafts."""
    return "" if engine.promise.lossless else "a lossy text follows the shape of its drafts"


def seeds(build: Build, prompts: Any, tokens: int) -> Checked:
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0)
    changed = seed_differences(build, prompts, params)
    detail = f"{changed} of {len(prompts)} texts changed"
    return changed == 0, detail, {"changed": changed}


def mutation_found(mutation: Mutation) -> Checked:
    finding = find(mutation)
    detail = f"{mutation.what}: {finding.broken:.3g} with the bug, {finding.sound:.1g} without"
    return finding.caught, detail, asdict(finding)

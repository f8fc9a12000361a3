"""From finished cells to one record per row.

Speeds are medians over prompts of a prompt's own rate (its median over repetitions); a speed-up
is the ratio of two rows' medians over the prompts both finished, with a paired bootstrap interval.
Accepted lengths are means over all steps, with the other usual definitions beside the first. Of a
row of beams the best text's tokens count, over the seconds that all texts took: its speed is that
of getting one text, and its fair rival is beam sampling of the same width.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from foretoken.bench import catalogue
from foretoken.bench.intervals import median_interval, ratio_interval
from foretoken.bench.journal import Cell

REFERENCES = ("plain", "hf:plain", "hf:compiled")
ByRow = Mapping[str, Sequence[Cell]]


def summarise(
    cells: Sequence[Cell],
    labels: Sequence[str],
    *,
    failed: Mapping[str, str] | None = None,
    greedy: bool = True,
) -> dict[str, Any]:
    """One record per row in the order asked for; a row that failed is there and says why."""
    failed = failed or {}
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.row].append(cell)
    rows = {label: row_record(label, found, failed.get(label), greedy) for label in labels}
    ours, peer = _fastest(rows, peers=False), _fastest(rows, peers=True)
    return {
        "rows": rows,
        "families": list(dict.fromkeys(cell.family for cell in cells)),
        "best": {"ours": ours, "peer": peer},
        "over_peer": speedup(found[ours], found[peer]) if ours and peer else None,
        "load_average": _load(cells),
    }


def row_record(label: str, found: ByRow, why: str | None, greedy: bool) -> dict[str, Any]:
    """Everything known about one row."""
    cells = found.get(label, [])
    name = _method(label)
    record: dict[str, Any] = {
        "method": name,
        "peer": catalogue.is_peer(name),
        "lossless": catalogue.lossless(name),
        "failed": why,
        "cells": len(cells),
        "prompts": len({cell.prompt for cell in cells}),
    }
    if not cells:
        if why is None:
            record["failed"] = "no cell was finished"
        return record
    plain = found.get("plain", [])
    value, span = median_interval(list(rates(cells).values()))
    record["tokens_per_second"] = {"value": value, "interval": span}
    record["total_tokens_per_second"] = _total_rate(cells)
    record["speedup"] = {
        reference: speedup(cells, found[row]) for reference, row in references(label, found).items()
    }
    record["accepted_length"] = accepted_lengths(cells)
    record["histogram"] = histogram(cells)
    record["acceptance"] = acceptance(cells)
    mean = record["accepted_length"]["emitted_per_forward"]
    over = (record["speedup"].get("plain") or {}).get("value")
    record["conversion"] = over / mean if over is not None and mean else None
    record["shares"] = shares(cells)
    record["overhead_ms"] = overhead_ms(cells)
    record |= efficiency(cells, plain)
    record["peak_rss"] = max((c.peak_rss for c in cells if c.peak_rss), default=None)
    record["rss_growth"] = max((c.rss_growth for c in cells if c.rss_growth), default=None)
    record["peak_cuda"] = max((c.peak_cuda for c in cells if c.peak_cuda), default=None)
    record["text"] = text_equality(cells, plain) if greedy and plain else None
    record["accuracy"] = accuracy(cells)
    record["beams"] = beams(cells)
    record["families"] = {
        family: family_record(cells, plain, family)
        for family in dict.fromkeys(cell.family for cell in cells)
    }
    record["load_average"] = _load(cells)
    return record


def references(label: str, found: ByRow) -> dict[str, str]:
    """The rows that a row is compared with, by the names tables use; beams with their like, too."""
    known = {reference: reference for reference in REFERENCES if reference in found}
    if catalogue.writes_beams(_method(label)):
        width = catalogue.beam_width(label)
        for row in found:
            if _method(row) == catalogue.BEAM_BASELINE and catalogue.beam_width(row) == width:
                known.setdefault(catalogue.BEAM_BASELINE, row)
    return known


def beams(cells: Sequence[Cell]) -> dict[str, float] | None:
    """Texts per prompt and the score of the best one, means over cells; None where one is written.

    A score is the mean log-likelihood of a token under the target.
    """
    scored = [cell for cell in cells if cell.texts is not None]
    if not scored:
        return None
    return {
        "texts": fmean(cell.texts or 0 for cell in scored),
        "score": fmean(cell.score or 0.0 for cell in scored),
    }


def rates(cells: Sequence[Cell]) -> dict[str, float]:
    """Tokens per second of each prompt: its median over repetitions."""
    found: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        found[cell.prompt].append(len(cell.tokens) / cell.seconds)
    return {prompt: median(values) for prompt, values in found.items()}


def speedup(cells: Sequence[Cell], reference: Sequence[Cell]) -> dict[str, Any] | None:
    """How many times faster than `reference`, over the prompts both have; None without any."""
    mine, theirs = rates(cells), rates(reference)
    shared = [prompt for prompt in mine if prompt in theirs]
    if not shared:
        return None
    value, span = ratio_interval([mine[p] for p in shared], [theirs[p] for p in shared])
    return {
        "value": value,
        "interval": span,
        "total": _total_rate([c for c in cells if c.prompt in theirs])
        / _total_rate([c for c in reference if c.prompt in mine]),
        "median_of_ratios": median([mine[p] / theirs[p] for p in shared]),
        "prompts": len(shared),
    }


def accepted_lengths(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Mean accepted length by its usual definitions; the first is what this project quotes."""
    counted = [cell for cell in cells if cell.forwards]
    forwards = sum(cell.forwards or 0 for cell in counted)
    tokens = sum(len(cell.tokens) for cell in counted)
    requests = [
        (written, given)
        for cell in counted
        for written, given in cell.each or [[len(cell.tokens), cell.forwards or 1]]
        if given
    ]
    stepped = [step for cell in cells for step in cell.steps]
    drafted = sum(step[0] for step in stepped)
    return {
        # vLLM, EAGLE, Spec-Bench: the bonus or corrected token counts
        "emitted_per_forward": tokens / forwards if forwards else None,
        # ViSpec: draft tokens only
        "accepted_without_bonus": fmean(step[2] for step in stepped) if stepped else None,
        # SGLang: the token an engine takes from its prompt forward counts, that forward does not
        "with_prefill_token": (tokens + len(requests)) / forwards if forwards else None,
        # ModelOpt: mean over requests of each request's own mean
        "mean_over_requests": (
            fmean(written / given for written, given in requests) if requests else None
        ),
        "drafted_per_step": drafted / len(stepped) if stepped else None,
        "acceptance_rate": (sum(step[2] for step in stepped) / drafted if drafted else None),
    }


def histogram(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """Steps by tokens emitted and by draft tokens accepted."""
    stepped = [step for cell in cells for step in cell.steps]
    emitted = Counter(step[3] for step in stepped)
    accepted = Counter(step[2] for step in stepped)
    return {
        "emitted_per_step": {str(n): emitted[n] for n in sorted(emitted)},
        "accepted_per_step": {str(n): accepted[n] for n in sorted(accepted)},
    }


def acceptance(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Acceptance at each depth, entry 0 for depth 1.

    conditional: of the steps that drafted so deep and accepted all above, the share accepted.
    joint: of all steps that drafted at all, the share accepted down to here (vLLM's figure).
    """
    steps = [step for cell in cells for step in cell.steps if step[1] > 0]
    deepest = max((step[1] for step in steps), default=0)
    conditional, joint = [], []
    for depth in range(1, deepest + 1):
        reached = [step for step in steps if step[1] >= depth and step[2] >= depth - 1]
        stood = sum(step[2] >= depth for step in reached)
        conditional.append(stood / len(reached) if reached else 0.0)
        joint.append(stood / len(steps))
    return {"conditional": conditional, "joint": joint}


def shares(cells: Sequence[Cell]) -> dict[str, float] | None:
    """Where the time went. A row that cannot tell its prompt's forward has it under target."""
    known = [cell for cell in cells if cell.target is not None]
    if not known:
        return None
    total = sum(cell.seconds for cell in known)
    prompt = sum(cell.prefill or 0.0 for cell in known)
    draft = sum(cell.draft or 0.0 for cell in known)
    target = sum(cell.target or 0.0 for cell in known)
    return {
        "prompt": prompt / total,
        "draft": draft / total,
        "target": target / total,
        "other": max(total - prompt - draft - target, 0.0) / total,
    }


def overhead_ms(cells: Sequence[Cell]) -> float | None:
    """Milliseconds per step outside drafting and target forwards: median over cells.

    A step is that of all texts written at once: they wait for it together.
    """
    values = [
        1000 * (decode_seconds(cell) - (cell.draft or 0.0) - cell.target) / steps
        for cell in cells
        if cell.target is not None and (steps := cell.rounds or cell.forwards)
    ]
    return median(values) if values else None


def decode_seconds(cell: Cell) -> float:
    """Seconds after the prompt's own forward."""
    return cell.seconds - (cell.prefill or 0.0)


def efficiency(cells: Sequence[Cell], plain: Sequence[Cell]) -> dict[str, Any]:
    """Measured speed-up over the one that measured costs and accepted length allow.

    implied = accepted length * plain step / (drafting + scoring per step), all from this run. What
    is lost between the two is the loop: laws, verdicts, commits, Python. Decoding only; the whole
    text, its prompt included, is in `efficiency_whole`.
    """
    nothing: dict[str, Any] = {
        "implied_speedup": None,
        "efficiency": None,
        "efficiency_whole": None,
    }
    timed = [cell for cell in cells if cell.prefill is not None and cell.steps]
    prompts = {cell.prompt for cell in timed}
    base = [cell for cell in plain if cell.prefill is not None and cell.prompt in prompts]
    timed = [cell for cell in timed if cell.prompt in {cell.prompt for cell in base}]
    if not base or not timed:
        return nothing
    steps = sum(len(cell.steps) for cell in timed)
    tokens = sum(len(cell.tokens) for cell in timed)
    step_cost = sum((cell.draft or 0.0) + (cell.target or 0.0) for cell in timed) / steps
    plain_rate = sum(len(c.tokens) for c in base) / sum(decode_seconds(c) for c in base)
    implied = (tokens / steps) / (plain_rate * step_cost)
    measured = tokens / sum(decode_seconds(cell) for cell in timed) / plain_rate
    return {
        "implied_speedup": implied,
        "efficiency": measured / implied,
        "efficiency_whole": _total_rate(timed) / _total_rate(base) / implied,
    }


def text_equality(cells: Sequence[Cell], plain: Sequence[Cell]) -> dict[str, Any]:
    """Whether each prompt's tokens are plain's; where not, from which token on."""
    wanted = {(cell.repetition, name): said for cell in plain for name, said in texts(cell)}
    differs: dict[str, int] = {}
    compared: set[str] = set()
    for cell in cells:
        for name, tokens in texts(cell):
            other = wanted.get((cell.repetition, name))
            if other is None:
                continue
            compared.add(name)
            if tokens != other:
                differs.setdefault(name, first_difference(tokens, other))
    return {
        "equal": len(compared) - len(differs),
        "of": len(compared),
        "first_difference": differs,
    }


def texts(cell: Cell) -> list[tuple[str, list[int]]]:
    """The texts of a cell by their prompts; those written at once by their places."""
    if not cell.each:
        return [(cell.prompt, cell.tokens)]
    ends = accumulate(written for written, _ in cell.each)
    return [
        (f"{cell.prompt}, text {n}", cell.tokens[end - written : end])
        for n, (end, (written, _)) in enumerate(zip(ends, cell.each, strict=True), 1)
    ]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one goes on."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


def accuracy(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Share of checkable answers that are right."""
    checked = [cell.correct for cell in cells if cell.correct is not None]
    return {"value": fmean(checked), "of": len(checked)} if checked else None


def family_record(cells: Sequence[Cell], plain: Sequence[Cell], family: str) -> dict[str, Any]:
    """The short record of one family."""
    mine = [cell for cell in cells if cell.family == family]
    base = [cell for cell in plain if cell.family == family]
    return {
        "tokens_per_second": median(rates(mine).values()),
        "speedup": speedup(mine, base) if base else None,
        "accepted_length": accepted_lengths(mine)["emitted_per_forward"],
        "accuracy": accuracy(mine),
    }


def _total_rate(cells: Sequence[Cell]) -> float:
    return sum(len(cell.tokens) for cell in cells) / sum(cell.seconds for cell in cells)


def _load(cells: Sequence[Cell]) -> dict[str, float] | None:
    loads = [value for cell in cells for value in cell.load]
    return {"median": median(loads), "highest": max(loads)} if loads else None


def _method(label: str) -> str:
    return label.split("[", 1)[0]


def _fastest(rows: Mapping[str, Mapping[str, Any]], *, peers: bool) -> str | None:
    """The fastest row of one text that did not fail; a lossy one or one of beams only where nothing
    else is.
    """

    def rank(label: str) -> tuple[bool, bool, float]:
        row = rows[label]
        speed = row["tokens_per_second"]["value"]
        return row["lossless"] is not False, row["beams"] is None, speed

    known = [label for label, row in rows.items() if row["peer"] == peers and not row["failed"]]
    return max(known, key=rank, default=None)

"""What a search found, as plain values: for the page, and as a configuration that `load` takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from foretoken import shipped
from foretoken.bench.catalogue import lossless
from foretoken.bench.intervals import interval
from foretoken.bench.tasks import Task
from foretoken.bench.tune.config import TuneConfig
from foretoken.bench.tune.halving import PLAIN
from foretoken.bench.tune.prompts_in_turn import digest
from foretoken.bench.tune.race import Race
from foretoken.bench.tune.search import Search
from foretoken.bench.tune.worth import worth
from foretoken.engine.tuned import Tuned, identity
from foretoken.lm.load import target_config


def results_of(search: Search, config: TuneConfig, tasks: Sequence[Task]) -> dict[str, Any]:
    """Everything that was measured. No path is among it: results travel."""
    chosen, models = search.choice.label, search.models
    best = over_plain(search.gains_of(chosen))
    return {
        "title": "The fastest way to decode, measured",
        "models": models.names(),
        "parameters": models.parameters,
        "dtype": models.dtype,
        "device": models.device.type,
        "writing": config.writing(),
        "prompts": {
            "digest": digest(tasks),
            "given": len(tasks),
            "families": list(dict.fromkeys(task.family for task in tasks)),
            "skipped": dict(search.prompts.skipped),
        },
        "chosen": chosen,
        "fastest": search.choice.fastest,
        "unsure": list(search.choice.unsure),
        "rows": {label: row_record(search, label, config) for label in search.specs},
        "rounds": [
            *rounds(search.race, "candidates"),
            *(rounds(search.sized, "sizes") if search.sized else []),
        ],
        "scoring": search.scoring,
        "worth": worth(search.scoring, search.certainty, best["value"]),
        "minutes": {
            "limit": config.minutes,
            "spent": search.clock.spent / 60.0,
            "interrupted": search.stopped,
        },
    }


def row_record(search: Search, label: str, config: TuneConfig) -> dict[str, Any]:
    """One candidate: what it was measured at, or why it was not."""
    spec = search.specs[label]
    records = [race.records[label] for race in races(search) if label in race.records]
    dropped = {label: why for race in races(search) for label, why in race.dropped.items()}
    found: dict[str, Any] = {
        "method": spec.method,
        "lossless": lossless(spec.method),
        "failed": (search.left_out | dropped).get(label),
        "prompts": len(search.gains_of(label)),
        "speedup": {},
    }
    if not records:
        return found
    over = over_plain(search.gains_of(label))
    forwards, texts = sum(r.forwards for r in records), sum(r.texts for r in records)
    same = None  # drawn texts differ from plain's, however lossless a method is
    if config.temperature == 0:
        same = {"equal": sum(r.same for r in records), "of": texts}
    notes = [race.rows[label].note for race in races(search) if label in race.rows]
    return found | {
        "speedup": {} if label == PLAIN else {PLAIN: over},
        "tokens_per_second": plain_rate(search) * over["value"],
        "accepted_length": sum(r.tokens for r in records) / forwards if forwards else None,
        "same_text": same,
        "note": notes[-1] if notes else "",
    }


def plain_rate(search: Search) -> float:
    """Tokens per second of plain decoding: geometric mean over all prompts.

    Candidates wrote about different numbers of prompts, so their own rates could not be compared.
    """
    found = [race.records[PLAIN].rates for race in races(search) if PLAIN in race.records]
    rates = [math.log(value) for by in found for values in by.values() for value in values]
    return math.exp(fmean(rates))


def races(search: Search) -> list[Race]:
    return [race for race in (search.race, search.sized) if race is not None]


def over_plain(gains: Sequence[float]) -> dict[str, Any]:
    """The geometric mean over prompts of a candidate's speed over plain's, with its interval."""
    span = interval(lambda at: math.exp(fmean(gains[i] for i in at)), len(gains))
    return {"value": math.exp(fmean(gains)), "interval": span, "prompts": len(gains)}


def rounds(race: Race, what: str) -> list[dict[str, Any]]:
    """The standings after each round, and what was raced: candidates, or sizes of the winner."""
    return [
        {
            "of": what,
            **{name: value for name, value in one.items() if name != "gains"},
            "standings": {label: over_plain(found) for label, found in one["gains"].items()},
        }
        for one in race.rounds
    ]


def tuned_of(search: Search, config: TuneConfig, results: dict[str, Any]) -> Tuned:
    """The chosen configuration, for `load`, `bench` and the commands that write."""
    spec = search.specs[search.choice.label]
    row = results["rows"][spec.label]
    measured = {
        "label": spec.label,
        "over_plain": row["speedup"].get(PLAIN, {"value": 1.0, "interval": None}),
        "tokens_per_second": row["tokens_per_second"],
        "unsure": results["unsure"],
        **results["writing"],
        "device": results["device"],
    }
    options = {name: value for name, value in spec.options.items() if name != "draft"}
    for name in ("datastore", "keys", "draft_head"):
        if name in options:
            options[name] = place(options[name])
    return Tuned(
        target=place(config.target),
        method=spec.method,
        draft=None if spec.draft is None else place(spec.draft),
        options=options,
        dtype=results["dtype"],
        made_for=identity(target_config(
            config.target, allow_pickle=config.allow_pickle,
            trust_remote_code=config.trust_remote_code,
        ), search.models.tokenizer),
        told={
            "measured": measured,
            "prompts": results["prompts"],
            "environment": results["environment"],
        },
    )  # fmt: skip


def place(source: str | Path) -> str:
    """A folder wherever the file is read from later, or the name of a model as it is."""
    folder = Path(source)
    if source in (*shipped.NAMES, *shipped.FETCHED):
        return str(source)
    return str(folder.resolve()) if folder.is_dir() else str(source)

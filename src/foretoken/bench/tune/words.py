"""A tuning in words: the choice, the table's cells, what training would be worth, the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from foretoken.bench.tune.config import CUTS
from foretoken.bench.tune.halving import PLAIN
from foretoken.bench.tune.worth import SURE, UNSURE
from foretoken.bench.words import MISSING, TIMES, number, times

COLUMNS = ["candidate", "over plain", "tokens/s", "accepted length", "text as plain", "prompts"]


def summary(results: Mapping[str, Any]) -> str:
    """The choice in a few sentences."""
    chosen, row = results["chosen"], results["rows"][results["chosen"]]
    if chosen == PLAIN:
        text = f"**plain** decoding {why_plain(results)}."
    else:
        ratio = times(row["speedup"][PLAIN])
        text = f"**{chosen}** is the one to use: {ratio} plain decoding's speed"
        text += f" over {row['prompts']} prompts, {row['tokens_per_second']:.1f} tokens/s."
        if results["fastest"] != chosen:
            text += f" {unfelt(results)}."
    if results["unsure"]:
        text += f" Not told apart on these prompts: {', '.join(results['unsure'])}."
    if results["minutes"]["interrupted"]:
        text += " The search was interrupted: this is the best so far."
    return text


def why_plain(results: Mapping[str, Any]) -> str:
    """Why plain decoding was chosen: that no guessing pays is said where that was found only."""
    if results["fastest"] != PLAIN:
        return f"is the one to use: {unfelt(results)}"
    others = [row for label, row in results["rows"].items() if label != PLAIN]
    if not any("tokens_per_second" in row and not row["failed"] for row in others):
        return "is the one to use: no way of guessing could be measured"
    if results["minutes"]["interrupted"]:
        return "is the fastest so far"
    return "is the fastest: no way of guessing that was tried pays here"


def unfelt(results: Mapping[str, Any]) -> str:
    """Why the fastest is not the chosen one."""
    fastest, chosen = results["fastest"], results["chosen"]
    return f"{fastest} was no faster than can be felt (2 %), and {chosen} is simpler"


def table(results: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Every candidate, the fastest first."""
    rows = results["rows"]
    order = sorted(rows, key=lambda label: -speed(rows[label], label))
    return COLUMNS, {label: cells(label, rows[label], results["chosen"]) for label in order}


def speed(row: Mapping[str, Any], label: str) -> float:
    """What a candidate is ranked by; those that were not measured come last."""
    if label == PLAIN:
        return 1.0
    found = row["speedup"].get(PLAIN)
    return float(found["value"]) if found else 0.0


def cells(label: str, row: Mapping[str, Any], chosen: str) -> list[str]:
    """One line of the table."""
    name = f"{label} (chosen)" if label == chosen else label
    if "tokens_per_second" not in row:
        return [name, "not measured", *[MISSING] * (len(COLUMNS) - 2)]
    same = row["same_text"]
    return [
        name,
        times(row["speedup"].get(PLAIN)),
        f"{row['tokens_per_second']:.1f}",
        number(row["accepted_length"]),
        MISSING if same is None else f"{same['equal']}/{same['of']}",
        str(row["prompts"]),
    ]


def worth_table(worth: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Speed-up by acceptance, one line per cost of a draft."""
    rates = [f"acceptance {rate:g}" for rate in worth["rates"]]
    columns = ["draft's forward", *rates, "pays from", "faster than the best from"]
    return columns, [
        [
            f"{100 * one['cost']:.0f} % of the target's",
            *(f"{value:.2f}{TIMES}" for value in one["speedup"]),
            least(one["pays_from"]),
            least(one["beats_best_from"]),
        ]
        for one in worth["costs"]
    ]


def least(acceptance: float | None) -> str:
    return "no acceptance" if acceptance is None else f"{acceptance:.2f}"


def worth_words(worth: Mapping[str, Any]) -> list[str]:
    """What the table assumes, and which acceptance the target's own text suggests."""
    lines = [
        "Reckoned, not measured: from what forwards of this target cost here, with the best "
        "length of a chain, every guess accepted with the same chance. Real drafts guess worse "
        "the deeper they go, and the loop's own time is left out, so a trained draft will stay "
        "below these figures."
    ]
    sure = worth["certainty"]
    if sure is None:
        return [*lines, "How sure the target is of its text was not measured."]
    lines.append(
        f"Over {sure['tokens']} tokens of its own text the target gave its likeliest token a "
        f"probability of {sure['top']:.2f} on average, above {SURE:g} on {100 * sure['sure']:.0f} %"
        f" and below {UNSURE:g} on {100 * sure['unsure']:.0f} % of them; two draws from its law "
        f"agree with a chance of {sure['same']:.2f}; its entropy is {sure['entropy']:.2f} nats."
    )
    middle = worth["costs"][len(worth["costs"]) // 2]
    lines.append(
        f"A draft that is right as often as the target is sure ({sure['top']:.2f}) would make it "
        f"{middle['at_certainty']:.2f}{TIMES} as fast at {100 * middle['cost']:.0f} % of its cost; "
        f"the best measured here is {worth['best']:.2f}{TIMES}. That a small draft gets so far is "
        "an assumption: only training one tells."
    )
    return lines


def facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Models, prompts, writing and machine in words."""
    place, prompts, writing = results["environment"], results["prompts"], results["writing"]
    sizes, minutes = results["parameters"], results["minutes"]
    models = {
        role: f"{name}, {sizes[role] / 1e6:.1f}M parameters" if role in sizes else str(name)
        for role, name in results["models"].items()
        if name is not None
    }
    left_out = Counter(prompts["skipped"].values())
    skipped = "".join(f"; {count} left out: {why}" for why, count in left_out.items())
    cuts = "".join(f", {name} {writing[name]:g}" for name in CUTS if name in writing)
    return {
        **models,
        "numbers": f"{results['dtype']} on {results['device']}",
        "prompts": f"{prompts['given']} given, of {', '.join(prompts['families'])}; "
        f"{prompts['digest'][:19]}{skipped}",
        "writing": f"at most {writing['max_new_tokens']} new tokens, temperature "
        f"{writing['temperature']:g}, seed {writing['seed']}{cuts}",
        "time": f"{minutes['spent']:.1f} of {minutes['limit']:g} minutes",
        "processor": f"{place['cpu']}, {place['cores']} cores, {place['threads']} threads, "
        f"{place['cpu_capability']}",
        "versions": f"foretoken {place['foretoken']}, torch {place['torch']}, transformers "
        f"{place['transformers']}, Python {place['python']}, {place['system']}",
        **({"GPU": place["gpu"]} if place["gpu"] else {}),
        "date": place["date"],
    }

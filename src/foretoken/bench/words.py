"""Results in words: the table's cells, the sentence on top, the facts below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "row",
    "tokens/s",
    "over plain",
    "over hf:plain",
    "over hf:compiled",
    "accepted length",
    "conversion",
    "efficiency",
    "overhead ms/step",
    "text as plain",
    "answers right",
    "peak MiB",
)
MISSING, TIMES = "\u2013", "\u00d7"  # en dash, multiplication sign


def summary(results: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    rows, best = results["rows"], results["best"]
    ours, peer = best["ours"], best["peer"]
    if ours is None:
        return "None of our rows finished."
    text = f"Fastest of ours: **{ours}**, {rows[ours]['tokens_per_second']['value']:.1f} tokens/s"
    if over := rows[ours]["speedup"].get("plain"):
        text += f", {times(over)} plain"
    if equal := rows[ours]["text"]:
        text += f"; text equal to plain's on {equal['equal']} of {equal['of']} prompts"
    if peer is not None:
        ratio = rows[ours]["tokens_per_second"]["value"] / rows[peer]["tokens_per_second"]["value"]
        text += f"; {ratio:.2f} times the fastest peer, {peer}"
    return text + "."


def titled(label: str, row: Mapping[str, Any]) -> str:
    """The name of a row for readers: a lossy one says so."""
    return label if row["lossless"] is not False else f"{label} (lossy)"


def cells_of(label: str, row: Mapping[str, Any]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    name = titled(label, row)
    if "tokens_per_second" not in row:
        return [name, f"failed: {row['failed']}".replace("|", "/")] + [MISSING] * (len(COLUMNS) - 2)
    if row["failed"]:
        name += " (failed on the way)"
    over = [times(row["speedup"].get(r)) for r in ("plain", "hf:plain", "hf:compiled")]
    text, right = row["text"], row["accuracy"]
    rss = row["peak_cuda"] or row["peak_rss"]
    return [
        name,
        f"{row['tokens_per_second']['value']:.1f}",
        *over,
        number(row["accepted_length"]["emitted_per_forward"]),
        number(row["conversion"]),
        number(row["efficiency"]),
        number(row["overhead_ms"]),
        f"{text['equal']}/{text['of']}" if text else MISSING,
        f"{100 * right['value']:.0f} %" if right else MISSING,
        f"{rss / 2**20:.0f}" if rss else MISSING,
    ]


def times(found: Mapping[str, Any] | None) -> str:
    """A speed-up with its interval."""
    if found is None:
        return MISSING
    span = found["interval"]
    return f"{found['value']:.2f}{TIMES}" + (f" [{span[0]:.2f}, {span[1]:.2f}]" if span else "")


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def facts(results: Mapping[str, Any]) -> dict[str, str]:
    """Models, prompts, sampling and machine in words."""
    setting, place = results["setting"], results["environment"]
    sizes = setting["parameters"]
    models = {
        role: f"{name}, {sizes[role] / 1e6:.1f}M parameters" if role in sizes else str(name)
        for role, name in setting["models"].items()
        if name is not None
    }
    sampling = f"temperature {setting['temperature']}"
    if setting["temperature"] > 0:
        sampling += f", top-k {setting['top_k']}, top-p {setting['top_p']}, seed {setting['seed']}"
    load = results.get("load_average")
    found = {
        **models,
        "numbers": f"{setting['dtype']} on {setting['device']}",
        "prompts": f"{setting['prompts']} ({setting['prompt_tokens']:.0f} tokens on average) of "
        f"{', '.join(setting['families'])}; {setting['repetitions']} repetitions, interleaved",
        "sampling": f"{sampling}, at most {setting['max_new_tokens']} new tokens",
        "processor": f"{place['cpu']}, {place['cores']} cores, {place['threads']} threads, "
        f"{place['cpu_capability']}",
        "versions": f"foretoken {place['foretoken']}, torch {place['torch']}, "
        f"transformers {place['transformers']}, Python {place['python']}, {place['system']}",
        "date": place["date"],
    }
    if place["gpu"]:
        found["GPU"] = place["gpu"]
    if load:
        found["load average"] = f"{load['median']:.2f} (median), {load['highest']:.2f} (highest)"
    if setting["skipped"]:
        found["left out"] = f"{len(setting['skipped'])} prompts too long for the context"
    return found

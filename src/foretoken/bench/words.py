"""Results in words: the table's cells, the sentence on top, the facts below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFERENCES = ("plain", "beam-sampling", "hf:plain", "hf:compiled")
COLUMNS = (
    "row", "tokens/s", *(f"over {name}" for name in REFERENCES), "accepted length", "conversion",
    "efficiency", "overhead ms/step", "forward/limit", "speed/limit", "text as plain",
    "answers right", "texts", "best score", "peak MiB",
)  # fmt: skip
SAME = "not distinguishable"
MISSING, TIMES = "\u2013", "\u00d7"  # en dash, multiplication sign


def summary(results: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    rows, best = results["rows"], results["best"]
    ours, peer = best["ours"], best["peer"]
    if ours is None:
        return "None of our rows finished."
    speed = rows[ours]["tokens_per_second"]["value"]
    text = f"Fastest of ours: **{titled(ours, rows[ours])}**, {speed:.1f} tokens/s"
    if over := rows[ours]["speedup"].get("plain"):
        text += f", {compared(over, 'plain')}"
    if equal := rows[ours]["text"]:
        text += f"; text equal to plain's on {equal['equal']} of {equal['of']} prompts"
    if peer is not None:
        text += f"; {compared(over_peer(results), f'the fastest peer, {peer}')}"
    return text + "."


def over_peer(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our fastest row over the fastest peer; results of before had no interval for it."""
    rows, best = results["rows"], results["best"]
    speeds = [rows[best[side]]["tokens_per_second"]["value"] for side in ("ours", "peer")]
    return results.get("over_peer") or {"value": speeds[0] / speeds[1], "interval": None}


def titled(label: str, row: Mapping[str, Any]) -> str:
    """The name of a row for readers: a lossy one says so, and one of another law."""
    if row["lossless"] is False:
        return f"{label} (lossy)"
    return f"{label} (law of beams)" if row.get("beams") else label


def table(results: Mapping[str, Any]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """The columns that some row fills, and the cells of every row by column."""
    cells = {label: cells_of(label, row) for label, row in results["rows"].items()}
    known = cells.values()
    return [c for c in COLUMNS if any(row.get(c, MISSING) != MISSING for row in known)], cells


def cells_of(label: str, row: Mapping[str, Any]) -> dict[str, str]:
    """One row of the table by column; what is not known is MISSING."""
    name = titled(label, row)
    if "tokens_per_second" not in row:
        return {"row": name, "tokens/s": "failed"}
    if row["failed"]:
        name += " (failed on the way)"
    text, right, beams = row["text"], row["accuracy"], row.get("beams")
    peak = row["peak_cuda"] or row["peak_rss"]
    over_limit = row.get("over_limit") or {"forward": None, "speed": None}  # of results of before
    return {
        "row": name,
        "tokens/s": f"{row['tokens_per_second']['value']:.1f}",
        **{f"over {r}": times(row["speedup"].get(r)) for r in REFERENCES},
        "accepted length": number(row["accepted_length"]["emitted_per_forward"]),
        "conversion": number(row["conversion"]),
        "efficiency": number(row["efficiency"]),
        "overhead ms/step": number(row["overhead_ms"]),
        "forward/limit": number(over_limit["forward"]),
        "speed/limit": number(over_limit["speed"]),
        "text as plain": f"{text['equal']}/{text['of']}" if text else MISSING,
        "answers right": f"{100 * right['value']:.0f} %" if right else MISSING,
        "texts": number(beams["texts"]) if beams else MISSING,
        "best score": f"{beams['score']:.3f}" if beams else MISSING,
        "peak MiB": f"{peak / 2**20:.0f}" if peak else MISSING,
    }


def same(found: Mapping[str, Any] | None) -> bool:
    """Whether a ratio cannot be told from 1: its interval holds 1. A row is never over itself."""
    if not found or not found["interval"]:
        return False
    low, high = found["interval"]
    return bool(low <= 1.0 <= high and low < high)


def times(found: Mapping[str, Any] | None) -> str:
    """A speed-up with its interval, and whether that tells it from 1."""
    if found is None:
        return MISSING
    text = f"{found['value']:.2f}{TIMES}"
    span = found["interval"]
    if not span or span[0] == span[1] == 1.0:
        return text
    text += f" [{span[0]:.2f}, {span[1]:.2f}]"
    return f"{text} {SAME}" if same(found) else text


def compared(found: Mapping[str, Any], what: str) -> str:
    """A speed-up inside a sentence."""
    ratio = times(found).removesuffix(f" {SAME}")
    return f"{ratio} {what}" + (f" ({SAME})" if same(found) else "")


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def memory_limit(results: Mapping[str, Any]) -> dict[str, str]:
    """The memory limit in words; results of before had none."""
    limit = results.get("memory_limit")
    if limit is None:
        return {}
    return {
        "memory limit": f"{limit['forward_ms']:.2f} ms per forward, "
        f"{limit['tokens_per_second']:.1f} tokens/s one at a time: "
        f"{limit['weight_bytes'] / 1e6:.1f} MB of weights, read at "
        f"{limit['bytes_per_second'] / 1e9:.1f} GB/s in this run"
    }


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
    if setting.get("ignore_eos"):
        sampling += ", end tokens ignored"
    load = results.get("load_average")
    together = f"; {n} requests at once" if (n := setting.get("requests", 1)) > 1 else ""
    found = {
        **models,
        "numbers": f"{setting['dtype']} on {setting['device']}",
        "prompts": f"{setting['prompts']} ({setting['prompt_tokens']:.0f} tokens on average) of "
        f"{', '.join(setting['families'])}; {setting['repetitions']} repetitions, "
        f"interleaved{together}",
        "sampling": f"{sampling}, at most {setting['max_new_tokens']} new tokens",
        **memory_limit(results),
        "processor": f"{place['cpu']}, {place['cores']} cores, {place['threads']} threads, "
        f"{place['cpu_capability']}",
        "versions": f"foretoken {place['foretoken']}, torch {place['torch']}, "
        f"transformers {place['transformers']}, Python {place['python']}, {place['system']}",
        **({"other engines": engines} if (engines := versions(place.get("engines", {}))) else {}),
        "date": place["date"],
    }
    if place["gpu"]:
        found["GPU"] = place["gpu"]
    if load:
        found["load average"] = f"{load['median']:.2f} (median), {load['highest']:.2f} (highest)"
    if setting["skipped"]:
        found["left out"] = f"{len(setting['skipped'])} prompts too long for the context"
    return found


def versions(engines: Mapping[str, Mapping[str, str]]) -> str:
    """Packages of other engines."""
    found = {package: version for one in engines.values() for package, version in one.items()}
    return ", ".join(f"{package} {version}" for package, version in found.items())

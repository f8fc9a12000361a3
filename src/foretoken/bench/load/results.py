"""A load test as plain values: every load, every server, and the servers against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench import environment
from foretoken.bench.load.config import LoadConfig
from foretoken.bench.load.meeting import Met
from foretoken.bench.load.prompts import Prompts
from foretoken.bench.load.ratios import over
from foretoken.bench.load.record import TIMEOUT, Block
from foretoken.bench.load.sample import floors_of, sample_of
from foretoken.bench.load.steady import TOO_FEW
from foretoken.bench.load.summary import doubts, summary


def results_of(
    config: LoadConfig,
    blocks: Sequence[Block],
    met: Mapping[str, Met],
    prompts: Prompts,
    digest: str,
) -> dict[str, Any]:
    """Everything that was measured. Addresses of other machines and keys are not among it."""
    by_server = {s.name: [b for b in blocks if b.server == s.name] for s in config.servers}
    floors = {name: floors_of(mine) for name, mine in by_server.items()}
    levels = []
    for level in config.levels:
        mine = {name: [b for b in found if b.level == level] for name, found in by_server.items()}
        mine = {name: found for name, found in mine.items() if found}
        if mine:
            levels.append(
                {
                    "label": level.label,
                    "kind": level.kind,
                    "value": level.value,
                    "servers": {
                        name: summary(found, config.promise, floors[name])
                        for name, found in mine.items()
                    },
                    "over": compared(config, mine, floors),
                }
            )
    return {
        "title": "Load test",
        "servers": {
            server.name: {"model": met[server.name].model, "usage": met[server.name].counts}
            for server in config.servers
            if server.name in met
        },
        "setting": config.asked()
        | {
            "warm_up_requests": config.warm_up,
            "slo": {"ttft": config.promise.ttft, "tpot": config.promise.tpot},
        },
        "prompts": {
            "given": len(prompts.tasks),
            "families": prompts.families,
            "repeated": prompts.repeated,
            "digest": digest,
        },
        "levels": levels,
    }


def compared(
    config: LoadConfig,
    blocks: Mapping[str, Sequence[Block]],
    floors: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The first server over each of the others, at one load."""
    samples = {name: sample_of(mine, config.promise, floors[name]) for name, mine in blocks.items()}
    first, *others = (server.name for server in config.servers)
    ours = samples.get(first)
    found = {}
    for name in others:
        theirs = samples.get(name)
        if ours is not None and theirs is not None:
            found[f"{first} over {name}"] = over(ours, theirs)
    return found


def warnings_of(results: Mapping[str, Any]) -> list[str]:
    """What a reader has to know before any number."""
    found = []
    if busy := environment.busy(results["environment"]):
        found.append(busy.replace("rows wait", "servers and load generator wait"))
    if results["interrupted"]:
        found.append("the test was interrupted: the last load is a part of what was asked for")
    if results["prompts"]["repeated"]:
        found.append(
            f"{results['prompts']['given']} prompts were fewer than requests, warm-up included, so "
            "some came again: a server that keeps what it computed for a prompt has less to do "
            "than with new ones"
        )
    for level in results["levels"]:
        for name, row in level["servers"].items():
            at = f"{name} at {level['label']}"
            found += [
                f"{at}: {doubt}, so it may be slower than the server" for doubt in doubts(row)
            ]
            if late := row["errors"].get(TIMEOUT, {}).get("count"):
                found.append(
                    f"{at}: {late} requests had no end in time; their latencies, and times to a "
                    "first token that never came, are counted as what was waited: at least that"
                )
            if cut := row["unfinished"]:
                found.append(
                    f"{at}: {cut} requests were cut off by Ctrl-C; their latencies, and times to a "
                    "first token that had not come, are counted as what was waited: at least that"
                )
            if row["client"]["held"]:
                found.append(
                    f"{at}: {row['client']['held']} requests waited at the limit of requests in "
                    "flight; their wait is in their latencies"
                )
            if TOO_FEW in row.get("steady", {}).get("rules", []):
                found.append(f"{at}: too few requests to cut warm-up and tail; ask for more")
            if not row["answered"]:
                found.append(f"{at}: not one request was answered")
    return found

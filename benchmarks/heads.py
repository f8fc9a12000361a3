"""Trained heads side by side: what each costs, how far its guesses are kept, how fast it writes.

    python benchmarks/heads.py HEAD_DIR ...                      # on the shipped mini, or --target
    python benchmarks/heads.py HEAD_DIR ... --target smollm2-135m --draft smollm2-135m-draft \
        --dtype bfloat16 --tasks spec-bench.jsonl --temperature 1
    python benchmarks/heads.py HEAD_DIR --params 350M            # the mini, widened; eagle3 heads

Each folder is one that `foretoken train NAME --out DIR` wrote; all rows of METHODS that take its
kind of head run, beside `plain`, the best rows without training and those of the draft, in turns on
every prompt. Writes benchmarks/results/heads-TARGET.json, .md and two plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gates
import torch
from pair import WORK, main, names, pair, parser, prompts
from real import possible, tasks
from safetensors import safe_open
from transformers import AutoConfig

from foretoken import minis
from foretoken.bench import report
from foretoken.bench.files import replace
from foretoken.bench.plots import draw
from foretoken.bench.rows import parse_methods
from foretoken.bench.run import BenchConfig, run_bench
from foretoken.bench.svg import standalone
from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.methods import METHODS

RIGHT = (
    "Right, held out: how often a best guess is the token that the target wrote, by depth; that of "
    "EAGLE-3 is held against the likeliest one of its law, and CTC's figure is a length."
)
OTHERS = ("prompt-lookup", "suffix", "token-recycling", "tree", "hybrid")  # no head in them
SAMPLED = ("prompt-lookup", "suffix", "token-recycling", "chain", "tree", "hybrid", "auto-draft")
PAPERS = (  # the orderings of the papers: above, below, by which figure
    ("eagle", "medusa", "accepted"), ("eagle2", "eagle", "accepted"),
    ("eagle3", "eagle2", "accepted"), ("ctc-drafter", "medusa", "accepted"),
    ("hydra", "medusa", "accepted"), ("fspad", "eagle2", "accepted"),
    ("falcon", "eagle", "speed"), ("dspark", "dflash", "accepted"),
    ("dspark", "dspark-chain", "accepted"), ("dflash", "dflash[branch=1]", "accepted"),
)  # fmt: skip


def kind_of(folder: Path) -> str:
    """The kind of the head in a folder."""
    card = folder / store.CARD
    if not card.is_file():
        raise ConfigError(
            f"the head in {folder}.",
            f"there is no {store.CARD} in that folder.",
            "pass folders that `foretoken train NAME --out DIR` wrote.",
        )
    return str(json.loads(card.read_text(encoding="utf-8"))["kind"])


def rows_of(folder: Path, paper: bool = False) -> list[str]:
    """The rows that take the head of a folder, portfolios with it among them.

    With `paper` in their papers' shapes: drafts are then as large for every row as its authors
    made them, whatever they cost here.
    """
    kind = kind_of(folder)
    if paper:
        shapes = [(name, paper_shape(name)) for name, row in METHODS.items() if row.head == kind]
        if kind == "dflash":  # its paper drafts chains; the tree is ours
            shapes.append((kind, {**shapes[0][1], "nodes": 60, "branch": 8}))
        return [f"{name}[{said(shape)},draft_head={folder}]" for name, shape in shapes]
    taking = [name for name, method in METHODS.items() if method.head == kind]
    fused = [
        name
        for name, method in METHODS.items()
        if "draft_head" in method.needs and set(method.inner) & set(taking)
    ]
    found = [f"{name}[draft_head={folder}]" for name in (*taking, *fused)]
    if kind == "dflash":
        found.append(f"dflash[branch=1,draft_head={folder}]")
    return found


def paper_shape(name: str) -> dict[str, Any]:
    """The options of a row with its paper's shape, the same in every step."""
    row = METHODS[name]
    given = {"depth": 7, **row.paper_options}
    given.pop("template", None)  # a drawn tree has no short form: as many nodes, as deep
    if "nodes" not in given and "template" not in row.defaults and not name.endswith("-chain"):
        given["nodes"] = 60
    return {"controller": "fixed", **({} if "template" in row.defaults else given)}


def said(options: Mapping[str, Any]) -> str:
    """Options of a row as the bench reads them."""
    return ",".join(f"{name}={value}" for name, value in options.items())


def short(label: str) -> str:
    """A row's name, with the one option that the papers' orderings tell apart."""
    name = label.partition("[")[0]
    return f"{name}[branch=1]" if "branch=1," in label or "branch=1]" in label else name


def sizes(folder: Path) -> dict[str, Any]:
    """What a head is and how it was made."""
    card = store.read_card(folder, kind_of(folder))
    path = folder / card.weights
    with safe_open(path, framework="pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    count = sum(int(torch.tensor(shape).prod()) if shape else 1 for shape in shapes)
    notes = card.notes
    return {
        "kind": card.kind, "parameters": count, "bytes": path.stat().st_size,
        "seconds": notes.get("seconds"), "steps": notes.get("steps"),
        "right_by_depth": notes.get("figures", {}).get("trained", {}),
    }  # fmt: skip


def told(results: dict[str, Any], label: str) -> dict[str, Any]:
    """What a row's run says of its drafts: lengths, what is kept by depth, what drafting costs."""
    row = results["rows"][label]
    seconds_per_token = 1.0 / row["total_tokens_per_second"]
    length = row["accepted_length"]["emitted_per_forward"]
    share = (row["shares"] or {}).get("draft") if length else None  # other engines tell neither
    return {
        "accepted": length,
        "kept_by_depth": row["acceptance"]["conditional"][:6],
        "draft_ms": 1000.0 * share * seconds_per_token * length if share is not None else None,
        "speed": (row["speedup"].get("plain") or {}).get("total"),
        "interval": (row["speedup"].get("plain") or {}).get("interval"),
    }


def markdown(results: dict[str, Any], heads: dict[str, dict[str, Any]]) -> str:
    """A line for every row."""
    lines = [
        "| row | head, M | MiB | trained | right, held out | accepted length | kept at depth 1, 2, "
        "... | draft, ms per step | over plain (all tokens) |",
        "|---|---:|---:|---|---|---:|---|---:|---:|",
    ]
    for label, row in results["rows"].items():
        if row["failed"]:
            lines.append(f"| {label} | failed: {row['failed']} |" + " |" * 7)
            continue
        head, found = heads.get(label, {}), told(results, label)
        minutes = f", {head['seconds'] / 60:.0f} min" if head.get("seconds") else ""
        cells = [
            label.replace("|", "/"),
            f"{head['parameters'] / 1e6:.2f}" if head else "-",
            f"{head['bytes'] / 2**20:.1f}" if head else "-",
            f"{head['steps']} steps{minutes}" if head else "-",
            " ".join(f"{value:.2f}" for value in head.get("right_by_depth", {}).values()) or "-",
            number(found["accepted"]),
            " ".join(f"{value:.2f}" for value in found["kept_by_depth"]) or "-",
            number(found["draft_ms"]),
            number(found["speed"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def fastest(results: dict[str, Any], labels: Sequence[str]) -> str | None:
    return gates.best(results, lambda label: label in labels, whole=True)


def categories_above(results: dict[str, Any], label: str, others: Sequence[str]) -> int:
    """In how many categories a row is faster than each of the others."""

    def speed(name: str, family: str) -> float:
        return results["rows"][name]["families"][family]["speedup"]["total"]

    known = [name for name in others if not results["rows"][name]["failed"]]
    return sum(
        all(speed(label, family) > speed(name, family) for name in known)
        for family in results["families"]
    )


def verdicts(
    results: dict[str, Any], heads: dict[str, dict[str, Any]], bars: argparse.Namespace
) -> list[gates.Gate]:
    """The papers' orderings, and the best head against all that needs none."""
    found = []
    named = {short(label): label for label in heads if not results["rows"][label]["failed"]}
    for above, below, figure in PAPERS:
        if above in named and below in named:
            values = [told(results, named[name])[figure] for name in (above, below)]
            words = "accepted length" if figure == "accepted" else "tokens/s"
            found.append(gates.Gate(f"{above} over {below}, {words}", values[0] / values[1], 1.0))
    best = fastest(results, list(heads))
    others = [name for name in results["rows"] if name not in heads and name != "plain"]
    if best is None:
        return found
    rival, figures = fastest(results, others), told(results, best)
    families = len(results["families"])
    found += [
        gates.Gate(f"{best} over plain", figures["speed"], bars.over_plain, unit="x"),
        gates.Gate(f"{best}, accepted length", figures["accepted"], bars.accepted),
        gates.Gate(f"{best} over {rival}", gates.ratio(results, best, rival, whole=True), 1.0),
        gates.Gate(
            f"categories of {families} in which {best} is above every row without a head",
            float(categories_above(results, best, others)), round(11 / 13 * families),
        ),
    ]  # fmt: skip
    return found


@contextmanager
def widened(folders: Sequence[Path], factor: int) -> Iterator[list[Path]]:
    """Heads for a target whose hidden channels were copied so many times (Net2Net)."""
    if factor == 1:
        yield list(folders)
        return
    with TemporaryDirectory(prefix="foretoken-") as place:
        found = []
        for folder in folders:
            head, card = store.load(folder, kind_of(folder))
            if card.kind != "eagle3":
                raise ConfigError(
                    f"widening {folder}, a head of the kind {card.kind}, was asked for.",
                    "only eagle3 heads have a width of their own.",
                    "leave --params out, or pass eagle3 heads.",
                )
            taps, width, state = len(head.config.taps), head.config.hidden_size, head.state_dict()
            new = type(head)(dataclasses.replace(head.config, hidden_size=width * factor))
            fuse = state["fuse.weight"].view(-1, taps, 1, width) / factor
            state["fuse.weight"] = fuse.expand(-1, -1, factor, -1).reshape(len(fuse), -1)
            for name in {"enter.weight", "score.weight"} & state.keys():  # of the embeddings
                state[name] = (state[name] / factor).repeat(1, factor)
            new.load_state_dict(state)
            found.append(store.save(Path(place) / folder.name, card.kind, new, card.notes))
        yield found


def wanted_rows(folders: Sequence[Path], asked: argparse.Namespace) -> list[str]:
    """The rows of the heads, and those they are held against."""
    if asked.methods:
        others = list(asked.methods)
    else:
        others = list(SAMPLED if asked.temperature else OTHERS)
    drafted = asked.target is None or asked.draft is not None
    known = possible(["plain", *others], asked.draft or "the mini's" if drafted else None)
    return [*known, *(row for folder in folders for row in rows_of(folder, asked.paper))]


def measure(asked: argparse.Namespace, models: Any, folders: Sequence[Path], name: str) -> None:
    """The bench, its table, its verdicts, its files."""
    rows = wanted_rows(folders, asked)
    config = BenchConfig(
        target=models.target,
        draft=models.draft if asked.target is None else asked.draft,
        dtype=asked.dtype,
        methods=rows,
        out=WORK / (f"{name}-quick" if asked.quick else name),
        repetitions=1 if asked.quick else asked.repetitions,
        max_new_tokens=16 if asked.quick else asked.max_new_tokens,
        temperature=asked.temperature,
        threads=asked.threads,
        resume=asked.resume,
        title=f"Trained heads. {names(asked)}",
    )
    number = 1 if asked.quick else asked.per_category
    chosen = tasks(asked.tasks, number, asked.turns) if asked.tasks else prompts(number)
    results = run_bench(config, chosen)
    heads = {  # by a report's labels, which name no paths
        parse_methods(row)[0].label: sizes(folder)
        for folder in folders
        for row in rows_of(folder, asked.paper)
    }
    found = verdicts(results, heads, asked)
    results |= {"heads": heads, "gates": [gate.to_dict() for gate in found]}
    pictures = draw(results)
    links = {}
    for picture in ("families", "acceptance"):
        links[picture] = f"{name}-{picture}.svg"
        replace(asked.out / links[picture], standalone(pictures[picture]))
    text = report.markdown(results, links) + f"\n## Heads\n\n{RIGHT}\n\n" + markdown(results, heads)
    text += "\n## Bounds\n\n" + gates.markdown(found)
    gates.publish(asked.out, name, results, text)
    gates.show(found, results["title"])


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("heads", nargs="+", type=Path, help="folders of trained heads")
    options.add_argument("--params", help="the mini widened to so many parameters, such as 350M")
    options.add_argument("--dtype", help="number type (default: the model's own)")
    options.add_argument("--tasks", type=Path, help="questions of Spec-Bench; none: the minis'")
    options.add_argument("--per-category", type=int, default=2, help="tasks of each category")
    options.add_argument("--turns", type=int, default=2, help="turns of a task at most")
    options.add_argument("--repetitions", type=int, default=1)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--methods", nargs="*", help="rows without a head to hold them against")
    options.add_argument(
        "--over-plain", type=float,
        help="bar of the best head; default: 1.6, above temperature 0 1.35",
    )  # fmt: skip
    options.add_argument("--accepted", type=float, default=2.5, help="bar of its accepted length")
    options.add_argument("--paper", action="store_true", help="drafts as large as in the papers")
    options.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    asked = options.parse_args()
    if asked.over_plain is None:
        asked.over_plain = 1.35 if asked.temperature else 1.6
    name = f"heads-{Path(asked.target or 'text-target').name}"
    name += f"-{asked.params}" if asked.params else ""
    name += f"-t{asked.temperature:g}" if asked.temperature else ""
    name += "-paper" if asked.paper else ""
    with pair(asked.target, asked.draft, asked.params) as models:
        own = minis.path("text-target") if asked.params else models.target
        with widened(asked.heads, times_wider(models.target, own)) as folders:
            measure(asked, models, folders, name)
    return 0


def times_wider(model: Path | str, than: Path | str) -> int:
    """How many hidden channels one folder's model has for each of another's."""
    if model == than:
        return 1
    wide, narrow = (AutoConfig.from_pretrained(place).hidden_size for place in (model, than))
    return int(wide // narrow)


if __name__ == "__main__":
    main(run, __doc__)

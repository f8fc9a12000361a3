"""`foretoken plan`: memory before the first token, and what fits a budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options as o
from foretoken.cli.app import app
from foretoken.cli.logs import hushed
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.engine.memory.plan import Layout, MemoryPlan, Need

USUAL = 1024  # tokens of a row where nobody says
RATES = "0.7,0.1,0.05"  # chances of the first, second and third child, where nobody says
OWN_FLAGS = {
    "max_rows": "--rows",
    "memory_budget": "--budget",
}  # of what a session is told by --set
READING = ("kernels", "draft_vocabulary", "allow_pickle", "trust_remote_code")
UNPLANNED = {"exact_bits", "compile", "device_map", "draft_thresholds", "generation_config"}

Rows = Annotated[int, typer.Option(min=1, help="Texts decoded together.")]
Context = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a text, prompt and new ones; default: 1024.")
]
Nodes = Annotated[
    int | None,
    typer.Option(min=0, help="Nodes guessed per text and step; default: the method's most."),
]
Limit = Annotated[
    str | None,
    typer.Option("--budget", help="What may be taken: 2GiB, 512MiB; prints what fits."),
]


@app.command(epilog="Example: `foretoken plan --target ./model --rows 8 --budget 2GiB`")
def plan(
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    method: o.MethodName = None,
    rows: Rows = 1,
    context: Context = None,
    nodes: Nodes = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Texts are drawn at a temperature, not greedy.")
    ] = False,
    budget: Limit = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Load the models, time them, and print speed by memory."),
    ] = False,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="With --measure: chances that the first, second, ... child stands; default: "
            f"{RATES}."
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(help="auto counts second copies of weights, inplace has none; default: auto."),
    ] = None,
    given: o.Settings = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    json_: o.AsJson = False,
) -> None:
    """Say what a model and a method take in memory, from configuration files alone.

    Weights lie there between two texts; generation is what comes and goes with texts: caches, and
    the most that a chunk of prompts or a step holds. Not counted: the interpreter and its
    libraries, a quarter of a GiB before any model and about half a GiB with captured forwards.
    With --budget also the largest batch, context and tree that fit beside the other two.
    """
    if acceptance is not None and not measure:
        raise unmeasured(acceptance)
    loading: dict[str, Any] = {
        "dtype": dtype, "device": device, "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    config = o.settings(given)
    o.check_said_once({**loading, "kernels": kernels}, config)
    whole, small = o.pair(target, draft)
    reading, rules, config = parted({"kernels": kernels or "auto", **config})
    chosen = named_method(method, small, rules, config)
    from foretoken.engine.memory.layout import largest_draft, layout_of
    from foretoken.engine.memory.plan import Need

    check(chosen, small, rows, reading, {**rules, **config})
    layout = layout_of(whole, chosen, small, config=config, **{**loading, **reading})
    depth, most = largest_draft(chosen, config, rules.get("controller"))
    check_context(context, layout.target.max_length, target)
    longest = layout.target.max_length or USUAL
    guessed = most if nodes is None else nodes
    need = Need(rows, context or min(USUAL, longest), guessed, depth, sampled)
    document = described(target, small, chosen, layout, need, budget)
    if measure:
        document["frontier"] = measured(
            layout, need, acceptance or RATES, budget, target=target, draft=draft, method=chosen,
            given=given, quiet=hushed(json_), kernels=reading["kernels"], **loading,
        )  # fmt: skip
    if json_:
        o.print_json(document)
    else:
        show(document, layout.plan(need))


def unmeasured(acceptance: str) -> ConfigError:
    return ConfigError(
        f"--acceptance {acceptance} was passed without --measure.",
        "chances tell what a tree is worth; memory does not follow from them.",
        "add --measure, or leave --acceptance out.",
    )


def check_context(context: int | None, positions: int | None, target: str) -> None:
    """ConfigError for texts that the target has no positions for."""
    if context is not None and positions is not None and context > positions:
        raise ConfigError(
            f"--context {context} was asked for.",
            f"{target} has positions for {positions} tokens.",
            f"pass {positions} or less, or plan with a target of a longer context.",
        )


def check(
    method: str, draft: Any, rows: int, reading: dict[str, Any], options: dict[str, Any]
) -> None:
    """ConfigError for what `load` would refuse, by options alone."""
    from foretoken.engine.assemble import check_options
    from foretoken.engine.models import check_request
    from foretoken.lm.draft_vocabulary import check_asked
    from foretoken.lm.kernels.choosing import MODES

    check_options(method, **options)
    check_request(method, draft, rows)
    check_asked(reading.get("draft_vocabulary"))
    if reading["kernels"] not in MODES:
        raise ConfigError(
            f"kernels={reading['kernels']!r} was asked for.",
            f"kernels is one of {', '.join(MODES)}.",
            "pass one of these; 'auto' is the default.",
        )


def parted(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What --set says of how models are read, of the rules, and of the method's own options.

    What a session takes as well, and no plan depends on, is left out.
    """
    for name, flag in OWN_FLAGS.items():
        if name in config:
            raise ConfigError(
                f"--set {name}={o.spelt(config[name])} was passed to `foretoken plan`.",
                "a plan is of so many texts, and says what a budget holds.",
                f"pass {flag} in its place.",
            )
    found = [
        {name: config[name] for name in names if name in config}
        for names in (READING, ("controller", "verifier"))
    ]
    aside = {name for part in found for name in part} | UNPLANNED
    return found[0], found[1], {k: v for k, v in config.items() if k not in aside}


def named_method(
    method: str | None, draft: Any, rules: dict[str, Any], config: dict[str, Any]
) -> str:
    """The method asked for, or what `load` would take."""
    from foretoken.engine.loading import usual_method
    from foretoken.methods import method as method_row

    if method is not None:
        return method_row(method).name
    head = config.get("draft_head")
    return usual_method(draft, head, rules.get("controller"), rules.get("verifier"))


def described(
    target: str, draft: Any, method: str, layout: Layout, need: Need, budget: str | None
) -> dict[str, Any]:
    """The plan, and what fits the budget."""
    from foretoken.engine.memory.amounts import amount
    from foretoken.engine.memory.solver import largest

    drafted = layout.draft is not None
    found = {
        "target": target,
        "draft": str(draft) if drafted else None,
        "method": method,
        **layout.plan(need).to_dict(),
    }
    if budget is not None:
        held = amount(budget, "budget")
        fitting = largest(layout, held, need)
        spare = layout.without_copies()
        found["budget"] = {
            "bytes": held,
            "fits": layout.plan(need).total <= held,
            "largest": asdict(fitting),
            "without_second_copies": asdict(largest(spare, held, need)) if layout.copies else None,
        }
    return found


def measured(
    layout: Layout, need: Need, acceptance: str, budget: str | None, *, kernels: str, **opening: Any
) -> dict[str, Any]:
    """Expected tokens per second by size of tree, from costs measured on this machine."""
    from foretoken.engine.memory.amounts import amount
    from foretoken.engine.memory.solver import best, costs_of, frontier, lower_bound

    rates = chances(acceptance)
    with o.open_session(kernels=kernels, **opening) as session:
        costs = costs_of(session.engine, need.rows)
    points = frontier(layout, need, costs, rates)
    held = None if budget is None else amount(budget, "budget")
    chosen = None if held is None else best(points, held)
    return {
        "acceptance": rates,
        "points": [asdict(point) for point in points],
        "lower_bound": lower_bound(points),
        "best": None if chosen is None else asdict(chosen),
    }


def chances(text: str) -> list[float]:
    """Numbers between 0 and 1, with commas between them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.0 <= rate <= 1.0 for rate in found) or sum(found) > 1.0:
        raise ConfigError(
            f"--acceptance {text} was passed.",
            "chances that the first, second, ... child of a node stands: together at most 1.",
            f"write for example --acceptance {RATES}.",
        )
    return found


def show(document: dict[str, Any], plan: MemoryPlan) -> None:
    """Tables for people."""
    from rich.console import Console

    console = Console()
    console.print(plan_table(document, plan))
    if "budget" in document:
        console.print(budget_table(document))
    if "frontier" in document:
        console.print(frontier_table(document["frontier"]))


def plan_table(document: dict[str, Any], plan: MemoryPlan) -> Any:
    """A line for every part; of what a chunk or a step holds, the largest counts."""
    from rich.table import Table

    from foretoken.engine.memory.amounts import told
    from foretoken.engine.memory.plan import PHASES

    need = plan.need
    title = (
        f"{document['target']}, {document['method']}: {need.rows} x {need.context} tokens, "
        f"{need.nodes} nodes"
    )
    table = Table("", "part", "bytes", "what it is", title=title)
    table.columns[2].justify = "right"
    largest = max(PHASES, key=plan.of)
    for part in plan.parts:
        style = "dim" if part.kind in PHASES and part.kind != largest else None
        table.add_row(part.kind, part.name, told(part.bytes), part.how, style=style)
    table.add_section()
    table.add_row("", "weights", told(plan.weights), "between two texts", style="bold")
    told_of = f"caches, {largest}, slack"
    table.add_row("", "generation", told(plan.generation), told_of, style="bold")
    table.add_row("", "total", told(plan.total), "", style="bold")
    return table


def budget_table(document: dict[str, Any]) -> Any:
    """The largest batch, context and tree."""
    from rich.table import Table

    from foretoken.engine.memory.amounts import told

    held = document["budget"]
    title = f"in {told(held['bytes'])}: {'fits' if held['fits'] else 'does not fit'}"
    table = Table("", "rows", "context", "nodes", title=title)
    for name, key in (("at most", "largest"), ("without copies", "without_second_copies")):
        if (found := held[key]) is not None:
            nodes = "-" if found["nodes"] is None else str(found["nodes"])
            table.add_row(name, str(found["rows"]), str(found["context"]), nodes)
    return table


def frontier_table(found: dict[str, Any]) -> Any:
    """Memory against expected speed."""
    from rich.table import Table

    from foretoken.engine.memory.amounts import told

    bound = found["lower_bound"]
    title = "no tree is expected to pay" if bound is None else f"trees pay from {told(bound)} on"
    table = Table("nodes", "generation", "total", "tokens/step", "tokens/s", title=title)
    for point in found["points"]:
        best = found["best"] is not None and found["best"]["nodes"] == point["nodes"]
        table.add_row(
            str(point["nodes"]), told(point["generation"]), told(point["total"]),
            f"{point['tokens']:.2f}", f"{point['score']:.1f}", style="bold" if best else None,
        )  # fmt: skip
    return table

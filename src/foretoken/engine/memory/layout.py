"""What a plan is made of, read from configurations: of target, draft and head, and the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken import shipped
from foretoken.drafters.nothing import Nothing
from foretoken.drafters.parts.row_by_row import RowDrafter
from foretoken.engine.assemble import config_fields
from foretoken.engine.memory.plan import Layout
from foretoken.errors import CapabilityError
from foretoken.heads.sizes import sizes_of
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.footprint import Footprint, as_held, footprint
from foretoken.lm.load import target_config
from foretoken.methods import Method, needs_draft, resolve, settled
from foretoken.methods import method as method_row
from foretoken.types import Draw

HEAD = "draft_head"
DATA = ("datastore", "keys")  # options that name folders of data
NO_COPIES = ("dense", "lean", "inplace")  # modes of kernels that keep one copy of a weight


def layout_of(
    target: Any,
    method: str,
    draft: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    kernels: str = "auto",
    draft_vocabulary: Any = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Layout:
    """Of a request for a session; no weight is read. `config` are the method's options."""
    row, options = method_row(method), dict(config or {})
    check_plannable(row)
    reading = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
    place = {"dtype": dtype, "device": device}
    whole = model_of(target, reading, place)
    made = Layout(
        whole,
        copies=kernels not in NO_COPIES,
        trees="chain" not in row.drafter.partition(":")[0],
        ahead=2 if "overlap" in row.engine else 1,
        deepest=largest_draft(method, options)[0],
        drawn=draws(row),
    )
    if needs_draft(row):
        small = model_of(draft, reading, place)
        rows = chosen_rows(draft_vocabulary, shipped.resolve(draft), small.vocab)
        small = small if rows is None else small.with_outputs(len(rows.rows))
        made = replace(made, draft=small)
    if options.get(HEAD):
        made = with_head(made, str(options[HEAD]), whole)
    data = sum(folder_bytes(options[name]) for name in DATA if options.get(name))
    return replace(made, data=data)


def model_of(source: Any, reading: Mapping[str, Any], place: Mapping[str, Any]) -> Footprint:
    """Of a model that is loaded, or would be."""
    config = target_config(source, **reading)
    return as_held(footprint(config, **place, source=source), source, config)


def draws(row: Method) -> bool:
    """Whether a method may draw guesses, whose laws are kept until they are judged."""
    own: frozenset[Draw] = resolve(row.drafter).traits.draws
    return own != {Draw.POINT} or any(draws(method_row(name)) for name in row.inner)


def with_head(layout: Layout, folder: str, target: Footprint) -> Layout:
    """With a trained head beside the target."""
    sizes = sizes_of(folder)
    element = target.element
    return replace(
        layout,
        head=sizes.weights * element,
        head_column=sizes.column * element,
        head_row=sizes.row * element,
        head_decodes=sizes.decodes,
        taps=sizes.states,
    )


def folder_bytes(folder: Any) -> int:
    """Bytes of the files below a folder."""
    files = Path(str(folder)).expanduser().rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def largest_draft(
    method: str, config: Mapping[str, Any] | None = None, controller: str | None = None
) -> tuple[int, int]:
    """Depth and nodes of the largest draft that a method may make with these options.

    They are those of the parts that `assemble` would make: of the controller that the options
    choose, or of the drafter where its shape says them.
    """
    row = method_row(method)
    drafter: Any = resolve(row.drafter)
    if issubclass(drafter, Nothing):
        return 0, 0
    chosen, options = settled(row, controller, config or {})
    fields = config_fields(method, chosen)
    values = {name: option.default for name, option in fields.items()} | options
    sizes = {name: values[name] for name, one in fields.items() if one.part == "controller"}
    if {"depth", "nodes"} <= sizes.keys() and drafter.fitting is not RowDrafter.fitting:
        own: Any = drafter.Config(**_of_drafter(fields, options))
        # where the options alone tell the size, no drafter is made: it may hold as much as a matrix
        shaped = own if hasattr(own, "fitting") else drafter(Unasked(), own)
        size = shaped.fitting(options.get("depth"), options.get("nodes"))
        sizes |= {} if size is None else {"depth": size.depth, "nodes": size.nodes}
    return largest_of(sizes, chains(row))


def chains(row: Method) -> bool:
    """Whether a method's drafts never branch, whatever its options are."""
    return row.drafter.partition(":")[0].endswith("chain")


def largest_of(sizes: Mapping[str, Any], chains: bool) -> tuple[int, int]:
    """Depth and nodes of the largest draft, by the sizes among a controller's options."""
    depth = sizes.get("max_depth", sizes.get("depth"))
    nodes = sizes.get("max_nodes", sizes.get("nodes"))
    depth = 0 if depth is None else int(depth)
    nodes = depth if nodes is None else int(nodes)
    return depth, min(nodes, depth) if chains else nodes


def _of_drafter(fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a method's drafter takes."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name in fields and fields[name].part == "drafter"
    }


@dataclass(frozen=True, slots=True)
class Unasked:
    """A draft model in whose place nobody guesses: of drafters that say how large they are."""

    vocab_size: int = 1 << 30  # whoever has fewer tokens refuses the shape when it is made
    taps: tuple[Any, ...] = ()
    context: int | None = None
    max_length: int | None = None


def check_plannable(row: Method) -> None:
    """Refuse methods whose caches follow other sizes than rows, tokens and trees."""
    why = ""
    if row.writes == "beams":
        why = "beams keep forests in the cache, whose size follows the text"
    elif "realigned" in row.drafter:
        why = "realigned rows are padded to the longest of them, and its pool holds more rows"
    if why:
        raise CapabilityError(
            f"a memory plan was asked for method {row.name!r}.",
            f"{why}; plans are of rows that own their slots.",
            "leave the budget out, or use chain, tree or any other method that writes one text.",
        )

"""What a plan is made of, read from configurations: of target, draft and head, and the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken import shipped
from foretoken.engine.assemble import config_fields
from foretoken.engine.memory.plan import Layout
from foretoken.errors import CapabilityError
from foretoken.heads.sizes import sizes_of
from foretoken.lm.draft_vocabulary import chosen_rows
from foretoken.lm.footprint import Footprint, footprint
from foretoken.lm.load import target_config
from foretoken.methods import Method, needs_draft
from foretoken.methods import method as method_row

HEAD = "draft_head"
DATA = ("datastore", "keys")  # options that name folders of data
STATES = {"eagle3": 3, "eagle3-wide": 3}  # layers that a head reads; others read the last one
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
    whole = footprint(target_config(target, **reading), **place)
    made = Layout(whole, copies=kernels not in NO_COPIES, ahead=2 if "overlap" in row.engine else 1)
    if needs_draft(row):
        small = footprint(target_config(draft, **reading), **place)
        rows = chosen_rows(draft_vocabulary, shipped.resolve(draft), small.vocab)
        small = small if rows is None else small.with_outputs(len(rows.rows))
        made = replace(made, draft=small, trees="chain" not in row.drafter.partition(":")[0])
    if options.get(HEAD):
        made = with_head(made, str(options[HEAD]), whole)
    data = sum(folder_bytes(options[name]) for name in DATA if options.get(name))
    return replace(made, data=data)


def with_head(layout: Layout, folder: str, target: Footprint) -> Layout:
    """With a trained head beside the target."""
    sizes = sizes_of(folder)
    element = target.element
    return replace(
        layout,
        head=sizes.weights * element,
        head_column=sizes.column * element,
        taps=STATES.get(sizes.kind, 1),
    )


def folder_bytes(folder: Any) -> int:
    """Bytes of the files below a folder."""
    files = Path(str(folder)).expanduser().rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def largest_draft(method: str, config: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Depth and nodes of the largest draft that a method may make with these options."""
    options, row = dict(config or {}), method_row(method)
    fields = {name: option.default for name, option in config_fields(method).items()}
    if row.drafter.endswith(":Nothing"):
        return 0, 0
    depth = options.get("max_depth") or options.get("depth") or fields.get("max_depth")
    depth = depth or fields.get("depth") or 0
    sized = options.get("nodes") or options.get("max_nodes")
    sized = sized or (options.get("depth") if "depth" in options else None)
    nodes = sized or fields.get("max_nodes") or fields.get("nodes") or depth
    if row.drafter.partition(":")[0].endswith("chain"):
        nodes = min(int(nodes), int(depth))
    return int(depth), int(nodes)


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

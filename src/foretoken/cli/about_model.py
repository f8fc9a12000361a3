"""What one model allows and how its forwards will be made: `foretoken methods --model T`."""

from __future__ import annotations

from typing import Any

from foretoken.cli import options as o


def about_model(name: str, dtype: str | None = None) -> dict[str, Any]:
    """Open a model as `load` does; facts about it as plain values."""
    from foretoken.lm.load import load_model
    from foretoken.lm.opening import open_lm

    with open_lm(load_model(o.source(name), dtype=dtype)) as lm:
        return {
            "model": name,
            "family": lm.family.name,
            "layers": lm.layers,
            "vocabulary": lm.vocab_size,
            "context": lm.max_length,
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "device": str(lm.device),
            "drafts": "trees" if lm.caps.tree == "mask" else "chains",
            "batches": "ragged" if lm.caps.ragged else "one row at a time",
            "limit": lm.caps.why,
            "captured": lm.kernels.captured,
            "not_captured_because": lm.kernels.uncaptured,
            "kernels": lm.kernels.chosen,
            "no_native_products_because": lm.kernels.not_native,
        }


def sheet(about: dict[str, Any]) -> str:
    """The same for people."""
    forward = "captured at load, run as straight-line code"
    if not about["captured"]:
        forward = f"the model's own modules ({about['not_captured_because']})"
    lines = [
        f"{about['model']}: {about['family']}, {about['layers']} layers, "
        f"{about['vocabulary']} words, context {about['context'] or 'any'}, "
        f"{about['dtype']} on {about['device']}",
        f"  drafts   {about['drafts']}, {about['batches']}",
        f"  forward  {forward}",
    ]
    if about["limit"]:
        lines.insert(2, f"           {about['limit']}")
    for shape, rows in about["kernels"].items():
        chosen = ", ".join(f"{count}: {kernel}" for count, kernel in rows.items())
        lines.append(f"  product  {shape} by rows: {chosen}")
    if about["no_native_products_because"]:
        lines.append(f"  product  none in C: {about['no_native_products_because']}")
    return "\n".join(lines)

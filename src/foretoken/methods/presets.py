"""What a request for a method means: measured costs, the paper's own setting, or a constant size.

By default the costs measured on this machine decide how much is guessed, so that no method is
slower than plain decoding where guessing does not pay. Whoever names a size gets that size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.errors import ConfigError, meant
from foretoken.methods.method import Method

MEASURED, PAPER = "measured", "paper"
PRESETS = (MEASURED, PAPER)
SIZES = ("depth", "nodes", "k", "width", "template")  # options that say how large a draft is


def settled(
    row: Method, controller: str | None, config: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The controller and the options of a request, once its preset has been looked up."""
    options = dict(config)
    if preset_of(row, options.pop("preset", MEASURED)) == PAPER:
        setting = paper_setting(row)
        by_paper = setting.pop("controller")
        if controller not in (None, by_paper):
            raise ConfigError(
                f"preset={PAPER!r} was asked for with controller={controller!r}.",
                f"by the paper of {row.name!r} the controller is {by_paper!r}.",
                "leave one of the two out.",
            )
        return by_paper, {**setting, **options}
    if controller is not None:
        return controller, options
    constant = row.controller == "cost_model" and any(name in options for name in SIZES)
    return "fixed" if constant else row.controller, options


def selecting(row: Method, controller: str | None) -> tuple[str, ...]:
    """Options that choose a controller, where none is named: possible whatever it is then."""
    sized = controller is None and row.controller == "cost_model"
    return ("preset", "depth", "nodes") if sized else ("preset",)


def paper_setting(row: Method) -> dict[str, Any]:
    """The options that `preset="paper"` stands for, the controller first."""
    controller = "fixed" if row.controller == "cost_model" else row.controller
    size = {name: value for name, value in row.defaults.items() if name in SIZES}
    return {"controller": controller, **size, **row.paper_options}


def preset_of(row: Method, name: Any) -> str:
    """The name of a preset that this method has."""
    if name not in PRESETS:
        raise ConfigError(
            f"preset={name!r} was asked for.",
            f"presets are {', '.join(PRESETS)}.",
            meant(str(name), PRESETS),
        )
    if name == PAPER and not row.paper:
        raise ConfigError(
            f"preset={PAPER!r} was asked for with method {row.name!r}.",
            f"{row.name!r} has no paper whose setting it could take.",
            "leave preset out, or name a size: depth=4.",
        )
    return str(name)

"""Speculative decoding for any Hugging Face causal language model: faster text, the same law."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["METHODS", "__version__", "custom_generate", "generate", "load"]

_HOMES = {
    "METHODS": "foretoken.methods",
    "load": "foretoken.engine.session",
    "generate": "foretoken.engine.session",
    "custom_generate": "foretoken.engine.inside",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `import foretoken` must stay nearly free."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

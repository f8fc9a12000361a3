"""Speculative decoding for any Hugging Face causal language model: faster text, the same law.

    import foretoken

    spec = foretoken.load("text-target", draft="text-draft")  # directories, hub names, models
    out = spec.generate("Once upon a time", max_new_tokens=100, temperature=0.7, seed=1)
    print(out.text, out.stats.mean_accepted_length)

    for piece in spec.stream("Once upon a time"):
        print(piece.text, end="", flush=True)

    spec.generate([{"role": "user", "content": "Hello"}])  # through the tokenizer's chat template
    model.generate(**inputs, custom_generate=foretoken.custom_generate(draft=draft_model))

`METHODS` are the ways of guessing there are; `foretoken methods NAME` in a shell lists the options
of one. What cannot work raises a `ForetokenError` that says what to do. What happens at load is
told to `logging.getLogger("foretoken")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.engine.hf_generate import custom_generate as custom_generate
    from foretoken.engine.loading import generate as generate
    from foretoken.engine.loading import load as load
    from foretoken.engine.results import Result as Result
    from foretoken.engine.session import Session as Session
    from foretoken.errors import ForetokenError as ForetokenError
    from foretoken.methods import METHODS as METHODS

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "ForetokenError",
    "Result",
    "Session",
    "__version__",
    "custom_generate",
    "generate",
    "load",
]

_HOMES = {
    "METHODS": "foretoken.methods",
    "ForetokenError": "foretoken.errors",
    "Result": "foretoken.engine.results",
    "Session": "foretoken.engine.session",
    "load": "foretoken.engine.loading",
    "generate": "foretoken.engine.loading",
    "custom_generate": "foretoken.engine.hf_generate",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `import foretoken` must stay nearly free."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)

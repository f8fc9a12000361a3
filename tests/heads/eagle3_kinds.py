"""Where an EAGLE-3 head has its tables of tokens from: options of its Config."""

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "own embeddings": {},
    "the target's": {"embeds": False},
    "and outputs made of them": {"embeds": False, "own_rows": False},
}

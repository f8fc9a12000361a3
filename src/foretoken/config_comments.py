"""What an option means: the comment beside its field, read from the source of its Config."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from typing import Any


def meanings(config: Any) -> dict[str, str]:
    """Field -> its comment, for every field of a Config dataclass; empty where it has none.

    A field's comment stands behind it, or in the lines right above it, or both.
    """
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if dataclasses.is_dataclass(owner):
            found |= _written_in(owner)
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(config)}


def _written_in(owner: Any) -> dict[str, str]:
    """The comments of the fields that a class declares itself."""
    source = textwrap.dedent(inspect.getsource(owner))
    comments = {  # by line
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    found, free = {}, definition.lineno + 1  # comments from here on belong to the next field
    for node in definition.body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [comments[line] for line in range(free, last + 1) if line in comments]
            found[node.target.id] = " ".join(lines)
        free = last + 1
    return found

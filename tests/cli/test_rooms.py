"""The files of the command line import each other in one direction only."""

import ast
from pathlib import Path

import foretoken.cli

FOLDER = Path(foretoken.cli.__file__).parent


def neighbours(path: Path) -> set[str]:
    """The files of the folder that a file imports, at its head or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretoken.cli"):
            names = [(node.module or "").removeprefix("foretoken.cli").lstrip(".")]
            found |= {name for name in names if name} or {alias.name for alias in node.names}
    return found


def test_no_command_imports_what_imports_it():
    graph = {path.stem: neighbours(path) for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert {"app", "options"} <= graph["write"] and "write" in graph["commands"]
    while leaves := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in leaves}
    assert graph == {}, f"a circle among {sorted(graph)}"

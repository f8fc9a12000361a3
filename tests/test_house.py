"""The rules of the house, checked on the source itself."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "foretoken"
LAYERS = (
    {
        "types",
        "contract",
        "coins",
        "costs",
        "warp",
        "errors",
        "row",
        "sampling",
        "trees",
        "shipped",
        "values",
        "native",
        "config_comments",
    },
    {"lm", "heads", "datastore"},  # a datastore knows ids and files, neither models nor drafters
    {"drafters", "verifiers", "controllers"},
    {"engine", "continuous", "methods"},
    {"bench", "audit", "training", "minis", "evaluation"},
    {"cli", "serve"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# methods is strings and errors only; the recipes of the minis run on the trainer; `foretoken serve`
ALLOWED_SIDEWAYS = {("engine", "methods"), ("minis", "training"), ("cli", "serve")}
CATALOGUE_MAY_IMPORT = ("foretoken.methods", "foretoken.errors", "foretoken.types")
MAY_IMPORT_TRANSFORMERS = ("lm/", "heads/", "training/", "minis/", "bench/peers.py")
MAY_IMPORT_FASTAPI = ("serve/",)  # and pydantic, which comes with it
MAY_USE_RANDOMNESS = ("coins.py", "minis/", "training/", "bench/")
# where a caller's own code runs: what it raises goes to the owner of its row, unchanged
MAY_CATCH_ALL = (
    "warp/__init__.py",
    "engine/engine.py",
    "engine/step.py",
    "engine/scheduling.py",
    "engine/tolerant.py",
    "serve/engine_thread.py",
)
CATCHES_ALL = ("Exception", "BaseException", "everything")
BANNED_NAMES = {"utils", "helpers", "misc", "common", "manager"}
BANNED_ENDINGS = ("_v2", "_new", "_legacy")
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    *MODULES,
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """The dotted name a file is imported by."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.stmt, folder: list[str]) -> Iterator[str]:
    """Dotted names that a statement in a file of `folder` imports, relative ones resolved."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = folder[: len(folder) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """Dotted names a module imports anywhere."""
    folder = ["foretoken", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.stmt):
            yield from imported(node, folder)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a module, those in functions too, but none that only type checkers read."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Which modules of a package each of them imports, at its head or later: an import that waits
    in a function only hides a circle.

    A name taken from a folder is the module of that name, or else what the folder's own file says.
    """
    files = {module_of(path, package): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        folder = list(path.relative_to(package.parent).parent.parts)
        tree = ast.parse(path.read_text())
        used: set[str] = set()
        for node in statements(tree.body):
            found = [dotted for dotted in imported(node, folder) if dotted in files]
            used |= set(found[1:] or found) if isinstance(node, ast.ImportFrom) else set(found)
        graph[name] = used - {name}
    return graph


def circle_in(graph: dict[str, set[str]]) -> set[str]:
    """The modules that lie on circles of imports, with those between two circles."""
    left = dict(graph)
    while True:
        pointed_at = set[str]().union(*left.values()) if left else set()
        ends = {name for name, used in left.items() if not used & left.keys()}
        ends |= left.keys() - pointed_at
        if not ends:
            return set(left)
        left = {name: used - ends for name, used in left.items() if name not in ends}


def expect_none(found: Iterable[str]) -> None:
    """Fail with all that was found, one a line."""
    lines = list(found)
    assert not lines, "\n".join(["", *lines])


def part_of(dotted: str) -> str | None:
    """The part of the house a dotted name belongs to."""
    pieces = dotted.split(".")
    if pieces[0] != "foretoken" or len(pieces) < 2:
        return None
    return pieces[1] if pieces[1] in LEVEL else None


def own_part(path: Path) -> str | None:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def points_down(own: str, dotted: str) -> bool:
    other = part_of(dotted)
    if other is None or other == own or (own, other) in ALLOWED_SIDEWAYS:
        return True
    ground_floor = LEVEL[own] == LEVEL[other] == 0
    return LEVEL[other] < LEVEL[own] or ground_floor


def test_every_part_has_a_layer() -> None:
    parts = {own_part(path) for path in MODULES} - {None}
    assert parts <= LEVEL.keys(), f"add {parts - LEVEL.keys()} to DESIGN and to this test"


def test_imports_point_down() -> None:
    expect_none(
        f"{name_of(path)} imports {dotted}"
        for path in MODULES
        if (own := own_part(path)) is not None
        for dotted in imports(path)
        if not points_down(own, dotted)
    )


def test_the_layer_check_sees_an_import_that_points_up() -> None:
    found = list(imports(PACKAGE / "engine" / "engine.py"))
    assert "foretoken.engine.promise" in found and "foretoken.types.Step" in found
    assert all(points_down("engine", dotted) for dotted in found)
    assert not points_down("engine", "foretoken.cli.app")
    assert not points_down("types", "foretoken.engine.step")
    assert not points_down("verifiers", "foretoken.drafters.growers.chain")


def test_the_catalogue_is_strings_errors_and_types() -> None:
    expect_none(
        f"{name_of(path)} imports {dotted}"
        for path in MODULES
        if own_part(path) == "methods"
        for dotted in imports(path)
        if dotted.startswith("foretoken") and not dotted.startswith(CATALOGUE_MAY_IMPORT)
    )


def test_no_modules_import_each_other() -> None:
    expect_none(sorted(circle_in(import_graph(PACKAGE))))


def test_the_circle_check_sees_planted_circles(tmp_path: Path) -> None:
    """Inside a folder, late, across folders, and through a folder's own file."""
    package = tmp_path / "planted"
    texts = {
        "__init__": "",
        "room/__init__": "",
        "room/a": "from planted.room import b",
        "room/b": "if True:\n    from . import c",
        "room/c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import planted.room.a",
        "other": "from planted.room.a import x",
    }
    for name, text in texts.items():
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    assert import_graph(package)["planted.room.a"] == {"planted.room.b"}
    assert circle_in(import_graph(package)) == set(), "what type checkers read is no circle"

    (package / "room/c.py").write_text("def later():\n    from planted.room.a import x")
    circle = {f"planted.room.{name}" for name in "abc"}
    assert circle_in(import_graph(package)) == circle

    (package / "room/c.py").write_text("try:\n    import planted.other\nfinally:\n    pass")
    assert circle_in(import_graph(package)) == {*circle, "planted.other"}

    (package / "other.py").write_text("from planted.room import value")
    (package / "room/__init__.py").write_text("from planted.room.a import value")
    assert circle_in(import_graph(package)) == {*circle, "planted.other", "planted.room"}


def test_only_the_model_layer_imports_transformers() -> None:
    expect_none(
        f"{name_of(path)} imports {dotted}"
        for path in MODULES
        if not name_of(path).startswith(MAY_IMPORT_TRANSFORMERS)
        for dotted in imports(path)
        if dotted.split(".")[0] == "transformers"
    )


def test_only_the_server_imports_fastapi() -> None:
    expect_none(
        f"{name_of(path)} imports {dotted}"
        for path in MODULES
        if not name_of(path).startswith(MAY_IMPORT_FASTAPI)
        for dotted in imports(path)
        if dotted.split(".")[0] in ("fastapi", "starlette", "uvicorn", "pydantic")
    )


def test_randomness_comes_from_coins() -> None:
    found = []
    for path in MODULES:
        if name_of(path).startswith(MAY_USE_RANDOMNESS):
            continue
        found += [
            f"{name_of(path)} imports {d}" for d in imports(path) if d.split(".")[0] == "random"
        ]
        for node in ast.walk(TREES[path]):
            drawn = ("rand", "rand_like", "multinomial", "bernoulli")
            if isinstance(node, ast.Attribute) and node.attr in drawn:
                found.append(f"{name_of(path)}:{node.lineno} uses .{node.attr}")
    expect_none(found)


def lengths(path: Path) -> Iterator[tuple[str, int]]:
    """Functions of a file and their lines."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_and_files_stay_short() -> None:
    found = []
    for path in SOURCES:
        lines = len(path.read_text().splitlines())
        found += [f"{name_of(path)} has {lines} lines"] if lines > 400 else []
        found += [f"{name_of(path)}: {f} has {n} lines" for f, n in lengths(path) if n > 80]
    expect_none(found)


def test_nineteen_of_twenty_functions_have_fewer_than_thirty_lines() -> None:
    sizes = sorted(lines for path in MODULES for _, lines in lengths(path))
    assert sizes[int(0.95 * len(sizes))] < 30


def test_names_are_ideas_and_nothing_is_left_undone() -> None:
    found = []
    for path in SOURCES:
        if path.stem in BANNED_NAMES or path.stem.endswith(BANNED_ENDINGS):
            found.append(f"{name_of(path)} is no idea")
        text = path.read_text()
        found += [
            f"{name_of(path)}: {mark}" for mark in ("TO" + "DO", "FIX" + "ME") if mark in text
        ]
    expect_none(found)


def swallowed(path: Path) -> Iterator[str]:
    """Handlers that catch whatever there is, and neither raise it again nor hand it over."""
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        raised = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if caught not in CATCHES_ALL or raised:
            continue
        inside = [inner for one in node.body for inner in ast.walk(one)]
        handed = any(isinstance(one, ast.Name) and one.id == node.name for one in inside)
        if not (handed and name_of(path).startswith(MAY_CATCH_ALL)):
            yield f"{name_of(path)}:{node.lineno} catches {caught}"


def test_nothing_is_caught_that_is_not_known() -> None:
    expect_none(line for path in SOURCES for line in swallowed(path))


def measure(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return ran.stdout.strip()


def test_importing_foretoken_loads_nothing_heavy() -> None:
    heavy = measure(
        "import sys, foretoken; foretoken.METHODS; "
        "print([m for m in ('transformers', 'fastapi', 'torch') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_the_public_names_cost_less_than_a_second_more_than_torch() -> None:
    code = (
        "import time, torch; began = time.process_time(); import foretoken; "
        "foretoken.load, foretoken.generate, foretoken.custom_generate, foretoken.METHODS; "
        "import sys; assert 'transformers' not in sys.modules; print(time.process_time() - began)"
    )
    assert min(float(measure(code)) for _ in range(2)) < 1.0


def test_calls_in_the_documents_are_there_after_a_bare_import() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    calls = r"(?<![\w./-])foretoken((?:\.[A-Za-z_]\w*)+)\("
    told = {name for path in documents for name in re.findall(calls, path.read_text())}
    assert ".load" in told
    measure("; ".join(["import foretoken", *(f"foretoken{name}" for name in sorted(told))]))


def test_the_version_is_the_package_version() -> None:
    import tomllib

    import foretoken

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert foretoken.__version__ == project["version"]


def test_who_installs_the_server_can_hold_answers_to_a_grammar() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["guided"]) <= set(extras["serve"])

"""The rules of the house, checked on the source itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "foretoken"
LAYERS = (
    {"types", "asking", "coins", "warp", "errors", "sampling", "trees"},
    {"lm", "heads", "datastore"},  # a datastore knows ids and files, neither models nor drafters
    {"drafters", "verifiers", "controllers"},
    {"engine", "continuous", "methods"},
    {"bench", "audit", "training", "minis"},
    {"cli", "serve"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# methods is strings and errors only; the recipes of the minis run on the trainer
ALLOWED_SIDEWAYS = {("engine", "methods"), ("minis", "training")}
MAY_IMPORT_TRANSFORMERS = ("lm/", "heads/", "training/", "minis/", "bench/peers.py")
MAY_USE_RANDOMNESS = ("coins.py", "minis/", "training/", "bench/")
BANNED_NAMES = {"utils", "helpers", "misc", "common", "manager"}
BANNED_ENDINGS = ("_v2", "_new", "_legacy")
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    *MODULES,
    *sorted((ROOT / "examples").rglob("*.py")),
    *(ROOT / "benchmarks").rglob("*.py"),
]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def imports(path: Path) -> Iterator[str]:
    """Dotted names a module imports anywhere, relative ones resolved."""
    package = ["foretoken", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(dotted: str) -> str | None:
    """The part of the house a dotted name belongs to."""
    pieces = dotted.split(".")
    if pieces[0] != "foretoken" or len(pieces) < 2:
        return None
    return pieces[1] if pieces[1] in LEVEL else None


def own_part(path: Path) -> str | None:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if first == "__init__" else first


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    own = own_part(path)
    if own is None:
        return
    assert own in LEVEL, f"{own} has no layer: add it to DESIGN and to this test"
    for dotted in imports(path):
        other = part_of(dotted)
        if other is None or other == own or (own, other) in ALLOWED_SIDEWAYS:
            continue
        ground_floor = LEVEL[own] == LEVEL[other] == 0
        assert LEVEL[other] < LEVEL[own] or ground_floor, f"{name_of(path)} imports {dotted}"


def test_the_layer_check_sees_an_import_that_points_up() -> None:
    found = list(imports(PACKAGE / "engine" / "loop.py"))
    assert "foretoken.engine.pairing" in found
    assert part_of("foretoken.cli.app") == "cli" and LEVEL["cli"] > LEVEL["engine"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_model_layer_imports_transformers(path: Path) -> None:
    heavy = [name for name in imports(path) if name.split(".")[0] in ("transformers", "fastapi")]
    assert not heavy or name_of(path).startswith(MAY_IMPORT_TRANSFORMERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_randomness_comes_from_coins(path: Path) -> None:
    if name_of(path).startswith(MAY_USE_RANDOMNESS):
        return
    assert "random" not in {name.split(".")[0] for name in imports(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            drawn = node.attr in ("rand", "rand_like", "multinomial", "bernoulli")
            assert not drawn, f"line {node.lineno} uses .{node.attr}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_and_files_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 80, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_names_are_ideas_and_nothing_is_left_undone(path: Path) -> None:
    assert path.stem not in BANNED_NAMES and not path.stem.endswith(BANNED_ENDINGS)
    text = path.read_text()
    for mark in ("TO" + "DO", "FIX" + "ME"):
        assert mark not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("Exception", "BaseException", "everything"), node.lineno


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


def test_the_version_is_the_package_version() -> None:
    import tomllib

    import foretoken

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert foretoken.__version__ == project["version"]

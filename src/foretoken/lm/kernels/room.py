"""How much memory this process may still take: of the system's, and of what its limits leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
Names = tuple[str, str, str]
# Files of a control group: its limit, what it uses; and a line of memory.stat: what of that is
# given back before anything is refused (pages of files, such as weights that were read).
SECOND: Names = ("memory.max", "memory.current", "inactive_file")
FIRST: Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(proc: Path = PROC, mounted: Path = GROUPS) -> int | None:
    """Bytes the system would give without swapping; None where it does not say.

    A container may have less than its machine: who goes beyond the limit of a control group is
    killed, and each group that this process is in may have one.
    """
    told = numbers(proc / "meminfo").get("MemAvailable")
    found = [left(*group) for group in groups(proc, mounted)]
    found.append(None if told is None else 1024 * told)
    return min((free for free in found if free is not None), default=None)


def groups(proc: Path, mounted: Path) -> Iterator[tuple[Path, Names]]:
    """The control groups of memory that this process is in, and their parents.

    A container may see its own group as the root and still be told the path outside: folders that
    are not there have no limits.
    """
    for line in text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (mounted / "memory", FIRST) if controllers else (mounted, SECOND)
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents):
            yield root / folder, names


def left(folder: Path, names: Names) -> int | None:
    """Bytes that a control group may still take; None without a limit."""
    most, used = (text(folder / name).strip() for name in names[:2])
    if not (most.isdigit() and used.isdigit()):  # "max" is none
        return None
    spare = numbers(folder / "memory.stat").get(names[2], 0)
    return max(0, int(most) - max(0, int(used) - spare))


def numbers(file: Path) -> dict[str, int]:
    """The first number of every line by the word before it."""
    lines = [line.replace(":", " ").split() for line in text(file).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def text(file: Path) -> str:
    """What stands in a file; nothing where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""

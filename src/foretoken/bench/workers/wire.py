"""JSON lines between a bench and a worker: one request a line, one answer a line.

Scripts of this folder run in the interpreter of another package, so they import only each other,
that package and the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


class Refused(Exception):
    """What this engine cannot do, in the three parts of an error message."""


def probe(packages: tuple[str, ...], either: bool = False) -> None:
    """Print the installed versions of `packages` and end; `either`: one of them is enough."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    print(json.dumps(found if either or len(found) == len(packages) else {}))


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until the other side closes the pipe.

    Whatever the engine prints goes to the error stream: the answers have the pipe to themselves.
    An exception that is no refusal ends the worker; its last line tells the bench why.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            verb = verbs[request.pop("do")]
            try:
                answer = {"done": verb(**request)}
            except Refused as problem:
                answer = {"refused": problem.args}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def peak_memory() -> int:
    """Most bytes this process ever held; `getrusage` on Linux counts what its parent held, too."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (one for one in status.read_text().splitlines() if one.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""What language models over one module share: whose turn it is, and how far they were checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Shared:
    """One module: its attention and its shadowed layers are its own, whoever runs it."""

    lock: threading.RLock = field(default_factory=threading.RLock)  # of a call
    # of a whole step, whose calls may come from other threads: they take the lock above
    turn: threading.RLock = field(default_factory=threading.RLock)
    verified: int = 32  # tokens of the longest text whose cached logits were seen to be right
    changes: int = 0  # of weights, that were seen: what was learned of the model before is past


_modules: WeakKeyDictionary[Any, Shared] = WeakKeyDictionary()
_guard = threading.Lock()


def shared_by(model: Any) -> Shared:
    """What all users of a module, or of a table, share."""
    with _guard:
        return _modules.setdefault(model, Shared())


def share(copied: Any, model: Any) -> None:
    """Have a copy that holds the tables of a model's weights share its lock and its turns."""
    with _guard:
        _modules[copied] = _modules.setdefault(model, Shared())


def exclusive(method: Callable[P, R]) -> Callable[P, R]:
    """`method` under its model's lock, in inference mode: several threads may use one model.

    The engine is in that mode already: entering again costs more than some of the calls themselves.
    Numbers are of the model's own type even where a caller trains with others (autocast): kernels
    and caches are made for it.
    """

    @wraps(method)
    def call(*given: P.args, **named: P.kwargs) -> R:
        me: Any = given[0]
        with me.lock:
            plain = not torch.is_autocast_enabled(me.device.type)
            if plain and torch.is_inference_mode_enabled():
                return method(*given, **named)
            with torch.inference_mode(), torch.autocast(me.device.type, enabled=False):
                return method(*given, **named)

    return call

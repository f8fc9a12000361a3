"""Where a caller's code and numbers enter a model beside its weights: what a capture must not miss.

A captured forward has every number of Python in it as a constant, and no hook that was hung on a
module since. So the modules, their code and their plain values are noted when a model is captured
and compared before it is used. Values that hooks and patched forwards read cannot be seen: a model
that has such is not captured. What lies in the configuration is not looked at.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from foretoken.lm.kernels.few_tokens import Norm
from foretoken.lm.kernels.linears import Product

Seam = tuple[Any, ...]

OURS = Product, Norm  # forwards of our own, which give what the module's give
# transformers hangs these on layers when hidden states are asked for; they change nothing.
CAPTURING = "transformers.utils.output_capturing"
OF_EVERY_MODULE = frozenset(nn.Module().__dict__)  # `training` among them, which is looked at apart
PLAIN = frozenset((int, float, bool, str, type(None)))
FEW = 16  # entries of a list or a dictionary that is compared, such as an adapter's scalings


def seams(model: nn.Module) -> list[Seam]:
    """Of every module: itself, its code, what is hung on it, and its plain values."""
    found: list[Seam] = []
    waiting = [model]
    while waiting:  # `modules()` makes a name for each, and takes five times as long
        module = waiting.pop()
        waiting += [child for child in module._modules.values() if child is not None]
        kind = type(module)
        found.append((module, kind, kind.forward, own_forward(module), hooks(module)))
        found.append(values(module))
    return found


def own_forward(module: nn.Module) -> Any:
    """A forward that this module has instead of its class's; None for one of ours."""
    forward = module.__dict__.get("forward")
    return None if isinstance(forward, OURS) else forward


def hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of its hooks, which no two hooks of a process share."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return ()
    own = {**module._forward_pre_hooks, **module._forward_hooks}
    return tuple([i for i, hook in own.items() if getattr(hook, "__module__", "") != CAPTURING])


def values(module: nn.Module) -> Seam:
    """Plain attributes, such as epsilons and scalings.

    Of a whole model only those with public names: transformers keeps its bookkeeping in the others.
    """
    whole = isinstance(module, PreTrainedModel)
    found: list[Any] = []
    for name, value in module.__dict__.items():
        kind = type(value)
        if name in OF_EVERY_MODULE or (whole and name[0] == "_"):
            continue
        if kind in PLAIN:
            found.append(value)
        elif kind in (list, tuple, dict) and len(value) <= FEW:
            found.append(repr(value))
    return tuple(found)


def hooked(model: nn.Module) -> str | None:
    """The first module with a hook or a forward that is not its class's; None if there is none."""
    for name, module in model.named_modules():
        if own_forward(module) is not None or hooks(module):
            return name or type(module).__name__
    return None

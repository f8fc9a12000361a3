"""Where a caller's code and numbers enter a model beside its weights: what a capture must not miss.

A captured forward has every number of Python in it as a constant, and no hook that was hung on a
module since. So the modules, their forwards and their plain attributes (numbers, texts, functions,
tensors) are noted when a model is captured and compared before it is used. Values that hooks and
patched forwards read cannot be seen: a model that has such is not captured. Not looked at are the
configuration, other methods than `forward`, and objects of other kinds.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from transformers import PreTrainedModel

from foretoken.lm.kernels.few_tokens import Norm
from foretoken.lm.kernels.linears import Product

Seam = tuple[Any, ...]

OURS = Product, Norm  # forwards of our own, which give what the module's give
# transformers hangs these on layers when hidden states are asked for, and on embeddings for
# adapters that learn; they change nothing.
IDLE = "output_capturing_hook", "make_inputs_require_grads"
# `training` is looked at apart; the others have no say outside of training.
UNREAD = frozenset(nn.Module().__dict__) | {
    "forward", "extra_repr", "gradient_checkpointing", "_gradient_checkpointing_func",
}  # fmt: skip
NUMBERS = frozenset((int, float, bool))
PLAIN = NUMBERS | {str, type(None)}
FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType, MethodType))
FEW = 16  # entries of a list or a dictionary that is compared, such as an adapter's scalings


def seams(model: nn.Module) -> list[Seam]:
    """Of every module: itself, its code, what is hung on it, and its plain values."""
    found: list[Seam] = [of_all_modules()]
    waiting = [model]
    while waiting:  # `modules()` makes a name for each, and takes five times as long
        module = waiting.pop()
        waiting += [child for child in module._modules.values() if child is not None]
        kind = type(module)
        code = getattr(kind, "forward", None), own_forward(module)  # a script has no forward
        found.append((module, kind, code, hooks(module)))
        found.append(values(module))
    return found


def own_forward(module: nn.Module) -> Any:
    """A forward that this module has instead of its class's; None for one of ours."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, OURS):
        return None
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return None if forward.__func__ is getattr(type(module), "forward", None) else forward
    return forward


def of_all_modules() -> Seam:
    """The numbers of hooks that torch runs in every module."""
    return (*everywhere._global_forward_pre_hooks, *everywhere._global_forward_hooks)


def hooks(module: nn.Module) -> tuple[int, ...]:
    """The numbers of its hooks, which no two hooks of a process share."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return ()
    own = {**module._forward_pre_hooks, **module._forward_hooks}
    return tuple([i for i, hook in own.items() if getattr(hook, "__name__", "") not in IDLE])


def values(module: nn.Module) -> Seam:
    """Attributes such as epsilons, scalings and activations.

    Of a whole model only numbers with public names: transformers keeps its bookkeeping in others.
    """
    whole = isinstance(module, PreTrainedModel)
    found: list[Any] = []
    for name, value in tuple(module.__dict__.items()):  # other threads may set some meanwhile
        kind = type(value)
        if name in UNREAD or (whole and (name[0] == "_" or kind not in NUMBERS)):
            continue
        if kind in PLAIN or kind in FUNCTIONS:
            found.append(value)
        elif kind in (list, tuple, dict) and len(value) <= FEW:
            parts = (*value, *value.values()) if kind is dict else value
            if all(type(part) in PLAIN for part in parts):
                found.append(tuple(parts))
        elif isinstance(value, Tensor):
            found.append((id(value), 0 if value.is_inference() else value._version))
    return tuple(found)


def hooked(model: nn.Module) -> str | None:
    """The first module with a hook or a forward that is not its class's; None if there is none."""
    if of_all_modules():
        return "every module"
    for name, module in model.named_modules():
        if own_forward(module) is not None or hooks(module):
            return name or type(module).__name__
    return None

"""Models borrowed from their owner: evaluation mode and kernels while anybody decodes with them.

Several may borrow one model at a time. The first to take it records modes and forwards, the last
to give it back restores them; what is in between is shared. A borrower that is dropped without
being closed gives back what it held.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from threading import RLock
from typing import Any, NoReturn

from torch import nn

from foretoken.errors import CapabilityError, ConfigError
from foretoken.lm.kernels.choosing import (
    KernelReport,
    choose_kernels,
    in_few_sizes,
    installed,
    reach_in_c,
    restore,
)
from foretoken.lm.kernels.lean import LeanForward
from foretoken.lm.kernels.linears import Product
from foretoken.lm.kernels.merged import Site
from foretoken.lm.kernels.seams import Seam, hooked, seams
from foretoken.lm.runtime.fingerprints import WeightWatch, states
from foretoken.lm.runtime.finite import check_finite
from foretoken.lm.runtime.slot_attention import IN_ONE_CALL

LOG = logging.getLogger(__name__)

# One lock for all models: kernels measured beside each other would be measured wrongly. It is
# entered again by a borrower that the garbage collector drops meanwhile.
_lock = RLock()
_shared: weakref.WeakKeyDictionary[nn.Module, Shared] = weakref.WeakKeyDictionary()
_keys = count()


@dataclass(slots=True)
class Kernels:
    """Products chosen for one model, in place or put away."""

    asked: tuple[str, bool]  # mode, and whether lone rows are padded
    report: KernelReport
    products: list[Product]  # that stand in for linear layers
    lean: LeanForward | None = None  # the captured model, with products of its own
    spared: bool = False  # a budget of memory was told of

    @property
    def copies(self) -> list[Site]:
        """Everything that may hold a copy of a weight."""
        return [*self.products, *(self.lean.sites if self.lean is not None else ())]

    def spare_memory(self) -> None:
        """Take no more of it for a prompt than a plan can know, also once others are chosen."""
        self.spared = True
        in_few_sizes(self.copies)
        if self.lean is not None:
            self.lean.reach = min(self.lean.reach, IN_ONE_CALL)
            self.lean.spared = True


@dataclass(slots=True)
class Modes:
    """Which modules were in training mode before a model was set to evaluation."""

    before: weakref.WeakKeyDictionary[nn.Module, bool]
    stubborn: weakref.WeakSet[nn.Module]  # in training mode whatever `eval` says

    @classmethod
    def evaluated(cls, model: nn.Module) -> Modes:
        before = weakref.WeakKeyDictionary({m: m.training for m in model.modules()})
        model.eval()
        return cls(before, weakref.WeakSet(m for m in model.modules() if m.training))

    def changed(self, model: nn.Module) -> list[str]:
        """Names of modules that somebody has set to training mode since."""
        if not any(m.training and m not in self.stubborn for m in model.modules()):
            return []
        named = model.named_modules()
        return [name for name, m in named if m.training and m not in self.stubborn]

    def restore(self, model: nn.Module) -> None:
        """As it was before. Modes that the owner has set meanwhile are the owner's wish."""
        if any(m.training and m not in self.stubborn for m in self.before):
            return
        if self.before.get(model):
            model.train()  # by its own method, which some models extend
        for module in model.modules():
            module.training = self.before.get(module, module.training)


@dataclass(slots=True)
class Shared:
    """What is changed in one model, and by whom it is held."""

    users: list[int] = field(default_factory=list)  # keys of borrowings, once per `take`
    modes: Modes | None = None
    kernels: Kernels | None = None
    before: list[Product] = field(default_factory=list)  # what stood in for linear layers before

    def release(self, model: nn.Module) -> None:
        """Restore the model, once nobody holds it."""
        if self.users or self.modes is None:
            return
        for product in self.kernels.products if self.kernels is not None else ():
            product.take_out()
        for product in self.before:
            if product.fits():
                product.renew()
                product.put_in()
        self.modes.restore(model)
        self.modes, self.kernels, self.before = None, None, []


@dataclass(frozen=True, slots=True)
class Followed:
    """What a look at a model has found."""

    weights: int = 0  # that were changed or replaced
    patched: bool = False  # whether modules, their values, buffers or places of tensors are others
    hooked: bool = False  # whether a caller's code runs in the modules now


def let_go(held: weakref.ref[nn.Module], shared: Shared, key: int) -> None:
    """Give back whatever a borrower held, however often it took it."""
    with _lock:
        shared.users[:] = [user for user in shared.users if user != key]
        model = held()
        if model is not None:
            shared.release(model)


class Borrowing:
    """One borrower's hold on a model, taken when made; between uses it may be given back."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        self.placement = placement(model)
        self.closed = False
        self.key = next(_keys)
        self.asked = "auto", False
        self.kernels: Kernels | None = None
        self.watch: WeightWatch | None = None
        self.seams: list[Seam] = []
        self.patched = False  # since it was told last
        with _lock:
            self.shared = _shared.setdefault(model, Shared())
        self.close_once = weakref.finalize(self, let_go, weakref.ref(model), self.shared, self.key)
        self.close_once.atexit = False
        self.take()

    def take(self) -> None:
        """Evaluation mode, and the kernels chosen before; those of another borrower are shared."""
        with _lock, ExitStack() as refused:
            shared = self.shared
            shared.users.append(self.key)
            refused.callback(self.give_back)
            if shared.modes is None:
                shared.modes = Modes.evaluated(self.model)
            if self.kernels is None or self.kernels is shared.kernels:
                pass
            elif shared.kernels is None:
                shared.before, shared.kernels = list(installed(self.model)), self.kernels
                for product in shared.before:
                    product.take_out()
                for product in self.kernels.products:
                    product.put_in()
            else:
                self.share(*self.asked)
            refused.pop_all()

    def give_back(self) -> None:
        """End one `take`."""
        with _lock:
            if self.key in self.shared.users:
                self.shared.users.remove(self.key)
            self.shared.release(self.model)

    def close(self) -> None:
        """Give back for good."""
        self.closed = True
        self.close_once()
        self.kernels = self.watch = None
        self.seams = []

    def install(
        self, mode: str, pad_lone: bool = False, capture: Callable[[], LeanForward] | None = None
    ) -> KernelReport:
        """Choose kernels as `choose_kernels` does, or share what another has chosen.

        Those of a captured model are its own; without one they stand in for the model's layers.
        """
        with _lock:
            shared, self.asked = self.shared, (mode, pad_lone)
            if shared.kernels is None:
                shared.before = list(installed(self.model))
                restore(self.model)
                lean, why = None, ""
                if capture is not None:
                    try:
                        lean = capture()
                    except CapabilityError as refused:
                        why = refused.possible.rstrip(".")
                shared.kernels = self.chosen(mode, pad_lone, lean, why)
            self.share(mode, pad_lone)
            self.watch, self.seams = WeightWatch(self.model), seams(self.model)
            return shared.kernels.report

    def follow(self) -> None:
        """Have kernels that another borrower chose read the weights as they are now, before
        anything is computed with them: nobody may have looked since these were written to."""
        with _lock:
            there = self.shared.kernels
            if there is None:
                return
            for product in there.copies:
                product.renew([states(module) for module in product.modules])
            if there.lean is not None:
                there.lean.settle()

    def chosen(self, mode: str, pad_lone: bool, lean: LeanForward | None, why: str) -> Kernels:
        """Kernels for a captured model, or for the modules."""
        sites = None if lean is None else lean.sites
        report = choose_kernels(self.model, mode, pad_lone=pad_lone, sites=sites)
        if lean is not None and mode in ("auto", "inplace"):
            lean.reach = reach_in_c(lean.sites, copies=not report.why)
        report = replace(report, captured=lean is not None, uncaptured=why)
        made = Kernels((mode, pad_lone), report, list(installed(self.model)), lean)
        for product in made.copies:
            product.read = [states(module) for module in product.modules]
        return made

    def give_up_capture(self, why: str) -> KernelReport:
        """Run the modules after all, for everybody who holds the model."""
        with _lock:
            there = self.shared.kernels
            assert there is not None
            LOG.info("the captured forward of the %s is given up: %s", self.name, why)
            found = self.chosen(*there.asked, None, why)
            there.report, there.products, there.lean = found.report, found.products, None
            if there.spared:
                there.spare_memory()
            return there.report

    @property
    def lean(self) -> LeanForward | None:
        """The captured model; None where there is none, or it was closed."""
        return None if self.kernels is None else self.kernels.lean

    def share(self, mode: str, pad_lone: bool) -> None:
        """Use the kernels that are in place. `auto` takes what there is, others what they ask."""
        there = self.shared.kernels
        assert there is not None
        if mode != "auto" and there.asked != (mode, pad_lone):
            raise ConfigError(
                f"{wording(mode, pad_lone)} was asked for the {self.name}, and another session "
                f"has this very model with {wording(*there.asked)}.",
                "kernels are put into a model, so those who share a model share its kernels.",
                "close the other session, ask for the same, or load the model a second time.",
            )
        self.kernels = there

    def fits(self) -> bool:
        """Whether the model has the place, type and vocabulary it was opened with."""
        return placement(self.model) == self.placement

    def refresh(self, full: bool, check: Callable[[Any], None] = lambda model: None) -> Followed:
        """Follow what was changed; `check` refuses a model with other modules than can be followed.

        A look at fingerprints; `full` compares every packed number with its weight.
        """
        with _lock:
            if self.closed or self.kernels is None or self.watch is None:
                return Followed()
            now = seams(self.model)
            if now != self.seams:
                check(self.model)
                self.seams, self.patched = now, True
            if self.kernels.lean is not None and self.kernels.lean.patched(now):
                self.give_up_capture("its modules were patched after it was captured")
            found = self.watch.look(self.model)
            changed, weights, moved = found.modules, found.weights, found.moved
            self.patched |= moved or found.buffers
            if moved and not self.fits():
                refuse_other_place(self.model, self.name)
            if moved and self.kernels.lean is not None and self.kernels.lean.parted():
                self.give_up_capture("weights that were one when it was captured are several now")
            if changed:
                check_finite(self.model, self.name)
            for product in self.kernels.copies:
                written = [module for module in product.modules if id(module) in changed]
                if written:
                    product.renew([states(module) for module in product.modules])
                elif full and not product.follows():
                    product.renew()
                    weights += 1
            if self.kernels.lean is not None and (changed or self.patched or full):
                self.kernels.lean.settle()
            if changed or moved or full:
                self.watch.renew(self.model)
            patched, self.patched = self.patched, False  # told once, also if a look was refused
            return Followed(weights, patched, patched and hooked(self.model) is not None)

    def check_usable(self) -> None:
        """ConfigError where the model was closed, or set to training mode since it was loaded."""
        if self.closed:
            raise ConfigError(
                f"the {self.name} was asked to score after it was closed.",
                "close gave the model back to its owner, without our kernels and in its own mode.",
                "load the model again, or close it later.",
            )
        modes = self.shared.modes
        training = modes.changed(self.model) if modes is not None else []
        if training:
            which = f"{training[0] or 'all of it'}" + (
                f" and {len(training) - 1} more modules" if training[0] and training[1:] else ""
            )
            raise ConfigError(
                f"the {self.name} has modules in training mode, set so or put in after it was "
                f"loaded: {which}.",
                "text is written in evaluation mode; dropout would change it at every token.",
                "call model.eval() before generate.",
            )


def wording(mode: str, pad_lone: bool) -> str:
    """How a user asks for these kernels."""
    return "exact_bits=True" if pad_lone else f"kernels={mode!r}"


def placement(model: Any) -> tuple[Any, ...]:
    """Where a model is, in which type, and how many words it knows."""
    words = model.get_input_embeddings().weight.shape, model.get_output_embeddings().weight.shape
    return model.device, model.dtype, *words


def refuse_other_place(model: Any, name: str) -> NoReturn:
    device, dtype, words, _ = placement(model)
    raise ConfigError(
        f"the {name} was moved, converted or resized after it was loaded: it is on {device} in "
        f"{dtype} and knows {words[0]} words now.",
        "weights may get other numbers under a loaded model, no other size, type or place.",
        "close what was loaded, and load the changed model.",
    )

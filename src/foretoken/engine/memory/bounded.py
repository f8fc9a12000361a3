"""A budget of memory kept at run time: who gets a place in the batch, and how large trees may be.

Memory that gets short is saved in this order: less is kept of texts that are over; trees shrink,
down to small ones; then fewer rows are decoded together, and others wait; then a lone row has no
tree. A row that would not fit alone is refused with the numbers, while others go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foretoken.engine.admission import Waiting
from foretoken.engine.memory.amounts import enough, told
from foretoken.engine.memory.plan import CACHE, PHASES, Layout, Need
from foretoken.engine.memory.solver import most
from foretoken.errors import CapabilityError
from foretoken.lm.runtime.heap import use_large_blocks_again
from foretoken.lm.runtime.prefixes import Prefixes
from foretoken.types import DecodeState, Rows

FEW = 4  # nodes: rows with smaller trees write less than one row fewer with what that leaves
SEVERAL = 4  # rows that have a place at once, with few nodes, where none names its length


class Room:
    """What is left of a budget beside weights, and what rows together take of it."""

    def __init__(self, layout: Layout, budget: int, nodes: int, steady: bool) -> None:
        self.layout, self.budget = layout, budget
        self.nodes = nodes  # of the largest tree that is ever asked for
        self.steady = steady  # a row's text may depend on how much is drafted for it

    @property
    def left(self) -> int:
        """Bytes for generation."""
        return self.budget - self.layout.plan(Need(0, 0)).weights

    def takes(self, rows: int, context: int, nodes: int, sampled: bool = False) -> int:
        """Bytes of generation for rows of at most so many tokens; `sampled`: any one of them."""
        return self.layout.plan(Need(rows, context, nodes, sampled=sampled)).generation

    def passing(self, need: Need) -> int:
        """Bytes of generation that come and go with every chunk and step."""
        return max(map(self.layout.plan(need).of, PHASES))

    def fits(self, rows: int, context: int, nodes: int, sampled: bool = False) -> bool:
        return self.takes(rows, context, nodes, sampled) <= self.left

    def cap(self, rows: int, context: int, sampled: bool = False) -> int | None:
        """Nodes of the largest trees that these rows may have; None: not even plain decoding."""
        found = most(lambda size: self.fits(rows, context, size - 1, sampled), 1, self.nodes + 1)
        return found - 1 if found else None

    def longest(self, sampled: bool = False, rows: int = 1, nodes: int = 0) -> int:
        """Tokens of the longest row that fits: alone and without guesses, or as asked for."""
        return most(lambda tokens: self.fits(rows, tokens, nodes, sampled), 1, 1 << 24)

    def refusal(self, row: DecodeState) -> CapabilityError | None:
        """Why a row can never have a place; None where it can."""
        tokens, sampled = wanted(row), draws([row])
        if self.fits(1, tokens, 0, sampled):
            return None
        needs, new = self.takes(1, tokens, 0, sampled), tokens - row.prompt_len
        longest = self.longest(sampled)
        left = max(longest - row.prompt_len, 0)
        do = f"ask for at most {left} new tokens" if left else "shorten the prompt"
        held = self.budget - self.left
        return CapabilityError(
            f"a text of {row.prompt_len} prompt tokens and up to {new} new ones was asked for: it "
            f"needs {told(needs)} beside the weights, without any guess.",
            f"of the memory budget of {told(self.budget)}, {told(held)} are held by weights; "
            f"{told(max(self.left, 0))} are left, enough for one text of {longest} tokens, prompt "
            f"included.",
            f"{do}, or load with memory_budget={enough(held + needs)!r} or more.",
        )


def wanted(row: DecodeState) -> int:
    """Tokens of a row at its end."""
    return row.prompt_len + row.limit[0]


def draws(rows: Iterable[DecodeState]) -> bool:
    """Whether the text of any row is sampled."""
    return any(row.params.temperature != 0.0 for row in rows)


class Bounded(Waiting):
    """Rows wait until what they need is free; `caches` are told which size they may have."""

    def __init__(self, room: Room, caches: Iterable[Any], rows: int = SEVERAL) -> None:
        super().__init__()
        self.room, self.caches = room, tuple(caches)
        self.several = min(SEVERAL, rows)  # of the most that are decoded together
        self.granted = Need(0, 0)  # what caches have room for
        self.wishes: dict[Prefixes, int] = {}  # bytes that may be kept of texts, memory allowing
        self.seen: tuple[int, ...] = ()  # uids of the rows that trees were cut for
        self.full: tuple[int, ...] = ()  # and of rows that did not fit together
        self.asked: dict[int, int | None] = {}  # uid -> the cap that its owner has set

    def add(self, row: DecodeState) -> None:
        """Have a row wait, or end it where it could wait for ever."""
        why = self.refusal(row)
        if why is not None:
            row.fail(why)
        super().add(row)
        if why is not None:
            self.ends = True  # now that it waits: a step that looked before would have unset it

    def refusal(self, row: DecodeState) -> CapabilityError | None:
        return self.room.refusal(row)

    @property
    def longest(self) -> int | None:
        return self.room.longest(sampled=True)

    @property
    def usual(self) -> int | None:
        return self.room.longest(sampled=True, rows=self.several, nodes=min(FEW, self.room.nodes))

    def look(self) -> None:
        """Share what is left among what is kept of texts that are over, when that has changed."""
        kept = [lm.prefixes for _, lm in self.caches if lm.prefixes is not None]
        if list(self.wishes) != kept:
            self.wishes = {prefixes: prefixes.asked for prefixes in kept}
            self.spare()

    def spare(self) -> None:
        """Have what is kept of texts, and then of freed blocks, fit into what nothing else may
        take. Of rows that write, the states that a head was told are kept until they are over."""
        granted, wanted, layout = self.granted, sum(self.wishes.values()), self.room.layout
        heard = layout.target.states(granted.rows * granted.context, layout.taps) if wanted else 0
        free = max(self.room.left - layout.plan(granted).generation - heard, 0)
        if heard and not free:
            for _, lm in self.caches:
                lm.forget_states()
        for prefixes, wish in self.wishes.items():
            prefixes.allow(min(wish, free * wish // wanted))
        use_large_blocks_again(self, free >= wanted + self.room.passing(granted))

    def next(self, inside: Rows) -> DecodeState | None:
        """The row whose turn it is, if it fits beside those that have a place."""
        self.look()
        row = super().next(inside)
        while row is not None and row.finish is not None:
            self.remove([row])
            row = super().next(inside)
        together = inside if row is None else (*inside, row)
        uids = tuple(one.uid for one in together)
        if uids in (self.seen, self.full):
            return None  # nobody has come or gone
        nodes = self.share(together)
        if nodes is not None:
            self.seat(together, nodes)
            return row
        self.full = uids
        before = tuple(one for one in together if one is not row)
        self.seat(before, self.share(before) or 0)
        return None

    def share(self, rows: Rows) -> int | None:
        """Nodes that each row may have; None: they do not fit together.

        The text of a row whose draws have to repeat may not follow from its neighbours: it keeps
        the trees that it would have alone.
        """
        if not rows:
            return self.room.nodes
        count, context = len(rows), max(map(wanted, rows))
        own = [self.alone(row) for row in rows if self.keeps(row)]
        if count > 1:
            own.append(min(FEW, max(map(self.wish, rows))))
        cap = self.room.cap(count, context, draws(rows))
        return None if cap is None or cap < max(own, default=0) else cap

    def wish(self, row: DecodeState) -> int:
        """Nodes of the trees that a row may have where memory is no matter."""
        own = self.asked.get(row.uid, row.guesses)
        return self.room.nodes if own is None else min(own, self.room.nodes)

    def keeps(self, row: DecodeState) -> bool:
        return self.room.steady and row.repeatable

    def alone(self, row: DecodeState) -> int:
        """Nodes of the trees that a row may have without neighbours."""
        return self.room.cap(1, wanted(row), draws([row])) or 0

    def seat(self, rows: Rows, nodes: int) -> None:
        """Cut trees for these rows, and give caches the size that they need."""
        uids = tuple(row.uid for row in rows)
        if uids == self.seen or not rows:
            return
        self.seen = uids
        self.asked = {row.uid: self.asked.get(row.uid, row.guesses) for row in rows}
        for row in rows:
            row.guesses = min(self.wish(row), self.alone(row) if self.keeps(row) else nodes)
        self.grant(len(rows), max(map(wanted, rows)), nodes, draws(rows))

    def grant(self, rows: int, context: int, nodes: int, sampled: bool) -> None:
        """The size of caches: what they have where that is enough and fits, else what is needed."""
        larger = max(rows, self.granted.rows), max(context, self.granted.context)
        chosen = larger if self.room.fits(*larger, nodes, sampled) else (rows, context)
        self.granted = need = Need(*chosen, nodes, sampled=sampled)
        self.spare()
        layout = self.room.layout
        for role, lm in self.caches:
            columns = layout.columns(need) if role == "target" else layout.draft_columns(need)
            lm.grant(need.rows, columns)

    def affords(self, tokens: int, nodes: int, rows: int = 1) -> bool:
        """Whether rows of so many tokens may have trees of so many nodes, with the root, as the
        rows have that have a place now."""
        return self.room.fits(rows, tokens, nodes - 1, self.granted.sampled)

    def affords_check(self, tokens: int, rows: int = 1) -> bool:
        """Whether one of rows of so many tokens may be read without its cache, beside theirs: the
        granted ones, and what is kept of texts, which fills what those leave."""
        plan, kept = self.room.layout.plan, sum(prefixes.held for prefixes in self.wishes)
        need = Need(rows, tokens, sampled=self.granted.sampled)
        return plan(need).checked(plan(self.granted).of(CACHE)) + kept <= self.room.left

"""The memory plan: every byte before the first token (after SpecMemo, arXiv 2506.01986).

Yildirim and Chen, "SpecMemo: Speculative Decoding is in Your Pocket", model the footprint of
speculative decoding to bound what guessing costs in memory. Their formulas were not at hand: these
are ours, of what this runtime allocates. Weights are what lies in memory between two texts;
generation is all that comes and goes with texts: caches, and the larger of what a chunk of prompts
and what a step holds while it runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretoken.lm.footprint import LAWS, Footprint
from foretoken.lm.kernels.linears import LISTED
from foretoken.lm.runtime.cache import PARTS, rounded

# of generation memory for the allocator, and pages of libraries that any forward touches: measured
# once (benchmarks/memory_plan.py)
SLACK, FLOOR = 0.02, 3 << 20
WEIGHTS, CACHE = "weights", "cache"
SCORES = "scores of a check"  # which is made where there is room for them, and else left out
PHASES = CHUNK, GUESSING, STEP, JUDGING, GROWTH, CHECK = (
    "chunk", "guessing", "step", "judging", "growth", "check",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a plan."""

    kind: str  # WEIGHTS, or of generation: CACHE, and one of PHASES at a time
    name: str
    bytes: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be decoded together."""

    rows: int = 1
    context: int = 1024  # tokens of a row, prompt and new ones
    nodes: int = 0  # guessed below the root, per row and step
    depth: int = 0
    sampled: bool = False  # any of them: laws of every node are made, and kept until all is judged


def slack(counted: int) -> int:
    """Bytes with what the allocator and libraries take beside what is counted."""
    return counted + round(SLACK * counted) + FLOOR


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what takes them."""

    need: Need
    parts: tuple[Part, ...]

    def of(self, *kinds: str) -> int:
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    @property
    def weights(self) -> int:
        """What lies in memory between two texts."""
        return self.of(WEIGHTS)

    @property
    def generation(self) -> int:
        """The most that texts take beside it, the allocator's slack included."""
        return slack(self.of(CACHE) + max(map(self.of, PHASES)))

    def checked(self, caches: int = 0) -> int:
        """Likewise while a text is compared with a forward of the model's own attention, beside
        caches of so many bytes where those are larger."""
        return slack(max(self.of(CACHE), caches) + self.of(CHECK, SCORES))

    @property
    def total(self) -> int:
        return self.weights + self.generation

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "need": asdict(self.need),
            "parts": [asdict(part) for part in self.parts],
            "weights": self.weights,
            "generation": self.generation,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True)
class Layout:
    """What a target, a method and its parts are made of."""

    target: Footprint
    draft: Footprint | None = None
    head: int = 0  # bytes of a head's weights
    head_column: int = 0  # bytes that a head keeps of every token
    head_row: int = 0  # and of a text, however long
    head_decodes: bool = False  # it keeps them in a cache as a draft model does
    taps: int = 0  # hidden states of the target that are read
    data: int = 0  # bytes of a datastore, resident once all of it was looked at
    copies: bool = True  # kernels may keep second copies of weights
    trees: bool = False  # a draft model may be fed more nodes than are proposed
    deepest: int = 0  # nodes of the longest path of a draft; 0: not known
    drawn: bool = False  # guesses for sampled text may be drawn, from laws that are kept
    ahead: int = 1  # drafts of a row at a time: two where it is drafted while the target verifies
    # bytes counted where weights lie by now; None: as the configurations say
    loaded: int | None = None
    notes: tuple[str, ...] = field(default=())

    def plan(self, need: Need) -> MemoryPlan:
        """The plan for rows decoded together."""
        parts = (*self.kept(), *self.caches(need), *self.chunk(need), *self.step(need))
        return MemoryPlan(need, tuple(part for part in parts if part.bytes))

    def kept(self) -> list[Part]:
        """Weights, and what lies beside them between texts."""
        if self.loaded is not None:
            return [Part(WEIGHTS, "weights and their copies", self.loaded, "as loaded"),
                    Part(WEIGHTS, "datastore", self.data, "its files")]  # fmt: skip
        models = [("target", self.target)] + ([("draft", self.draft)] if self.draft else [])
        found = [Part(WEIGHTS, name, one.weights, "parameters and buffers") for name, one in models]
        copies = sum(one.copies for _, one in models) if self.copies else 0
        return [
            *found,
            Part(WEIGHTS, "second copies", copies, "packed for kernels, at most"),
            Part(WEIGHTS, "head", self.head, "parameters, in the target's type"),
            Part(WEIGHTS, "datastore", self.data, "its files"),
        ]

    def columns(self, need: Need) -> int:
        """Of a row: all tokens, and the tree behind the last one."""
        return need.context + self.ahead * need.nodes

    def draft_columns(self, need: Need) -> int:
        """Likewise in a draft's cache, which may have been fed nodes that were not proposed."""
        return need.context + (2 if self.trees else 1) * self.ahead * need.nodes

    def caches(self, need: Need) -> list[Part]:
        """Keys and values, and what stays for as long as a row does."""
        rows, target, draft = need.rows, self.target, self.draft
        columns = self.columns(need)
        tables = target.tables(columns)
        found = [
            Part(
                CACHE,
                "target's cache",
                rows * rounded(columns) * target.column,
                f"{columns} columns",
            )
        ]
        if draft is not None:
            own = self.draft_columns(need)
            tables += draft.tables(own)
            found.append(
                Part(CACHE, "draft's cache", rows * rounded(own) * draft.column, f"{own} columns")
            )
        part = sum(one.bytes for one in found) // min(PARTS, target.layers)
        return [
            *found,
            Part(GROWTH, "one part of caches", part, "the old one, while the new one is filled"),
            Part(CACHE, "head's cache", self.head_memory(need), "keys and values of its own"),
            Part(CACHE, "rotations", tables, "tables by position"),
        ]

    def head_memory(self, need: Need) -> int:
        """Bytes of the keys and values of a trained head."""
        columns = rounded(self.draft_columns(need)) if self.head_decodes else self.columns(need)
        return need.rows * (columns * self.head_column + self.head_row)

    def guessing(self, need: Need, guessed: int) -> list[Part]:
        """While a draft is made. A head that keeps no cache as models do reads what it keeps of
        all rows, padded to the longest, with new nodes."""
        small = self.draft.activations(need.rows * need.nodes) if self.draft is not None else 0
        memory = 0 if self.head_decodes else 2 * self.head_memory(need)
        return [
            Part(GUESSING, "draft's logits", guessed, "of every guessed node"),
            Part(GUESSING, "draft's activations", small, "of one layer"),
            Part(GUESSING, "head's cache", memory, "padded, and with nodes"),
        ]

    def chunk(self, need: Need) -> list[Part]:
        """While a chunk of prompts is fed."""
        rows, target = need.rows, self.target
        tokens = target.chunk(rows, need.context)
        columns = self.columns(need)
        states = 2 * target.states(rows * need.context, self.taps)
        scores = target.scores(1, min(tokens, need.context), columns)
        attention = target.prompt_attention(rows, need.context, columns)
        of = f"of one layer, {tokens} tokens of prompts"
        return [
            Part(CHUNK, "activations", target.activations(tokens), of),
            Part(CHUNK, "idle blocks", target.lent(tokens), "of what they lend each other"),
            Part(CHUNK, "mask", target.prompt_mask(rows, need.context, columns), "of a chunk"),
            Part(CHUNK, "attention", attention, "repeated keys and values of one layer"),
            Part(CHUNK, "scores", scores, "of one layer"),
            Part(CHUNK, "hidden states", states, "of whole prompts, for the drafter"),
        ]

    def step(self, need: Need) -> list[Part]:
        """While a tree of every row is scored and judged, and a text checked without its cache."""
        rows, nodes, target = need.rows, 1 + need.nodes, self.target
        tokens = rows * nodes
        columns = self.columns(need)
        guessed = 0
        if self.draft is not None and not (need.sampled and self.drawn):  # laws in their place
            guessed = self.draft.logits(rows * max(need.nodes, 1))
        elif self.draft is None and self.head:
            guessed = target.logits(rows * max(need.nodes, 1))
        # a draft model's are gone by then, unless it writes ahead meanwhile
        beside = guessed if self.draft is None or self.ahead > 1 else 0
        block = target.logits(min(tokens, LISTED)) if tokens > LISTED else 0
        logits = target.logits(tokens)
        of = f"of {tokens} nodes"
        return [
            Part(STEP, "target's logits", logits, of),
            Part(STEP, "draft's logits", beside, "of every guessed node"),
            Part(STEP, "a block of logits", block, "while it is put to the others"),
            Part(STEP, "hidden states", target.states(tokens, self.taps), "for the drafter"),
            Part(STEP, "mask", target.mask(rows, nodes, columns), "additive, heads folded"),
            Part(STEP, "attention", target.attention(rows, nodes, columns), "of one layer"),
            Part(STEP, "scores", target.scores(rows, nodes, columns), "of one layer"),
            Part(STEP, "activations", target.activations(tokens), "of one layer"),
            Part(STEP, "idle blocks", target.lent(tokens), "of what they lend each other"),
            Part(JUDGING, "target's logits", logits, of),
            Part(JUDGING, "draft's logits", beside, "of every guessed node"),
            *self.laws(need),
            *self.guessing(need, guessed),
            Part(CHECK, "target's logits", logits, of),
            Part(CHECK, "activations", target.fresh(need.context), "of a text without cache"),
            Part(SCORES, "scores", target.fresh_scores(need.context), "of a layer, and its masks"),
        ]

    def laws(self, need: Need) -> list[Part]:
        """What is made of logits, in float32: for greedy text a few laws at a time; of sampled text
        every law that is asked for stays until all rows are judged, as do those that guesses were
        drawn from. Fixed guesses are asked about along one path; of drawn ones no plan is told
        which rule asks about all."""
        vocab, nodes = self.target.vocab, need.rows * (1 + need.nodes)
        parts = [Part(JUDGING, "laws", 3 * 4 * min(nodes * vocab, max(LAWS, vocab)), "being made")]
        if need.sampled:
            path = need.nodes if self.drawn else min(need.nodes, self.deepest or need.nodes)
            nodes = need.rows * (1 + path)
            drawn = need.rows * need.nodes if self.drawn else 0
            parts += [
                Part(JUDGING, "target's laws", 4 * nodes * vocab, f"of {nodes} nodes"),
                Part(JUDGING, "draft's laws", 4 * drawn * vocab, "that guesses were drawn from"),
                Part(STEP, "draft's laws", 4 * drawn * vocab, "that guesses were drawn from"),
            ]
        return parts

    def without_copies(self) -> Layout:
        """The same with kernels that work on the weights where they lie."""
        return replace(self, copies=False)

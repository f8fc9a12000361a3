"""From the ids of a target to those of a draft with another tokenizer, and back.

An id of the target is fed to the draft as the id of the same text, or as several that together are
that text. The draft's law is read at the ids whose text both have; all other tokens of the target
get no guess, so its text follows its own law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretoken.errors import ConfigError
from foretoken.lm.draft_vocabulary import OutputRows
from foretoken.lm.token_bytes import Pieces

LEAST_SHARED = 0.05  # of the smaller vocabulary: with less, hardly a word can be guessed
EXAMPLES = 6


@dataclass(frozen=True, slots=True, eq=False)
class TokenMap:
    """How one tokenizer's ids are told to a model of another."""

    feeds: tuple[tuple[int, ...], ...]  # by id of the target: ids of the draft, one or more
    rows: OutputRows  # ids of both that stand for the same text
    begin: tuple[int, ...] = ()  # what the draft expects before every text
    # so many first ids are the same in both, and no text is of others; 0: ids differ
    alike: int = 0

    @property
    def one_to_one(self) -> bool:
        """Whether every id is fed as itself: nothing but the widths differs."""
        return not self.begin and all(fed == (i,) for i, fed in enumerate(self.feeds))


def same_tokens(width: int, draft_width: int) -> TokenMap:
    """The map between models of one vocabulary, of which one has more rows than the other.

    A text is in ids that both have. What is beyond the draft's is fed as its first id.
    """
    both = min(width, draft_width)
    ids = torch.arange(both)
    feeds = tuple((i if i < both else 0,) for i in range(width))
    return TokenMap(feeds, OutputRows(ids, ids, width), alike=both)


def map_tokens(target: Any, draft: Any, width: int, draft_width: int, name: str) -> TokenMap:
    """The map between two tokenizers, for models of so many tokens; ConfigError with what is
    missing where too little is shared."""
    ours, theirs = Pieces(target), Pieces(draft)
    known = {text: i for text, i in theirs.by_bytes().items() if i < draft_width}
    special = {name: i for name, i in theirs.special.items() if i < draft_width}
    same: dict[int, int] = {}
    for text, i in ours.by_bytes().items():
        if i < width and text in known:
            same[i] = known[text]
    for piece, i in ours.special.items():
        if i < width and piece in special:
            same[i] = special[piece]
    for role, i in ours.roles.items():
        if i < width and theirs.roles.get(role, draft_width) < draft_width:
            same.setdefault(i, theirs.roles[role])
    unshared = [i for i in range(min(width, len(ours.text))) if i not in same]
    least = min(len(ours.by_bytes()), len(theirs.by_bytes()))
    texts = sum(i < len(ours.text) and ours.text[i] is not None for i in same)
    if texts < max(1, LEAST_SHARED * least):
        shown = [repr((ours.text[i] or b"").decode(errors="replace")) for i in unshared[:EXAMPLES]]
        raise ConfigError(
            f"the draft {name} was asked for, which has a tokenizer of its own.",
            f"{texts} of the target's {len(ours.text):,} tokens have their text as one token of "
            f"the draft ({texts / max(1, len(ours.text)):.1%}); not, for instance, "
            f"{', '.join(shown)}.",
            "use a draft whose tokenizer has more words of the target's, or method prompt-lookup.",
        )
    longest = max(map(len, known), default=1)
    spare = next(iter(theirs.roles.values()), 0)
    names = {i: piece.encode() for piece, i in ours.special.items()}
    feeds = []
    for i in range(width):
        said = names.get(i) or (ours.text[i] if i < len(ours.text) else None)
        feeds.append((same[i],) if i in same else pieces_of(said, known, longest) or (spare,))
    taken: dict[int, int] = {}  # an id of the draft stands for one of the target
    for i, j in sorted(same.items()):
        taken.setdefault(j, i)
    pairs = sorted((i, j) for j, i in taken.items())
    rows = OutputRows(
        torch.tensor([j for _, j in pairs]), torch.tensor([i for i, _ in pairs]), width
    )
    return TokenMap(tuple(feeds), rows, beginning(draft, draft_width))


def pieces_of(text: bytes | None, known: dict[bytes, int], longest: int) -> tuple[int, ...]:
    """A text as known pieces, the longest first; none where a byte of it has no piece."""
    found: list[int] = []
    at = 0
    while text and at < len(text):
        ends = range(min(len(text), at + longest), at, -1)
        end = next((end for end in ends if text[at:end] in known), None)
        if end is None:
            return ()
        found.append(known[text[at:end]])
        at = end
    return tuple(found)


def beginning(draft: Any, width: int) -> tuple[int, ...]:
    """What the draft's tokenizer puts before every text."""
    first = getattr(draft, "bos_token_id", None)
    begun = draft("")["input_ids"][:1] if first is not None else []
    return tuple(token for token in begun if token == first and token < width)

"""Where a suffix occurred before, and what followed: texts in one array, places chained by hash.

The published structure is a trie of all suffixes with counts, some hundred bytes per token and
level. Counts are only ever asked below one match, so here they are made from the occurrences of
that match alone: the last two tokens lead to the newest places where they stood, and comparing
backwards from there tells how long each match is. A place costs two links and at most two keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from foretoken.native.look_ups import IndexTable

NOWHERE = -1
END = -1  # stands after every closed text; no token is negative
LOOKED = 4  # places after one token that are visited for each that is wanted, as `copies.c` does


class SuffixIndex:
    """Texts that can be added to at the end and forgotten at the beginning."""

    __slots__ = ("base", "latest", "limit", "links", "table", "tokens")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit  # tokens kept; None: all
        self.tokens = array("q")
        self.table = IndexTable()
        self.base = 0  # tokens forgotten before these; links and keys count from the first ever
        # For the last one and the last two tokens: the newest place they led to, and per place the
        # one before it that the same tokens led to.
        self.latest: tuple[dict[int, int], dict[tuple[int, int], int]] = ({}, {})
        self.links = (array("q"), array("q"))

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The open text goes on. A place is known once its token is: no suffix finds itself."""
        known, pairs = self.latest
        single, double = self.links
        text = self.tokens
        one = text[-1] if text else END
        two = text[-2] if len(text) > 1 else END
        place = self.base + len(text)
        for token in tokens:
            if one == END:
                single.append(NOWHERE)
            else:
                single.append(known.get(one, NOWHERE))
                known[one] = place
            if one == END or two == END:
                double.append(NOWHERE)
            else:
                double.append(pairs.get((two, one), NOWHERE))
                pairs[two, one] = place
            text.append(token)
            two, one = one, token
            place += 1

    def close(self) -> None:
        """The open text ends here; its end counts as something that followed."""
        self.extend((END,))
        if self.limit is not None and len(self.tokens) > self.limit:
            self.forget(len(self.tokens) - self.limit + self.limit // 8)

    def forget(self, count: int) -> None:
        """Drop the oldest closed texts, `count` tokens or a little more."""
        text = self.tokens
        last = min(count, len(text)) - 1
        while last < len(text) and text[last] != END:
            last += 1
        known, pairs = self.latest
        for at in range(1, min(last + 1, len(text))):
            one, two = text[at - 1], text[at - 2] if at > 1 else END
            if known.get(one) == self.base + at:
                del known[one]
            if pairs.get((two, one)) == self.base + at:
                del pairs[two, one]
        del text[: last + 1]
        for links in self.links:
            del links[: last + 1]
        self.base += last + 1

    def located(self, context: Sequence[int]) -> IndexTable:
        """Where all of this lies, and the newest places behind the end of `context`."""
        table, (known, pairs) = self.table, self.latest
        table.aim(self.tokens, self.links, self.base)
        table.after_one = known.get(context[-1], NOWHERE)
        before = context[-2] if len(context) > 1 else END
        table.after_two = pairs.get((before, context[-1]), NOWHERE)
        return table

    def matches(self, context: Sequence[int], longest: int, most: int) -> list[tuple[int, int]]:
        """(place, length of the match before it), newest first.

        At most `most` places after the last two tokens, and as many after the last one alone, of
        the newest `LOOKED` times as many: in a text that goes round in circles nearly all of these
        lie behind both.
        """
        if not context:
            return []
        text, base = self.tokens, self.base
        known, pairs = self.latest
        single, double = self.links
        found: list[tuple[int, int]] = []
        if len(context) > 1 and longest > 1:
            place = pairs.get((context[-2], context[-1]), NOWHERE) - base
            while place >= 0 and len(found) < most:
                length, furthest = 2, min(longest, len(context), place)
                while length < furthest and text[place - 1 - length] == context[-1 - length]:
                    length += 1
                found.append((place, length))
                place = double[place] - base
        both = context[-2] if len(context) > 1 and longest > 1 else None
        place, count, looked = known.get(context[-1], NOWHERE) - base, 0, 0
        while place >= 0 and count < most and looked < LOOKED * most:
            looked += 1
            if both is None or place < 2 or text[place - 2] != both:
                found.append((place, 1))
                count += 1
            place = single[place] - base
        found.sort(reverse=True)
        return found


class Followers:
    """The trie of what followed some places, with how often: counts never grow downwards."""

    __slots__ = ("counts", "parents", "tokens", "total")

    def __init__(
        self, index: SuffixIndex, places: Sequence[int], depth: int, eos: frozenset[int]
    ) -> None:
        text = index.tokens
        same: dict[tuple[int, ...], int] = {}
        for place in places:
            path = tuple(text[place : place + depth])
            same[path] = same.get(path, 0) + 1
        self.total = len(places)
        self.tokens, self.parents, self.counts = [END], [-1], [self.total]
        child: dict[tuple[int, int], int] = {}
        for path, times in same.items():
            node = 0
            for token in path:
                if token == END:
                    break
                below = child.get((node, token))
                if below is None:
                    below = child[node, token] = len(self.tokens)
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.counts.append(0)
                self.counts[below] += times
                node = below
                if token in eos:
                    break

    def best(self, nodes: int, least: float) -> list[int]:
        """The `nodes` most frequent nodes seen at least `least` times; parents come along."""
        counts = self.counts
        often = [node for node in range(1, len(counts)) if counts[node] >= least]
        often.sort(key=lambda node: -counts[node])  # stable: older ones, so parents, first
        return sorted(often[:nodes])

    def chain(self, nodes: int, least: float) -> list[int]:
        """The most frequent child of the most frequent child, and so on; ties to the newest."""
        heirs: dict[int, int] = {}
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            if self.counts[node] > self.counts[heirs.get(parent, 0)] or parent not in heirs:
                heirs[parent] = node
        path: list[int] = []
        node = heirs.get(0, 0)
        while node and len(path) < nodes and self.counts[node] >= least:
            path.append(node)
            node = heirs.get(node, 0)
        return path

"""A draft with another tokenizer, spoken to in the ids of the target.

Every row has a shadow, which is the same text in the draft's own ids. A node of the target is a
path of one or more nodes in the draft's tree, and its law is the one behind the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foretoken.coins import SeededCoins
from foretoken.contract import LanguageModel
from foretoken.lm.token_map import TokenMap
from foretoken.lm.views.few_rows import FewRows
from foretoken.trees.growing import Grown, GrowthRule
from foretoken.types import DecodeState, Draft, Ragged, Rows, SamplingParams, Scores, Taps


@dataclass(slots=True)
class Shadow:
    """A row in the draft's ids, and its open tree in places of the draft's."""

    row: DecodeState
    known: int = 0  # tokens of the target that the shadow has
    paths: list[list[int]] = field(default_factory=list)  # by node of the target
    depths: list[int] = field(default_factory=list)  # of its last place
    places: int = 0
    lost: bool = False  # it reached beyond the draft's positions: its guesses are blind

    def forget(self) -> None:
        self.paths, self.depths, self.places = [], [], 0


class MappedTokens(FewRows):
    """The LanguageModel protocol over `lm`, whose ids are other ones."""

    def __init__(
        self, lm: LanguageModel, tokens: TokenMap, follow: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__(lm, tokens.rows, follow)
        self.map = tokens
        self.longest = lm.max_length
        self._shadows: dict[int, Shadow] = {}

    def prefill(
        self, rows: Rows, taps: Taps = (), *, limit: int | None = None, last: int | None = None
    ) -> list[Float[Tensor, "S L H"] | None]:
        assert not taps, "states of other tokens than were asked for"
        shadows = [self.follow_text(row) for row in rows]
        fed = [shadow.row for shadow in shadows if not shadow.lost]
        if fed:
            self.lm.prefill(fed, limit=limit)
        return [None] * len(rows)

    def missing(self, row: DecodeState) -> int:
        shadow = self.follow_text(row)
        return 0 if shadow.lost else self.lm.missing(shadow.row)

    def score(self, rows: Rows, drafts: Sequence[Draft], taps: Taps = ()) -> list[Scores]:
        trees = [draft.tree for draft in drafts]
        return self.grow(rows, [t.tokens for t in trees], [t.parents for t in trees], taps)

    def grow(self, rows: Rows, tokens: Ragged, parents: Ragged, taps: Taps = ()) -> list[Scores]:
        asked: list[DecodeState] = []
        fed: list[list[int]] = []
        hung: list[list[int]] = []
        wanted: list[list[int] | None] = []  # places in what is fed now, one of each node
        for row, new, above in zip(rows, tokens, parents, strict=True):
            shadow = self._shadows[row.uid]
            if above and above[0] < 0:
                shadow = self.follow_text(row)
                shadow.forget()
            first = shadow.places
            feed = None if shadow.lost else self.translated(shadow, new, above)
            if feed is None:
                self.lose(shadow)
                wanted.append(None)
                continue
            asked.append(shadow.row)
            fed.append(feed[0])
            hung.append(feed[1])
            wanted.append([path[-1] - first for path in shadow.paths[-len(new) :]] if new else [])
        scores = iter(self.lm.grow(asked, fed, hung, taps) if asked else ())
        some = [None if at is None else next(scores) for at in wanted]
        return [
            self.blind(len(new), taps) if at is None or score is None else self.picked(score, at)
            for new, at, score in zip(tokens, wanted, some, strict=True)
        ]

    def grow_trees(
        self, rows: Rows, rules: Sequence[GrowthRule], names: Int[Tensor, "n"] | None = None
    ) -> list[Grown | None]:
        return [None] * len(rows)  # a node of the target's may be several of the draft's

    def translated(
        self, shadow: Shadow, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], list[int]] | None:
        """New nodes as nodes of the draft's tree; None where its positions end before."""
        fed: list[int] = []
        above: list[int] = []
        root = len(shadow.row.tokens) - 1
        for token, parent in zip(tokens, parents, strict=True):
            # The root is the last id of the shadow; what is before it is text.
            own = shadow.row.tokens[-1:] if parent < 0 else self.map.feeds[token]
            at = -1 if parent < 0 else shadow.paths[parent][-1]
            depth = -1 if parent < 0 else shadow.depths[parent]
            path = list(range(shadow.places, shadow.places + len(own)))
            fed += own
            above += [at, *path[:-1]]
            shadow.paths.append(path)
            shadow.depths.append(depth + len(own))
            shadow.places += len(own)
        far = root + max(shadow.depths, default=0) + 1
        return None if self.longest is not None and far > self.longest else (fed, above)

    def picked(self, score: Scores, at: Sequence[int]) -> Scores:
        """The laws behind the last places of nodes."""
        if len(at) != len(score.logits):
            index = torch.tensor(list(at), dtype=torch.long, device=score.logits.device)
            hidden = None if score.hidden is None else score.hidden[index]
            score = Scores(score.logits[index], hidden, score.p, score.share)
        return self.spread(score)

    def blind(self, count: int, taps: Taps) -> Scores:
        """What a draft says of a text that it can no longer read: any token that both share."""
        like = self.base.embed([0])
        hidden = like.new_zeros(count, len(taps), self.hidden_size) if taps else None
        return self.spread(Scores(like.new_zeros(count, len(self.output_rows)), hidden))

    def commit(self, rows: Rows, paths: Ragged) -> None:
        kept: list[tuple[DecodeState, list[int]]] = []
        for row, path in zip(rows, paths, strict=True):
            shadow = self._shadows[row.uid]
            if not shadow.lost:
                places = [place for node in path for place in shadow.paths[node]]
                kept.append((shadow.row, places))
            shadow.forget()
        if kept:
            self.lm.commit([row for row, _ in kept], [places for _, places in kept])

    def prune(self, rows: Rows, kept: Ragged, settled: Sequence[int]) -> None:
        cuts = []
        for row, nodes, count in zip(rows, kept, settled, strict=True):
            shadow = self._shadows[row.uid]
            if shadow.lost:
                continue
            paths = [shadow.paths[node] for node in nodes]
            places = [place for path in paths for place in path]
            now = {place: i for i, place in enumerate(places)}
            # The new root is the last place of its node; what leads to it becomes text.
            gone = sum(map(len, paths[:count])) + (len(paths[count]) - 1 if paths[count:] else 0)
            base = shadow.depths[nodes[count]] if paths[count:] else 0
            shadow.paths = [[max(now[place] - gone, 0) for place in path] for path in paths[count:]]
            shadow.paths = [path[-1:] if i == 0 else path for i, path in enumerate(shadow.paths)]
            shadow.depths = [shadow.depths[node] - base for node in nodes[count:]]
            shadow.places = len(places) - gone
            cuts.append((shadow.row, places, gone))
        if cuts:
            self.base.prune(*map(list, zip(*cuts, strict=True)))

    def free(self, rows: Rows) -> None:
        shadows = []
        for row in rows:
            if (shadow := self._shadows.pop(row.uid, None)) is not None:
                shadow.row.finish, shadow.row.error = row.finish, row.error  # it may be kept now
                shadows.append(shadow.row)
        self.lm.free(shadows)

    def self_check(self, row: DecodeState) -> None:
        shadow = self.follow_text(row)
        shadow.forget()
        if not shadow.lost:
            self.lm.self_check(shadow.row)

    def embed(self, tokens: Sequence[int]) -> Float[Tensor, "n H"]:
        """Of the last id that each token is fed as."""
        return self.lm.embed([self.map.feeds[token][-1] for token in tokens])

    def follow_text(self, row: DecodeState) -> Shadow:
        """The row's shadow, as long as the row is now."""
        shadow = self._shadows.get(row.uid)
        if shadow is None:
            begin = list(self.map.begin)
            if begin and list(self.map.feeds[row.tokens[0]]) == begin:
                begin = []
            own = [len(self.map.feeds[token]) for token in row.tokens[: row.prompt_len]]
            made = DecodeState(begin, len(begin) + sum(own), SamplingParams(), SeededCoins(0), None)
            made.owner, made.rehearsal = row.owner, row.rehearsal
            shadow = self._shadows[row.uid] = Shadow(made)
        for token in row.tokens[shadow.known :]:
            shadow.row.tokens.extend(self.map.feeds[token])
        shadow.known = max(shadow.known, len(row.tokens))
        if self.longest is not None and len(shadow.row.tokens) > self.longest:
            self.lose(shadow)
        return shadow

    def lose(self, shadow: Shadow) -> None:
        """Give up reading a text that is longer than the draft's positions."""
        if not shadow.lost:
            shadow.lost = True
            self.lm.free([shadow.row])

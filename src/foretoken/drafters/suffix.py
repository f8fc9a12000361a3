"""Suffix decoding: follow the most frequent continuations of the recent suffix (arXiv 2411.04975).

Two indexes, one of the request and one of earlier answers to the same owner. For every match length
the frequencies of what followed give a draft and its score, the accepted tokens to expect; the
longer the match, the longer the draft may be. The draft with the best score is taken. Differences:
an answer enters its index when it is complete; a draft may be a tree, best first; frequencies come
from the newest occurrences (`SuffixIndex`), and of equally frequent tokens the newest leads; and
where tokens have prices, chances are what shares of this size behind a match of this length came
to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.contract import Features
from foretoken.drafters.parts.look_up import LookUp
from foretoken.drafters.parts.match_odds import MatchOdds, least_copied
from foretoken.drafters.parts.suffix_index import Followers, SuffixIndex
from foretoken.errors import check_values
from foretoken.native.look_ups import FollowingTable, followed
from foretoken.trees.build import parents_among
from foretoken.trees.guesses import Guesses
from foretoken.trees.worth import added
from foretoken.types import Budget, DecodeState, Memory, Shape, Step, TokenTree, Traits

LENGTHS = 3  # longest match lengths looked at where chances rise with the length


class SuffixDecoding(LookUp):
    """A tree or a chain from frequencies, as long as the match deserves."""

    traits = Traits(shape=Shape.TREE, memory=Memory.ENGINE, prices=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        max_match: int = 24  # longest suffix told apart; the production engines' default, paper 64
        max_spec: int = 32  # most nodes of a draft, whatever the budget; paper default
        # nodes of a draft per token matched, where no prices say how far it goes; paper default
        factor: float = 1.0
        offset: float = 0.0  # added to that; paper default
        min_prob: float = 0.1  # paths less frequent than this are not drafted; paper default
        branching: bool = True  # a tree; False: a chain of the most frequent tokens, as published
        occurrences: int = 32  # newest occurrences counted; paper: all
        # tokens of earlier answers kept, for all owners (API keys) together; drafts for one come
        # from its own alone, so that nobody can tell from the speed of an answer what other owners
        # were answered; 0: none, and nobody can within an owner either
        remember: int = 200_000

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        settings = self.config
        check_values(
            settings,
            *(
                (name, getattr(settings, name) >= least, f"{least} or more")
                for name, least in (("max_match", 1), ("max_spec", 1), ("factor", 0),
                                    ("min_prob", 0), ("occurrences", 1), ("remember", 0))
            ),
        )  # fmt: skip
        shape = Shape.TREE if settings.branching else Shape.CHAIN
        memory = Memory.ENGINE if settings.remember else Memory.ROW
        self.traits = replace(self.traits, shape=shape, memory=memory)
        # of every owner who was answered, none of them empty; whoever is quiet longest comes first
        self.answers: dict[str, SuffixIndex] = {}
        self.odds = MatchOdds(), MatchOdds()  # of the request's own text, of earlier answers
        self.following = FollowingTable(
            longest=settings.max_match, most=settings.occurrences, max_spec=settings.max_spec,
            branching=settings.branching, lengths=LENGTHS, factor=settings.factor,
            offset=settings.offset, min_prob=settings.min_prob,
        )  # fmt: skip
        self.spare, self.cut = Guesses(), Guesses()

    def start(self, row: DecodeState, seen: Features | None) -> None:
        row.private[self] = _LookedUp(SuffixIndex(), array("q", row.params.eos))

    def look_up(self, row: DecodeState, budget: Budget) -> Guesses:
        state: _LookedUp = row.private[self]
        state.found = state.own
        if min(budget.depth, budget.nodes) <= 0:
            state.own.clear(row.tokens[-1])
            return state.own
        state.index.extend(row.tokens[len(state.index) :])
        # The request's own suffix is an occurrence as well, one that nothing has followed yet.
        self.speculate(state.index, row, budget, state.own, unfinished=1)
        answers = self.answers.get(row.owner)
        if answers is not None:
            self.speculate(answers, row, budget, state.other)
            if state.other.score > state.own.score:
                state.found = state.other
        return state.found

    def speculate(
        self,
        index: SuffixIndex,
        row: DecodeState,
        budget: Budget,
        found: Guesses,
        unfinished: int = 0,
    ) -> None:
        """The most accepted tokens that a draft promises over all match lengths; ties go to the
        longer match.
        """
        state: _LookedUp = row.private[self]
        least, settings = least_copied(budget), self.config
        odds = self.odds[index is not state.index]
        if followed(
            found, self.spare, index.located(row.tokens), state.index.tokens, len(row.tokens),
            self.following, unfinished, budget.depth, budget.nodes, least, odds.table,
            row.warp.greedy, state.ends,
        ):  # fmt: skip
            return
        found.clear(row.tokens[-1])
        context = row.tokens[-settings.max_match :]
        matches = index.matches(context, settings.max_match, settings.occurrences)
        lengths = sorted({length for _, length in matches}, reverse=True)
        for length in lengths if least is None else lengths[:LENGTHS]:
            nodes = min(settings.max_spec, budget.nodes)
            if least is None:  # 1e-6: a factor such as 0.1 must not lose a node to rounding
                nodes = min(nodes, int(settings.factor * length + settings.offset + 1e-6))
            if nodes <= found.score:  # no node is worth more than one; shorter ones get fewer
                break
            depth = min(nodes, budget.depth)
            if least is not None:  # deeper nodes would only take the place of likelier ones
                depth = odds.reach(length, row.warp.greedy, least, depth)
                if not depth:
                    continue
            places = [place for place, matched in matches if matched >= length]
            following = Followers(index, places, depth, row.params.eos)
            total = following.total + unfinished
            choose = following.best if settings.branching else following.chain
            kept = choose(nodes, settings.min_prob * total)
            if least is None:
                chances = [1.0, *(following.counts[node] / total for node in kept)]
            else:
                kept, chances = judged(following, kept, length, odds, row.warp.greedy, least)
            if added(chances) - 1.0 > found.score:
                write(found, row.tokens[-1], following, kept, chances, length)

    def observe(self, step: Step) -> None:
        for row, said in zip(step.rows, step.emitted, strict=True):
            state: _LookedUp = row.private[self]
            if not row.rehearsal:
                odds = self.odds[state.found is state.other]
                odds.all_tried(state.found, said, row.warp.greedy)

    def finish(self, row: DecodeState) -> None:
        super().finish(row)
        # Rows that were broken off are not remembered; nor are those that only measure costs.
        whole = row.finish is not None and row.finish.reason not in ("cancelled", "error")
        if self.config.remember and whole:
            self.remember(row.owner, row.new_tokens)

    def remember(self, owner: str, answer: Sequence[int]) -> None:
        """Keep an answer for its owner; where room is short, whoever was quiet longest loses its
        oldest ones first.
        """
        most = self.config.remember
        index = self.answers.pop(owner, None) or SuffixIndex(most)
        index.extend(answer)
        index.close()
        if len(index):  # nothing stays of an answer that is longer than all that is kept
            self.answers[owner] = index
        while (over := sum(map(len, self.answers.values())) - most) > 0:
            quiet = next(iter(self.answers))
            self.answers[quiet].forget(over + most // 8)
            if not len(self.answers[quiet]):
                del self.answers[quiet]


def write(
    found: Guesses,
    root: int,
    following: Followers,
    kept: Sequence[int],
    chances: Sequence[float],
    matched: int,
) -> None:
    """A draft, and what its chances were made of: lengths that match, and shares of followers."""
    counts, parents = following.counts, following.parents
    tokens = (root, *(following.tokens[node] for node in kept))
    tree = TokenTree(tokens, tuple(parents_among((0, *kept), parents)))
    marks = [0, *(matched + depth - 1 for depth in tree.depths()[1:])]
    shares = [1.0, *(counts[node] / counts[parents[node]] for node in kept)]
    found.fill(tree, chances, marks, shares, score=added(chances) - 1.0)


def judged(
    following: Followers,
    kept: Sequence[int],
    matched: int,
    odds: MatchOdds,
    greedy: bool,
    least: float,
) -> tuple[list[int], list[float]]:
    """Nodes that are likely enough behind a match so long, and their chances, the root's first."""
    counts, parents = following.counts, following.parents
    depth, chance = {0: 0}, {0: 1.0}
    for node in kept:
        parent = parents[node]
        if parent in chance:
            share = counts[node] / counts[parent]
            found = chance[parent] * odds.chance(matched + depth[parent], share, greedy)
            if found >= least:
                chance[node], depth[node] = found, depth[parent] + 1
    return [node for node in kept if node in chance], list(chance.values())


@dataclass(slots=True)
class _LookedUp:
    """What is known of one row."""

    index: SuffixIndex  # of its own text
    ends: array[int]  # tokens that nothing follows
    own: Guesses = field(default_factory=Guesses)  # from its own text
    other: Guesses = field(default_factory=Guesses)  # from earlier answers
    found: Guesses = field(init=False)  # the better one, for the step under way

    def __post_init__(self) -> None:
        self.found = self.own

"""Stochastic beam search by arrivals: the same law as with Gumbel noise, and an exact text."""

from collections import Counter
from functools import partial

import pytest
import torch

from foretoken.audit.law import BOUND, law_gap
from foretoken.coins import enumerate_outcomes
from foretoken.controllers.fixed import Fixed
from foretoken.drafters.growers.chain import Chain
from foretoken.drafters.growers.stochastic_beam import BeamGrowth, StochasticBeam
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import Engine
from foretoken.errors import PairingError
from foretoken.lm.table import TableLM
from foretoken.types import Budget, Draw
from foretoken.verifiers.recursive import Recursive
from foretoken.verifiers.traversal import Traversal


def beam_of(lm, width=2):
    return StochasticBeam(OrdinaryModel(lm), StochasticBeam.Config(width=width))


def grown(drafter, row, depth=2, nodes=99):
    drafter.start(row, None)
    (found,) = drafter.propose([row], [Budget(depth, nodes)])
    return found


def levels_of(draft):
    """Paths of every level, siblings in node order; parents in their own order."""
    tree = draft.tree
    levels = [[] for _ in range(max(tree.depths()) + 1)]
    for node, depth in enumerate(tree.depths()):
        levels[depth].append(tuple(tree.tokens[i] for i in tree.path(node)))
    return tuple(tuple(level) for level in levels[1:])


def enumerated(lm, row, width, depth, **options):
    """The exact law of the tree."""
    law = Counter()

    def run(coins):
        one = row([0, 1], lm.vocab_size, max_new_tokens=20, temperature=1.0, **options)
        one.coins = coins
        return levels_of(grown(beam_of(lm, width), one, depth))

    for found, chance in enumerate_outcomes(run):
        law[found] += chance
    return law


def paths_law(lm, depth):
    """The draft's law of whole paths."""
    law = {(): 1.0}
    for _ in range(depth):
        law = {
            (*path, token): chance * float(q)
            for path, chance in law.items()
            for token, q in enumerate(lm.after([0, 1, *path]).softmax(-1))
        }
    return law


def arrivals_law(law, width, depth):
    """The first `width` different prefixes of each length in a random order of all paths.

    Gumbel-perturbed log-probabilities sort paths like successive draws without replacement, and
    a prefix is perturbed by the best of what continues it: so this is what the papers' beam keeps.
    """
    found = Counter()

    def draw(left, kept, chance):
        if all(len(level) == width for level in kept):
            found[tuple(tuple(level) for level in kept)] += chance
            return
        total = sum(left.values())
        for path, q in left.items():
            longer = []
            for size, level in enumerate(kept, start=1):
                new = path[:size] not in level and len(level) < width
                longer.append([*level, path[:size]] if new else level)
            rest = {other: mass for other, mass in left.items() if other != path}
            draw(rest, longer, chance * q / total)

    draw(law, [[] for _ in range(depth)], 1.0)
    return found


@pytest.mark.parametrize("seed", [0, 3])
def test_arrivals_have_the_law_of_the_perturbed_beam(row, seed):
    """Jointly over both levels, and to the last digit."""
    lm = TableLM.random(3, order=2, seed=seed)
    expected = arrivals_law(paths_law(lm, 2), width=2, depth=2)
    found = enumerated(lm, row, 2, 2)
    assert len(expected) > 60 and found.keys() == expected.keys()
    for tree, chance in expected.items():
        assert found[tree] == pytest.approx(chance, abs=1e-12)


def test_gumbel_noise_gives_the_same_trees(row):
    """The papers' own construction, by simulation."""
    lm, count = TableLM.random(3, order=2, seed=5), 100_000
    law = paths_law(lm, 2)
    generator = torch.Generator().manual_seed(0)
    noise = -torch.empty(count, 9, dtype=torch.float64).exponential_(generator=generator).log()
    perturbed = torch.tensor(list(law.values()), dtype=torch.float64).log() + noise
    leaves = perturbed.topk(2).indices
    first = perturbed.view(count, 3, 3).amax(-1).topk(2).indices
    seen = Counter(map(tuple, torch.cat([first, leaves], 1).tolist()))
    found = enumerated(lm, row, 2, 2)
    paths = list(law)
    gap = 0.5 * sum(
        abs(found[((a,), (b,)), (paths[c], paths[d])] - seen[a, b, c, d] / count)
        for a, b, c, d in seen
    )
    assert gap < 0.012, "five standard errors of the simulation itself"


@pytest.mark.parametrize(("width", "depth"), [(2, 3), (4, 2), (5, 3)])
def test_levels_are_full_and_paths_differ(pair, row, width, depth):
    _, draft = pair
    for seed in range(5):
        one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=seed)
        found = grown(beam_of(draft, width), one, depth)
        assert found.draw is Draw.DISTINCT
        levels = levels_of(found)
        assert [len(level) for level in levels] == [width] * depth
        assert all(len(set(level)) == width for level in levels)
        for node, children in enumerate(found.tree.children()):
            assert (found.q[node] is None) == (not children)


def test_where_little_is_possible_the_beam_is_narrower(pair, row):
    _, draft = pair
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, top_k=2, seed=0)
    assert [len(level) for level in levels_of(grown(beam_of(draft, 5), one, 3))] == [2, 4, 5]


def test_a_path_that_ended_keeps_its_place(pair, row):
    _, draft = pair
    ended = 0
    for seed in range(20):
        one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=seed, eos=frozenset({3, 7}))
        found = grown(beam_of(draft, 4), one, 3)
        tree = found.tree
        for node, children in enumerate(tree.children()):
            if tree.tokens[node] in (3, 7) and node:
                ended += 1
                assert not children
        assert all(len(level) <= 4 for level in levels_of(found))
    assert ended


def test_nothing_is_drawn_where_chances_are_no_numbers(pair, row):
    logits = pair[1].logits.clone()
    logits[1, 2, [4, 6]] = 50.0  # so these are the first level
    logits[2, 4] = torch.nan
    for seed in range(4):
        one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=seed)
        tree = grown(beam_of(TableLM(logits)), one).tree
        below = {tree.tokens[node]: tree.children()[node] for node in tree.children()[0]}
        assert below.keys() == {4, 6} and not below[4] and below[6]
    one = row([1, 2], 12, max_new_tokens=30, temperature=1.0, seed=0)
    assert len(grown(beam_of(TableLM(torch.full_like(logits, torch.nan))), one).tree) == 1


def test_a_beam_of_one_is_plain_speculative_sampling(pair, prompts, row, run):
    target, draft = pair
    make = lambda: [  # noqa: E731
        row(p, 12, temperature=1.0, max_new_tokens=40, seed=i) for i, p in enumerate(prompts)
    ]
    expected, _ = run(target, Chain(OrdinaryModel(draft)), make(), verifier=Recursive(), depth=3)
    found, _ = run(target, beam_of(draft, 1), make(), verifier=Recursive(), depth=3)
    assert found == expected


def test_a_perfect_draft_is_accepted_to_the_end(pair, row, run):
    target, _ = pair
    rows = [row([3, 1], 12, temperature=1.0, max_new_tokens=40, seed=1)]
    drafter = beam_of(TableLM(target.logits), 3)
    _, records = run(target, drafter, rows, verifier=Recursive(), depth=3, nodes=9)
    # The first path of the stream is a plain draw; later ones lead only where others were rejected.
    assert all(len(record.verdicts[0].path) >= 1 for record in records)


@pytest.mark.parametrize("rule", [Recursive, Traversal])
@pytest.mark.parametrize(("vocab", "width"), [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_a_random_number_of_siblings_leaves_the_law_alone(vocab, width, rule):
    """By enumeration, top-down and leaves first; three levels where the vocabulary is small.

    Leaves first, a node is judged before others whose tokens had a say in its number of children.
    """
    target, draft = TableLM.random(vocab, seed=3), TableLM.random(vocab, seed=4)
    depth = 3 if vocab == 2 else 2

    def build():
        controller = Fixed(Fixed.Config(depth=depth, nodes=width * depth))
        return Engine(target, beam_of(draft, width), rule(), controller)

    gap = law_gap(build, target, {"temperature": 1.0}, tokens=depth + 1)
    assert gap.law.accepted > 0 and gap.variation <= BOUND


def test_an_end_token_leaves_the_law_alone():
    target, draft = TableLM.random(3, seed=3), TableLM.random(3, seed=4)

    def build():
        controller = Fixed(Fixed.Config(depth=2, nodes=6))
        return Engine(target, beam_of(draft, 3), Recursive(), controller)

    setting = {"temperature": 1.0, "eos": frozenset({1})}
    assert law_gap(build, target, setting, tokens=3).variation <= BOUND


class CutGrowth(BeamGrowth):
    """Draws one node too many per level and drops the least likely: a choice after the draw."""

    def spawn(self, laws):
        self.widths = tuple(width + 1 for width in self.widths)
        super().spawn(laws)
        self.widths = tuple(width - 1 for width in self.widths)
        worst = min(self.beam, key=lambda node: self.mass[node])
        keep = [node for node in range(len(self.tokens)) if node != worst]
        place = {node: i for i, node in enumerate(keep)}
        self.beam = [place[node] for node in self.beam if node != worst]
        self.parents = [place.get(self.parents[node], -1) for node in keep]
        for name in ("tokens", "laws", "mass"):
            setattr(self, name, [getattr(self, name)[node] for node in keep])


class KeepsLikeliest(StochasticBeam):
    growth = CutGrowth


def test_a_beam_cut_by_likelihood_after_its_draws_is_biased():
    target, draft = TableLM.random(3, seed=3), TableLM.random(3, seed=4)

    def build(drafter):
        made = drafter(OrdinaryModel(draft), StochasticBeam.Config(width=2))
        return Engine(target, made, Recursive(), Fixed(Fixed.Config(depth=1, nodes=2)))

    gaps = [
        law_gap(partial(build, kind), target, {"temperature": 1.0}, tokens=2).variation
        for kind in (StochasticBeam, KeepsLikeliest)
    ]
    assert gaps[0] <= BOUND and gaps[1] > 1e-3


def test_at_temperature_zero_it_is_plain_beam_search(pair, row):
    _, draft = pair
    one = row([0, 1], 12, max_new_tokens=30)
    found = grown(beam_of(draft, 3), one, 2)
    assert found.draw is Draw.POINT and found.q is None
    law = draft.after([0, 1]).softmax(-1)
    first = law.topk(3).indices.tolist()
    values = {
        (a, b): float(law[a] * draft.after([0, 1, a]).softmax(-1)[b])
        for a in first
        for b in range(12)
    }
    best = sorted(values, key=lambda path: -values[path])[:3]
    assert levels_of(found) == (tuple((token,) for token in first), tuple(best))


def greedy_beam_of(lm, width):
    return StochasticBeam(OrdinaryModel(lm), StochasticBeam.Config(width=width, greedy_draft=True))


def test_a_greedy_draft_gives_each_node_what_plain_beam_search_keeps_there(pair, row):
    _, draft = pair
    one = row([0, 1], 12, max_new_tokens=30, temperature=1.0, seed=3)
    found = grown(greedy_beam_of(draft, 3), one, 3)
    assert found.draw is Draw.MIXED
    paths = levels_of(found)
    assert [len(level) for level in paths] == [3, 3, 3]
    beam = [()]
    for level in paths:
        laws = {path: one.warp.law([0, 1, *path], draft.after([0, 1, *path])) for path in beam}
        values = {
            (*path, token): chance_of(path, one, draft) * float(law[token])
            for path, law in laws.items()
            for token in range(12)
        }
        best = sorted(values, key=lambda path: -values[path])[:3]
        kept = Counter(path[:-1] for path in best)
        assert kept == Counter(path[:-1] for path in level)
        for path, count in kept.items():
            tokens = [other[-1] for other in level if other[:-1] == path]
            assert tokens[:-1] == laws[path].topk(count).indices.tolist()[:-1]
        beam = list(level)


def chance_of(path, row, lm):
    """The draft's probability of a path."""
    chance = 1.0
    for at, token in enumerate(path):
        text = [*row.tokens, *path[:at]]
        chance *= float(row.warp.law(text, lm.after(text))[token])
    return chance


@pytest.mark.parametrize("verifier", ["mixed", "traversal"])
@pytest.mark.parametrize(
    "setting", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.7}, {"temperature": 0.0}]
)
def test_a_greedy_beam_keeps_the_law(verifier, setting):
    target, guess = TableLM.random(4, seed=21), TableLM.random(4, seed=22)

    def build():
        options = {"width": 2, "depth": 2, "greedy_draft": True}
        return assemble("rsd-s", target, guess, verifier=verifier, **options)

    gap = law_gap(build, target, setting)
    assert gap.law.drafted > 0 and gap.variation <= BOUND


def test_a_greedy_beam_needs_a_rule_for_it():
    lm = TableLM.random(4)
    with pytest.raises(PairingError, match="mixed"):
        assemble("rsd-s", lm, lm, greedy_draft=True)

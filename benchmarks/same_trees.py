"""Which rule keeps more of the very same tree, and which tree more of the very same context.

    python benchmarks/same_trees.py [--quick] [--per-family 50] [--noise 0.5]

The target writes after held-out prompts at temperature 1. At places of that text every kind of
tree is drawn once, the target scores it, and every rule that is exact for it judges it many times
over: rules differ by their own coins only, and those are averaged out. Intervals come from
resampling the prompts. Counted, not timed. Writes benchmarks/results/same_trees.json and .md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import paired
import torch
from pair import draft_noise, main, names, pair, parser, prompts, weak_name, weaker
from rich.markup import escape

import foretoken
from foretoken.bench import environment
from foretoken.bench.progress import Bar, shown
from foretoken.bench.rows import parse_methods
from foretoken.coins import SeededCoins
from foretoken.engine.engine import decode
from foretoken.methods import VERIFIERS, resolve
from foretoken.types import DecodeState, Draft, Scores, Verdict
from foretoken.verifiers.point import Rule

# Three tokens deep; trees of 14 nodes, chains and beams of 12.
CHAIN, DISTINCT, REPEATING = "chain[depth=3]", "mcsd[k=2x2x2]", "mcsd[k=2x2x2,replacement=true]"
CHAINS, BEAM = "spectr[k=4,depth=3]", "rsd-s[width=4,depth=3]"
GREEDY, GREEDY_BEAM = (
    "mcsd[k=2x2x2,greedy_draft=true]", "rsd-s[width=4,depth=3,greedy_draft=true]"
)  # fmt: skip
RULES = {  # of each tree, the first is the one from the top
    CHAIN: ("recursive", "traversal"),
    DISTINCT: ("recursive", "traversal"),
    REPEATING: ("recursive", "k_sequential", "traversal"),
    CHAINS: ("recursive", "k_sequential", "traversal"),
    BEAM: ("recursive", "traversal"),
    GREEDY: ("mixed", "traversal"),
    GREEDY_BEAM: ("mixed", "traversal"),
}
LEAVES_FIRST = "traversal"
Cell = tuple[str, str]  # tree, rule
SIBLINGS = (DISTINCT, REPEATING, GREEDY)  # one shape: two children for every node
ORDERINGS: tuple[tuple[str, Cell, Cell], ...] = (
    *(
        (f"{tree}: leaves first over {rule}", (tree, LEAVES_FIRST), (tree, rule))
        for tree, rules in RULES.items()
        for rule in rules
        if rule != LEAVES_FIRST
    ),
    *(
        (f"equal shape: greedy draft, leaves first, over {tree}, {rule}",
         (GREEDY, LEAVES_FIRST), (tree, rule))
        for tree in SIBLINGS
        for rule in RULES[tree]
        if (tree, rule) != (GREEDY, LEAVES_FIRST)
    ),
    *(
        (f"equal beam: greedy draft, leaves first, over {tree}, {rule}",
         (GREEDY_BEAM, LEAVES_FIRST), (tree, rule))
        for tree in (BEAM, GREEDY_BEAM)
        for rule in RULES[tree]
        if (tree, rule) != (GREEDY_BEAM, LEAVES_FIRST)
    ),
    (f"{CHAINS}: k_sequential over recursive", (CHAINS, "k_sequential"), (CHAINS, "recursive")),
    ("equal shape: drawn without replacement over with",
     (DISTINCT, "recursive"), (REPEATING, "recursive")),
    ("rsd-s over mcsd", (BEAM, "recursive"), (DISTINCT, "recursive")),
    ("mcsd over chain", (DISTINCT, "recursive"), (CHAIN, "recursive")),
)  # fmt: skip


@dataclass(slots=True)
class Prompt:
    """What every rule keeps on average at places of one text."""

    family: str
    places: list[list[int]]  # the text up to each place
    kept: dict[Cell, list[float]] = field(default_factory=dict)  # accepted tokens, per place


class Judges(Rule):
    """Several rules asked many times about a row's first tree; the first's last answer stands."""

    def __init__(self, rules: Mapping[str, Rule], times: int) -> None:
        super().__init__()
        self.rules, self.times = rules, times
        self.exact_for = frozenset.intersection(*(rule.exact_for for rule in rules.values()))
        self.means: dict[int, dict[str, float]] = {}  # by the row's uid

    def verify(
        self, rows: Sequence[DecodeState], drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[Verdict]:
        verdicts = []
        for row, draft, said in zip(rows, drafts, scores, strict=True):
            found = {
                name: [rule.judge_row(draft, said, row.coins) for _ in range(self.times)]
                for name, rule in self.rules.items()
            }
            kept = {name: sum(len(v.path) for v in own) / self.times for name, own in found.items()}
            self.means.setdefault(row.uid, kept)
            verdicts.append(next(iter(found.values()))[-1])
        return verdicts


def texts(session: Any, tasks: Sequence[Any], asked: Any) -> list[Prompt]:
    """The target's own text after every prompt, and the places where trees will be drawn."""
    plain = session.using("plain")
    rows = plain.rows([task.turns[0] for task in tasks], asked.text, temperature=1.0, seed=0)
    starts = [len(row.tokens) for row in rows]
    plain.decode(rows)
    return [
        Prompt(task.family, [row.tokens[:at] for at in range(start, len(row.tokens), asked.every)])
        for task, row, start in zip(tasks, rows, starts, strict=True)
    ]


def judge(session: Any, label: str, found: list[Prompt], asked: Any, bar: Bar) -> None:
    """Draw this kind of tree at every place and ask all its rules."""
    (spec,) = parse_methods(label)
    rules = {name: made(name) for name in RULES[label]}
    own = session.using(spec.method, **spec.method_options, verifier=RULES[label][0])
    depth = own.engine.controller.config.depth
    places = [(prompt, place) for prompt in found for place in prompt.places]
    seeds = count()
    for start in range(0, len(places), asked.max_rows):
        batch = places[start : start + asked.max_rows]
        judges = own.engine.verifier = Judges(rules, asked.times)
        rows = own.rows([place for _, place in batch], depth + 1, temperature=1.0)
        for row in rows:
            row.coins = SeededCoins(next(seeds))
        first_steps(own.engine, rows, judges)
        for (prompt, _), row in zip(batch, rows, strict=True):
            for name, mean in judges.means[row.uid].items():
                prompt.kept.setdefault((label, name), []).append(mean)
            bar.advance()


def made(name: str) -> Rule:
    rule = resolve(VERIFIERS[name])
    return rule(rule.Config())


def first_steps(engine: Any, rows: Sequence[DecodeState], judges: Judges) -> None:
    """One draft, one forward, one verdict for every row; then the rows are let go.

    Rows with longer prompts may join later: the others go on meanwhile, uncounted.
    """
    with closing(decode(rows, engine)) as steps:
        for _ in steps:
            if len(judges.means) == len(rows):
                break


def mean(found: Sequence[Prompt], cell: Cell) -> float:
    """Accepted tokens per step, over all places."""
    return sum(sum(one.kept[cell]) for one in found) / sum(len(one.kept[cell]) for one in found)


def gap(found: Sequence[Prompt], above: Cell, below: Cell) -> paired.Gap:
    """How much more one cell keeps, on the same places."""

    def over(at: Sequence[int]) -> float:
        chosen = [found[i] for i in at]
        return mean(chosen, above) - mean(chosen, below)

    return over


def report(found: Sequence[Prompt], compared: Sequence[dict[str, Any]], setting: str) -> str:
    """The result as Markdown."""
    families = list(dict.fromkeys(prompt.family for prompt in found))
    lines = [
        "# What each rule keeps of the same trees", "", setting, "",
        "Counts, not times: accepted tokens per step at the same places of the target's own text, "
        "the rule's coins averaged out.", "",
        "| tree | rule | accepted | " + " | ".join(families) + " |",
        "|---|---|---:|" + "---:|" * len(families),
    ]  # fmt: skip
    for tree, rules in RULES.items():
        for rule in rules:
            by_family = [mean([p for p in found if p.family == f], (tree, rule)) for f in families]
            cells = " | ".join(f"{value:.3f}" for value in by_family)
            lines.append(f"| `{tree}` | {rule} | {mean(found, (tree, rule)):.3f} | {cells} |")
    return "\n".join([*lines, "", *paired.table(compared)]) + "\n"


def run(description: str | None) -> int:
    options = parser(description)
    options.add_argument("--per-family", type=int, default=50, help="prompts of each family")
    options.add_argument("--text", type=int, default=32, help="tokens the target writes")
    options.add_argument("--every", type=int, default=2, help="tokens from place to place")
    options.add_argument("--times", type=int, default=16, help="verdicts of a rule on a tree")
    options.add_argument("--max-rows", type=int, default=16, help="places judged together")
    draft_noise(options)
    asked = options.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    tasks = prompts(1 if asked.quick else asked.per_family)
    with (
        pair(asked.target, asked.draft) as models,
        weaker(models, asked.noise) as models,
        shown(False) as bar,
        foretoken.load(models.target, "chain", models.draft, max_rows=asked.max_rows) as session,
    ):
        found = texts(session, tasks, asked)
        for label in RULES:
            bar.begin(escape(label), sum(len(prompt.places) for prompt in found))
            judge(session, label, found, asked, bar)
    families = [prompt.family for prompt in found]
    compared = [
        paired.ordering(claim, gap(found, above, below), families)
        for claim, above, below in ORDERINGS
    ]
    where = environment.describe()
    places = sum(len(prompt.places) for prompt in found)
    setting = (
        f"{names(asked)}; {places} places in texts after {len(found)} held-out prompts, "
        f"temperature 1, {asked.times} verdicts per rule and tree. {where['date']}, "
        f"foretoken {where['foretoken']}, torch {where['torch']}, {where['cpu']}."
    )
    rows = [
        {"tree": tree, "rule": rule, "accepted": mean(found, (tree, rule))}
        for tree, rules in RULES.items()
        for rule in rules
    ]
    document = {"environment": where, "setting": setting, "rows": rows, "orderings": compared}
    text = report(found, compared, setting)
    paired.publish(asked.out, weak_name("same_trees", asked.noise), document, text)
    return 0


if __name__ == "__main__":
    main(run, __doc__)

"""What a grammar promises of every lossless method: the masked law, to the last digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken.audit import checks
from foretoken.audit.fixtures import needed
from foretoken.audit.law import BOUND, PROMPT, engine_law, total_variation
from foretoken.coins import Coins, SeededCoins
from foretoken.drafters.given_text import GivenText
from foretoken.drafters.parts.prediction import Prediction
from foretoken.engine.assemble import assemble
from foretoken.engine.engine import decode
from foretoken.engine.guided import Grammars
from foretoken.engine.promise import promise_of_row
from foretoken.lm.table import TableLM
from foretoken.methods import METHODS, Method, needs_draft
from foretoken.row import make_row
from foretoken.types import DecodeState, SamplingParams, Step
from foretoken.verifiers.traversal import level_by_level

LETTERS, END, HOT = "abc", 3, 0.8
VOCAB = len(LETTERS) + 1
# After the first letter two are forced; some texts may end where others go on; one cannot.
WORDS = ("abca", "abcb", "abcbb", "cabc", "b")
# Two beginnings that wait for the same thing, which ends differently behind each.
TWINS = ("acb", "accb", "bca", "bcca")
AS_RULES = {"grammar": 'start: "a" SAME "b" | "b" SAME "a"\nSAME: /c{1,2}/'}
LOSSLESS = [
    entry for entry in METHODS.values() if entry.writes == "text" and promise_of_row(entry).lossless
]
PAIRS = [
    pytest.param(entry, verifier, id=f"{entry.name}-{verifier}")
    for entry in LOSSLESS
    for verifier in (entry.verifier, *entry.verifiers)
]
every_row = pytest.mark.parametrize("entry", LOSSLESS, ids=lambda entry: entry.name)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    return Grammars(tokenizer, VOCAB, frozenset({END}))


def masked_law(target: TableLM, words: Sequence[str], temperature: float) -> dict[Any, float]:
    """By the definition: letters that lead to a word, or the end after one, share the mass."""
    joint: dict[Any, float] = {}

    def go_on(text: str, chance: float) -> None:
        further = {word[len(text)] for word in words if word.startswith(text) and word != text}
        path = tuple(LETTERS.index(letter) for letter in text)
        if not further:
            joint[path] = chance
            return
        open_ = [LETTERS.index(letter) for letter in further] + [END] * (text in words)
        logits = target.after([*PROMPT, *path])
        law = (logits[open_] / temperature).softmax(0).tolist()
        for token, p in zip(open_, law, strict=True):
            if token == END:
                joint[(*path, END)] = chance * p
            else:
                go_on(text + LETTERS[token], chance * p)

    go_on("", 1.0)
    return joint


class Watched:
    """Rows of one grammar, and the drafts that were made for them."""

    def __init__(
        self,
        grammars: Grammars,
        temperature: float,
        prediction: Sequence[int] = (),
        guided: Any = None,
    ):
        self.grammars, self.prediction = grammars, tuple(prediction)
        self.guided = guided or {"choice": list(WORDS)}
        self.params = SamplingParams(
            max_new_tokens=8, temperature=temperature, eos=frozenset({END})
        )
        self.forced = self.followed = 0

    def __call__(self, coins: Coins) -> DecodeState:
        grammar = self.grammars.begin(self.guided, len(PROMPT), self.params.eos)
        options = {name: getattr(self.params, name) for name in ("max_new_tokens", "temperature")}
        params = SamplingParams(**options, eos=self.params.eos, grammar=grammar)
        row = make_row(PROMPT, params, coins, VOCAB)
        if self.prediction:
            row.prediction = Prediction(self.prediction, len(PROMPT))
        return row

    def watch(self, build: Any) -> Any:
        """The engine, with its drafts counted."""
        engine = build()
        engine.listeners.append(self.count)
        return engine

    def count(self, step: Step) -> None:
        draft = step.drafts[0]
        self.forced += draft.given
        self.followed += draft.given > 0 and len(draft.tree) - 1 > draft.given


def takes_given(entry: Method) -> bool:
    """Plain decoding drafts nothing; one that drafts while it verifies, its own guesses alone."""
    return entry.name != "plain" and entry.engine != "engine.overlap:OverlapEngine"


@pytest.mark.parametrize(("entry", "verifier"), PAIRS)
@torch.inference_mode()
def test_the_law_under_a_grammar(grammars, entry: Method, verifier: str) -> None:
    made = Watched(grammars, HOT)
    build = partial(made.watch, partial(checks.table_engine, entry, VOCAB, "fixed", verifier))
    law = engine_law(build, made)
    truth = masked_law(TableLM.random(VOCAB, seed=21), WORDS, HOT)
    assert math.isclose(sum(truth.values()), 1.0)
    assert total_variation(law.joint, truth) <= BOUND
    if not takes_given(entry):
        assert made.forced == 0
    elif GivenText(build().drafter).goes_on:
        assert made.forced > 0, "forced tokens were drafted"


@pytest.mark.parametrize("entry", [METHODS[name] for name in ("chain", "mcsd", "rsd-s", "tree")])
@torch.inference_mode()
def test_drafts_go_on_behind_forced_tokens(grammars, entry: Method) -> None:
    made = Watched(grammars, HOT)
    build = partial(made.watch, partial(checks.table_engine, entry, VOCAB, "fixed"))
    engine_law(build, made)
    assert made.followed > 0


@pytest.mark.parametrize("entry", [METHODS[name] for name in ("mcsd", "tree")])
@torch.inference_mode()
def test_the_law_where_branches_wait_for_the_same(grammars, entry: Method) -> None:
    made = Watched(grammars, HOT, guided=AS_RULES)
    build = partial(made.watch, partial(checks.table_engine, entry, VOCAB, "fixed"))
    law = engine_law(build, made)
    truth = masked_law(TableLM.random(VOCAB, seed=21), TWINS, HOT)
    assert math.isclose(sum(truth.values()), 1.0)
    assert total_variation(law.joint, truth) <= BOUND


@torch.inference_mode()
def test_the_law_of_the_rule_that_devices_take(grammars) -> None:
    """Given nodes come with laws of one token, level by level as well."""

    def build() -> Any:
        engine = checks.table_engine(METHODS["rsd-s"], VOCAB, "fixed", "traversal")
        engine.verifier.settle = level_by_level
        return engine

    made = Watched(grammars, HOT)
    law = engine_law(partial(made.watch, build), made)
    truth = masked_law(TableLM.random(VOCAB, seed=21), WORDS, HOT)
    assert total_variation(law.joint, truth) <= BOUND and made.followed > 0


@every_row
@torch.inference_mode()
def test_the_law_with_a_prediction_under_a_grammar(grammars, entry: Method) -> None:
    """Right at first, then wrong: the law does not know of it."""
    made = Watched(grammars, HOT, [0, 1, 2, 1, 0, 2])
    build = partial(made.watch, partial(checks.table_engine, entry, VOCAB, "fixed"))
    law = engine_law(build, made)
    truth = masked_law(TableLM.random(VOCAB, seed=21), WORDS, HOT)
    assert total_variation(law.joint, truth) <= BOUND


def written(entry: Method, grammars: Grammars, temperature: float, seed: int) -> list[Any]:
    """Texts of one batch, of which some are guided, and some predicted."""
    config = {} if entry.name == "plain" else {"depth": 3, "nodes": 6}
    config |= needed(entry, VOCAB, controller="fixed")
    draft = TableLM.random(VOCAB, seed=22) if needs_draft(entry) else None
    engine = assemble(
        entry.name, TableLM.random(VOCAB, seed=21), draft, controller="fixed", **config
    )
    guided = Watched(grammars, temperature, [0, 1, 2, 0])
    free = SamplingParams(max_new_tokens=9, temperature=temperature)
    rows = [
        guided(SeededCoins(seed)),
        make_row([1, 2, 0, 1], free, SeededCoins(seed), VOCAB),
        guided(SeededCoins(seed + 1)),
        make_row([2], free, SeededCoins(seed), VOCAB),
    ]
    rows[3].prediction = Prediction([0, 2, 1, 1, 0, 2, 1], 1)
    for _ in decode(rows, engine):
        pass
    assert engine.target.rows_held == 0
    return [row.new_tokens for row in rows]


@every_row
def test_guided_and_free_rows_in_one_batch(grammars, entry: Method) -> None:
    """Greedy texts are those of plain decoding; sampled ones are words of the language."""
    plain = written(METHODS["plain"], grammars, 0.0, 0)
    assert written(entry, grammars, 0.0, 0) == plain
    for seed in range(5):
        found = written(entry, grammars, 1.0, seed)
        for tokens in (found[0], found[2]):
            text = "".join(LETTERS[token] for token in tokens if token != END)
            assert text in WORDS

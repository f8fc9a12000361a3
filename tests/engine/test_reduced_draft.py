"""A draft that scores some tokens only: the text is the target's own, whatever the tokens."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import foretoken
from foretoken.audit.law import own_law
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lm.draft_vocabulary import NAME
from foretoken.lm.views.few_rows import FewRows

DRAFTED = ("chain", "tree", "pearl", "mcsd", "rsd-c", "rsd-s", "spectr")
VOCAB = 80
PROMPTS = [[5, 9, 2, 41, 9, 2], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]]
EVEN = list(range(0, VOCAB, 2))


@pytest.fixture(scope="module")
def pair(make_llama):
    import copy

    target = make_llama(VOCAB)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return target, draft


@pytest.fixture(scope="module")
def plain_texts(pair):
    with foretoken.load(pair[0], "plain", kernels="dense") as session:
        return [result.tokens for result in session.generate(PROMPTS, 24)]


@pytest.mark.parametrize("words", [EVEN, [0, 9], [41]], ids=["half", "two", "one"])
@pytest.mark.parametrize("method", DRAFTED)
def test_greedy_text_is_the_targets_alone_and_in_a_batch(pair, plain_texts, method, words):
    with foretoken.load(
        pair[0], method, pair[1], kernels="dense", draft_vocabulary=words, depth=3
    ) as session:
        assert isinstance(session.draft, FewRows)
        together = session.generate(PROMPTS, 24)
        assert [result.tokens for result in together] == plain_texts
        assert session.generate(PROMPTS[0], 24).tokens == plain_texts[0]
        if words is EVEN:
            assert sum(result.stats.accepted for result in together) > 0


@pytest.mark.parametrize("method", DRAFTED)
def test_sampled_text_is_what_a_row_writes_alone(pair, method):
    with foretoken.load(
        pair[0], method, pair[1], kernels="dense", draft_vocabulary=EVEN, depth=3
    ) as session:
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
        together = session.generate(PROMPTS, 16, **options)
        for i, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
            alone = session.generate(prompt, 16, **{**options, "seed": 3 + i})
            assert alone.tokens == text.tokens
        odd = [token for text in together for token in text.tokens if token % 2]
        assert odd  # tokens that no guess can be are written all the same


@pytest.mark.parametrize("method", ["chain", "tree", "mcsd", "rsd-s", "spectr"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"banned_tokens": frozenset(EVEN)},
        {"logit_bias": dict.fromkeys(EVEN, float("-inf"))},
        {"banned_tokens": frozenset(EVEN[1:])},
        {"banned_tokens": frozenset(EVEN), "repetition_penalty": 1.3},
        {"top_k": 70},
    ],
    ids=["all banned", "all biased away", "all but one", "banned, penalty", "top-k beyond"],
)
def test_options_that_leave_a_draft_little_or_nothing(pair, method, temperature, options):
    how = {"temperature": temperature, "seed": 5, **options}
    with foretoken.load(
        pair[0], method, pair[1], kernels="dense", draft_vocabulary=EVEN, depth=3
    ) as session:
        tokens = session.generate(PROMPTS[0], 16, **how).tokens
    assert len(tokens) == 16
    banned = set(options.get("banned_tokens", options.get("logit_bias", ())))
    assert not banned & set(tokens)
    if temperature == 0.0:
        with foretoken.load(pair[0], "plain", kernels="dense") as plain:
            assert plain.generate(PROMPTS[0], 16, **how).tokens == tokens


@pytest.mark.parametrize("method", ["chain", "tree", "mcsd", "rsd-s"])
def test_a_draft_that_knows_the_end_alone_and_may_not_say_it(pair, method):
    how = {"temperature": 1.0, "seed": 2, "min_new_tokens": 8}
    with foretoken.load(
        pair[0], method, pair[1], kernels="dense", draft_vocabulary=[3], depth=3
    ) as session:
        session.eos = frozenset({3})
        assert len(session.generate(PROMPTS[0], 16, **how).tokens) >= 8


def test_the_law_over_many_texts_is_the_targets(make_llama):
    """A real pair, two tokens deep: frequencies beside the law that plain sampling follows."""
    target, draft = make_llama(6, seed=1), make_llama(6, seed=2)
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight /= 3.0
    with foretoken.load(
        target, "chain", draft, kernels="dense", draft_vocabulary=[1, 4], depth=2
    ) as session:
        rows = [session.rows([[1, 2]], 2, temperature=1.0, seed=0)[0]]
        law = own_law(_Model(session.target), (1, 2), rows[0].params)
        count = 3000
        texts = session.generate([[1, 2]] * count, 2, temperature=1.0, seed=0)
    seen: dict[tuple[int, ...], float] = {}
    for text in texts:
        seen[tuple(text.tokens)] = seen.get(tuple(text.tokens), 0.0) + 1 / count
    far = 0.5 * sum(abs(law[text] - seen.get(text, 0.0)) for text in law)
    assert far < 0.06  # a law renormalised wrongly is off by a third


class _Model:
    """`own_law` asks a table for logits after a text; here the model itself answers."""

    def __init__(self, lm):
        self.model, self.vocab_size = lm.model, lm.vocab_size

    def after(self, tokens):
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)])).logits[0, -1].double()


def test_a_directory_says_which_tokens_and_the_session_tells(pair_folders, tmp_path, caplog):
    import shutil

    target, draft = pair_folders
    copied = tmp_path / "draft"
    shutil.copytree(draft, copied)
    (copied / NAME).write_text(json.dumps({"version": 1, "vocab_size": 265, "tokens": [3, 70]}))
    with (
        caplog.at_level(logging.INFO, "foretoken"),
        foretoken.load(target, "chain", copied, kernels="dense") as session,
    ):
        assert "draft vocabulary 2 of 265" in repr(session)
        assert "draft: draft vocabulary 2 of 265" in caplog.text
        assert "draft vocabulary 2 of 265" in repr(session.using("tree"))
    with foretoken.load(
        target, "chain", copied, kernels="dense", draft_vocabulary="off"
    ) as session:
        assert "draft vocabulary" not in repr(session)
    from transformers import AutoModelForCausalLM

    ordinary = AutoModelForCausalLM.from_pretrained(copied)
    assert ordinary.get_output_embeddings().weight.shape[0] == 265


def test_what_cannot_be_is_refused_in_three_parts(pair_folders, tmp_path):
    target, draft = pair_folders
    with pytest.raises(ConfigError, match="no such file"):
        foretoken.load(target, "chain", draft, draft_vocabulary=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="0 to 264"):
        foretoken.load(target, "chain", draft, kernels="dense", draft_vocabulary=[265])
    (tmp_path / NAME).write_text(json.dumps({"version": 1, "vocab_size": 9, "tokens": [1]}))
    with pytest.raises(CheckpointError, match="made for 9 tokens"):
        foretoken.load(target, "chain", draft, kernels="dense", draft_vocabulary=tmp_path / NAME)

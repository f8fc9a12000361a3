"""What every method with a trained head keeps, on tiny models; new rows of METHODS join by
themselves.
"""

from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

import foretoken
from foretoken.audit.fixtures import random_head
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import store
from foretoken.heads.table import HEADS, resolve
from foretoken.lm import draft_vocabulary
from foretoken.methods import METHODS
from foretoken.training.heads import run_training

VOCAB = 61
ROWS = [pytest.param(row, id=row.name) for row in METHODS.values() if row.head]
PROMPTS = [[(7 * i * i + 3 * i) % VOCAB for i in range(n)] for n in (19, 1, 6)]
HEAD_ROWS = {row.head: row for row in reversed(METHODS.values()) if row.head}  # one of each head
every_head = pytest.mark.parametrize(
    "row", [pytest.param(row, id=kind) for kind, row in HEAD_ROWS.items()]
)
every_row = pytest.mark.parametrize("row", ROWS)
every_model = pytest.mark.parametrize(
    "family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def models(make_llama):
    torch.manual_seed(0)
    gpt2 = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    qwen3 = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return {
        "llama": make_llama(VOCAB, seed=3),
        "gpt2": GPT2LMHeadModel(gpt2).eval(),
        "qwen3": Qwen3ForCausalLM(qwen3).eval(),
    }


def opened(model, row, head=None, **options):
    """A session of the row, with a random head unless there is another."""
    head = head or random_head(row.head, VOCAB, model.config.hidden_size)
    return foretoken.load(model, method=row.name, draft_head=head, kernels="dense", **options)


def texts(results):
    return [result.tokens for result in results]


def accepted(session):
    """Tokens per target forward, along the corpus."""
    stats = [one.stats.mean_accepted_length for one in session.generate(prompts("train", 8), 40)]
    return sum(stats) / len(stats)


@every_model
@every_row
def test_greedy_text_is_plains_with_any_head(row, family, models):
    with foretoken.load(models[family], method="plain", kernels="dense") as plain:
        wanted = texts(plain.generate(PROMPTS, 40))
    # what a row drafts by itself is the machine's affair: on a tiny target often nothing
    for always in ({}, {"controller": "fixed", "depth": 3}):
        with opened(models[family], row, **always) as session:
            found = session.generate(PROMPTS, 40)
            assert texts(found) == wanted
            assert not always or sum(one.stats.drafted for one in found) > 0
            assert texts([session.generate(prompt, 40) for prompt in PROMPTS]) == wanted


@every_model
@every_row
def test_sampled_text_is_its_own_whatever_runs_beside_it(row, family, models):
    options = {"max_new_tokens": 30, "temperature": 1.0}
    with opened(models[family], row) as session:
        together = session.generate(PROMPTS, seed=[1, 2, 3], **options)
        alone = [session.generate(p, seed=i + 1, **options) for i, p in enumerate(PROMPTS)]
    assert texts(together) == texts(alone)
    assert all(one.lossless for one in together)


@every_head
def test_a_target_with_normed_queries_and_few_keys_keeps_its_law(row, models):
    wanted, model = {}, models["qwen3"]
    for heat in (0.0, 1.0):
        with opened(model, row, controller="fixed", depth=3) as session:
            options = {"max_new_tokens": 24, "temperature": heat}
            together = session.generate(PROMPTS, seed=[1, 2, 3], **options)
            alone = [session.generate(p, seed=i + 1, **options) for i, p in enumerate(PROMPTS)]
            assert texts(together) == texts(alone)
            assert sum(one.stats.drafted for one in together) > 0
            wanted[heat] = texts(alone)
    with foretoken.load(model, method="plain", kernels="dense") as plain:
        assert texts(plain.generate(PROMPTS, 24)) == wanted[0.0]


@every_row
def test_a_controller_that_measures_costs_gets_them(row, models):
    with opened(models["llama"], row, controller="cost_model") as session:
        assert len(session.generate(PROMPTS[0], 20).tokens) == 20


@every_row
def test_no_head_and_another_models_head_are_refused(row, models):
    with pytest.raises(ConfigError, match="draft_head"):
        foretoken.load(models["llama"], method=row.name)
    with pytest.raises(ConfigError, match="hidden size"):
        opened(models["llama"], row, random_head(row.head, VOCAB, 16))
    with pytest.raises(CheckpointError, match="there is no"):
        opened(models["llama"], row, "nowhere")


def prompts(split, count):
    """A tiny corpus, known by heart in the end: texts of random models have no rule to find."""
    return [[i % VOCAB, 5 * i % VOCAB, 7] for i in range(count)]


def settings(row, **changes):
    small = {"prompts": 32, "new_tokens": 40, "window": 40, "steps": 120, "batch": 8, "rate": 5e-3}
    cls = resolve(HEADS[row.head].config)
    own = {name: 64 for name in ("width",) if name in cls.__dataclass_fields__}
    return cls(**{**small, **own, "temperature": 0.0, **changes})


def trained(model, row, out, **changes):
    with foretoken.load(model, method="plain", kernels="dense") as session:
        config = settings(row, **changes)
        return run_training(session, row.head, prompts, config, out, show=False)


@pytest.fixture(scope="module")
def heads(models, tmp_path_factory):
    """Trained heads: (folder, notes) of a row's head for a family; rows of one head share it."""

    @cache
    def made(kind, family):
        row = next(row for row in METHODS.values() if row.head == kind)
        out = tmp_path_factory.mktemp(kind)
        return out, trained(models[family], row, out)

    return lambda row, family: made(row.head, family)


@every_model
@every_row
def test_training_makes_longer_accepted_paths(row, family, models, heads):
    head, notes = heads(row, family)
    assert sum(notes["figures"]["trained"].values()) > sum(notes["untrained"].values())
    with opened(models[family], row, preset="paper") as session:
        untrained = accepted(session)
    with opened(models[family], row, head, preset="paper") as session:
        assert accepted(session) > untrained + 0.2


@every_head
def test_a_killed_training_ends_with_the_same_weights(row, models, tmp_path, monkeypatch):
    small = {"prompts": 16, "steps": 12}
    whole = trained(models["llama"], row, tmp_path / "whole", **small)
    objective = resolve(HEADS[row.head].objective)
    learn, calls = objective.__call__, []

    def killed(self, model, batch, rng):
        calls.append(1)
        if len(calls) > 9:
            raise KeyboardInterrupt
        return learn(self, model, batch, rng)

    with monkeypatch.context() as patch:
        patch.setattr(objective, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(models["llama"], row, tmp_path / "killed", **small)
    assert not (tmp_path / "killed" / store.CARD).exists()
    again = trained(models["llama"], row, tmp_path / "killed", **small)
    assert again["figures"] == whole["figures"]
    heads = [store.load(tmp_path / name, row.head)[0] for name in ("whole", "killed")]
    for name, weight in heads[0].state_dict().items():
        assert torch.equal(weight, heads[1].state_dict()[name]), name


@every_head
def test_a_head_that_scores_few_tokens_drafts_no_other(row, models, tmp_path):
    model, head = models["llama"], tmp_path / "few"
    few = {"vocabulary": 9, "prompts": 16, "steps": 60}
    notes = trained(model, row, head, **few)
    assert sum(notes["figures"]["trained"].values()) > sum(notes["untrained"].values())
    with opened(model, row, head, controller="fixed", depth=2) as session:
        found = session.generate(PROMPTS, 30)
        drafter = session.engine.drafter
        draft = getattr(drafter, "block", None) or drafter.source
        scored = getattr(draft, "output_rows", None) or draft_rows(draft)
        assert len(scored) == 9
        assert sum(one.stats.accepted for one in found) > 0
    with foretoken.load(model, method="plain", kernels="dense") as plain:
        assert texts(found) == texts(plain.generate(PROMPTS, 30))
    if (head / draft_vocabulary.NAME).is_file():  # a head of all tokens takes the list away
        trained(model, row, head, **{**few, "vocabulary": 0, "steps": 2})
        assert not (head / draft_vocabulary.NAME).is_file()


def draft_rows(draft):
    """The outputs that a head's laws are read at."""
    laws = getattr(draft, "laws", None)
    return getattr(laws, "output_rows", None) or draft.target.output_rows


def test_a_session_with_a_head_uses_the_method_it_was_trained_for(models):
    for kind in HEAD_ROWS:
        head = random_head(kind, VOCAB, models["llama"].config.hidden_size)
        with foretoken.load(models["llama"], draft_head=head, kernels="dense") as session:
            assert session.method == HEADS[kind].serves
            assert session.generate(PROMPTS[0], 8).lossless
    with pytest.raises(CheckpointError, match="there is no"):
        foretoken.load(models["llama"], draft_head="nowhere")


def test_inside_generate_a_head_has_the_method_it_was_trained_for(models):
    target = models["llama"]
    for kind in HEAD_ROWS:
        head = random_head(kind, VOCAB, target.config.hidden_size)
        wanted = HEADS[kind].serves
        assert foretoken.custom_generate(draft_head=head).method == wanted
        assert foretoken.custom_generate(draft=target, draft_head=head).method == wanted
    with pytest.raises(CheckpointError, match="there is no"):
        foretoken.custom_generate(draft_head="nowhere")


def test_greedy_and_sampled_rows_share_one_head(models):
    row = METHODS["auto-eagle3"]
    head = random_head("eagle3", VOCAB, models["llama"].config.hidden_size)
    with opened(models["llama"], row, head, controller="fixed", depth=3) as session:
        hybrid, chain = session.engine.drafter.members
        assert hybrid.inner.source is chain.source
        for heat in (0.0, 1.0):
            options = {"max_new_tokens": 30, "temperature": heat}
            together = session.generate(PROMPTS, seed=[1, 2, 3], **options)
            alone = [session.generate(p, seed=i + 1, **options) for i, p in enumerate(PROMPTS)]
            assert texts(together) == texts(alone)
            assert sum(one.stats.drafted for one in together) > 0

"""Distillation: divergences, texts of the draft's own, and drafts that become better by it."""

import copy
import math
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

import foretoken
from foretoken.errors import CapabilityError, ConfigError
from foretoken.training.dataset import own_answers
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.stream import ChatStream
from foretoken.training.drafts import distilling, learning, selecting
from foretoken.training.drafts.distilling import DistillConfig
from foretoken.training.drafts.selecting import AdaspecConfig
from foretoken.training.objectives.distilled import Distilled, joined, parts, target_logits
from foretoken.training.objectives.divergence import (
    DIVERGENCES,
    PiecedDivergence,
    jensen_shannon,
    restricted,
)
from foretoken.training.objectives.selected import Selected, largest
from foretoken.training.recipes import Order

NAMES = sorted(DIVERGENCES)


@pytest.fixture(scope="module")
def session(tiny_pair, byte_tokenizer):
    with foretoken.load(tiny_pair[0], "plain", tokenizer=byte_tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def texts(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    config = DataConfig(chats=40, shard=20, new_tokens=16, held_out=0.2, laws=6, repeated=1.0)
    make_data(
        session, config, folder, [f"the {n} train in the rain" for n in range(40)], show=False
    )
    return folder


@pytest.fixture(scope="module")
def weak_draft(tiny_pair, byte_tokenizer, tmp_path_factory):
    """A draft whose weights are further from the target's than those of the pair."""
    folder, model = tmp_path_factory.mktemp("weak"), copy.deepcopy(tiny_pair[0])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


def laws(n=40, width=30, seed=0):
    torch.manual_seed(seed)
    return (2 * torch.randn(n, width)).log_softmax(-1), (2 * torch.randn(n, width)).log_softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_is_zero_for_equal_laws_only(name):
    p, q = laws()
    assert torch.allclose(DIVERGENCES[name](p, p), torch.zeros(len(p)), atol=1e-6)
    assert bool((DIVERGENCES[name](p, q) > 1e-3).all())


def test_total_variation_is_what_acceptance_loses_and_pinsker_bounds_it():
    p, q = laws()
    lost = DIVERGENCES["tvd"](p, q)
    accepted = torch.minimum(p.exp(), q.exp()).sum(-1)
    torch.testing.assert_close(lost, 1 - accepted)
    assert bool((lost**2 <= 0.5 * DIVERGENCES["fkl"](p, q) + 1e-6).all())
    assert bool((lost**2 <= 0.5 * DIVERGENCES["rkl"](p, q) + 1e-6).all())


def test_jensen_shannon_is_symmetric_and_bounded():
    p, q = laws()
    torch.testing.assert_close(jensen_shannon(p, q), jensen_shannon(q, p))
    assert float(jensen_shannon(p, q).max()) <= math.log(2)
    apart = torch.tensor([[0.0, -1e9]]), torch.tensor([[-1e9, 0.0]])
    assert float(jensen_shannon(*apart)) == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_pieces_are_those_of_whole_logits(name, monkeypatch):
    monkeypatch.setattr("foretoken.training.objectives.divergence.PIECE", 9)
    torch.manual_seed(1)
    states, rows = torch.randn(25, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    p, weights = torch.randn(25, 30).log_softmax(-1), torch.rand(25)
    loss, figures = PiecedDivergence.apply(states, rows, p, weights, DIVERGENCES[name])
    (2.0 * loss).backward()
    found = states.grad.clone(), rows.grad.clone()
    states.grad = rows.grad = None
    log_q = (states @ rows.T).log_softmax(-1)
    truth = (DIVERGENCES[name](p, log_q) * weights).sum()
    (2.0 * truth).backward()
    torch.testing.assert_close(loss, truth.detach())
    torch.testing.assert_close(found, (states.grad, rows.grad))
    accepted = torch.minimum(p.exp(), log_q.exp()).sum().detach()
    torch.testing.assert_close(figures[0], accepted)


def objective(session, tokens, on_policy, name="fkl"):
    eos = tuple(sorted(session.eos))
    return Distilled(session.target, tokens, DIVERGENCES[name], on_policy, 12, eos)


def batch_of(texts):
    return ChatStream(texts, "train", tokens=256, row_tokens=64, pad=0, seed=0, packed=False).batch(
        0
    )


def test_prompts_and_answers_come_apart_and_together(texts):
    batch = batch_of(texts)
    prompts, answers = parts(batch)
    ids, told = joined(prompts, answers)
    assert torch.equal(told.float(), batch["weights"][:, : told.shape[1]])
    assert torch.equal(ids[told], batch["input_ids"][batch["weights"] > 0])


def test_laws_are_those_of_a_forward_of_the_target(session, texts):
    prompts, answers = parts(batch_of(texts))
    found = target_logits(session.target, prompts, answers)
    with torch.no_grad():
        truth = torch.cat(
            [
                session.target.model(torch.tensor([[*p, *a]])).logits[0, len(p) - 1 : -1]
                for p, a in zip(prompts, answers, strict=True)
            ]
        )
    torch.testing.assert_close(found, truth.float(), atol=1e-3, rtol=1e-3)


def test_the_target_as_its_own_draft_has_nothing_to_learn(session, texts):
    tokens = torch.arange(session.target.vocab_size)
    for on_policy in (0.0, 1.0):
        torch.manual_seed(0)
        model = copy.deepcopy(session.target.model)
        loss, figures = objective(session, tokens, on_policy)(
            model, batch_of(texts), random.Random(0)
        )
        assert abs(loss.item()) < 1e-4
        assert float(figures["overlap"]) == pytest.approx(1.0, abs=1e-3)


def test_an_own_text_is_drawn_from_the_draft_among_its_tokens(session, texts, weak_draft):
    """Frequencies of the first token sampled follow the draft's law, restricted and rescaled."""
    model = distilling.load_model(weak_draft, dtype=torch.float32)
    tokens = torch.arange(40, 140)
    sampler = objective(session, tokens, 1.0)
    prompt = [5, 60, 61, 62]
    torch.manual_seed(0)
    firsts = torch.tensor([t[0] for t in sampler.sampled(model, [prompt] * 4000)])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1:]
    law = restricted(logits, tokens).exp()[0]
    seen = torch.bincount(firsts - 40, minlength=100) / 4000
    assert set(firsts.tolist()) <= set(tokens.tolist())
    assert float((seen - law).abs().sum()) / 2 < 0.06


def test_ragged_prompts_are_answered_as_alone(session, weak_draft):
    """Left padding changes no law: greedy answers of a batch are those of each prompt alone."""
    model = distilling.load_model(weak_draft, dtype=torch.float32)
    sampler = objective(session, torch.arange(session.target.vocab_size), 1.0)
    prompts = [[5, 60, 61, 62, 63, 64, 65], [9, 10]]
    with pytest.MonkeyPatch.context() as patch:
        greedy = type(model).generate
        patch.setattr(
            type(model), "generate",
            lambda self, **options: greedy(
                self, **{**options, "do_sample": False, "temperature": None, "top_k": None,
                         "top_p": None}
            ),
        )  # fmt: skip
        together = sampler.sampled(model, prompts)
        assert together == [sampler.sampled(model, [one])[0] for one in prompts]


def test_drafts_are_read_to_where_the_target_is(session, weak_draft, monkeypatch):
    seen = []
    for module in (distilling, own_answers):
        real = module.load_model
        monkeypatch.setattr(
            module, "load_model",
            lambda draft, real=real, **options: (
                seen.append(options.get("device")), real(draft, **options)
            )[1],
        )  # fmt: skip
    distilling.student(session, weak_draft)
    distilling.cost_of(session, weak_draft)
    with own_answers.draft_session(session, weak_draft):
        pass
    assert seen == [session.target.model.device] * 3


def test_an_own_text_follows_no_generation_config(session, weak_draft):
    """Penalties are none of the law that the draft is judged by."""
    model = distilling.load_model(weak_draft, dtype=torch.float32)
    sampler = objective(session, torch.arange(session.target.vocab_size), 1.0)
    said = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        torch.manual_seed(0)
        said.append(sampler.sampled(model, [[5, 60, 61, 62]] * 8))
        assert model.generation_config.repetition_penalty == penalty
    assert said[0] == said[1]


@pytest.mark.parametrize("on_policy", [0.0, 1.0])
def test_distilling_raises_acceptance(on_policy, session, texts, weak_draft, tmp_path):
    config = DistillConfig(
        epochs=8.0, minutes=None, tokens=512, row_tokens=64, evaluations=2, held_out=8,
        on_policy=on_policy, new_tokens=16, precision="no", vector_rate=2e-3, embedding_rate=2e-3,
    )  # fmt: skip
    order = Order(session, config, tmp_path, texts, weak_draft, (), "tiny", False)
    notes = distilling.run(order)
    best = max(told["acceptance"] for _, told in notes["measured"])
    assert best > notes["before"]["acceptance"] + 0.03
    with foretoken.load(
        session.target.model, "chain", draft=tmp_path, tokenizer=session.tokenizer
    ) as fast:
        prompts = ["the rain", "in the train there"]
        one, other = (
            [r.tokens for r in s.generate(prompts, 30, temperature=0.0)] for s in (session, fast)
        )
        assert one == other


@pytest.mark.parametrize(
    ("recipe", "options"), [(distilling, DistillConfig), (selecting, AdaspecConfig)]
)
def test_no_text_that_the_draft_has_just_drawn_judges_it(
    recipe, options, session, texts, weak_draft, tmp_path, monkeypatch
):
    """The held-out loss of the same weights is the same, whatever they would draw."""
    found = []

    class Judging(learning.Trainer):
        def run(self, **named):
            for seed in (1, 2):
                torch.manual_seed(seed)
                found.append(self.evaluate())
            return super().run(**named)

    monkeypatch.setattr(learning, "Trainer", Judging)
    config = options(
        epochs=0.1, minutes=None, tokens=512, row_tokens=64, evaluations=1, held_out=2,
        on_policy=1.0, new_tokens=8, precision="no",
    )  # fmt: skip
    recipe.run(Order(session, config, tmp_path, texts, weak_draft, (), "tiny", False))
    assert found and found[::2] == pytest.approx(found[1::2], abs=1e-6)


def test_the_places_with_the_most_to_gain_are_kept_and_ties_with_them():
    values = torch.tensor([0.1, 0.5, 0.3, 0.5, -1.0])
    assert largest(values, 0.4).tolist() == [False, True, False, True, False]
    assert largest(values, 0.2).tolist() == [False, True, False, True, False]
    assert largest(values, 1.0).all()
    assert largest(torch.zeros(7), 0.4).all()


def test_keeping_every_place_is_forward_divergence_over_all_of_them(session, texts, weak_draft):
    """The same gradients; and where draft and reference are one, every place is kept."""
    tokens, batch = torch.arange(session.target.vocab_size), batch_of(texts)
    whole = objective(session, tokens, 0.0)
    model = distilling.load_model(weak_draft, dtype=torch.float32)
    places = whole.places(model, batch, random.Random(0))
    with torch.enable_grad():
        log_q = model.lm_head(places.states(model)).log_softmax(-1)
        truth = DIVERGENCES["fkl"](places.laws, log_q).mean()
    truth.backward()
    wanted = {name: w.grad.clone() for name, w in model.named_parameters()}
    for reference, keep in ((session.target.model, 1.0), (model, 0.4)):
        model.zero_grad()
        loss, told = Selected(whole, reference, keep)(model, batch, random.Random(0))
        loss.backward()
        torch.testing.assert_close(loss, truth.detach())
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.grad, wanted[name], atol=1e-5, rtol=1e-4)
    assert abs(float(told["gap"])) < 1e-6


def test_a_selection_holds_its_share_and_shifts_as_the_draft_learns(session, texts, weak_draft):
    """The mean gap to the reference falls while the draft is trained towards it."""
    tokens, batch = torch.arange(session.target.vocab_size), batch_of(texts)
    model = distilling.load_model(weak_draft, dtype=torch.float32).train()
    selected = Selected(objective(session, tokens, 0.0), session.target.model, 0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    gaps = []
    for _ in range(12):
        loss, told = selected(model, batch, random.Random(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gaps.append(float(told["gap"]))
    assert gaps[-1] < 0.7 * gaps[0]


def test_adaspec_raises_acceptance_and_keeps_its_reference(session, texts, weak_draft, tmp_path):
    config = AdaspecConfig(
        epochs=8.0, reference_epochs=4.0, minutes=None, tokens=512, row_tokens=64, evaluations=2,
        held_out=8, precision="no", vector_rate=2e-3, embedding_rate=2e-3,
    )  # fmt: skip
    order = Order(session, config, tmp_path, texts, weak_draft, (), "tiny", False)
    notes = selecting.run(order)
    best = max(told["acceptance"] for _, told in notes["measured"])
    assert best > notes["before"]["acceptance"] + 0.03
    assert (next((tmp_path / "training").iterdir()) / "reference").is_dir()
    assert notes["recipe"] == "adaspec"


def test_a_draft_of_another_vocabulary_is_refused(session, texts, make_llama, tmp_path):
    make_llama(99).save_pretrained(tmp_path / "other")
    order = Order(session, DistillConfig(), tmp_path, texts, tmp_path / "other", (), "tiny", False)
    with pytest.raises(ConfigError, match="99 tokens and the target"):
        distilling.run(order)
    with pytest.raises(ConfigError, match="without a draft"):
        distilling.read_draft(Order(session, DistillConfig(), tmp_path, texts, None, (), "", False))


def test_a_draft_that_scales_its_logits_is_refused(session, weak_draft, tmp_path):
    """Losses are of its states and its output layer: those of another model."""
    GraniteForCausalLM(GraniteConfig(
        vocab_size=session.target.vocab_size, hidden_size=64, intermediate_size=128,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
        attention_multiplier=0.25, logits_scaling=8.0,
    )).save_pretrained(tmp_path)  # fmt: skip
    for doing in ("distilling", "continuing"):
        with pytest.raises(CapabilityError, match=rf"{doing} was asked of a draft(.|\n)*scaled"):
            distilling.student(session, tmp_path, doing)
    assert distilling.student(session, weak_draft).training


@pytest.mark.parametrize("wrong", [{"divergence": "kl"}, {"on_policy": 1.5}, {"new_tokens": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        DistillConfig(**wrong)


def test_layers_learn_in_bf16_from_the_drafts_own_texts(session, texts, weak_draft):
    """Casts that sampling has made, without gradients, are not those that learning uses."""
    model = copy.deepcopy(AutoModelForCausalLM.from_pretrained(weak_draft).float())
    loss_of = objective(session, torch.arange(model.config.vocab_size), 1.0)
    batch = batch_of(texts)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = loss_of(model, batch, random.Random(0))
    loss.backward()
    slopes = {name: weight.grad for name, weight in model.named_parameters() if weight.ndim == 2}
    assert len(slopes) > 5 and all(slope is not None for slope in slopes.values())
    assert all(slope.abs().sum() > 0 for name, slope in slopes.items() if "embed" not in name)


def test_a_draft_that_was_trained_further_is_taught_anew(session, texts, weak_draft, tmp_path):
    """Into its own folder, twice: what is taught the second time is what the first one wrote."""
    config = DistillConfig(
        epochs=0.5, minutes=None, tokens=512, row_tokens=64, evaluations=1, held_out=2,
        on_policy=0.0, precision="no",
    )  # fmt: skip
    shutil.copytree(weak_draft, tmp_path, dirs_exist_ok=True)
    order = Order(session, config, tmp_path, texts, tmp_path, (), "tiny", False)
    begun_in = distilling.Student.of(order).work
    assert distilling.Student.of(order).work == begun_in, "a killed run goes on"
    first = distilling.run(order)
    written = (tmp_path / "model.safetensors").read_bytes()
    second = distilling.run(order)
    assert (tmp_path / "model.safetensors").read_bytes() != written
    assert second["first_loss"] != first["first_loss"]
    assert len(list((tmp_path / "training").iterdir())) == 2


def test_the_reference_and_the_draft_share_the_minutes(session, texts, weak_draft, tmp_path):
    config = AdaspecConfig(
        epochs=1.5, reference_epochs=0.5, minutes=8.0, tokens=512, row_tokens=64, evaluations=1,
        held_out=2, precision="no",
    )  # fmt: skip
    order = Order(session, config, tmp_path, texts, weak_draft, (), "tiny", False)
    seconds, real = [], learning.Trainer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            learning, "Trainer",
            lambda *parts, **named: (seconds.append(parts[3].seconds), real(*parts, **named))[1],
        )  # fmt: skip
        notes = selecting.run(order)
    assert seconds == [120.0, 360.0]
    assert notes["settings"]["minutes"] == 8.0

"""EAGLE-3's head: what a step of its training sees, and that it drafts as it was trained."""

import json

import pytest
import torch

import foretoken
from foretoken.audit.fixtures import folder
from foretoken.audit.rows import seeded_rows
from foretoken.errors import CapabilityError, ConfigError
from foretoken.heads import store
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.wide_eagle3 import WideEagle3
from foretoken.lm.opening import open_lm
from foretoken.training.heads import run_training
from foretoken.training.objectives.unrolled import UnrolledTraining, sight, unrolled
from foretoken.trees.build import chain
from foretoken.types import Draft, Draw, Layer, SamplingParams
from tests.heads.eagle3_kinds import KINDS

VOCAB, WIDTH = 61, 64


TABLE = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(3))


def embed(tokens):
    """The target's embeddings."""
    return TABLE[tokens]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def head(request):
    torch.manual_seed(0)
    config = Eagle3.Config(
        hidden_size=32, vocab_size=VOCAB, taps=(0, 1), width=WIDTH, layers=2, **request.param
    )
    return Eagle3(config).eval().requires_grad_(False)


def test_a_step_sees_the_text_before_its_draft_and_its_own_tokens_since():
    last = sight(5, 2)[0, -1].reshape(3, 5).tolist()
    assert last[0] == [True, True, True, False, False], "the text up to where the draft began"
    assert last[1] == [False, False, False, True, False], "one level below that"
    assert last[2] == [False, False, False, False, True], "and itself"


def test_training_steps_are_what_a_draft_computes(head):
    """Step s at token i is the draft that began at token i - s, fed with what was really said."""
    states, tokens = torch.randn(1, 7, 2, 32), torch.arange(7)
    steps = list(unrolled(head, tokens[None], head.fused(states), 3, embed))
    decoder = open_lm(head.decoder(64, TABLE), name="draft")
    ids = tokens.tolist()
    for root in range(2, 4):
        [row] = seeded_rows([ids[: root + 1]], SamplingParams(), VOCAB)
        before = torch.cat([torch.zeros(1, WIDTH), head.fused(states[0, :root])])
        with torch.inference_mode():
            decoder.supply(row, head.entering(tokens[: root + 1], before, embed))
            decoder.prefill([row])
            nodes, parents = [[ids[root]]], [[-1]]
            for step in range(3):
                [score] = decoder.grow([row], nodes, parents, (Layer(-1),))
                own = score.hidden[0, 0]
                assert torch.allclose(own, steps[step][0, root + step], atol=1e-5), (root, step)
                laws = head.norm(own[None]) @ head.outputs(TABLE).T
                assert torch.allclose(score.logits[:, :VOCAB], laws, atol=1e-5)
                following = tokens[root + step + 1 : root + step + 2]
                extra = score.logits[:, -WIDTH:]
                assert torch.allclose(head.heard(own[None]), extra, atol=1e-5)
                decoder.supply(row, head.entering(following, extra, embed))
                nodes, parents = [following.tolist()], [[step]]
            decoder.free([row])


def test_a_head_begins_as_a_draft_model_that_hears_nothing(make_llama):
    """Word for word the draft's laws, whatever the target's states; trained, it hears them."""
    draft = make_llama(
        VOCAB, seed=5, hidden_size=64, intermediate_size=256, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    config = Eagle3.Config(
        hidden_size=32, vocab_size=VOCAB, taps=(0,), width=64, layers=len(draft.model.layers)
    )
    head = Eagle3(config).eval().requires_grad_(False)
    head.begin_as(draft)
    ids = torch.randint(VOCAB, (2, 9))
    [states] = unrolled(head, ids, head.fused(torch.randn(2, 9, 1, 32)), 1)
    said = head.norm(states) @ head.outputs().T
    assert torch.allclose(said, draft(ids).logits, atol=1e-4)


@pytest.fixture
def taught(make_llama, tmp_path):
    """Trains a head for a tiny target, beginning as what a folder holds: its notes."""
    target = make_llama(VOCAB, seed=3)

    def prompts(split, count):
        return [[i % VOCAB, 5 * i % VOCAB, 7] for i in range(count)]

    def run(out, start, rate=1e-5, **changes):
        config = UnrolledTraining(
            prompts=8, new_tokens=12, window=16, steps=3, batch=4, start=str(start), seed=1,
            temperature=0.0, rate=1e-5, matrix_rate=0.0, embedding_rate=rate, **changes,
        )  # fmt: skip
        with foretoken.load(target, method="plain", kernels="dense") as session:
            return run_training(session, "eagle3", prompts, config, out, show=False)

    return run


def test_training_goes_on_from_a_draft_and_from_a_head(taught, make_llama, tmp_path):
    draft = make_llama(
        VOCAB, seed=5, hidden_size=64, intermediate_size=128, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    draft.save_pretrained(tmp_path / "draft")
    taught(tmp_path / "first", tmp_path / "draft")
    head, card = store.load(tmp_path / "first", "eagle3")
    assert card.options["inner"] == 128, "the shape is the draft's"
    table = draft.get_input_embeddings().weight
    assert 0 < (head.embedding.weight - table).abs().max() < 1e-3
    taught(tmp_path / "second", tmp_path / "first")
    other, _ = store.load(tmp_path / "second", "eagle3")
    taught(tmp_path / "third", tmp_path / "first", rate=0.0)
    third, _ = store.load(tmp_path / "third", "eagle3")
    assert torch.equal(third.embedding.weight, head.embedding.weight), "it may stay as it is"
    apart = (other.embedding.weight - head.embedding.weight).abs().max()
    assert 0 < apart < 1e-3 and other.join.weight.abs().max() > head.join.weight.abs().max() > 0


def test_a_head_that_goes_on_reads_the_layers_it_read_before(taught, tmp_path):
    small = {"width": 64, "inner": 64}
    for taps in ((1,), (1, 0)):
        first = tmp_path / f"first-{len(taps)}"
        taught(first, "", taps=taps, **small)
        second = tmp_path / f"second-{len(taps)}"
        notes = taught(second, first)
        assert store.load(second, "eagle3")[0].config.taps == taps
        captured = json.loads((second / "training" / "capture" / "train.json").read_text())
        assert captured["plan"]["taps"] == list(taps) == list(notes["settings"]["taps"])
        with pytest.raises(ConfigError, match="reads the layers 0, 1 and begins as") as caught:
            taught(tmp_path / "third", first, taps=(0, 1))
        assert f"layers {', '.join(map(str, taps))}," in caught.value.possible
        assert not (tmp_path / "third" / "training").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        (Eagle3, {"taps": (0, 9)}, "the target has 2"),
        (Eagle3, {"hidden_size": 32}, "hidden size"),
        (WideEagle3, {}, "kind eagle3-wide"),
    ],
)
def test_a_head_that_cannot_be_begun_with_is_refused_before_anything_is_captured(
    kind, changes, told, taught, tmp_path
):
    config = kind.Config(**{"hidden_size": 64, "vocab_size": VOCAB, **changes})
    name = "eagle3" if kind is Eagle3 else "eagle3-wide"
    where = store.save(tmp_path / "start", name, kind(config), {})
    with pytest.raises(ConfigError, match=told):
        taught(tmp_path / "out", where)
    assert not (tmp_path / "out").exists()


def test_a_draft_of_another_form_cannot_be_begun_with(taught, make_llama, tmp_path):
    draft = make_llama(VOCAB, seed=5, tie_word_embeddings=False)
    draft.save_pretrained(tmp_path / "draft")
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        taught(tmp_path / "head", tmp_path / "draft")


def test_supplied_embeddings_are_read_in_place_of_the_models_own(make_llama):
    """One row, several laid end to end, and the model's own modules say the same."""
    model = make_llama(VOCAB, seed=3)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [1]]
    said = []
    for compile in ("auto", "off"):
        for supplied in (False, True):
            lm = open_lm(model, compile=compile)
            rows = seeded_rows(prompts, SamplingParams(), VOCAB)
            drafts = [Draft(chain(row.tokens[-1], [3, 4]), Draw.POINT) for row in rows]
            with torch.inference_mode():
                if supplied:
                    for row in rows:
                        lm.supply(row, lm.embed([*row.tokens, 3, 4]).clone())
                lm.prefill(rows)
                said.append(torch.cat([score.logits for score in lm.score(rows, drafts)]))
            lm.close()
    for other in said[1:]:
        assert torch.allclose(said[0], other, atol=1e-4)


def test_a_head_that_reads_layers_the_target_lacks_is_refused(make_llama):
    model = make_llama(VOCAB, seed=3)
    head = Eagle3(
        Eagle3.Config(hidden_size=model.config.hidden_size, vocab_size=VOCAB, taps=(0, 99))
    )
    where = store.save(folder(), "eagle3", head, {})
    with pytest.raises(CapabilityError, match="layers"):
        foretoken.load(model, method="eagle3", draft_head=where)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"taps": (0, 2)}, "has 2 layers, counted from 0: the last one is 1"),
        ({"width": 128, "embeds": False}, "64 directions"),
        ({"own_rows": False, "embeds": False}, "other rows"),
    ],
)
def test_a_head_that_its_target_cannot_have_is_refused_before_anything_is_captured(
    changes, told, taught, tmp_path
):
    with pytest.raises(ConfigError, match=told):
        taught(tmp_path / "head", "", **{"width": 64, "inner": 64, **changes})
    assert not (tmp_path / "head" / "training").exists()

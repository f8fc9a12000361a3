"""States asked of the target while a head learns are those that would have been kept."""

from dataclasses import replace

import pytest
import torch

import foretoken
from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.training.asked import POOL, Alike, AskedTexts
from foretoken.training.capture import shard
from foretoken.training.captures.keys_values import KeysValues
from foretoken.training.captures.texts import LayeredTexts, TappedTexts, Texts
from foretoken.training.dataset.records import Chat
from foretoken.training.heads import run_training
from foretoken.training.objectives.guessing import ParallelTraining
from foretoken.training.objectives.unrolled import UnrolledObjective, UnrolledTraining
from tests.lm.families import short, tied, tiny

LENGTHS = [(5, 7), (1, 12), (11, 4), (3, 1), (8, 20)]
SAID = {"new_tokens": 20, "temperature": 1.0, "seed": 0, "window": 32}
CAPTURES = (
    Texts(**SAID),
    LayeredTexts(**SAID, taps=(0, 2), likeliest=5),
    TappedTexts(**SAID, taps=(1,)),
)


def chats(count=0, seed=4):
    """Of several lengths; or so many."""
    rng = torch.Generator().manual_seed(seed)
    sizes = [LENGTHS[i % 5] for i in range(count or 5)]
    texts = [torch.randint(97, (sum(size),), generator=rng).tolist() for size in sizes]
    return [
        Chat("open", 1.0, text[:prompt], text[prompt:])
        for text, (prompt, _) in zip(texts, sizes, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("window", [32, 11])
def test_what_is_asked_is_what_is_kept(family, capture, window):
    """A text that is longer than the window was read whole."""
    capture = replace(capture, window=window)
    with foretoken.load(tiny(family), "plain", kernels="dense") as session:
        kept = shard(session, chats(), capture, 0)
        asked = AskedTexts(session, chats(), capture, "some").take(torch.arange(5))
    assert set(asked) == set(kept)
    width = asked["input_ids"].shape[1]
    for i, (prompt, answer) in enumerate(LENGTHS):
        length = min(prompt + answer, window)
        for name, values in asked.items():
            first = name in ("laws", "log_probs")  # the first token's law is never learnt
            before, now = kept[name][i, first:length], values[i, first:length]
            assert not kept["weights"][i, width:].any() and now.shape == before.shape
            assert torch.allclose(now.float(), before.float(), atol=2e-3, rtol=1e-3), name
        assert not asked["weights"][i, length:].any(), "nothing is learnt of padding"


@pytest.mark.parametrize("length", [61, 62])  # the last token that an engine writes is not fed
def test_a_text_may_fill_the_models_positions(length):
    """Padding behind it, for which there are none, is read as well."""
    capture = replace(CAPTURES[0], window=80)
    with foretoken.load(short("gpt2", 61), "plain", kernels="dense") as session:
        full = [Chat("open", 1.0, list(range(6)), list(range(12, length + 6)))]
        found = AskedTexts(session, full, capture, "some").take(torch.arange(1))
        kept = shard(session, full, capture, 0)
    assert found["hidden"].shape[1] == 64
    assert torch.allclose(found["hidden"][0, :61], kept["hidden"][0, :61], atol=1e-3)


def test_texts_of_a_batch_are_of_one_length_and_come_once_per_epoch():
    with foretoken.load(tiny("llama"), "plain", kernels="dense") as session:
        texts = AskedTexts(session, chats(100), CAPTURES[0], "some")
        lengths = Alike(texts, 6, 1).batch(3)["lengths"]
    stream = Alike(texts, 6, 1)
    epochs = [[stream.chosen(16 * epoch + i) for i in range(16)] for epoch in range(2)]
    assert stream.per_epoch == 16 <= POOL
    for epoch in epochs:
        numbers = torch.cat(epoch).tolist()
        assert len(set(numbers)) == 96 and max(numbers) < 100
        assert sum(len(set(texts.sizes[some].tolist())) == 1 for some in epoch) >= 10
    assert [a.tolist() for a in epochs[0]] != [b.tolist() for b in epochs[1]]
    assert torch.equal(stream.chosen(3), epochs[0][3]), "an index says it all"
    assert torch.equal(lengths, texts.sizes[stream.chosen(3)]), "without padding"


def some(split, count):
    return chats(count, len(split))


def test_a_run_does_not_go_on_with_other_texts(tmp_path):
    config = ParallelTraining(prompts=10, window=32, batch=4, steps=2, states="asked")
    runs = []
    with foretoken.load(tiny("llama"), "plain") as session:
        for texts in (some, some, lambda _, count: chats(count, 9)):
            run_training(session, "medusa", texts, config, tmp_path, show=False)
            runs.append(sum(path.is_dir() for path in (tmp_path / "training").iterdir()))
    assert runs == [1, 1, 2]


def test_a_run_does_not_go_on_for_another_target(tmp_path):
    """Of one tokenizer: options and texts are the same, and what is asked is not."""
    config = ParallelTraining(prompts=10, window=32, batch=4, steps=2, states="asked")
    heads = []
    for seed in (0, 5, 0):
        with foretoken.load(tiny("llama", seed=seed), "plain") as session:
            run_training(session, "medusa", some, config, tmp_path, show=False)
        heads.append(store.card_of(tmp_path))
    runs = [path for path in (tmp_path / "training").iterdir() if path.is_dir()]
    assert len(runs) == 2
    assert heads[0].weights == heads[2].weights != heads[1].weights
    assert heads[0].notes["identity"] == heads[2].notes["identity"] != heads[1].notes["identity"]


def test_a_run_does_not_go_on_from_what_has_changed(tmp_path):
    """A folder that it begins as holds another head by now."""
    config = UnrolledTraining(
        prompts=10, window=32, batch=4, steps=2, width=64, inner=64, unrolled=2, states="asked"
    )
    with foretoken.load(tied(), "plain") as session:
        for seed in (1, 2, 2):
            first = replace(config, seed=seed)
            run_training(session, "eagle3", some, first, tmp_path / "first", show=False)
            goes_on = replace(config, start=str(tmp_path / "first"))
            run_training(session, "eagle3", some, goes_on, tmp_path / "second", show=False)
    runs = [path for path in (tmp_path / "second" / "training").iterdir() if path.is_dir()]
    assert len(runs) == 2


@pytest.mark.parametrize(("embeds", "own_rows"), [(True, True), (False, True), (False, False)])
def test_a_head_learns_from_asked_states(embeds, own_rows, tmp_path):
    config = UnrolledTraining(
        prompts=40, window=32, batch=4, steps=30, width=64, vocabulary=80, unrolled=2,
        states="asked", embeds=embeds, own_rows=own_rows, inner=96, seed=1,
    )  # fmt: skip
    with foretoken.load(tied(), "plain", kernels="dense") as session:
        notes = run_training(session, "eagle3", some, config, tmp_path, show=False)
        head, card = store.load(tmp_path, "eagle3")
        assert card.options["embeds"] == embeds and len(head.scored) == 80
        assert notes["figures"]["trained"]["depth_1"] > notes["untrained"]["depth_1"]
    asked = {"max_new_tokens": 24, "temperature": 0.0}
    with foretoken.load(tied(), "eagle3", draft_head=tmp_path) as drafting:
        said = drafting.generate([5, 6, 7], **asked)
    with foretoken.load(tied(), "plain") as plain:
        assert said.tokens == plain.generate([5, 6, 7], **asked).tokens


def test_a_start_says_how_tokens_are_embedded():
    with pytest.raises(ConfigError, match="start"):
        UnrolledTraining(embeds=False, start="somewhere")
    with pytest.raises(ConfigError, match="own_rows"):
        UnrolledTraining(own_rows=False)
    config = UnrolledTraining(
        prompts=5, window=32, width=128, vocabulary=80, states="asked", embeds=False
    )
    with (
        foretoken.load(tiny("llama"), "plain") as session,
        pytest.raises(ConfigError, match="64 directions"),
    ):
        UnrolledObjective.completed(config, session)  # before anything is captured


def test_starting_over_deletes_nothing_where_it_could_not_begin(make_llama, tmp_path):
    """Whatever can be refused is, before hours of captured states are gone."""
    kept = tmp_path / "out" / "training" / "capture" / "train-000000.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_text("states")
    make_llama(300).save_pretrained(tmp_path / "other")
    config = UnrolledTraining(prompts=10, window=32, batch=4, steps=2, width=64, inner=64)
    anew = {"fresh": True, "show": False}
    with foretoken.load(tied(), "plain") as session:
        for wrong in ({"taps": (99,)}, {"start": str(tmp_path / "other")}, {"states": "asked"}):
            with pytest.raises(ConfigError):
                run_training(
                    session, "eagle3", lambda *_: [[1, 2, 3]], replace(config, **wrong),
                    tmp_path / "out", **anew,
                )  # fmt: skip
            assert kept.exists(), wrong
        seen = []

        def read(split, count):
            seen.append((split, count))
            return some(split, count)

        run_training(session, "eagle3", read, config, tmp_path / "out", **anew)
    assert kept.read_bytes()[:6] != b"states"
    assert seen == [("train", 10), ("valid", 1)], "as many as are told of"


def test_a_head_that_reads_no_states_is_refused():
    capture = KeysValues(**SAID)
    with foretoken.load(tiny("llama"), "plain") as session:
        with pytest.raises(ConfigError, match="leave states=asked out") as caught:
            AskedTexts(session, chats(), capture, "longspec")
        assert "train data" not in str(caught.value), "there are such texts"
        with pytest.raises(ConfigError, match="train data"):
            AskedTexts(session, [[1, 2, 3]], CAPTURES[0], "medusa")


def test_other_heads_learn_so_too(tmp_path):
    config = ParallelTraining(prompts=20, window=32, batch=4, steps=4, states="asked")
    with foretoken.load(tiny("llama"), "plain") as session:
        run_training(session, "medusa", some, config, tmp_path, show=False)
    assert store.load(tmp_path, "medusa")[1].kind == "medusa"


def test_outputs_made_of_embeddings_are_refused_where_a_target_has_others():
    config = UnrolledTraining(
        prompts=5, window=32, width=64, vocabulary=80, states="asked", embeds=False, own_rows=False
    )
    with (
        foretoken.load(tiny("llama"), "plain") as session,
        pytest.raises(ConfigError, match="other rows than it embeds"),
    ):
        UnrolledObjective.completed(config, session)


def test_a_size_beside_a_start_of_another_is_refused(tmp_path):
    config = UnrolledTraining(
        prompts=10, window=32, batch=4, steps=2, width=64, inner=64, vocabulary=80, unrolled=2,
        states="asked",
    )  # fmt: skip
    with foretoken.load(tied(), "plain") as session:
        run_training(session, "eagle3", some, config, tmp_path, show=False)
        begun = UnrolledTraining(prompts=10, window=32, states="asked", start=str(tmp_path))
        own = replace(begun, width=64, inner=64, vocabulary=80)
        for same in (begun, own):
            assert UnrolledObjective.completed(same, session) == same
        for name, size in (("width", 128), ("layers", 2), ("inner", 96), ("vocabulary", 60)):
            with pytest.raises(ConfigError, match=f"a head of {name}={size} that begins as"):
                UnrolledObjective.completed(replace(own, **{name: size}), session)

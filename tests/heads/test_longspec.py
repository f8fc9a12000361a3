"""LongSpec's head: it drafts as it was trained, keeps a window, and sees what is verified alone."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import foretoken
from foretoken.audit.rows import seeded_rows
from foretoken.drafters.given_text import GivenText
from foretoken.drafters.growers.best_first import BestFirst
from foretoken.drafters.hybrid import Hybrid
from foretoken.drafters.parts.ordinary_model import OrdinaryModel
from foretoken.drafters.parts.window_reader import ROOM, WindowReader
from foretoken.drafters.portfolio import Portfolio
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.errors import CapabilityError, ConfigError
from foretoken.heads import store
from foretoken.heads.longspec import LongSpec, withheld
from foretoken.lm.opening import open_lm
from foretoken.lm.table import TableLM
from foretoken.training.capture import collect
from foretoken.training.captures.keys_values import SINKS, KeysValues
from foretoken.training.features import Features
from foretoken.training.heads import run_training
from foretoken.training.objectives.guessing import Ends
from foretoken.training.objectives.long_contexts import LongContextTraining, offset
from foretoken.types import SamplingParams

VOCAB, WINDOW = 61, 8
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(200)]


def gpt2():
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def targets(make_llama):
    models = {
        "llama": make_llama(VOCAB, seed=3),
        "yarn": make_llama(VOCAB, seed=3, rope_parameters=YARN),
        "wide": make_llama(VOCAB, seed=3, head_dim=32),
        "gpt2": gpt2(),
    }
    opened = {name: open_lm(model, name="target") for name, model in models.items()}
    yield opened
    for target in opened.values():
        target.close()


def made(target, **changes):
    """A random head in the shape of a trained one, whose branches all speak."""
    memory = target.layer_cache(target.layers - 1)
    shape = {"window": WINDOW, "heads": 4, "kv_heads": 2, "asked": 4 * memory.size, **changes}
    torch.manual_seed(1)
    head = LongSpec(
        LongSpec.Config(hidden_size=target.hidden_size, vocab_size=target.vocab_size, **shape)
    )
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=2 * weight.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def reader(target, head, tmp_path):
    where = store.save(tmp_path / "head", "longspec", head, {})
    return WindowReader(target, "longspec", WindowReader.Config(draft_head=where))


def opened(target, model, tokens):
    [row] = seeded_rows([tokens], SamplingParams(), VOCAB)
    target.prefill([row])
    assert model.open(row, None)
    return row


def along(target, head, tokens, late):
    """Laws at every token of a text, as the head is trained at a depth."""
    [row] = seeded_rows([[*tokens, 0]], SamplingParams(), VOCAB)
    memory = target.layer_cache(target.layers - 1)
    with torch.inference_mode():
        target.prefill([row])
        keys, values = (part.transpose(0, 1)[None] for part in memory.keys_values(row))
        positions = torch.arange(len(tokens))[None]
        states = head(
            target.embed(tokens)[None], positions, keys, values, late, memory.rotated
        )  # fmt: skip
        laws = target.unembed(states[0])
    target.free([row])
    return laws


@pytest.mark.parametrize("family", ["llama", "yarn", "wide", "gpt2"])
def test_a_draft_is_what_training_computes_at_its_depths(family, targets, tmp_path):
    target = targets[family]
    head = made(target)
    model = reader(target, head, tmp_path)
    trained = [along(target, head, TEXT, late) for late in (1, 2, 3)]
    row = opened(target, model, TEXT[:1])
    for root in (0, 1, 5, 7, 8, 9, 40, 41, 60, 130):  # across the window, and far behind it
        row.tokens += TEXT[len(row.tokens) : root + 1]
        if root:
            target.prefill([row]) if target.missing(row) else None
        [first] = model.grow([row], [[TEXT[root]]], [[-1]])
        below = model.grow([row], [[4, TEXT[root + 1]]], [[0, 0]])[0]
        [last] = model.grow([row], [[TEXT[root + 2]]], [[2]])
        model.keep([row], [[2, 3]], [None])
        found = torch.stack([first.logits[0], below.logits[1], last.logits[0]])
        wanted = torch.stack([trained[depth][root + depth] for depth in range(3)])
        assert torch.allclose(found, wanted, atol=2e-3, rtol=1e-4), root
        assert not torch.allclose(below.logits[0], below.logits[1], atol=1e-2)
    target.free([row])


def test_rows_of_different_lengths_share_a_forward(targets, tmp_path):
    target = targets["llama"]
    model = reader(target, made(target), tmp_path)
    texts = [TEXT[:1], TEXT[3:23], TEXT[50:59]]
    rows = [opened(target, model, text) for text in texts]
    roots = model.grow(rows, [row.tokens[-1:] for row in rows], [[-1]] * 3)
    nodes = model.grow(rows, [[1, 2], [3], [4, 5, 6]], [[0, 0], [0], [0, 0, 0]])
    for text, root, below, own in zip(texts, roots, nodes, ([1, 2], [3], [4, 5, 6]), strict=True):
        alone = opened(target, model, text)
        assert torch.allclose(
            model.grow([alone], [text[-1:]], [[-1]])[0].logits, root.logits, atol=1e-4
        )
        again = model.grow([alone], [own], [[0] * len(own)])[0].logits
        assert torch.allclose(again, below.logits, atol=1e-4)
        target.free([alone])
    target.free(rows)


def test_a_draft_sees_verified_rows_of_the_target_alone(targets, tmp_path):
    target = targets["llama"]
    model = reader(target, made(target), tmp_path)
    row = opened(target, model, TEXT[:30])
    target.grow([row], [[TEXT[29], 4, 5]], [[-1, 0, 1]])  # columns of an open tree

    def laws():
        [first] = model.grow([row], [TEXT[29:30]], [[-1]])
        [below] = model.grow([row], [[4, 5]], [[0, 1]])
        model.keep([row], [[]], [None])
        return torch.cat([first.logits, below.logits])

    laws()  # from here on the window holds the text, and forwards are of one shape
    before = laws()
    keys, values = target.cache.kept(target.layers - 1, 0, 32)
    for column, changes in ((29, False), (30, False), (31, False), (28, True), (0, True)):
        kept = keys[:, column].clone(), values[:, column].clone()
        with torch.inference_mode():
            keys[:, column] += 1.0
            values[:, column] += 1.0
        assert torch.equal(laws(), before) != changes, column
        with torch.inference_mode():
            keys[:, column], values[:, column] = kept
    target.free([row])


def test_what_is_kept_of_a_row_is_a_window_and_a_tree(targets, tmp_path):
    target = targets["llama"]
    model = reader(target, made(target), tmp_path)
    sizes = []
    for length in (2, 20, 190):
        row = opened(target, model, TEXT[:length])
        model.grow([row], [TEXT[length - 1 : length]], [[-1]])
        model.grow([row], [list(range(20))], [[0] * 20])
        sizes.append(row.private[model].columns)
        held, context = row.private[model], row.private[model].context
        cache = {group.keys.untyped_storage().data_ptr() for group in target.cache.groups}
        assert context[0].untyped_storage().data_ptr() in cache, "the context is not copied"
        model.grow([row], [[7] * 80], [[0] * 80])
        assert held.columns >= WINDOW + 101, "a larger tree finds room"
        target.free([row])
    assert sizes == [WINDOW + ROOM] * 3


@pytest.mark.parametrize("shape", [{"depth": 4, "nodes": 20}, {"depth": 4, "branch": 1}])
def test_greedy_text_is_plains_long_after_the_window_wrapped(shape, targets, make_llama, tmp_path):
    head = store.save(tmp_path / "head", "longspec", made(targets["llama"]), {})
    model = make_llama(VOCAB, seed=3)
    with foretoken.load(model, method="plain", kernels="dense") as plain:
        wanted = plain.generate(TEXT[:9], 400).tokens
    options = {"method": "longspec", "draft_head": head, "kernels": "dense", "controller": "fixed"}
    with foretoken.load(model, **options, **shape) as session:
        found = session.generate(TEXT[:9], 400)
    assert found.tokens == wanted and found.stats.drafted > 400


@pytest.mark.parametrize("late", [1, 2, 4, 11, 12])
@pytest.mark.parametrize("heads", [2, 6])
def test_withheld_rows_are_those_of_a_mask(late, heads):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 11, heads, 4, generator=generator)
    keys, values = torch.randn(2, 3, 11, 2, 4, generator=generator)
    found = withheld(query, keys, values, late)
    keys, values = (part.repeat_interleave(heads // 2, 2) for part in (keys, values))
    for t in range(11):
        if t < late:
            assert not found[:, t].any()
            continue
        seen = slice(0, t - late + 1)
        scores = torch.einsum("bhd,bshd->bhs", query[:, t], keys[:, seen]) / 2.0
        wanted = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), values[:, seen]).flatten(1)
        assert torch.allclose(found[:, t], wanted, atol=1e-5)


def captured(target_session, window, folder, prompts):
    capture = KeysValues(new_tokens=20, temperature=0.0, seed=0, window=window)
    return collect(target_session, prompts, capture, folder, "train", show=False)


def test_captured_texts_keep_their_beginning_and_their_places(make_llama, tmp_path):
    with foretoken.load(make_llama(VOCAB, seed=3), method="plain", kernels="dense") as session:
        train = captured(session, 12, tmp_path, [TEXT[:5], TEXT[:1]])
        texts = train.take(torch.arange(2))
        assert texts["positions"][0].tolist() == [0, 1, 2, 3, *range(17, 25)]
        assert texts["input_ids"][0, :SINKS].tolist() == TEXT[:SINKS]
        assert texts["keys"].shape == (2, 12, 2, 16)
        # The first token behind the gap is not learned as the one behind token 3.
        assert texts["weights"][1].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, *([1.0] * 7)]
        ids = texts["input_ids"][1].tolist()
        assert texts["positions"][1].tolist() == [0, 1, 2, 3, *range(13, 21)]
        target = session.target
        whole = [TEXT[0], *session.generate(TEXT[:1], 20).tokens]
        assert ids == whole[:4] + whole[-8:]
        [row] = seeded_rows([whole], SamplingParams(), VOCAB)
        target.prefill([row])
        keys, _ = target.layer_cache(1).keys_values(row)
        kept = texts["keys"][1, :-1]
        assert torch.allclose(kept, keys.transpose(0, 1)[[0, 1, 2, 3, *range(13, 20)]])


def test_a_text_that_is_moved_as_a_whole_says_the_same(targets):
    """Keys, queries and the window agree on positions, so only distances are left."""
    target = targets["yarn"]
    head, memory = made(target), target.layer_cache(1)
    text = {
        "positions": torch.arange(40)[None],
        "keys": memory.rotated(torch.randn(40, 2, 16), torch.arange(40))[None],
        "values": torch.randn(1, 40, 2, 16),
    }
    embedded = torch.randn(1, 40, 64)

    def states(by, sinks):
        texts = offset(text, by, sinks, memory)
        return head(
            embedded, texts["positions"], texts["keys"], texts["values"], 2, memory.rotated
        )  # fmt: skip

    here = states(0, 0)
    assert torch.allclose(states(300, 0), here, atol=1e-3)
    apart = states(300, SINKS)
    assert torch.allclose(apart[:, :SINKS], here[:, :SINKS], atol=1e-4), "they stayed"
    assert not torch.allclose(apart[:, 12:], here[:, 12:], atol=1e-2), "and are far from the rest"


def training(model, out, **changes):
    small = {"prompts": 32, "new_tokens": 40, "window": 40, "steps": 120, "batch": 8, "rate": 5e-3}
    config = LongContextTraining(**{**small, "temperature": 0.0, "sliding_window": 3, **changes})

    def prompts(split, count):
        return [[i % VOCAB, 5 * i % VOCAB, 7] for i in range(count)]

    with foretoken.load(model, method="plain", kernels="dense") as session:
        return run_training(session, "longspec", prompts, config, out, show=False)


def loss(model, out, late, by):
    """Of a trained head on its texts, at a depth of drafts, moved away from their beginning."""
    head = store.load(out, "longspec")[0]
    texts = Features(sorted((out / "training" / "capture").glob("*.safetensors")))
    with foretoken.load(model, method="plain", kernels="dense") as session, torch.no_grad():
        memory = session.target.layer_cache(1)
        moved = offset(texts.take(torch.arange(len(texts))), by, SINKS, memory)
        return float(head.learn(moved, Ends(session.target), late, memory.rotated)[0])


def test_short_texts_teach_large_positions_and_withheld_rows_deep_drafts(make_llama, tmp_path):
    model = make_llama(VOCAB, seed=3, max_position_embeddings=4096)
    plain, far, deep = tmp_path / "plain", tmp_path / "far", tmp_path / "deep"
    training(model, plain, offset=0, noise=1, steps=100)
    training(model, far, noise=1, steps=100)
    training(model, deep, offset=0, noise=4, steps=100)
    assert loss(model, far, 1, 3900) < 0.7 * loss(model, plain, 1, 3900)
    assert loss(model, deep, 4, 0) < 0.5 * loss(model, plain, 4, 0)


def test_offsets_that_a_target_cannot_follow_are_refused(make_llama, tmp_path):
    with pytest.raises(CapabilityError, match="offset of 100"):
        training(gpt2(), tmp_path / "gpt2", offset=100, steps=1)
    with pytest.raises(CapabilityError, match="offset of 500"):
        training(make_llama(VOCAB, seed=3), tmp_path / "llama", offset=500, steps=1)


def test_a_head_for_other_heads_is_refused(targets, tmp_path):
    with pytest.raises(ConfigError, match="2 heads of 32"):
        reader(targets["wide"], made(targets["wide"], asked=16), tmp_path)


def test_a_table_is_read_as_well(tmp_path):
    target = TableLM.random(VOCAB, order=1, seed=2)
    model = reader(target, made(target, heads=1, kv_heads=1, asked=VOCAB).double(), tmp_path)
    row = opened(target, model, TEXT[:5])
    [law] = model.grow([row], [TEXT[4:5]], [[-1]])
    before = law.logits.clone()
    other = opened(target, model, [*TEXT[:3], (TEXT[3] + 1) % VOCAB, TEXT[4]])
    assert law.logits.dtype == torch.float64
    assert not torch.allclose(F.softmax(model.grow([other], [TEXT[4:5]], [[-1]])[0].logits, -1),
                              F.softmax(before, -1))  # fmt: skip


def test_a_window_knows_nothing_before_its_columns_are_there(targets, tmp_path, monkeypatch):
    target = targets["llama"]
    model = reader(target, made(target), tmp_path)
    row, other = (opened(target, model, TEXT[:12]) for _ in range(2))
    embed = target.embed

    def broken(tokens):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target, "embed", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.grow([row], [[TEXT[11]]], [[-1]])
    monkeypatch.setattr(target, "embed", embed)
    [said], [wanted] = (model.grow([one], [[TEXT[11]]], [[-1]]) for one in (row, other))
    assert torch.equal(said.logits, wanted.logits)


def test_it_does_not_guess_behind_tokens_whose_keys_are_not_there(tmp_path):
    """Those that a request forces: others go on behind them before the target has read them."""
    target = TableLM.random(VOCAB, order=1, seed=2)
    head = made(target, heads=1, kv_heads=1, asked=VOCAB).double()
    alone = BestFirst(reader(target, head, tmp_path))
    other = BestFirst(OrdinaryModel(target))
    for drafter in (alone, Hybrid(alone, PromptLookup()), Portfolio(PromptLookup(), alone)):
        assert not GivenText(drafter).goes_on
    for drafter in (other, Hybrid(other, PromptLookup()), Portfolio(PromptLookup(), other)):
        assert GivenText(drafter).goes_on

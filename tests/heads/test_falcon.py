"""Falcon's head: what a block sees, that it drafts as it is trained, and what glancing shows."""

import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foretoken
from foretoken.audit.rows import seeded_rows
from foretoken.drafters.parts.state_blocks import StateBlocks
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.engine.assemble import assemble
from foretoken.errors import ConfigError
from foretoken.heads import store
from foretoken.heads.eagle import Eagle
from foretoken.heads.falcon import HEAT, LAW, SOFT, Falcon, Recurrence
from foretoken.heads.table import HEADS, Head
from foretoken.lm.table import TableLM
from foretoken.training.objectives.glancing import GlancingObjective, GlancingTraining, glances
from foretoken.types import FinalNorm, SamplingParams

VOCAB = 6
SIZES = [1, 2, 3, 4]
every_size = pytest.mark.parametrize("size", SIZES)


class TableEnds:
    """A table's states are its logits."""

    places = torch.arange(VOCAB)  # every token has an output

    def embed(self, tokens):
        return F.one_hot(tokens, VOCAB).float()

    def unembed(self, states):
        return states


class Straight(Falcon):
    """A head without the recurrence, its input joined as EAGLE's."""

    def __init__(self, config):
        super().__init__(config)
        self.recurrence = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def entering(self, inputs):
        joined = self.recurrence(inputs)
        return joined, joined


def made(size=2, kind=Falcon, width=VOCAB, vocab=VOCAB):
    torch.manual_seed(0)
    head = kind(Falcon.Config(hidden_size=width, vocab_size=vocab, block=size, inner=8))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def reader(target, head, folder, kind="falcon"):
    where = store.save(folder / kind, kind, head, {})
    return StateBlocks(target, kind, StateBlocks.Config(draft_head=where))


def opened(model, target, tokens):
    [row] = seeded_rows([tokens], SamplingParams(), VOCAB)
    [features] = target.prefill([row], (FinalNorm(),))
    assert model.open(row, features)
    target.free([row])
    return row


def laws_along(model, row, path):
    """Logits after the root and after each token of a chain below it."""
    found = []
    for above, token in enumerate((row.tokens[-1], *path), -1):
        [score] = model.grow([row], [[token]], [[above]])
        found.append(score.logits[0])
    return torch.stack(found)


def texts(count=2, length=11):
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(VOCAB, (count, length), generator=generator),
        "hidden": torch.randn(count, length, VOCAB, generator=generator),
        "weights": torch.ones(count, length),
    }


@pytest.fixture
def target():
    return TableLM.random(VOCAB, seed=1)


def test_the_recurrence_is_an_lstm():
    torch.manual_seed(0)
    ours, theirs = Recurrence(6, 3), nn.LSTM(6, 3, 2, batch_first=True)
    for layer in range(2):
        for name, part in (("ih", ours.given[layer]), ("hh", ours.kept[layer])):
            part.weight.data.copy_(getattr(theirs, f"weight_{name}_l{layer}"))
        bias = getattr(theirs, f"bias_ih_l{layer}") + getattr(theirs, f"bias_hh_l{layer}")
        ours.given[layer].bias.data.copy_(bias)
    inputs = torch.randn(2, 5, 4, 6)
    along, alone = ours(inputs)
    assert torch.allclose(along.flatten(0, 1), theirs(inputs.flatten(0, 1))[0], atol=1e-6)
    each = theirs(inputs.flatten(0, 2)[:, None])[0]
    assert torch.allclose(alone.flatten(0, 2), each[:, 0], atol=1e-6)


@every_size
def test_greedy_text_is_plains_for_every_size_of_block(size, make_llama, tmp_path):
    model = make_llama(7, seed=5)
    head = store.save(tmp_path / "head", "falcon", made(size, width=64, vocab=7), {})
    prompts = [[1, 2, 3, 4, 5, 6, 0, 3, 3], [2], [4, 4]]
    with foretoken.load(model, method="plain", kernels="dense", compile="off") as session:
        wanted = [one.tokens for one in session.generate(prompts, 40)]
    options = {"controller": "fixed", "depth": 6, "nodes": 24, "branch": 3, "min_gain": 0.0}
    with foretoken.load(
        model, method="falcon", draft_head=head, kernels="dense", compile="off", **options
    ) as session:
        found = session.generate(prompts, 40)
        assert [one.tokens for one in found] == wanted
        assert [session.generate(one, 40).tokens for one in prompts] == wanted
    assert sum(one.stats.accepted for one in found) > 10, "blocks were followed, too"


def test_blocks_of_one_without_the_recurrence_are_eagles_head():
    head, batch = made(1, Straight), texts()
    eagle = Eagle(Eagle.Config(hidden_size=VOCAB, vocab_size=VOCAB, inner=8))
    eagle.load_state_dict({
        name.replace("recurrence", "join"): part for name, part in head.state_dict().items()
    })  # fmt: skip
    before = F.pad(batch["hidden"][:, :-1], (0, 0, 1, 0))
    said = head.guessed(batch, TableEnds(), head.slots(batch, 0))[:, :, 0]
    theirs = eagle(batch["input_ids"], before, TableEnds().embed)
    assert torch.allclose(said, theirs[:, :-1], atol=1e-5)


def test_and_drafts_are_eagles_drafts(target, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "foretoken.heads.straight", sys.modules[__name__])
    name = "straight"
    place = "heads.straight:Straight"
    monkeypatch.setitem(HEADS, name, Head(name=name, summary="a toy", module=place, serves="eagle"))
    head = made(1, Straight)
    eagle = Eagle(Eagle.Config(hidden_size=VOCAB, vocab_size=VOCAB, inner=8))
    eagle.load_state_dict({
        name.replace("recurrence", "join"): part for name, part in head.state_dict().items()
    })  # fmt: skip
    where = store.save(tmp_path / "eagle", "eagle", eagle, {})
    models = (
        reader(target, head, tmp_path, name),
        StateReader(target, "eagle", StateReader.Config(draft_head=where)),
    )
    ours, theirs = (
        laws_along(model, opened(model, target, [1, 2, 0, 3]), [4, 1, 1]) for model in models
    )
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(("size", "first", "place"), [(2, 0, 4), (2, -1, 4), (3, -2, 4), (3, 0, 5)])
def test_an_input_changes_its_whole_block_and_later_ones_alone(size, first, place):
    head, batch = made(size), texts()
    at = head.slots(batch, first)
    before = head.guessed(batch, TableEnds(), at)
    batch["input_ids"][:, place] = (batch["input_ids"][:, place] + 1) % VOCAB
    moved = (head.guessed(batch, TableEnds(), at) - before).abs().amax((0, -1))
    [own] = (at == place).any(-1).nonzero()[:, 0].tolist()
    assert 0 < own < len(at) - 1
    assert (moved[:own] == 0).all(), "nothing is known of what is to come"
    assert (moved[own:] > 1e-4).all()


def recomputed(head, target, tokens, path):
    """States at the slots of the blocks that a path opens, all from the start."""
    ends, size, states = TableEnds(), head.block, [torch.zeros(VOCAB)]
    states += [target.after(tokens[: i + 1]).float() for i in range(len(tokens) - 1)]
    inputs = list(head.inputs(torch.tensor(tokens), torch.stack(states), ends.embed))
    begin, found = len(tokens) - size, []
    while True:
        own = torch.stack([inputs[max(0, begin + slot)] for slot in range(size)])
        past = inputs[: max(0, begin)]
        alone = [head.entering(one[None])[1] for one in past] or [torch.zeros(0, VOCAB)]
        memory = head.remember(torch.cat(alone)[None], torch.arange(len(past))[None])
        sees = torch.ones(1, 1, len(past), dtype=torch.bool)
        block = head(head.entering(own)[0][None, None], torch.tensor([[begin]]), sees, memory)
        found.append(block[0, 0])
        if len(path) < size:
            return torch.cat(found)
        below, path = path[:size], path[size:]
        inputs += head.inputs(torch.tensor(below), found[-1], ends.embed)
        begin += size


@every_size
def test_a_tree_grown_block_by_block_is_one_recomputed_from_the_start(size, target, tmp_path):
    head = made(size)
    model = reader(target, head, tmp_path)
    long, short = [1, 2, 0, 3, 5, 5], [4, 1]
    rows = [opened(model, target, text) for text in (long, short)]
    paths = [[[2, 3, 0, 1, 5, 4], [2, 0, 0, 1, 5, 1]], [[0, 0, 1, 2, 3, 4], [0, 5, 1, 2, 0, 0]]]
    said = [model.grow(rows, [[3], [1]], [[-1], [-1]])]
    said.append(model.grow(rows, [[2], [0]], [[0], [0]]))
    above = [1, 1]
    for depth in range(1, 6):
        tokens = [[path[depth] for path in both] for both in paths]
        said.append(model.grow(rows, tokens, [above, above]))
        above = [2 * depth, 2 * depth + 1]
    for i, text in enumerate((long, short)):
        for branch, path in enumerate(paths[i]):
            wanted = recomputed(head, target, text, path)[: len(path) + 1]
            found = [level[i].logits[min(branch, len(level[i].logits) - 1)] for level in said]
            assert torch.allclose(torch.stack(found).float(), wanted, atol=1e-4)


@every_size
def test_rows_at_different_levels_share_a_pass(size, target, tmp_path):
    model = reader(target, made(size), tmp_path)
    long, short = opened(model, target, [1, 2, 0, 3, 5, 5]), opened(model, target, [4])
    path, found = [2, 3, 0, 1], [model.grow([long], [[5]], [[-1]])[0].logits[0]]
    for depth, token in enumerate(path):
        above = depth - 1  # of the short row, which is one level behind
        both = model.grow([long, short], [[token], [[4, *path][depth]]], [[depth], [above]])
        found += [score.logits[0] for score in both]
    for text, said in (([1, 2, 0, 3, 5, 5], [found[0], *found[1::2]]), ([4], found[2::2])):
        alone = laws_along(model, opened(model, target, text), path[: len(said) - 1])
        assert torch.allclose(alone, torch.stack(said), atol=1e-5)


@every_size
def test_a_text_followed_is_a_text_taken_in_whole(size, target, tmp_path):
    model = reader(target, made(size), tmp_path)
    grown = opened(model, target, [1])
    for tree, accepted in ((True, [4, 3]), (False, [0]), (True, []), (True, [4])):
        path = None
        if tree:
            laws_along(model, grown, [4, 3, 1, 1, 0])
            path = range(1, 1 + len(accepted))
        contexts = [grown.tokens + accepted[:n] for n in range(len(accepted) + 1)]
        states = torch.stack([target.after(tokens) for tokens in contexts])[:, None]
        grown.tokens += [*accepted, 2]
        model.keep([grown], [path], [states])
        fresh = opened(model, target, grown.tokens)
        both = [laws_along(model, one, [1, 0, 3, 3, 2]) for one in (grown, fresh)]
        assert torch.allclose(*both, atol=1e-5)
    again = laws_along(model, grown, [1, 0, 3, 3, 2])
    assert torch.allclose(both[0], again, atol=1e-5), "a tree opened twice, as after a failed step"
    model.close(grown)
    assert model not in grown.private


def test_it_drafts_as_it_is_trained(target, tmp_path):
    head = made(3)
    model = reader(target, head, tmp_path)
    tokens = [1, 2, 0, 3, 5, 5, 4, 1]
    states = torch.stack([target.after(tokens[: i + 1]).float() for i in range(len(tokens))])
    batch = {"input_ids": torch.tensor([tokens]), "hidden": states[None]}
    for first in (-2, -1, 0):
        at = head.slots(batch, first)
        learnt = head.guessed(batch, TableEnds(), at)[0]
        for block, places in zip(learnt, at.tolist(), strict=True):
            one = opened(model, target, tokens[: places[-1] + 1])
            [score] = model.grow([one], [one.tokens[-1:]], [[-1]], (FinalNorm(),))
            assert torch.allclose(score.hidden[0, 0].float(), block[0], atol=1e-5)
            assert torch.allclose(laws_along(model, one, [0, 0]).float(), block, atol=1e-5)


@every_size
def test_a_draft_takes_a_pass_for_every_block_of_its_depth(size, tmp_path):
    target, depth = TableLM.random(VOCAB, seed=2, scale=0.5), 6
    head = store.save(tmp_path / "head", "falcon", made(size), {})
    engine = assemble(
        "falcon", target, draft_head=head, template=(2, *[1] * (depth - 1)),
        controller="fixed", depth=depth, nodes=2 * depth,
    )  # fmt: skip
    passes = []
    layer = engine.drafter.model.head.layer
    handle = layer.register_forward_hook(lambda *_: passes.append(1))
    for row in seeded_rows([[1, 2, 3], [4]], SamplingParams(max_new_tokens=50), VOCAB):
        engine.submit(row)
    step = engine.step()
    handle.remove()
    assert [max(draft.tree.depths()) for draft in step.drafts] == [depth, depth]
    assert len(passes) == -(-depth // size)
    engine.close()


def test_states_and_laws_are_learnt_k_places_ahead():
    head, batch = made(2), texts()
    batch["weights"][:, :4] = 0.0
    at = head.slots(batch, -1)
    learnt = head.counted(batch, at)
    guessed = head.guessed(batch, TableEnds(), at)
    apart, law, hits = [], [], []
    for text in range(2):
        for place in range(2, 9):  # the token of place 4 is the first that counts
            b, slot = divmod(place + 1, 2)
            said, true = guessed[text, b, slot], batch["hidden"][text, place + 1]
            token = batch["input_ids"][text, place + 2]
            apart.append(F.smooth_l1_loss(said, true))
            soft = F.cross_entropy(said / HEAT, (true / HEAT).softmax(-1))
            law.append(SOFT * soft + (1 - SOFT) * F.cross_entropy(said, token))
            hits.append((slot, float(said.argmax() == token)))
    loss, right = head.learn(batch, TableEnds(), at, learnt)
    assert int(learnt.sum()) == len(apart) == 14
    assert torch.allclose(loss, sum(apart) / 14 + LAW * sum(law) / 14, atol=1e-5)
    for slot in range(2):
        own = [hit for s, hit in hits if s == slot]
        assert float(right[f"depth_{slot + 1}"]) == pytest.approx(sum(own) / len(own))


@pytest.mark.parametrize("size", [2, 3])
def test_a_shown_slot_reads_what_it_guesses_and_only_its_block_sees_it(size):
    head, batch = made(size), texts(1)
    at = head.slots(batch, 0)
    shown = torch.zeros(1, *at.shape, dtype=torch.bool)
    shown[0, 1, 0] = True
    found = head.guessed(batch, TableEnds(), at, shown)[0]
    moved = (found - head.guessed(batch, TableEnds(), at)[0]).abs().amax(-1)
    assert (moved[1] > 1e-4).all() and (moved[[b for b in range(len(at)) if b != 1]] == 0).all()
    # The same block, made by hand: its first input is the token and the state k places later.
    ids, states = batch["input_ids"][0], F.pad(batch["hidden"][0, :-1], (0, 0, 1, 0))
    inputs = head.inputs(ids, states, TableEnds().embed)
    own = inputs[size : 2 * size].clone()
    own[0] = torch.cat([F.one_hot(ids[2 * size], VOCAB), batch["hidden"][0, 2 * size - 1]])
    memory = head.remember(
        head.entering(inputs[:size, None])[1][None, :, 0], torch.arange(size)[None]
    )
    sees = torch.ones(1, 1, size, dtype=torch.bool)
    block = head(head.entering(own)[0][None, None], torch.tensor([[size]]), sees, memory)
    assert torch.allclose(block[0, 0], found[1], atol=1e-5)


def test_as_many_answers_are_shown_as_the_share_of_the_wrong_guesses_says():
    generator = torch.Generator().manual_seed(3)
    for size in (2, 3, 4):
        wrong = torch.rand(5, 12, size, generator=generator) < 0.5
        learnt = torch.ones_like(wrong)
        learnt[:, :2, 0] = False
        for share in (0.4, 0.2, 0.0):
            shown = glances(wrong & learnt, learnt, share, random.Random(size))
            wanted = [round(share * int(one.sum())) for one in wrong & learnt]
            assert shown.sum((1, 2)).tolist() == wanted
            assert not shown[:, :2].any() and not shown.all(-1).any()
            assert (shown[..., 1:] <= shown[..., :-1]).all(), "runs from the beginning of blocks"
    alone = torch.ones(2, 5, 1, dtype=torch.bool)
    assert not glances(alone, alone, 0.4, random.Random(0)).any(), "a block of one has no rest"


class Noting(Falcon):
    """A head that tells what it was asked to learn."""

    def learn(self, texts, ends, at, learnt, shown=None):
        self.asked = (learnt, shown)
        return super().learn(texts, ends, at, learnt, shown)


@pytest.mark.parametrize("masked", [True, False])
def test_the_share_shown_falls_to_nothing_and_is_left_out_of_the_loss_by_a_flag(masked):
    head, batch = made(2, Noting).requires_grad_(True), texts(4, 40)
    objective = GlancingObjective(GlancingTraining(mask_glanced=masked), None)
    objective.ends = TableEnds()
    counts = []
    for done in (0.0, 0.5, 0.9, 1.0):
        objective.reach(done)
        objective(head, batch, random.Random(0))
        learnt, shown = head.asked
        counts.append(int(shown.sum()))
        assert (learnt & shown).any() == (not masked and counts[-1] > 0)
        rest = learnt | shown
        assert torch.equal(rest, head.counted(batch, head.slots(batch, -1))) or torch.equal(
            rest, head.counted(batch, head.slots(batch, 0))
        )
    assert counts == sorted(counts, reverse=True) and counts[0] > 2 * counts[2] > counts[3] == 0
    with torch.no_grad():
        objective.reach(0.0)
        objective(head, batch, random.Random(0))
    assert head.asked[1] is None, "nothing is shown where a head is judged"


def test_a_window_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="window"):
        GlancingTraining(block=4, window=4)

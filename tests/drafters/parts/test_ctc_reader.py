"""CTC frames as a draft model: prefix scores by enumeration, collapse, and the loss."""

from itertools import product
from math import log

import pytest
import torch

from foretoken.drafters.parts.ctc_reader import CtcReader, following, likelihood, path_of
from foretoken.heads import store
from foretoken.heads.block import Block
from foretoken.heads.ctc import CtcBlock, agreeing, collapsed
from foretoken.lm.table import TableLM

VOCAB, FRAMES = 3, 4


@pytest.fixture
def frames():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(FRAMES, VOCAB + 1, generator=generator, dtype=torch.float64).softmax(-1)


def every_alignment(frames):
    """What all frame paths say, and how likely each is."""
    for path in product(range(VOCAB + 1), repeat=FRAMES):
        chance = torch.stack([frames[t, token] for t, token in enumerate(path)]).prod()
        yield collapsed(list(path), VOCAB), chance


@pytest.mark.parametrize(
    ("frames", "said"),
    [("aab", "ab"), ("a.a", "aa"), ("..a", "a"), ("...", ""), ("aaa", "a"), (".ab", "ab")],
)
def test_frames_collapse(frames, said):
    ids = {"a": 0, "b": 1, ".": VOCAB}
    assert collapsed([ids[frame] for frame in frames], VOCAB) == [ids[token] for token in said]


@pytest.mark.parametrize("path", [[], [0], [1, 1], [0, 2], [2, 2, 2], [0, 1, 0, 1], [1, 1, 1]])
def test_the_scores_of_a_prefix_are_sums_over_all_alignments(path, frames):
    prefix = path_of(frames, path)
    exactly = sum(float(chance) for said, chance in every_alignment(frames) if said == path)
    assert likelihood(prefix) == pytest.approx(exactly)
    [law] = following([prefix], frames)
    for token in range(VOCAB):
        begun = [*path, token]
        expected = sum(
            float(chance) for said, chance in every_alignment(frames) if said[: len(begun)] == begun
        )
        assert float(law[token]) == pytest.approx(expected)


def test_the_loss_is_that_of_all_alignments(frames):
    path = [1, 1]
    ours = -log(likelihood(path_of(frames, path)))
    theirs = torch.nn.functional.ctc_loss(
        frames.log()[:, None], torch.tensor([path]), torch.tensor([FRAMES]), torch.tensor([2]),
        blank=VOCAB, reduction="sum",
    )  # fmt: skip
    assert ours == pytest.approx(float(theirs))


def test_a_tree_reads_the_frames_of_its_root(tmp_path, row):
    torch.manual_seed(1)
    target = TableLM.random(VOCAB, seed=3)
    head = CtcBlock(Block.Config(hidden_size=VOCAB, vocab_size=VOCAB, depth=FRAMES))
    where = store.save(tmp_path / "head", "ctc", head, {})
    model = CtcReader(target, "ctc", CtcReader.Config(draft_head=where))
    one = row([1, 2, 0], VOCAB)
    [features] = target.prefill([one], model.taps)
    assert model.open(one, features) and model.deepest == FRAMES // 2
    [root] = model.grow([one], [[0]], [[-1]])
    [level] = model.grow([one], [[1, 2]], [[0, 0]])
    [below] = model.grow([one], [[1]], [[1]])
    frames = one.private[model].frames
    for path, logits in (([], root.logits[0]), ([2], level.logits[1]), ([1, 1], below.logits[0])):
        [law] = following([path_of(frames, path)], frames)
        assert torch.allclose(logits.double().softmax(-1), law / law.sum(), atol=1e-6)


def test_tokens_agree_up_to_the_first_that_does_not():
    assert agreeing([1, 2, 0], [1, 2, 2, 0]) == 2
    assert agreeing([], [1]) == 0 == agreeing([1], [])

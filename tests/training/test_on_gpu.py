"""Texts and heads made on a GPU are those that a CPU makes."""

import pytest
import torch

import foretoken
from foretoken.heads import store
from foretoken.minis import recipes
from foretoken.training.dataset.lockstep import decode
from foretoken.training.dataset.records import Chat
from foretoken.training.heads import run_training
from foretoken.training.objectives.unrolled import UnrolledTraining
from tests.lm.families import tied, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [3]]


def test_texts_in_lockstep_are_those_of_a_cpu():
    found = []
    for device, together in (("cuda", 3), ("cpu", 0)):
        with foretoken.load(tiny("llama").to(device), "plain") as session:
            rows = session.rows([list(ids) for ids in PROMPTS], 20, temperature=0.0)
            decode(session, rows, together)
            found.append([row.new_tokens for row in rows])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's norms
@pytest.mark.parametrize(("embeds", "own_rows"), [(True, True), (False, True), (False, False)])
def test_a_head_that_learned_on_a_gpu_drafts_on_a_cpu(embeds, own_rows, tmp_path):
    def chats(split, count):
        drawn = torch.Generator().manual_seed(len(split))
        texts = torch.randint(97, (count, 20), generator=drawn).tolist()
        return [Chat("open", 1.0, text[:5], text[5:]) for text in texts]

    config = UnrolledTraining(
        prompts=40, window=32, batch=4, steps=60, width=64, vocabulary=80, unrolled=3,
        states="asked", embeds=embeds, own_rows=own_rows, precision="bf16",
    )  # fmt: skip
    with foretoken.load(tied().cuda(), "plain") as session:
        notes = run_training(session, "eagle3", chats, config, tmp_path, show=False)
    assert notes["figures"]["trained"]["depth_1"] > notes["untrained"]["depth_1"]
    losses = [loss for _, loss in notes["held_out"]]
    assert losses[-1] < losses[0]
    assert store.load(tmp_path, "eagle3")[1].options["embeds"] == embeds
    asked = {"max_new_tokens": 24, "temperature": 0.0}
    with foretoken.load(tied(), "eagle3", draft_head=tmp_path) as drafting:
        said = drafting.generate([5, 6, 7], **asked)
    with foretoken.load(tied(), "plain") as plain:
        assert said.tokens == plain.generate([5, 6, 7], **asked).tokens


def test_a_mini_draft_is_taught_where_it_learns(tmp_path):
    recipes.train("tiny", tmp_path / "tiny", progress=False)
    taught = recipes.train("tiny-draft", tmp_path / "d", teacher=tmp_path / "tiny", progress=False)
    assert taught.step == 4 and (tmp_path / "d" / "config.json").is_file()

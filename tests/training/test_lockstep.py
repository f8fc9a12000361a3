"""Texts written in lockstep: what the engine would write, whatever stands beside them."""

import copy
from dataclasses import replace

import pytest
import torch

import foretoken
from foretoken.errors import CapabilityError, ConfigError
from foretoken.training.dataset.lockstep import Draw, Room, decode
from foretoken.training.dataset.making import DataConfig, make_data
from foretoken.training.dataset.records import every_chat, largest_in_blocks
from foretoken.types import SamplingParams
from tests.lm.families import short, tiny

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [3], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40, 41]]


def own(pair):
    """The target of a pair, which other tests may hold open as they want it captured or not."""
    return copy.deepcopy(pair[0])


def written(session, prompts, together, count=20, **asked):
    """What is written after prompts, and why it ended."""
    rows = session.rows(prompts, count, **asked)
    decode(session, rows, together)
    return [(row.new_tokens, row.finish.reason) for row in rows]


def alone(session, prompts, count=20):
    rows = session.rows(prompts, count, temperature=0.0)
    session.decode(rows)
    return [(row.new_tokens, row.finish.reason) for row in rows]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_greedy_texts_are_the_engines_own(family):
    """Ragged prompts; windows shorter than the texts and than a prompt; soft caps."""
    with foretoken.load(tiny(family), "plain", kernels="dense") as session:
        for together in (1, 2, 5):
            found = written(session, PROMPTS, together, temperature=0.0)
            assert found == alone(session, PROMPTS), together


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_no_text_goes_beyond_the_models_positions(family):
    """Rows that are over are fed as long as others go on, at positions that there are."""
    prompts = [[1, 2, 3], [4] * 40, [5] * 64]
    with foretoken.load(short(family, 64), "plain", kernels="dense") as session:
        assert session.target.max_length == 64
        found = written(session, prompts, 3, 90, temperature=0.0)
        assert found == alone(session, prompts, 90)
        assert {reason for _, reason in found} == {"context"}


def test_texts_end_with_their_end_token(tiny_pair):
    with foretoken.load(own(tiny_pair), "plain") as session:
        prompts = [[i, i + 1] for i in range(90)]
        found = written(session, prompts, 32, 40, temperature=1.0, seed=list(range(90)))
        ends = set(session.eos)
        again = written(session, prompts, 32, 40, temperature=1.0, seed=list(range(90)))
    assert {reason for _, reason in found} == {"stop", "length"} and found == again
    for tokens, reason in found:
        assert (reason == "stop") == (tokens[-1] in ends)
        assert not ends & set(tokens[:-1]) and (reason == "stop" or len(tokens) == 40)


def test_tokens_are_drawn_from_the_law_at_a_rows_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])
    count = 20_000
    for temperature, min_p in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.2)):
        asked = SamplingParams(temperature=temperature, min_p=min_p, seed=7)
        draw = Draw([asked] * count + [SamplingParams()], torch.device("cpu"))
        drawn = draw(logits.expand(count + 1, -1))
        law = (logits / temperature).softmax(-1)
        law = torch.where(law < min_p * law.max(), 0.0, law)
        law /= law.sum()
        seen = torch.bincount(drawn[:-1], minlength=5) / count
        assert drawn[-1] == 0, "greedy beside rows that are not"
        assert (seen - law).abs().max() < 4 * (law * (1 - law) / count).sqrt().max()
        assert not seen[law == 0].any()


def test_laws_are_cut_as_the_engine_cuts_them():
    logits = 3 * torch.randn(6, 97, generator=torch.Generator().manual_seed(2))
    asked = [
        {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5},
        {"temperature": 0.6, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ]  # fmt: skip
    with foretoken.load(tiny("llama"), "plain") as session:
        rows = [session.rows([[1]], 5, **{"temperature": 1.3, **one})[0] for one in asked]
        laws = [row.warp.law(row.tokens, some, []) for row, some in zip(rows, logits, strict=True)]
    found = Draw([row.params for row in rows], torch.device("cpu")).scores(logits).softmax(-1)
    assert torch.allclose(found, torch.stack(laws), atol=1e-6)
    assert (found > 0).sum(-1).tolist() == [int((law > 0).sum()) for law in laws]


def test_options_that_are_not_known_are_refused():
    with foretoken.load(tiny("llama"), "plain") as session:
        for asked in ({"presence_penalty": 0.9}, {"logit_bias": {3: 1.0}}):
            with pytest.raises(ConfigError, match=next(iter(asked))):
                written(session, PROMPTS, 2, temperature=1.0, **asked)
    model = tiny("llama")
    model.generation_config.repetition_penalty = 1.5
    with (
        foretoken.load(model, "plain") as session,
        pytest.raises(ConfigError, match="repetition_penalty"),
    ):
        written(session, PROMPTS, 2, temperature=1.0)


def test_the_largest_scores_are_found_in_blocks():
    scores = torch.randn(20, 4096, generator=torch.Generator().manual_seed(1))
    values, places = largest_in_blocks(scores, 16)
    wanted = scores.topk(16, -1)
    assert torch.equal(values, wanted.values) and torch.equal(places, wanted.indices)


def test_rows_are_as_many_as_there_is_room_for():
    room = Room(free=1e6, column=100, law=1000)
    assert room.rows(90) == 100 and room.rows(10**6) == 1


def test_training_texts_are_made_in_lockstep(tiny_pair, byte_tokenizer, tmp_path):
    config = DataConfig(chats=24, shard=12, new_tokens=9, laws=0, lockstep=5, held_out=0.2,
                        temperatures=(0.0, 1.0), repeated=1.0)  # fmt: skip
    prompts = [f"number {i}" for i in range(24)]
    with foretoken.load(own(tiny_pair), "plain", tokenizer=byte_tokenizer) as session:
        assert Room.of(session) is None, "on a CPU whoever asks for rows knows best"
        make_data(session, config, tmp_path, prompts, show=False)
        chats = [one for split in ("train", "valid") for one in every_chat(tmp_path, split)]
        assert len(chats) == 24 and {one.temperature for one in chats} == {0.0, 1.0}
        for chat in [one for one in chats if one.temperature == 0.0][:6]:
            said = session.generate(chat.prompt, max_new_tokens=9, temperature=0.0)
            assert list(said.tokens) == chat.answer
        again = tmp_path / "again"
        make_data(session, config, again, prompts, show=False)
        for path in tmp_path.glob("train-*.jsonl"):
            assert path.read_text() == (again / path.name).read_text(), "as the seed says"


def test_laws_beside_lockstep_are_refused():
    config = DataConfig(laws=0, lockstep=8)
    for other in ({"laws": 4}, {"features": "final"}, {"writer": "draft"}, {"lockstep": 513}):
        with pytest.raises(ConfigError, match="lockstep"):
            replace(config, **other)


def test_a_target_that_is_not_captured_is_refused(tiny_pair):
    with (
        foretoken.load(own(tiny_pair), "plain", compile="off") as session,
        pytest.raises(CapabilityError, match="lockstep"),
    ):
        written(session, PROMPTS, 1)

"""Rotary positions of published EAGLE-3 heads: which scalings are computed, and which refused."""

import pytest
import torch
from test_public import BASE, HEADS, SIZE, VOCAB, write
from test_public_eagle3 import LLAMA3, native

from foretoken.errors import CheckpointError
from foretoken.heads import store


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_positions_of_pictures_are_ordinary_ones_in_texts(name, kind, tmp_path):
    where = write(tmp_path, *native(rope_scaling={name: kind, "mrope_section": [2, 3, 3]}))
    head, card = store.load(where, "eagle3")
    assert card.options["scaling"] is None
    rotary = head.decoder(64).config.rope_parameters
    assert rotary == {"rope_type": "default", "rope_theta": BASE}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (LLAMA3, LLAMA3),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0},
         {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0,
          "original_max_position_embeddings": 128}),
    ],
    ids=["llama3", "linear", "yarn"],
)  # fmt: skip
def test_scaled_positions_are_the_decoders(asked, told, make_llama, tmp_path):
    where = write(tmp_path, *native(rope_scaling=asked, max_position_embeddings=128))
    head, card = store.load(where, "eagle3")
    assert card.options["scaling"].items() >= told.items()
    found = head.decoder(512).model.rotary_emb
    like = make_llama(
        VOCAB,
        num_attention_heads=HEADS,
        head_dim=SIZE,
        rope_parameters={**told, "rope_theta": BASE},
    ).model.rotary_emb
    assert torch.equal(found.inv_freq, like.inv_freq)
    assert found.attention_scaling == like.attention_scaling
    plain = make_llama(VOCAB, head_dim=SIZE, rope_parameters={
        "rope_type": "default", "rope_theta": BASE}).model.rotary_emb  # fmt: skip
    assert not torch.equal(found.inv_freq, plain.inv_freq)


def test_a_scaling_that_follows_the_length_of_a_text_is_refused(tmp_path):
    factors = [1.0] * (SIZE // 2)
    for scaling, told in (
        ({"rope_type": "longrope", "short_factor": factors, "long_factor": factors}, "longrope"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "yarn", "factor": 4.0}, "original_max_position_embeddings is missing"),
    ):
        with pytest.raises(CheckpointError, match=told):
            store.load(write(tmp_path, *native(rope_scaling=scaling)), "eagle3")

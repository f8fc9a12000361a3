"""What a head's card says of memory is what the head and its decoder have."""

import json

import pytest
import torch
from test_public import eagle, medusa, write
from test_public_eagle3 import native
from torch import nn

import foretoken
from foretoken.engine.memory.layout import layout_of
from foretoken.errors import CheckpointError
from foretoken.heads import public, public_files, sizes, store
from foretoken.heads.block import Block
from foretoken.heads.chimera import Chimera
from foretoken.heads.ctc import CtcBlock
from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.falcon import Falcon
from foretoken.heads.fspad import Fspad
from foretoken.heads.longspec import LongSpec
from foretoken.heads.medusa import Medusa
from foretoken.heads.wide_eagle3 import WideEagle3
from tests.lm.families import tied

VOCAB, WIDTH = 97, 64
# kind -> method, module, options
DECODERS = {
    "eagle": ("eagle2", Eagle, {"heads": 4, "kv_heads": 2, "inner": 48}),
    "fspad": ("fspad", Fspad, {"heads": 4, "inner": 48}),
    "eagle3": ("eagle3", Eagle3, {"width": 32, "heads": 2, "layers": 2, "taps": (0, 1, 2)}),
    "eagle3-wide": ("eagle3", WideEagle3, {"heads": 4, "kv_heads": 2, "taps": (1, 2, 3)}),
}
BLOCKS = {
    "dflash": ("dflash", Block, {"layers": 2, "heads": 4, "taps": (0, 1, 3)}),
    "dspark": ("dspark", Block, {"rank": 8, "heads": 4, "taps": (0, 2, 3)}),
    "ctc": ("ctc-drafter", CtcBlock, {"heads": 4, "taps": (0, 1, 2)}),
}


def saved(folder, kind, module, options):
    """A folder with a random head of this kind."""
    torch.manual_seed(2)
    head = module(module.Config(hidden_size=WIDTH, vocab_size=VOCAB, **options))
    return str(store.save(folder, kind, head, {}))


def read_by(kind, row, tmp_path, look):
    """Write a text with a head of this kind; `look` sees its reader after every step."""
    method, module, options = row
    folder = saved(tmp_path / kind, kind, module, options)
    given = {"controller": "fixed", "depth": 3, "nodes": 6, "compile": "off"}
    with foretoken.load(tied(), method, draft_head=folder, **given) as session:
        reader = session.engine.drafter.model
        session.engine.listeners.append(lambda step: look(reader, step.rows[0]))
        session.generate([5, 6, 7, 8], max_new_tokens=12, ignore_eos=True)
    return sizes.sizes_of(folder), reader


@pytest.mark.parametrize("kind", DECODERS)
def test_a_head_that_decodes_has_a_cache_and_copies_of_its_layers(kind, tmp_path):
    columns = set()

    def look(reader, row):
        cache = reader.decoder.cache
        held = sum(group.keys.numel() + group.values.numel() for group in cache.groups)
        columns.add(held / (cache.slots * cache.columns))

    found, reader = read_by(kind, DECODERS[kind], tmp_path, look)
    assert columns == {found.column} and found.decodes and found.column > 0
    models: list[nn.Module] = [reader.head, reader.decoder.model]
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    tensors += [] if reader.table is None else [reader.table]  # which may be the head's own
    held = sum({one.data_ptr(): min(one.numel(), sizes.lying(one)) for one in tensors}.values())
    assert found.weights == pytest.approx(held, rel=0.01)
    assert found.states == len(reader.taps)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_head_keeps_rows_of_every_layer_and_reads_several(kind, tmp_path):
    kept = set()

    def look(reader, row):
        if row.finish is None:
            kept.add(sum(rows.shape[1] for rows in row.private[reader].memory))

    found, reader = read_by(kind, BLOCKS[kind], tmp_path, look)
    assert kept == {found.column} and not found.decodes
    assert found.states == len(reader.taps) == 3


def test_what_other_heads_keep(tmp_path):
    options = {"heads": 4, "inner": 48}
    layer = 2 * WIDTH  # a key and a value of four heads
    falcon = sizes.sizes_of(saved(tmp_path / "a", "falcon", Falcon, options))
    chimera = sizes.sizes_of(saved(tmp_path / "b", "chimera", Chimera, options))
    medusa = sizes.sizes_of(saved(tmp_path / "c", "medusa", Medusa, {}))
    assert (falcon.column, chimera.column, medusa.column) == (2 * layer, 2 * layer, 0)
    ring = sizes.sizes_of(saved(tmp_path / "d", "longspec", LongSpec, {"window": 32, **options}))
    assert ring.column == 0 and ring.row == 2 * (WIDTH // 4) * (32 + 64)


def test_a_head_cache_is_in_the_plan(tmp_path):
    from foretoken.engine.memory.plan import CACHE, Need

    for rows in (DECODERS, BLOCKS):
        for kind, (method, module, options) in rows.items():
            folder = saved(tmp_path / kind, kind, module, options)
            layout = layout_of(tied(), method, config={"draft_head": folder})
            parts = layout.plan(Need(2, 100, 6)).parts
            [cache] = [one for one in parts if (one.name, one.kind) == ("head's cache", CACHE)]
            assert cache.bytes >= 2 * 100 * 4 * sizes.sizes_of(folder).column > 0
            assert layout.taps >= 1


def test_a_published_head_is_looked_at_without_reading_a_weight(tmp_path, monkeypatch):
    folders = {
        "eagle": write(tmp_path / "a", *eagle(), "model.safetensors"),
        "eagle3-wide": write(tmp_path / "b", *native(), "pytorch_model.bin"),
        "medusa": write(tmp_path / "c", *medusa(), "medusa_lm_head.pt"),
    }
    for module in (public, public_files):
        monkeypatch.setattr(module, "tensors_of", lambda *_: pytest.fail("weights were read"))
    for kind, folder in folders.items():
        assert store.card_of(folder).kind == sizes.sizes_of(folder).kind == kind
        _, shapes, _ = public_files.opened(folder)
        assert shapes and all(part.is_meta for part in shapes.values())
    model = {"model.embed_tokens.weight": torch.ones(9, 4), "lm_head.weight": torch.ones(9, 4)}
    whole = write(tmp_path / "llama", eagle()[0], model, "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(model, "model-1.safetensors")}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="layout is none of"):
        store.card_of(whole)

import json

import numpy as np
import pytest
import torch

from foretoken.datastore.capture import capture, states_of
from foretoken.datastore.codecs import DTYPES, Codec
from foretoken.datastore.continuations import beginnings
from foretoken.datastore.dense import HEADER, KeyStore, write
from foretoken.datastore.vocabulary import Vocabulary
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lm.table import TableLM

VOCAB = 6


def texts(seed=0, count=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 20)).tolist() for _ in range(count)]


@pytest.fixture
def stored(tmp_path):
    """Makes a key store of texts that a table has read."""

    def make(documents, **options):
        options = {"dims": VOCAB, "dtype": "float32", **options}
        contents = capture(
            TableLM.random(VOCAB, seed=3), documents, Vocabulary.of_ids(VOCAB), **options
        )
        where = tmp_path / f"keys{len(list(tmp_path.iterdir()))}"
        write(where, contents)
        return KeyStore(where)

    return make


def spread_vectors(n=400, width=16):
    generator = torch.Generator().manual_seed(0)
    shape = torch.linspace(3.0, 0.2, width)
    return torch.randn(n, width, generator=generator) * shape + 7.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_bytes_are_kept_as_were_promised(stored, dtype):
    """Casting up on the way in would go unnoticed but for this."""
    for dims in (VOCAB, 3):
        store = stored(texts(), dtype=dtype, dims=dims)
        keys = store.contents.keys
        assert keys.dtype == np.uint8 and keys.shape[1] == store.contents.codec.bytes_per_key
        expected = {"float32": 4 * dims, "float16": 2 * dims, "binary": 1}.get(dtype, dims)
        assert keys.shape[1] == expected
        assert (store.folder / "keys.npy").stat().st_size == keys.size + 128


@pytest.mark.parametrize(("dtype", "least"), [
    ("float32", 0.999999), ("float16", 0.9999), ("float8_e4m3", 0.998), ("float8_e5m2", 0.99),
    ("int8", 0.999), ("binary", 0.6),
])  # fmt: skip
def test_what_is_read_back_points_where_it_pointed(dtype, least):
    vectors = spread_vectors()
    codec = Codec.fit(vectors, 16, dtype)
    back = codec.decode(codec.encode(vectors))
    cosines = torch.nn.functional.cosine_similarity(back, codec.project(vectors))
    assert float(cosines.mean()) > least


def test_all_components_keep_all_angles_and_few_keep_the_largest():
    vectors = spread_vectors()
    centred = vectors - vectors.mean(0)
    whole = Codec.fit(vectors, 16, "float32").project(vectors)
    unit = torch.nn.functional.normalize(centred, dim=-1)
    assert torch.allclose(whole @ whole.T, unit @ unit.T, atol=1e-5)
    few = Codec.fit(vectors, 4, "float32")
    kept = ((centred @ few.components) ** 2).sum() / (centred**2).sum()
    variances = centred.var(0).sort(descending=True).values
    assert float(kept) == pytest.approx(float(variances[:4].sum() / variances.sum()), abs=0.02)


def test_search_is_exact_and_sees_keys_of_the_same_token_only(stored, monkeypatch):
    store = stored(texts(count=200))
    held = store.contents
    monkeypatch.setattr("foretoken.datastore.dense.BLOCK", 7)  # many blocks
    keys = held.codec.decode(torch.from_numpy(np.array(held.keys)))
    keys = torch.nn.functional.normalize(keys, dim=-1)
    for seed in range(20):
        state = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        token = seed % VOCAB
        first, last = int(held.starts[token]), int(held.starts[token + 1])
        near, cosines = store.nearest(state, first, last, 5)
        truth = keys[first:last] @ held.codec.project(state[None])[0]
        assert cosines == pytest.approx(truth.sort(descending=True).values[:5].numpy(), abs=1e-5)
        assert truth[near - first].numpy() == pytest.approx(cosines, abs=1e-5)


def test_a_state_that_was_seen_leads_to_what_followed_it(stored):
    """A table's state tells its last two tokens, so equal states are equal contexts."""
    documents = texts(count=60)
    store = stored(documents)
    table = TableLM.random(VOCAB, seed=3)
    for context in ([1, 2, 3], [4, 4, 0], [5, 1, 0]):  # what is missing counts as token 0
        followed = [
            text[i + 3 : i + 5] for text in documents for i in range(len(text) - 3)
            if text[i : i + 3] == context
        ]  # fmt: skip
        assert followed, "pick a context that occurs"
        state = table.after(context[:2]).float()
        found = store.find(state, context[-1], 2, neighbours=len(followed), sharpness=0.0)
        rows = [[t for t in path if t < VOCAB] for path in found.paths.tolist()]
        assert sorted(r[:1] for r in rows) == sorted(f[:1] for f in followed)
        assert beginnings(found, 99, VOCAB).tokens


def test_nearer_states_weigh_more(stored):
    store = stored(texts(count=200))
    state = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    flat = store.find(state, 2, 3, neighbours=20, sharpness=0.0)
    steep = store.find(state, 2, 3, neighbours=20, sharpness=50.0)
    assert set(flat.weights) == {1.0} and flat.total == 20
    assert max(steep.weights) == 1.0 and min(steep.weights) < 0.1


def test_what_cannot_be_found_is_none(stored):
    store = stored([[0, 1, 2, 3], [0, 1, 2, 0]])
    assert store.find(torch.zeros(VOCAB), 5, 3, 9, 1.0) is None, "never said"
    assert store.find(torch.zeros(VOCAB), 99, 3, 9, 1.0) is None
    assert store.find(torch.zeros(VOCAB), 1, 0, 9, 1.0) is None


def test_what_is_damaged_or_missing_is_refused(stored, tmp_path):
    store = stored(texts())
    store.check()
    with pytest.raises(ConfigError, match="no such folder"):
        KeyStore(tmp_path / "none")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write(store.folder, store.contents)
    path = store.folder / "keys.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        KeyStore(store.folder).check()
    path.write_bytes(content[:-40])
    with pytest.raises(CheckpointError, match=r"keys\.npy"):
        KeyStore(store.folder)
    header = json.loads((store.folder / HEADER).read_text())
    (store.folder / HEADER).write_text(json.dumps({**header, "format": 9}))
    with pytest.raises(CheckpointError, match="format 9"):
        KeyStore(store.folder)


def test_shapes_that_cannot_be_are_refused(stored):
    for wrong, told in (({"dims": 99}, "99"), ({"dtype": "float4"}, "float4")):
        with pytest.raises(ConfigError, match=told):
            stored(texts(), **wrong)
    with pytest.raises(ConfigError, match="three tokens"):
        stored([[1, 2]])


def test_a_folder_may_lie_in_the_home_directory(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    contents = stored(texts()).contents
    write("~/home", contents)
    assert KeyStore("~/home").folder == tmp_path / "home"
    assert KeyStore("~/home").size == len(contents.keys)
    with pytest.raises(ConfigError, match="something is there already"):
        write("~/home", contents)


@pytest.mark.parametrize(("longest", "piece"), [(8, 2048), (None, 8)])
def test_memory_holds_the_fitted_states_and_one_piece_however_long_a_text(
    longest, piece, monkeypatch
):
    target = TableLM.random(VOCAB, seed=3)
    target.max_length = longest
    fit, encode, fits, held = Codec.fit, Codec.encode, [], [0]

    def reading(target, tokens, tap):
        states = states_of(target, tokens, tap)
        held.append(held[-1] + len(states) - 1)
        return states

    def fitting(vectors, dims, dtype):
        fits.append(len(vectors))
        return fit(vectors, dims, dtype)

    def encoding(codec, vectors):
        held.append(held[-1] - len(vectors))
        return encode(codec, vectors)

    monkeypatch.setattr("foretoken.datastore.capture.FITTED", 20)
    monkeypatch.setattr("foretoken.datastore.capture.PIECE", piece)
    monkeypatch.setattr("foretoken.datastore.capture.states_of", reading)
    monkeypatch.setattr(Codec, "fit", staticmethod(fitting))
    monkeypatch.setattr(Codec, "encode", encoding)
    text = np.random.default_rng(0).integers(0, VOCAB, 100)
    found = capture(target, [text.tolist()], Vocabulary.of_ids(VOCAB), dims=2)
    assert fits == [20] and max(held) <= 20 + 8
    assert held[-1] == 0 and len(found.keys) == 12 * 6 + 2

import ctypes
import warnings

import families
import pytest
import torch
import transformers as hf
from families import tiny

from foretoken.lm.kernels import segments
from foretoken.lm.opening import open_lm
from foretoken.lm.runtime import slot_attention
from foretoken.native import library as native

WIDER = {"hidden_size": 128, "head_dim": 32, "n_embd": 128, "word_embed_proj_dim": 128}


@pytest.fixture(scope="session")
def make_tiny():
    """Makes random tiny models by family: `make_tiny("qwen3", seed=1)`."""
    return tiny


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products are slower on several threads, and equal ones should round alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def vectors_alone():
    """No matrix units: theirs make sums of a tree in the order of its columns."""
    known = native.operation("product", torch.float32) is not None
    code = ctypes.CDLL(str(native.library().path)) if known else None
    if code is None or not hasattr(code, "amx"):
        yield
        return
    granted = ctypes.c_int.in_dll(code, "amx")
    before, granted.value = granted.value, 0
    yield
    granted.value = before


@pytest.fixture
def made(monkeypatch):
    """Opens a tiny model whose heads are wide enough for attention in C: (lm, segments made)."""
    monkeypatch.setattr(slot_attention, "reach", lambda *_: 32)
    found = []
    own = segments.Stretch.__init__

    def init(self, *given, **named):
        own(self, *given, **named)
        found.append(self)

    monkeypatch.setattr(segments.Stretch, "__init__", init)

    def make(family, dtype=torch.float32, **more):
        kind, changes = families.FAMILIES[family]
        wide = {key: WIDER[key] for key in WIDER if key in {**families.COMMON, **changes}}
        wide |= {"num_attention_heads": 4, "sliding_window": None} if "window" in family else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = kind(**{**families.COMMON, **changes, **wide, **more})
            model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        lm = open_lm(model)
        assert lm.lean is not None, lm.kernels.uncaptured
        lm.lean.reach = 32
        return lm, found

    return make

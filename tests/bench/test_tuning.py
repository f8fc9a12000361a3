"""Settings of peers: the fastest that runs, tried with as many texts at once as will be written."""

import copy
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import minis
from foretoken.bench.models import Models
from foretoken.bench.own import Outcome
from foretoken.bench.peers import ASSISTED_SETTINGS, Assisted
from foretoken.bench.rows import RowSpec
from foretoken.bench.tuning import TunedRow
from foretoken.errors import CapabilityError
from foretoken.types import SamplingParams

FAILURES = (RuntimeError, CapabilityError)


class Peer(TunedRow):
    """Writes as fast as its setting says; one of them cannot run."""

    settings = ({"speed": 1}, {"speed": 0}, {"speed": 3}, {"speed": 2})

    def __init__(self) -> None:
        super().__init__(RowSpec("peer", "peer"))
        self.wrote: list[int] = []

    def write(self, prompt, params):
        return self.write_together([prompt], [params])

    def write_together(self, prompts, params):
        if not self.setting["speed"]:
            raise RuntimeError("no compiler")
        self.wrote.append(len(prompts))
        return Outcome(tokens=[0] * 6 * len(prompts), seconds=6.0 / self.setting["speed"])


def test_a_setting_that_cannot_run_is_left_out():
    peer = Peer()
    found = peer.tune([[[1, 2]]], SamplingParams(max_new_tokens=6), failures=FAILURES)
    assert found["setting"] == {"speed": 3} and len(found["tried"]) == 3
    assert peer.note == "speed=3, the fastest of 3 tried"


def test_where_no_setting_runs_the_reason_is_told():
    peer = Peer()
    peer.settings = ({"speed": 0},)
    with pytest.raises(RuntimeError, match="no compiler"):
        peer.tune([[[1, 2]]], SamplingParams(max_new_tokens=6), failures=FAILURES)


def test_settings_are_tried_with_as_many_texts_as_will_be_written_at_once():
    peer = Peer()
    peer.tune([[[1, 2], [3]], [[4], [5]]], SamplingParams(max_new_tokens=6), failures=FAILURES)
    assert set(peer.wrote) == {2}


def test_rows_over_one_draft_keep_a_setting_each(tiny_pair):
    target, draft = (copy.deepcopy(model) for model in tiny_pair)
    before = draft.generation_config.num_assistant_tokens
    spec, rows, seen = RowSpec("hf:assisted", "hf:assisted"), [], []
    for tokens in (3, 20):
        rows.append(Assisted(spec, target, draft))
        rows[-1].apply({**ASSISTED_SETTINGS[0], "num_assistant_tokens": tokens})
    draft.register_forward_hook(
        lambda *_: seen.append(draft.generation_config.num_assistant_tokens)
    )
    for row, tokens in zip(rows, (3, 20), strict=True):
        seen.clear()
        row.write([1, 2, 3], SamplingParams(max_new_tokens=8))
        assert set(seen) == {tokens}
    assert draft.generation_config.num_assistant_tokens == before, "it is nobody's in between"


def test_what_a_schedule_made_of_a_setting_stays_with_its_row(tiny_pair):
    target, draft = (copy.deepcopy(model) for model in tiny_pair)
    spec = RowSpec("hf:assisted", "hf:assisted")
    rows = [Assisted(spec, target, draft) for _ in range(2)]
    for row in rows:
        row.apply({**ASSISTED_SETTINGS[3], "num_assistant_tokens": 6})
    rows[0].write([1, 2, 3], SamplingParams(max_new_tokens=2))
    counts = [row.own.num_assistant_tokens for row in rows]
    assert counts[0] != counts[1] == 6


@pytest.fixture
def wider(tmp_path):
    """A draft with eight rows more than its target, which is the same model."""
    mini = minis.path("text-draft")
    model = AutoModelForCausalLM.from_pretrained(mini, dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "wider")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mini / name, tmp_path / "wider" / name)
    return tmp_path / "wider"


def test_a_draft_of_another_width_assists_through_both_tokenizers(wider):
    models = Models(minis.path("text-draft"), wider)
    assisted, plain = (models.row(RowSpec(name, name)) for name in ("hf:assisted", "hf:plain"))
    handed = assisted.extra()
    assert handed["tokenizer"] is models.tokenizer
    assert handed["assistant_tokenizer"].get_vocab() == models.tokenizer.get_vocab()
    assisted.apply(ASSISTED_SETTINGS[1])
    prompt = models.tokenizer("The owner of the house on the hill said that the cat is in the")
    params = SamplingParams(max_new_tokens=6, eos=models.eos)
    found = assisted.write(prompt["input_ids"], params)
    assert found.tokens == plain.write(prompt["input_ids"], params).tokens


def test_a_draft_of_another_width_without_a_tokenizer_cannot_assist(wider):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (wider / name).unlink()
    models = Models(minis.path("text-draft"), wider)
    with pytest.raises(CapabilityError, match="the draft has no tokenizer"):
        models.row(RowSpec("hf:assisted", "hf:assisted"))


def test_a_draft_of_the_same_width_is_handed_no_tokenizer(pair_folders):
    row = Models(*pair_folders).row(RowSpec("hf:assisted", "hf:assisted"))
    assert set(row.extra()) == {"assistant_model"}


def test_peers_write_with_the_options_of_the_bench_alone(make_llama):
    """Else they would be compared over other texts, or none: stop strings ask for a tokenizer."""
    model = make_llama(40)
    prompt, params = [5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_new_tokens=12)
    plain, spec = RowSpec("plain", "plain"), RowSpec("hf:plain", "hf:plain")
    wanted = Models(copy.deepcopy(model)).row(plain).write(prompt, params).tokens
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.stop_strings = ["x"]
    models = Models(model)
    assert models.row(spec).write(prompt, params).tokens == wanted
    assert models.own("target").model.generation_config.no_repeat_ngram_size == 1

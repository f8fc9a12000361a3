"""What is made of a head when it is opened beside a target."""

import gc
import weakref

import pytest
import torch

import foretoken
from foretoken.drafters.parts import opened_head
from foretoken.drafters.parts.state_reader import StateReader
from foretoken.drafters.parts.trained_head import HeadOptions
from foretoken.errors import CheckpointError
from foretoken.heads import sizes, store
from foretoken.heads.eagle3 import Eagle3
from foretoken.lm.opening import open_lm
from tests.heads.eagle3_kinds import KINDS
from tests.lm.families import tied

VOCAB, WIDTH, FIRST = 97, 64, 9  # the tokens scored are those from FIRST on


@pytest.fixture
def folder(tmp_path):
    """A folder with a random head that scores some tokens."""

    def make(scored=None, **options):
        torch.manual_seed(2)
        scored = torch.arange(FIRST, VOCAB - 5) if scored is None else scored
        sizes = {"hidden_size": 64, "vocab_size": VOCAB, "width": WIDTH, "tokens": len(scored)}
        head = Eagle3(Eagle3.Config(**sizes, taps=(0, 1), **options))
        head.scored.copy_(scored)
        return store.save(tmp_path / "head", "eagle3", head, {})

    return make


def reader(target, folder):
    return StateReader(open_lm(target), "eagle3", HeadOptions(draft_head=folder))


@pytest.mark.parametrize("kind", KINDS)
def test_table_and_outputs_are_those_of_the_head(kind, folder):
    """As the head itself reads and scores tokens, one by one."""
    target = tied()
    found = reader(target, folder(**KINDS[kind]))
    embed = target.model.embed_tokens
    ids, before = torch.tensor([3, 96, 0, 41]), torch.randn(4, WIDTH)
    right = found.head.entering(ids, before, embed)
    torch.testing.assert_close(found.read(ids.tolist(), before), right)
    torch.testing.assert_close(found.table[ids] + before, right)
    theirs = embed(found.head.scored) if found.head.maps_outputs else None
    outputs = found.decoder.model.lm_head.weight
    torch.testing.assert_close(outputs[: VOCAB - 5 - FIRST], found.head.outputs(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_too_large_is_not_made(kind, folder, monkeypatch):
    """Tokens are then read as they come, and texts are the same."""
    asked = {"max_new_tokens": 24, "temperature": 0.0}
    options = {"controller": "fixed", "depth": 3, "nodes": 8}
    drafts = []
    for largest in (sizes.LARGEST, 0):
        monkeypatch.setattr(sizes, "LARGEST", largest)
        opened_head._known.clear()
        at = folder(**KINDS[kind])
        found = reader(tied(), at)
        assert (found.table is None) == (not largest and found.head.reads_embeddings)
        with foretoken.load(tied(), "eagle3", draft_head=at, **options) as session:
            written = session.generate([5, 6, 7], **asked)
            drafts.append((written.tokens, written.stats.drafted, written.stats.accepted))
    assert drafts[0] == drafts[1]


def test_a_head_over_two_targets_is_opened_for_each(folder):
    one, other = tied(), tied()
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2.0)
    at = folder(**KINDS["and outputs made of them"])
    first, second, again = reader(one, at), reader(other, at), reader(one, at)
    assert first.decoder is again.decoder and first.table is again.table
    assert not torch.equal(first.table, second.table)
    assert not torch.equal(first.decoder.model.lm_head.weight, second.decoder.model.lm_head.weight)


def test_a_target_that_is_closed_is_let_go(folder):
    target = tied()
    gone = weakref.ref(target)
    with foretoken.load(target, "eagle3", draft_head=folder(embeds=False)) as session:
        session.generate([5, 6, 7], max_new_tokens=4)
    assert opened_head._known, "its decoder is kept for the next session"
    del target, session
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bad", [-1, VOCAB, FIRST + 1])
def test_tokens_that_no_vocabulary_has_are_refused(bad, folder):
    """Rows of tables are looked up in C by them; twice the same is none either."""
    scored = torch.arange(FIRST, VOCAB - 5)
    scored[0] = bad
    with pytest.raises(CheckpointError, match="other tokens than 97"):
        reader(tied(), folder(scored=scored))


def test_what_is_made_is_counted(folder):
    """A plan knows of the table and the decoder before anything is loaded."""
    at = folder(**KINDS["and outputs made of them"])
    found, head = reader(tied(), at), store.load(at, "eagle3")[0]
    tensors = [*head.parameters(), *head.buffers(), *found.decoder.model.parameters(), found.table]
    assert sizes.sizes_of(at).weights == pytest.approx(
        sum(one.numel() for one in tensors), rel=0.01
    )

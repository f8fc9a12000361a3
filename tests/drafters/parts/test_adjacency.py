import os
from array import array

import pytest
import torch
from safetensors.torch import save_file

from foretoken.drafters.fusion import Fusion
from foretoken.drafters.parts.adjacency import FORM, HINTED, Adjacency
from foretoken.drafters.parts.class_odds import ClassOdds
from foretoken.drafters.token_recycling import TokenRecycling
from foretoken.engine.loading import load
from foretoken.errors import CheckpointError
from foretoken.lm.table import TableLM
from foretoken.shipped import user_cache
from foretoken.trees.guesses import Guesses
from foretoken.types import Budget


def filled(vocab=12, keep=3):
    known = Adjacency(vocab, keep)
    for token in range(0, vocab, 2):
        known.put(token, [(token + i) % vocab for i in range(1, keep + 1)])
    return known


def test_a_saved_matrix_comes_back(tmp_path):
    known = filled()
    known.hint(1, 5)
    known.put(2, [3, 4, 5], [11, 2, 0])
    known.save(tmp_path / "deep" / "memory.safetensors")
    other = Adjacency(12, 3)
    other.load(tmp_path / "deep" / "memory.safetensors")
    assert other.ids == known.ids and other.sure == known.sure
    assert os.listdir(tmp_path / "deep") == ["memory.safetensors"], "no temporary file stays"


def test_another_number_of_followers_is_cut_or_left_open(tmp_path):
    filled(keep=3).save(tmp_path / "m")
    less, more = Adjacency(12, 2), Adjacency(12, 5)
    less.load(tmp_path / "m")
    more.load(tmp_path / "m")
    assert less.followers(4) == [5, 6] and more.followers(4) == [5, 6, 7]
    assert less.followers(3) == []


def test_a_file_without_shares_is_taken_as_read_in_a_prompt(tmp_path):
    known = filled()
    followers = torch.tensor(known.ids, dtype=torch.int32).view(12, 3)
    save_file({"followers": followers}, tmp_path / "m", {"form": FORM})
    other = Adjacency(12, 3)
    other.load(tmp_path / "m")
    assert other.ids == known.ids and set(other.sure) == {HINTED}


def test_the_likeliest_nodes_are_grown_first(way):
    """Chances: 0.1 for each class, halved for a further follower."""
    known, found = Adjacency(12, 2), Guesses()
    known.put(0, [1, 2], [9, 4])
    known.put(1, [3, 4], [5, 2])
    known.put(2, [5, 6], [8, 8])
    size = HINTED + 1
    odds = ClassOdds([0.1 * at for at in range(size)] + [0.05 * at for at in range(size)], 1, 1)

    def grown(root, budget, ends=()):
        known.grow(found, root, odds, budget, True, array("q", ends))
        return found.tree.tokens

    tokens = grown(0, Budget(2, 9))
    assert tokens == (0, 1, 3, 2, 5, 4, 6)
    assert found.tree.parents == (-1, 0, 1, 0, 3, 1, 3)
    assert found.paths == pytest.approx([1.0, 0.9, 0.45, 0.2, 0.16, 0.09, 0.08])
    assert found.ranks == [0, 0, 0, 1, 0, 1, 1]
    assert [mark % size for mark in found.marks] == [0, 9, 5, 4, 8, 2, 8]
    assert [mark // size for mark in found.marks] == found.ranks, "further followers count apart"
    for nodes in range(7):
        assert grown(0, Budget(2, nodes)) == tokens[: nodes + 1]
    assert grown(0, Budget(1, 9)) == (0, 1, 2)
    assert grown(0, Budget(2, 9, None, 0.15)) == (0, 1, 3, 2, 5)
    assert grown(0, Budget(2, 9), (1,)) == (0, 1, 2, 5, 6)
    assert grown(7, Budget(2, 9)) == (7,), "nothing is known"


def test_another_vocabulary_and_foreign_files_are_refused(tmp_path):
    filled().save(tmp_path / "m")
    with pytest.raises(CheckpointError, match="for a model of 13"):
        Adjacency(13, 3).load(tmp_path / "m")
    (tmp_path / "broken").write_bytes((tmp_path / "m").read_bytes()[:-7])
    save_file({"followers": torch.zeros(12, 3, dtype=torch.int32)}, tmp_path / "foreign")
    for name in ("broken", "foreign", "."):
        with pytest.raises(CheckpointError, match="recycled tokens"):
            Adjacency(12, 3).load(tmp_path / name)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    known = filled()
    known.save(tmp_path / "m")
    before = (tmp_path / "m").read_bytes()

    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="older file is untouched"):
        Adjacency(12, 3).save(tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "m").write_text("a file in the way of the folder")
    with pytest.raises(CheckpointError, match="pass a path that can be written"):
        filled().save(tmp_path / "m" / "deep" / "memory.safetensors")
    assert os.listdir(tmp_path) == ["m"]


def test_the_drafter_starts_from_its_file_and_saves_to_it(tmp_path, row, run):
    target = TableLM.random(vocab=12, order=2, seed=3)
    config = TokenRecycling.Config(memory=str(tmp_path / "memory"))
    first = TokenRecycling(target, config)  # a file that does not exist yet is no mistake
    run(target, first, [row([1, 2], 12, max_new_tokens=20)])
    first.save()
    assert TokenRecycling(target, config).known.ids == first.known.ids
    with pytest.raises(CheckpointError):
        TokenRecycling(TableLM.random(vocab=9), config)


def test_a_file_of_another_tokenizer_is_refused(tmp_path):
    """As many tokens do not make it the same one: the ids mean something else."""
    target, words = TableLM.random(vocab=12), {f"v{n}": n for n in range(12)}
    others = {f"v{n}": 11 - n for n in range(12)}
    config = TokenRecycling.Config(memory=str(tmp_path / "m"))
    TokenRecycling(target, config).save()
    for read in (others, words):  # an older file does not say of which it is
        drafter = TokenRecycling(target, config)
        drafter.check_vocabulary(read)
    drafter.save()
    again = TokenRecycling(target, config)
    again.save()  # nobody said which tokenizer there is, so it is the one of before
    again.check_vocabulary(words)
    merged = Fusion(TokenRecycling(target, config))
    merged.check_vocabulary(words)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        merged.check_vocabulary(others)
    bare = TokenRecycling(target)
    bare.check_vocabulary(words)
    bare.save(tmp_path / "named")
    read = TokenRecycling(target, TokenRecycling.Config(memory=str(tmp_path / "named")))
    with pytest.raises(CheckpointError, match="another tokenizer"):
        read.check_vocabulary(others)


def test_a_session_saves_what_its_method_learnt_and_nothing_else(tmp_path, make_llama):
    model = make_llama(40)
    with load(model, "token-recycling", memory=str(tmp_path / "m"), kernels="dense") as session:
        session.generate([1, 2, 3], 8)
        session.save()
        assert (tmp_path / "m").is_file()
        session.using("token-recycling").save()
        session.using("plain").save()
    assert os.listdir(tmp_path) == ["m"]


def test_a_session_keeps_its_memory_in_the_home_directory(tmp_path, make_llama, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache().parent))  # what was compiled stays there
    monkeypatch.setenv("HOME", str(tmp_path))
    model = make_llama(40)
    with load(model, "token-recycling", memory="~/x", kernels="dense") as session:
        session.generate([1, 2, 3], 8)
        learnt = session.engine.drafter.known.ids
    assert (tmp_path / "x").is_file()
    with load(model, "token-recycling", memory="~/x", kernels="dense") as session:
        assert session.engine.drafter.known.ids == learnt
        session.engine.drafter.save("~/y")
    assert (tmp_path / "y").is_file()


def test_hints_fill_rows_that_were_never_scored():
    known = Adjacency(9, 2)
    known.hint(1, 4)
    known.hint(1, 5)
    assert known.followers(1) == [5, 4]
    known.hint(1, 4)
    assert known.followers(1) == [5, 4], "a full row changes no more"
    known.put(1, [7, 8])
    known.hint(1, 2)
    assert known.followers(1) == [7, 8]

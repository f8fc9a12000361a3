"""Drafts of another family: their tokenizers are mapped by what ids stand for, bytes by bytes."""

from __future__ import annotations

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.engine.models import translation
from foretoken.errors import CapabilityError, CheckpointError, ConfigError
from foretoken.lm import load
from foretoken.lm.draft_vocabulary import NAME, write
from foretoken.lm.token_bytes import Pieces
from foretoken.lm.token_map import map_tokens
from foretoken.lm.views.mapped_tokens import MappedTokens
from foretoken.training.online.served import whole_model

PROMPTS = ["the cat is in the", "then another", "naïve: tap\n\tin"]


def sentencepiece(byte_fallback=True):
    """Marked spaces, bytes by name, other special tokens, and a begin token before every text."""
    pieces = ["<unk>", "<s>", "</s>", "<turn>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    pieces += ["▁the", "▁", "▁a", "th", "in", "the", "on", "er", "ï", "▁in"]
    pieces += [chr(code) for code in range(ord("!"), ord("~") + 1)]
    scores = [(piece, -float(i) / 10) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken("<turn>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def other():
    return sentencepiece()


@pytest.fixture(scope="module")
def folders(byte_tokenizer, other, make_llama, tmp_path_factory):
    """A target of bytes and a draft of pieces, both random."""
    root = tmp_path_factory.mktemp("families")
    for name, tokenizer, seed in (("target", byte_tokenizer, 0), ("draft", other, 1)):
        model = make_llama(len(tokenizer), seed, eos_token_id=tokenizer.eos_token_id)
        with torch.no_grad():
            model.lm_head.weight /= 3.0  # both unsure: guesses of a stranger are taken at times
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root / "target", root / "draft"


def test_ids_stand_for_bytes_whatever_they_are_written_as(byte_tokenizer, other):
    ours, theirs = Pieces(byte_tokenizer), Pieces(other)
    for pieces, tokenizer in ((ours, byte_tokenizer), (theirs, other)):
        text = "the tap in naïve\n\tmoon"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(pieces.text[i] for i in ids) == text.encode()
    assert theirs.text[other.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert theirs.text[other.convert_tokens_to_ids("▁the")] == b" the"
    assert ours.text[byte_tokenizer.convert_tokens_to_ids("Ġa")] == b" a"
    assert ours.text[byte_tokenizer.eos_token_id] is None
    assert set(ours.special) == {"<eos>", "<pad>", "<turn>"}
    by_bytes = theirs.by_bytes()
    assert by_bytes[b"a"] == other.convert_tokens_to_ids("a")  # a piece before a byte by name
    assert by_bytes[b"\n"] == other.convert_tokens_to_ids("<0x0A>")


def test_an_added_piece_marks_its_spaces_as_others_do():
    tokenizer = sentencepiece()
    tokenizer.add_tokens([AddedToken("▁▁", special=False, normalized=False)])
    found = Pieces(tokenizer)
    assert found.text[tokenizer.convert_tokens_to_ids("▁▁")] == b"  "


def test_every_id_is_fed_as_ids_of_the_same_text(byte_tokenizer, other):
    found = map_tokens(byte_tokenizer, other, len(byte_tokenizer), len(other), "draft")
    ours, theirs = Pieces(byte_tokenizer), Pieces(other)
    for i, text in enumerate(ours.text):
        if text is not None:
            assert b"".join(theirs.text[j] for j in found.feeds[i]) == text
    one = dict(zip(found.rows.tokens.tolist(), found.rows.rows.tolist(), strict=True))
    assert all(found.feeds[i] == (j,) for i, j in one.items())
    assert len(set(one.values())) == len(one)  # an id of the draft stands for one of the target
    named = byte_tokenizer.convert_tokens_to_ids, other.convert_tokens_to_ids
    for target, draft in (("<eos>", "</s>"), ("<turn>", "<turn>"), ("Ġa", "▁a"), ("the", "the")):
        assert one[named[0](target)] == named[1](draft)
    pad = byte_tokenizer.pad_token_id
    assert pad not in one and len(found.feeds[pad]) == len("<pad>")  # as its name, in pieces
    back = map_tokens(other, byte_tokenizer, len(other), len(byte_tokenizer), "draft")
    assert len(back.feeds[other.convert_tokens_to_ids("▁the")]) == 2  # "Ġ" and "the"
    assert back.rows.width == len(other)


@pytest.fixture(scope="module")
def plain(folders):
    with foretoken.load(folders[0], "plain", kernels="dense") as session:
        yield [result.tokens for result in session.generate(PROMPTS, 24)]


@pytest.mark.parametrize("method", ["chain", "tree", "pearl", "mcsd", "rsd-s"])
def test_greedy_text_is_the_targets_alone_and_in_a_batch(folders, plain, method):
    with foretoken.load(folders[0], method, folders[1], kernels="dense", depth=3) as session:
        assert isinstance(session.draft, MappedTokens)
        assert [result.tokens for result in session.generate(PROMPTS, 24)] == plain
        assert session.generate(PROMPTS[2], 24).tokens == plain[2]
        assert session.draft.rows_held == 0


@pytest.mark.parametrize("method", ["chain", "mcsd"])
def test_sampled_text_is_what_a_row_writes_alone_and_guesses_are_taken(folders, method):
    with foretoken.load(folders[0], method, folders[1], kernels="dense", depth=3) as session:
        together = session.generate(PROMPTS, 40, temperature=1.5, seed=3)
        for i, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
            assert session.generate(prompt, 40, temperature=1.5, seed=3 + i).tokens == text.tokens
        assert sum(text.stats.accepted for text in together) > 0


def test_the_drafts_cache_holds_the_text_in_its_own_ids(folders, other):
    """After many rounds its laws are still those of a forward over the whole text."""
    with foretoken.load(folders[0], "tree", folders[1], kernels="dense", depth=3) as session:
        [row] = session.rows([PROMPTS[0]], 12, temperature=1.0, seed=1)
        lm, seen = session.draft, []
        grow = lm.lm.grow

        def noting(rows, tokens, parents, taps=()):
            found = grow(rows, tokens, parents, taps)
            if parents[0][0] < 0:
                seen.append((list(rows[0].tokens), found[0].logits[0].clone()))
            return found

        lm.lm.grow = noting
        session.write([row])
        del lm.lm.grow
        assert len(seen) > 4
        for text, logits in seen:
            assert text[0] == other.bos_token_id
            with torch.no_grad():
                fresh = lm.model(torch.tensor([text])).logits[0, -1]
            assert torch.allclose(logits, fresh, atol=1e-3)


def test_a_reduced_vocabulary_of_a_mapped_draft_is_in_its_own_ids(folders, other, tmp_path):
    kept = [other.convert_tokens_to_ids(piece) for piece in ("the", "▁a", "<s>", "</s>", "in")]
    write(tmp_path / NAME, kept, len(other))
    with foretoken.load(
        folders[0], "chain", folders[1], kernels="dense", draft_vocabulary=tmp_path / NAME
    ) as session:
        assert "draft vocabulary 4 of 265" in repr(session)  # <s> stands for no id of the target


def test_too_little_in_common_is_refused_with_what_is_missing(folders, make_llama, tmp_path):
    words = {f"word{i}": i for i in range(300)}
    strange = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="word0"))
    )
    make_llama(300).save_pretrained(tmp_path)
    strange.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"0 of the target's .* not, for instance, '!', "):
        foretoken.load(folders[0], "chain", tmp_path, kernels="dense")


def test_a_draft_with_more_rows_than_words_needs_no_shadow(folders, byte_tokenizer, make_llama,
                                                          tmp_path, plain):  # fmt: skip
    make_llama(len(byte_tokenizer) + 7, seed=1).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with foretoken.load(folders[0], "tree", tmp_path, kernels="dense", depth=3) as session:
        assert [result.tokens for result in session.generate(PROMPTS, 24)] == plain
        assert not isinstance(session.draft, MappedTokens)


@pytest.mark.parametrize(("more", "fewer"), [(9, 4), (0, 4)])
@pytest.mark.parametrize("words", ["byte_tokenizer", "other"])
def test_sizes_of_one_family_that_are_padded_to_other_widths_need_no_shadow(
    words, more, fewer, request, make_llama, tmp_path
):
    """Also where texts begin with a token, and where one holds an id that the draft has not."""
    tokenizer = request.getfixturevalue(words)
    size = len(tokenizer)
    for name, rows, seed in (("target", size + more, 0), ("draft", size + fewer, 1)):
        make_llama(rows, seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    last = size + more - 1
    prompts = [*(tokenizer(text)["input_ids"] for text in PROMPTS), [5, last, 7], [last]]
    target, draft = tmp_path / "target", tmp_path / "draft"
    with foretoken.load(target, "plain", kernels="dense") as session:
        wanted = [result.tokens for result in session.generate(prompts, 24)]
    for method in ("chain", "tree"):
        with foretoken.load(target, method, draft, kernels="dense", depth=3) as session:
            assert not isinstance(session.draft, MappedTokens)
            assert [result.tokens for result in session.generate(prompts, 24)] == wanted
            assert session.generate(prompts[-2], 24).tokens == wanted[-2]
            assert session.draft.rows_held == 0


def test_an_id_that_the_draft_has_not_is_read_as_its_first(byte_tokenizer, make_llama, tmp_path):
    size = len(byte_tokenizer)
    for name, rows in (("target", size + 9), ("draft", size)):
        make_llama(rows).save_pretrained(tmp_path / name)
        byte_tokenizer.save_pretrained(tmp_path / name)
    target, draft = tmp_path / "target", tmp_path / "draft"
    with foretoken.load(target, "chain", draft, kernels="dense") as session:
        [row] = session.rows([[5, size + 3, 7, size + 8]], 4)
        lm = session.draft
        with torch.inference_mode():
            lm.prefill([row])
            [score] = lm.grow([row], [row.tokens[-1:]], [[-1]])
            fresh = lm.whole(torch.tensor([[5, 0, 7, 0]])).logits[0, -1]
        assert torch.allclose(score.logits[0, :size], fresh, atol=1e-3)
        assert (score.logits[0, size:] == -torch.inf).all()
        assert row.tokens == [5, size + 3, 7, size + 8]
        lm.free([row])
        with pytest.raises(CapabilityError, match="fewer tokens than its target"):
            whole_model(lm)


def test_a_draft_of_the_hub_may_have_no_tokenizer(byte_tokenizer, monkeypatch, tmp_path):
    """Then it is as a directory without one; of one that is broken the draft is named."""

    def broken(*_, **__):
        raise OSError("no tokenizer to be read")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(load.AutoConfig, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", broken)
    with pytest.raises(CheckpointError, match="the draft some/draft was asked for"):
        translation(byte_tokenizer, "some/draft", 9, 9, False)  # nobody knows what the hub has
    known = tmp_path / "models--some--draft"
    snapshot = known / "snapshots" / "abc"
    for folder in (snapshot, known / "refs", known / ".no_exist" / "abc"):
        folder.mkdir(parents=True)
    (known / "refs" / "main").write_text("abc")
    (known / ".no_exist" / "abc" / "tokenizer_config.json").touch()
    assert translation(byte_tokenizer, "some/draft", 9, 9, False) is None
    (snapshot / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="the draft some/draft was asked for") as caught:
        translation(byte_tokenizer, "some/draft", 9, 9, False)
    assert "another draft" in caught.value.do and "tokenizer=" not in caught.value.do

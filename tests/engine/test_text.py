"""Tokens to text: pieces join to the whole, no half characters, stop texts cut to the character."""

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

import foretoken
from foretoken.coins import SeededCoins
from foretoken.engine.text import RowText, text_of, words_before
from foretoken.row import Turn, make_row
from foretoken.types import SamplingParams

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_decoder(tokens):
    """One token per byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def sentencepiece_decoder():
    """Words with a leading space that the first one loses, and bytes as a fallback."""
    words = ["<unk>", *BYTES, "▁the", "▁cat", "▁sat", "s", "é", "▁", "", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    index = {word: i for i, word in enumerate(words)}
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True), index


def told(row, tokens):
    """What a stream would show, piece by piece."""
    pieces = []
    for token in tokens:
        stopped = row.feed(token)
        pieces.append(row.take())
        if stopped is not None:
            break
    pieces.append(row.close())
    return pieces


TEXTS = ["plain words", "naïve café", "日本語のテキスト", "🎉 party 🎉🎉", "a\n\nb", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_and_never_hold_half_a_character(text):
    pieces = told(RowText(byte_decoder), text.encode())
    assert "".join(pieces) == text == text_of(list(text.encode()), byte_decoder)
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_text_that_ends_inside_a_character_says_so_at_the_end_only():
    broken = "ab日".encode()[:-1]
    pieces = told(RowText(byte_decoder), broken)
    assert pieces[:-1] == ["a", "b", "", ""] and pieces[-1] == "\ufffd"
    assert "".join(pieces) == text_of(list(broken), byte_decoder)


def test_broken_bytes_give_one_text_streamed_or_not():
    import itertools

    for tokens in itertools.product([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xFF], repeat=4):
        assert "".join(told(RowText(byte_decoder), tokens)) == text_of(tokens, byte_decoder)


def test_leading_spaces_survive_decoders_that_strip_the_first():
    decode, index = sentencepiece_decoder()
    tokens = [index[w] for w in ("▁the", "▁cat", "s", "▁sat", "<0xE2>", "<0x82>", "<0xAC>", "▁the")]
    pieces = told(RowText(decode), tokens)
    assert "".join(pieces) == "the cats sat€ the" == text_of(tokens, decode)


def test_a_text_that_goes_on_from_words_keeps_the_space_of_its_first_one():
    decode, index = sentencepiece_decoder()
    before, tokens = [index["▁the"]], [index[w] for w in ("▁cat", "s", "</s>", "▁sat")]
    for stops, kept in (((), " cats sat"), ((" cat",), ""), ((" sat",), " cats")):
        assert "".join(told(RowText(decode, stops, before=before), tokens)) == kept
    assert text_of(tokens, decode, before) == " cats sat"
    broken = [*tokens, index["<0xE2>"]]
    assert "".join(told(RowText(decode, before=before), broken)) == " cats sat\ufffd"
    assert text_of(broken, decode, before) == " cats sat\ufffd"


class Words:
    """A tokenizer, as far as stop texts need one."""

    def __init__(self, decode):
        self.read = decode

    def decode(self, tokens, **options):
        return self.read(tokens)

    def get_added_vocab(self):
        return {}


def test_a_stop_inside_generate_may_begin_with_the_space_of_the_first_word(make_llama):
    decode, index = sentencepiece_decoder()
    stopping = foretoken.custom_generate(
        "prompt-lookup", stop_strings=" cat", tokenizer=Words(decode), kernels="dense"
    )
    ids = torch.tensor([[index["▁the"], index["▁sat"]]])
    others = [token for word, token in index.items() if word != "▁cat"]
    options = {"do_sample": False, "max_new_tokens": 6, "suppress_tokens": others}
    written = make_llama(len(index)).generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=stopping, **options
    )
    assert written[0, 2:].tolist() == [index["▁cat"]]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["▁the"], "the"),
        (["▁the", *["▁cat"] * 20], "cat cat cat cat cat cat cat cat"),
        (["▁the", *["</s>"] * 20], "the"),  # what says nothing is looked past
        (["▁the", *(f"<0x{byte:02X}>" for byte in "日本語".encode())], "日本語"),
        (["▁the", "<0xE2>"], ""),  # the next token may be of this character
        (["</s>"] * 20, ""),
    ],
)
def test_the_words_before_a_text_are_the_last_of_its_prompt(words, shown):
    decode, index = sentencepiece_decoder()
    for kind, wanted in ((list, shown), (Turn, "")):
        prompt = kind(index[word] for word in words)
        row = make_row(prompt, SamplingParams(), SeededCoins(0), len(index))
        assert decode(words_before(row, decode)) == wanted


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("stop", ["stop"], ""),
        ("ends with st", ["stop"], "ends with st"),
        ("日本語", ["本"], "日"),
        ("ab\n\ncd", ["\n\n"], "ab"),
    ],
)
def test_a_stop_text_cuts_to_the_character_and_is_never_shown(text, stops, kept):
    pieces = told(RowText(byte_decoder, stops), text.encode())
    assert "".join(pieces) == kept


def test_text_that_may_become_a_stop_is_held_back_and_released():
    row = RowText(byte_decoder, ["END"])
    shown = []
    for token in b"xEN":
        row.feed(token)
        shown.append(row.take())
    assert shown == ["x", "", ""]
    row.feed(ord("Q"))
    assert row.take() == "ENQ"


def test_a_stop_is_found_at_the_token_that_completes_it_though_a_character_is_open():
    def decode(tokens):
        return b"".join([b"one", b"STOP\xe6", b"\x97\xa5"][t] for t in tokens).decode(
            "utf-8", errors="replace"
        )

    row = RowText(decode, ["STOP"])
    assert row.feed(0) is None
    assert row.feed(1) == "STOP"
    assert row.take() + row.close() == "one"


def test_a_window_of_tokens_is_decoded_not_the_whole_text():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return byte_decoder(tokens)

    row = RowText(decode, ["never in here"])
    for token in ("日本" * 500).encode():
        row.feed(token)
    row.close()
    assert row.text == "日本" * 500 and longest <= 8


def test_a_special_token_as_stop_is_seen_though_its_text_is_not():
    row = RowText(byte_decoder, ["<end>"], {255: "<end>"})
    assert row.feed(ord("a")) is None
    assert row.feed(255) == "<end>"
    assert row.close() == "a"


@pytest.mark.parametrize(
    ("text", "stops", "least", "kept"),
    [
        ("one.two.three", (".",), 3, "one"),
        ("one.two.three", (".",), 4, "one.two"),
        ("one.two.three", (".", "never said"), 4, "one.two"),
        ("one.two", (".t",), 4, "one"),
        ("one.two", (".",), 9, "one.two"),
        ("a日b日c", ("日",), 4, "a日b"),
    ],
)
def test_first_tokens_complete_no_stop(text, stops, least, kept):
    pieces = told(RowText(byte_decoder, stops, least=least), text.encode())
    assert "".join(pieces) == kept


def test_a_stop_beside_half_a_character_is_no_stop_later():
    pieces = [b"one", b"STOP\xe6", b"\x97\xa5", b" STOP"]

    def decode(tokens):
        return b"".join(pieces[t] for t in tokens).decode("utf-8", errors="replace")

    assert "".join(told(RowText(decode, ["STOP"], least=2), range(4))) == "oneSTOP日 "


def test_a_special_token_is_no_stop_too_early():
    row = RowText(byte_decoder, ["<end>"], {97: "<end>"}, least=2)
    assert [row.feed(token) for token in (97, 98, 97)] == [None, None, "<end>"]


@pytest.mark.parametrize("broken", [[0xFF], [0xF0, 0x9F], [0xE6, 0x97]])
def test_a_loop_of_broken_bytes_costs_no_more_per_token(broken):
    """What can be no character is told after a few tokens, not decoded again with every one."""
    widths = []

    def decode(tokens):
        widths.append(len(tokens))
        return byte_decoder(tokens)

    tokens = [*b"ab", *broken * 400, *"日本".encode()]
    row = RowText(decode, ("日本!",))
    pieces = told(row, tokens)
    assert max(widths) < 40
    text = "".join(pieces)
    assert text.startswith("ab\ufffd") and text.endswith("\ufffd日本")
    assert text == text_of(tokens, byte_decoder)


class Unbounded(RowText):
    """As if nothing were ever forgotten."""

    def _forget_silent(self):
        pass


SILENT = [
    ["▁the", *["</s>"] * 30, "▁cat", "s"],
    [*["</s>"] * 30, "▁the", "▁cat"],
    ["▁", *["</s>"] * 30, "▁the"],
    [*["</s>"] * 5, "▁", *["</s>"] * 30, "▁the"],
    [*[""] * 30, "▁the"],
    ["▁the", *[""] * 30, "▁cat"],
    ["▁the", *["</s>", ""] * 20, "s", *["</s>"] * 30, "s"],
    ["▁the", "<0xE2>", "<0x82>", *["</s>"] * 30, "<0xAC>", "▁cat"],
    ["▁the", "<0xE2>", *["</s>"] * 30, "▁cat", "<0xE2>", *["</s>"] * 30],
    ["▁the", *["▁"] * 30, "s", *["</s>"] * 30, *["▁"] * 30, "s"],
]


@pytest.mark.parametrize("words", SILENT)
@pytest.mark.parametrize("stops", [(), ("s the",)])
def test_what_was_forgotten_of_silent_tokens_changes_no_text(words, stops):
    decode, index = sentencepiece_decoder()
    tokens = [index[word] for word in words]
    pieces = told(RowText(decode, stops), tokens)
    assert pieces == told(Unbounded(decode, stops), tokens)
    assert "".join(pieces) == text_of(tokens, decode)


@pytest.mark.parametrize("begun", [[], ["▁the"], ["▁"], ["</s>", "▁"], ["▁the", "<0xE2>"]])
def test_an_end_token_on_and_on_costs_no_more_per_token(begun):
    """As where ends are ignored: it says nothing, and is not decoded again with every one."""
    decode, index = sentencepiece_decoder()
    widths = []

    def counted(tokens):
        widths.append(len(tokens))
        return decode(tokens)

    row = RowText(counted)
    for word in (*begun, *["</s>"] * 1000, "▁cat"):
        row.feed(index[word])
    assert row.close().endswith("cat")
    assert max(widths) < 40 and sum(widths) < 40 * 1000


def test_spaces_that_are_told_with_the_next_word_only_are_not_forgotten():
    def decode(tokens):
        return bytes(tokens).decode().rstrip(" ")

    text = b"a" + b" " * 30 + b"b"
    assert "".join(told(RowText(decode), text)) == text.decode()


def test_long_stop_texts_hold_back_what_may_become_one_and_no_more():
    stop = "ab" * 5000 + "!"
    row = RowText(byte_decoder, (stop, "bx"))
    assert [row.feed(token) for token in b"xyab"] == [None] * 4
    assert row.take() == "xy"
    assert row.feed(ord("b")) is None and row.take() == "ab"
    assert row.feed(ord("c")) is None and row.take() == "bc"
    assert row.feed(ord("b")) is None and row.take() == ""
    assert row.feed(ord("x")) == "bx" and row.close() == ""


def test_characters_that_end_in_the_next_token_are_never_told_broken():
    """Each token holds the end of one character and the beginning of the next."""
    text = "ー日本語" * 8
    data = text.encode()
    cuts = [0, *range(1, len(data), 3), len(data)]
    pieces = [data[a:b] for a, b in pairwise(cuts)]

    def decode(tokens):
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    row = RowText(decode)
    assert "".join(told(row, range(len(pieces)))) == text

"""Which token brought which characters, told as the text is."""

import pytest

from foretoken.engine.text import decoder
from foretoken.serve.noted_text import NotedText


def read(tokenizer, text, stops, step):
    """Segments of a text that is read in steps of some tokens."""
    noted = NotedText(decoder(tokenizer), stops)
    told, pieces, segments = 0, "", []
    tokens = tokenizer(text)["input_ids"]
    for at in range(0, len(tokens), step):
        over = any(noted.feed(token) is not None for token in tokens[at : at + step])
        piece = noted.take()
        over = over or at + step >= len(tokens)
        piece += noted.close() if over else ""
        told, pieces = told + len(piece), pieces + piece
        segments += noted.segments(told)
        if over:
            break
    return pieces, segments


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "whole"),
    [
        ("the thin one é日本 on", (), "the thin one é日本 on"),
        ("the thin one", ("in on",), "the th"),
        ("the thin one", ("one!",), "the thin one"),
        ("日本", (), "日本"),
        ("a", ("a",), ""),
    ],
)
def test_segments_are_the_text_piece_by_piece(byte_tokenizer, text, stops, whole, step) -> None:
    pieces, segments = read(byte_tokenizer, text, stops, step)
    assert pieces == whole == "".join(one.text for one in segments)
    offset = 0
    for one in segments:
        assert one.offset == offset
        offset += len(one.text)
    firsts = [one.at for one in segments if one.first]
    assert firsts == sorted(set(firsts)) == list(range(len(firsts)))
    tokens = byte_tokenizer(whole)["input_ids"] if not stops else firsts
    assert len(firsts) == len(tokens)


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize("stop", ["?", "?!", "c?", "c?!"])
def test_tokens_behind_the_cut_are_left_out_however_many_they_are(
    byte_tokenizer, stop, step
) -> None:
    pieces, segments = read(byte_tokenizer, "abc?!", (stop,), step)
    assert pieces == "abc"[: "abc?!".index(stop)]
    assert [one.text for one in segments] == list(pieces)


def test_a_special_token_as_stop_is_left_out(byte_tokenizer) -> None:
    special = byte_tokenizer.convert_tokens_to_ids("<turn>")
    noted = NotedText(decoder(byte_tokenizer), ("<turn>",), {special: "<turn>"})
    tokens = byte_tokenizer("ab")["input_ids"]
    assert [noted.feed(token) for token in [*tokens, special]] == [None, None, "<turn>"]
    assert noted.close() == "ab"
    assert [one.text for one in noted.segments(2)] == ["a", "b"]

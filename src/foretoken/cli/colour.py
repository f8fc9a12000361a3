"""Text on a terminal while it is written, marked by where each token came from.

Colours are told apart by the colour-blind (blue, orange, none), and styles differ as well. Where
there is no colour (NO_COLOR, a pipe, a plain terminal) signs around the text say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from foretoken.engine.text import RowText, reader_of

if TYPE_CHECKING:
    from foretoken.engine.results import Piece, Result
    from foretoken.engine.session import Session
    from foretoken.engine.stream import Stream


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a token came from, as a reader sees it."""

    meaning: str
    style: str
    signs: tuple[str, str]  # around it, without colour: single and double angle quotes
    ascii_signs: tuple[str, str]  # where the output knows no others


ACCEPTED = Origin("guessed and accepted", "#56b4e9", ("\u2039", "\u203a"), ("[", "]"))
CORRECTED = Origin(
    "guessed wrong, corrected by the target",
    "bold underline #e69f00",
    ("\u00ab", "\u00bb"),
    ("{", "}"),
)
OWN = Origin("written by the target alone", "", ("", ""), ("", ""))


def consoles() -> tuple[Console, Console]:
    """Standard output for text, standard error for remarks, which a file gets in whole lines."""
    remarks = Console(stderr=True, highlight=False)
    remarks.soft_wrap = not remarks.is_terminal
    return Console(highlight=False, soft_wrap=True), remarks


def signs(out: Console) -> Callable[[Origin], tuple[str, str]]:
    """The signs around an origin's text on this output: none where colours say it."""
    if out.color_system is not None and not out.no_color:
        return lambda origin: ("", "")
    try:
        "".join(ACCEPTED.signs + CORRECTED.signs).encode(out.encoding)
    except UnicodeEncodeError:
        return lambda origin: origin.ascii_signs
    return lambda origin: origin.signs


def legend(method: str, out: Console) -> Text:
    """What the marks mean."""
    line, around = Text(f"{method}: "), signs(out)
    for origin in (ACCEPTED, CORRECTED, OWN):
        before, after = around(origin)
        line.append(f"{before}{origin.meaning}{after}", style=origin.style).append("   ")
    line.rstrip()
    return line


def paint(
    session: Session,
    prompt: Any,
    sampling: dict[str, Any],
    out: Console,
    show: bool,
    stopped: Callable[[], bool] = bool,
) -> Result:
    """Write the text of a prompt as it comes; its result when it has ended or was stopped."""
    if session.tokenizer is None:
        show = False
    stream, around = session.stream(prompt, **sampling), signs(out)
    brush = brush_of(session, stream) if show else None
    for piece in stream:
        if brush is None:
            write(out, Segment(piece.text or plain_ids(session, piece)))
        else:
            write(out, *marked(brush, piece, session.eos, around))
        out.file.flush()
        if stopped():
            stream.close()
            break
    write(out, Segment("" if brush is None else brush.close()), Segment("\n"))
    return stream.result


def brush_of(session: Session, stream: Stream) -> RowText:
    """Tells the text of a stream once more, up to the stops that hold for its row."""
    return reader_of(stream.row, session.tokenizer, RowText)


def write(out: Console, *parts: Segment) -> None:
    """Write text as it is: rich's own printing replaces codes of emoji and tabs, and leaves out
    control characters that a text may hold."""
    out.print(Segments(parts), end="", crop=False)


def plain_ids(session: Session, piece: Piece) -> str:
    """Token ids where there is no tokenizer to tell the text."""
    return "" if session.tokenizer is not None else " ".join(map(str, piece.tokens)) + " "


def marked(
    brush: RowText,
    piece: Piece,
    ends: frozenset[int],
    around: Callable[[Origin], tuple[str, str]],
) -> list[Segment]:
    """The text of a step: what was accepted, then the target's own token."""
    parts = []
    own = CORRECTED if piece.corrected else OWN
    for origin, tokens in (
        (ACCEPTED, piece.tokens[: piece.accepted]),
        (own, piece.tokens[piece.accepted :]),
    ):
        for token in tokens:
            if token not in ends and brush.matched is None:
                brush.feed(token)
        told = brush.take()
        if told:
            before, after = around(origin)
            parts.append(Segment(f"{before}{told}{after}", Style.parse(origin.style)))
    return parts

"""Text on a terminal while it is written, coloured by where each token came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foretoken.engine.text import RowText, decoder

if TYPE_CHECKING:
    from foretoken.engine.session import Piece, Result, Session

ACCEPTED, CORRECTED, OWN = "green", "bold red", "yellow"


def consoles() -> tuple[Console, Console]:
    """Standard output for text, standard error for remarks."""
    return Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)


def legend(method: str) -> Text:
    """What the colours mean."""
    line = Text(f"{method}: ")
    for style, meaning in (
        (ACCEPTED, "guessed and accepted"),
        (CORRECTED, "guessed wrong, corrected by the target"),
        (OWN, "written by the target alone"),
    ):
        line.append("■ ", style=style).append(meaning + "   ", style="dim")
    return line


def paint(
    session: Session, prompt: Any, sampling: dict[str, Any], out: Console, show: bool
) -> Result:
    """Write the text of a prompt as it comes; its result when it has ended."""
    if session.tokenizer is None:
        show = False
    stream = session.stream(prompt, **sampling)
    brush = RowText(decoder(session.tokenizer), sampling.get("stop") or ()) if show else None
    for piece in stream:
        if brush is None:
            out.print(piece.text or plain_ids(session, piece), end="", markup=False)
        else:
            out.print(coloured(brush, piece, session.eos), end="")
        out.file.flush()
    out.print(brush.close() if brush is not None else "")
    return stream.result


def plain_ids(session: Session, piece: Piece) -> str:
    """Token ids where there is no tokenizer to tell the text."""
    return "" if session.tokenizer is not None else " ".join(map(str, piece.tokens)) + " "


def coloured(brush: RowText, piece: Piece, ends: frozenset[int]) -> Text:
    """The text of a step, each token in the colour of its origin."""
    text = Text()
    for place, token in enumerate(piece.tokens):
        if token in ends or brush.matched is not None:
            continue
        own = CORRECTED if piece.corrected else OWN
        brush.feed(token)
        text.append(brush.take(), style=ACCEPTED if place < piece.accepted else own)
    return text

"""How likely the target thought each token, by its own logits, before any option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.lm.token_bytes import Pieces
from foretoken.types import Step

LEAST = -9999.0  # for what is impossible: JSON has no infinity


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token that was written, and the likeliest ones in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def chosen_tokens(step: Step, at: int, count: int) -> list[Chosen]:
    """The tokens a step wrote into the row at a place, each judged at the node it followed.

    A token follows the root or an accepted node of the draft: the logits there are of this row
    behind exactly the text before it.
    """
    emitted = step.emitted[at]
    nodes = [0, *step.verdicts[at].path][: len(emitted)]
    logits = step.scores[at].logits[nodes].float()
    laws = logits.log_softmax(-1)
    own = [float(laws[i, token]) for i, token in enumerate(emitted)]
    if not count:
        return [Chosen(token, finite(value), []) for token, value in zip(emitted, own, strict=True)]
    values, ids = laws.topk(min(count, laws.shape[-1]), dim=-1)
    tops = [
        [(token, finite(value)) for token, value in zip(*pair, strict=True)]
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [
        Chosen(token, finite(value), top)
        for token, value, top in zip(emitted, own, tops, strict=True)
    ]


def finite(value: float) -> float:
    return max(value, LEAST)


class Names:
    """Token ids as clients read them."""

    def __init__(self, tokenizer: Any) -> None:
        self.pieces = Pieces(tokenizer)
        self.special = {index: name for name, index in self.pieces.special.items()}

    def bytes(self, token: int) -> bytes:
        """What a token stands for; a special one by its name."""
        known = self.pieces.text
        text = known[token] if token < len(known) else None
        return self.special.get(token, "").encode() if text is None else text

    def text(self, token: int) -> str:
        """A token as a text; half a character as its bytes."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def shown(self, token: int) -> str:
        """A token for a reader's eyes: of half a character, that it is one."""
        return self.bytes(token).decode(errors="replace")

    def in_chat(self, chosen: Chosen) -> dict[str, Any]:
        """A token as a chat tells it."""
        top = [self._entry(token, value) for token, value in chosen.top]
        return {**self._entry(chosen.token, chosen.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self.bytes(token))}

    def in_completion(self, chosen: list[Chosen], offsets: list[int]) -> dict[str, Any]:
        """Tokens as a completion tells them; `offsets` are their places in the text."""
        return {
            "tokens": [self.text(one.token) for one in chosen],
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [
                {self.text(token): value for token, value in one.top} or None for one in chosen
            ],
            "text_offset": offsets,
        }

"""How likely the target thought each token, by its own logits, before any option."""

from __future__ import annotations

import json
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
    return value if value > LEAST else LEAST  # NaN is above nothing


class Names:
    """Token ids as clients read them.

    What is the same wherever a token stands is written once: an answer may hold millions of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._quoted: dict[int, str] = {}  # a token's text as JSON
        self._begun: dict[int, str] = {}  # and an entry of a chat up to its logarithm
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

    def quoted(self, token: int) -> str:
        """A token as a text in JSON."""
        if token not in self._quoted:
            self._quoted[token] = json.dumps(self.text(token))
        return self._quoted[token]

    def in_chat(self, chosen: Chosen) -> str:
        """A token as a chat tells it, as JSON."""
        top = "},".join([self._entry(token, value) for token, value in chosen.top])
        end = "}]}" if top else "]}"
        return f'{self._entry(chosen.token, chosen.logprob)},"top_logprobs":[{top}{end}'

    def _entry(self, token: int, logprob: float) -> str:
        """The fields of one token; the brace that closes them is left to whoever adds more."""
        if token not in self._begun:
            told = {"token": self.text(token), "bytes": list(self.bytes(token))}
            self._begun[token] = f'{json.dumps(told)[:-1]},"logprob":'
        return f"{self._begun[token]}{logprob!r}"

    def in_completion(self, chosen: list[Chosen], offsets: list[int]) -> str:
        """Tokens as a completion tells them, as JSON; `offsets` are their places in the text."""
        tokens = ",".join([self.quoted(one.token) for one in chosen])
        own = ",".join([repr(one.logprob) for one in chosen])
        top = ",".join([self._likeliest(one) for one in chosen])
        return (
            f'{{"tokens":[{tokens}],"token_logprobs":[{own}],"top_logprobs":[{top}],'
            f'"text_offset":{json.dumps(offsets)}}}'
        )

    def _likeliest(self, chosen: Chosen) -> str:
        """The likeliest tokens and the one that was written by their texts, of equal ones the last;
        null where none are told.
        """
        tops = chosen.top
        if tops and all(token != chosen.token for token, _ in tops):
            tops = [*tops, (chosen.token, chosen.logprob)]
        by_text = {self.quoted(token): value for token, value in tops}
        told = ",".join([f"{text}:{value!r}" for text, value in by_text.items()])
        return f"{{{told}}}" if told else "null"

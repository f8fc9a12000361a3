"""What the ids of a tokenizer stand for, as bytes: what all tokenizers have in common.

Byte-level pieces ("Ġthe"), pieces of sentencepiece ("▁the") and bytes by name ("<0x0A>") come out
alike. Special tokens stand for no text, and are told apart by their name.
"""

from __future__ import annotations

import json
import re
from typing import Any

NAMED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # of sentencepiece
ROLES = ("eos_token_id", "bos_token_id")


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


ALPHABET = byte_alphabet()


class Pieces:
    """The ids of one tokenizer: `text` by id (None: special, or unknown), `special` by name."""

    def __init__(self, tokenizer: Any) -> None:
        vocab: dict[str, int] = tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        literal = {index: str(token) for index, token in added.items()}
        special = {index for index, token in added.items() if getattr(token, "special", True)}
        special |= set(getattr(tokenizer, "all_special_ids", ()))
        kinds = piece_kinds(tokenizer, vocab)
        self.text: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        self.special: dict[str, int] = {}
        self.named: set[int] = set()  # ids that are a byte by its name
        for piece, index in vocab.items():
            if index in special:
                self.special[piece] = index
            elif index in literal:
                marked = "spaces marked" in kinds  # in added pieces as in others
                said = literal[index]
                self.text[index] = (said.replace(SPACE, " ") if marked else said).encode()
            else:
                self.text[index] = piece_bytes(piece, kinds)
                if "bytes by name" in kinds and NAMED_BYTE.fullmatch(piece):
                    self.named.add(index)
        roles = ((role, getattr(tokenizer, role, None)) for role in ROLES)
        self.roles: dict[str, int] = {role: index for role, index in roles if index is not None}

    def by_bytes(self) -> dict[bytes, int]:
        """The id of every text; of several, a piece before a byte by name, then the first."""
        found: dict[bytes, int] = {}
        order = sorted(range(len(self.text)), key=lambda index: (index in self.named, index))
        for index in order:
            text = self.text[index]
            if text:
                found.setdefault(text, index)
        return found


def piece_kinds(tokenizer: Any, vocab: dict[str, int]) -> set[str]:
    """How a tokenizer writes its pieces; of one without a description, as its pieces look."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        starts = {piece[:1] for piece in vocab}
        kinds = {"byte-level"} if "Ġ" in starts and SPACE not in starts else {"spaces marked"}
    else:
        told = json.loads(backend.to_str())
        parts = json.dumps([told.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
        kinds = {"byte-level"} if '"ByteLevel"' in parts else set()
        marked = '"Metaspace"' in parts or json.dumps(SPACE) in parts
        kinds |= {"spaces marked"} if not kinds and marked else set()
    if any(NAMED_BYTE.fullmatch(piece) for piece in vocab) and "byte-level" not in kinds:
        kinds.add("bytes by name")
    return kinds


def piece_bytes(piece: str, kinds: set[str]) -> bytes | None:
    """What a piece stands for; None for one that is written in no known way."""
    if "byte-level" in kinds:
        if any(character not in ALPHABET for character in piece):
            return piece.encode()
        return bytes(ALPHABET[character] for character in piece)
    named = NAMED_BYTE.fullmatch(piece)
    if named and "bytes by name" in kinds:
        return bytes([int(named.group(1), 16)])
    return piece.replace(SPACE, " ").encode() if "spaces marked" in kinds else piece.encode()

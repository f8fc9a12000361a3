"""Which tokens the ids of a datastore stand for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How many ids there are, and a checksum of what they mean."""

    size: int  # every id is below
    fingerprint: str

    @classmethod
    def of(cls, tokens: Mapping[str, int]) -> Vocabulary:
        """From a tokenizer's vocabulary, token to id."""
        pairs = sorted((number, token) for token, number in tokens.items())
        if not pairs:
            raise ConfigError(
                "a datastore for a tokenizer without tokens was asked for.",
                "a datastore keeps ids of a vocabulary.",
                "pass the target's own tokenizer.",
            )
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        return cls(pairs[-1][0] + 1, f"sha256:{digest}")

    @classmethod
    def of_ids(cls, size: int) -> Vocabulary:
        """Ids that no tokenizer explains."""
        return cls(size, f"ids:{size}")

    def refuse_other(self, other: Vocabulary, where: object) -> None:
        """Raise unless `other`, that of a target, gives the ids the meaning they have here."""
        if other == self:
            return
        raise ConfigError(
            f"the datastore {where} was asked for with a tokenizer of {other.size} ids.",
            f"it was made with another tokenizer, of {self.size} ids: the same numbers stand for "
            "other tokens, so its guesses would be noise.",
            "build a datastore with the target's own tokenizer: foretoken datastore build.",
        )

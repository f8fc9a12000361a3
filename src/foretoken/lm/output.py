"""The object that `model.generate(return_dict_in_generate=True)` returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput


def decoder_only_output(sequences: Tensor) -> Any:
    """Sequences alone; scores, hidden states and caches are refused before a token is written."""
    return GenerateDecoderOnlyOutput(sequences=sequences)

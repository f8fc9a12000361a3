"""The object that `model.generate(return_dict_in_generate=True)` returns."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput


def decoder_only_output(sequences: Tensor) -> Any:
    """Sequences alone; scores, hidden states and caches are refused before a token is written."""
    return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))

"""A model and its tokenizer from a GGUF file, as ordinary transformers objects.

transformers multiplies the quantised weights out, but its result cannot be saved (its configuration
still says that it is quantised), and its tokenizer drops how the file splits text into words. Both
are mended here: the model is rebuilt around a plain configuration, and the split is the one that
`tokenizer.ggml.pre` names.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from foretoken.errors import CheckpointError
from foretoken.lm.load import quiet
from foretoken.lm.unreadable import UNREADABLE, first_line

SPLITS = {  # how text is cut before BPE, by llama.cpp's names
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}


def read(file: Path) -> tuple[PreTrainedModel, Any]:
    """The model in float32 and the tokenizer, ready for ``save_pretrained``."""
    import gguf  # transformers asks for it, too; an extra of this package

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet(), redirect_stderr(StringIO()):  # a bar that cannot be switched off
            split = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
            dequantised = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{file.name} cannot be read: {first_line(error)}.",
            "a GGUF file of a causal language model that the installed transformers knows.",
            "fetch it again, or use a newer transformers.",
        ) from error
    mend_split(tokenizer, None if split is None else split.contents(), file)
    tokenizer.model_max_length = dequantised.config.max_position_embeddings
    return plain(dequantised), tokenizer


def mend_split(tokenizer: Any, name: str | None, file: Path) -> None:
    """Cut text as the file says. Spaces before a digit, for one, are otherwise other tokens."""
    if name not in SPLITS:
        raise CheckpointError(
            f"{file.name} splits text in the way {name!r}.",
            f"known ways are {', '.join(SPLITS)}; with another one prompts would be other tokens.",
            "use a directory with the model's own tokenizer.json.",
        )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[name])


def plain(dequantised: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model whose configuration says nothing of quantisation."""
    values = dequantised.config.to_dict()
    for gone in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(gone, None)
    kind: Any = type(dequantised)
    model: PreTrainedModel = kind(type(dequantised.config)(**values))
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model.eval()

"""The minis' tokenizer: byte-level BPE with single digits, learned from the same data the models
see.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, PAD = "<s>", "</s>", "<pad>"
# A conversation in the frame (`example.frame`) that dialogues wear in the training data.
CHAT = """{{ bos_token }}### Task: dialogue
{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}### Answer:
{% endif %}"""


def learn(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries. Digits stay single, which makes sums learnable; every text
    starts with BEGIN.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )

"""What tests beside transformers' generate share: prompts, padding, greedy texts, a streamer that
listens."""

import torch
from transformers.generation.streamers import BaseStreamer

PROMPTS = ["the cat is in the ", "on", "a cat and "]


def encoded(tokenizer, texts):
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def greedy_text(model, prompt, count=16, **how):
    """What the model's own generate writes after a prompt of token ids."""
    ids = torch.tensor([prompt])
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **how
    )
    return written[0, len(prompt) :].tolist()


class Collect(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended += 1
